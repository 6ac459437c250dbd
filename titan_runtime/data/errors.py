"""The error of the data path: what is wrong, where, by which rule, and what to do about it."""

from __future__ import annotations


class DataError(Exception):
    """Training data, a tokenizer or a data state that cannot be used.

    Args:
        message: one sentence that says what is wrong.
        place: where: a file, ``file:line``, or the name of an argument.
        rule: short id of the rule that was broken, such as ``utf-8`` or ``same-data``.
        fix: one thing to try.
    """

    def __init__(
        self, message: str, *, place: str | None = None, rule: str | None = None, fix: str | None = None
    ) -> None:
        self.message = message
        self.place = place
        self.rule = rule
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        rule = f" [{self.rule}]" if self.rule else ""
        fix = f"\n    try: {self.fix}" if self.fix else ""
        return f"{where}{self.message}{rule}{fix}"
