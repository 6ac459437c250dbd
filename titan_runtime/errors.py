"""The one error that a user can mend: printed as a sentence, never as a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


class LostConnection(Exception):
    """Another rank is gone, or does not come: which one is for `watch.py` to find out."""


_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "socket closed",
    "communicator was aborted",
)
_WAITED = (
    "timed out waiting",  # gloo: for a send, a receive, or anybody at all
    "timeout caused pair closure",
    "wait timeout after",  # a store
    "collective operation timeout",
)


@contextmanager
def naming_lost_connections(during: Callable[[], str]) -> Iterator[None]:
    """Turn what a collective raises when another rank is gone into LostConnection; `during` says what was being done."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            words = str(cause).lower() if isinstance(cause, RuntimeError) else ""
            if any(known in words for known in _LOST):
                raise LostConnection(f"lost the connection to another rank {during()}") from error
            if any(known in words for known in _WAITED):
                raise LostConnection(f"waited in vain for another rank {during()}") from error
            cause = cause.__cause__ or cause.__context__
        raise


def warn(sentence: str) -> None:
    """Print a warning on this rank."""
    print(f"titan: warning: {sentence}", file=sys.stderr, flush=True)
