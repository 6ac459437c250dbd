"""What can be wrong with an input, as data: every complaint says what, where, and what to try."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


class InvariantError(ValueError):
    """A record was built with a value that its type forbids; `field` is the name of the offending field.

    `rule` is the id of the invariant (`ir/rules.py`), where it has one.
    """

    def __init__(self, field: str, message: str, hint: str | None = None, rule: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.hint = hint
        self.rule = rule


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A place in something the user wrote: a file (or a command-line option) with a 1-based line and column."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        parts = [self.file] + [str(n) for n in (self.line, self.column) if n is not None]
        return ":".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that is wrong: one sentence, the address it concerns, the place in the user's file, one thing to try.

    `address` is a dotted path (`parallelism.tensor_parallel_degree`, `mesh.tp`); empty for the whole document.
    `rule` is the id of the legality rule that was broken, where it was one.
    """

    message: str
    address: str = ""
    place: Place | None = None
    hint: str | None = None
    rule: str | None = None

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        rule = f" [{self.rule}]" if self.rule else ""
        hint = f"\n    try: {self.hint}" if self.hint else ""
        return f"{where}{self.message}{rule}{hint}"


class TitanError(Exception):
    """An error of the user's input. Printed as its complaints, never as a traceback."""

    def __init__(self, complaints: Sequence[Complaint] | Complaint) -> None:
        # What two checks find alike is said once.
        self.complaints: tuple[Complaint, ...] = (
            (complaints,) if isinstance(complaints, Complaint) else tuple(dict.fromkeys(complaints))
        )
        super().__init__("\n".join(str(c) for c in self.complaints))


class SpecError(TitanError):
    """The spec cannot be read, or asks for something that no plan can give."""


class PlanError(TitanError):
    """The plan cannot be read, or breaks a rule."""
