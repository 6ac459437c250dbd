"""The one error that a user can mend: printed as a sentence, never as a traceback."""

from __future__ import annotations


class RunError(Exception):
    """Something the user asked for cannot be done here: what, where, and one thing to try.

    `agreed` says that every rank raises the same error at the same place, so one rank speaks for all.
    """

    def __init__(self, message: str, *, hint: str | None = None, agreed: bool = False) -> None:
        self.message = message
        self.hint = hint
        self.agreed = agreed
        super().__init__(str(self))

    def __str__(self) -> str:
        return f"{self.message}\n    try: {self.hint}" if self.hint else self.message


def user_errors() -> tuple[type[Exception], ...]:
    """The exceptions whose text is the whole message: ours, the plan's, the data's."""
    # Imported here: the data package pulls in the tokenizer library, which most failures never reach.
    from titan_planner.ir.errors import TitanError
    from titan_runtime.data.errors import DataError

    return (RunError, TitanError, DataError)


def reason(error: BaseException) -> str:
    """Why the operating system said no, without errno and file name: "No space left on device"."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
