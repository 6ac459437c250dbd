"""What a pass is given besides the plan: remarks, and the look-ahead of finishing a candidate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from titan_planner.ir.plan import Plan, Remark


@dataclass(slots=True)
class Context:
    """Remarks of the running pass, and `finish(candidate)`: the candidate as the remaining passes would leave it."""

    name: str
    finish: Callable[[Plan], Plan]
    remarks: list[Remark] = field(default_factory=list)

    def applied(self, address: str, message: str) -> None:
        """Record something that was done."""
        self._add("applied", address, message)

    def missed(self, address: str, message: str) -> None:
        """Record something that was not done, and why."""
        self._add("missed", address, message)

    def analysis(self, address: str, message: str) -> None:
        """Record a fact."""
        self._add("analysis", address, message)

    def _add(self, kind: Literal["applied", "missed", "analysis"], address: str, message: str) -> None:
        self.remarks.append(Remark(kind=kind, by=self.name, address=address, message=message))


Pass: TypeAlias = Callable[[Plan, Context], Plan]
