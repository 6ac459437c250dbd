"""Actions of a pipeline schedule: what a row of `pipeline.actions` says, and whether the rows together can run.

The spelling is that of torch.distributed.pipelining: `2F0` is the forward of microbatch 0 through stage 2; `B` is a whole
backward, `I` only the gradients of the inputs and `W` only those of the weights; `(0F3;3B1)OVERLAP_F_B` is a forward and
a backward that may overlap.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Literal, NamedTuple, TypeAlias, cast

from titan_planner.ir.errors import InvariantError

Kind: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward; whole backward; gradients of the inputs; gradients of the weights."""

_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_BEFORE: dict[Kind, Kind | None] = {"F": None, "B": "F", "I": "F", "W": "I"}
_INSTEAD: dict[Kind, Kind] = {"B": "I", "I": "B"}
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One computation of one microbatch on one stage. Of a pair that may overlap, both are `paired`, the forward first."""

    kind: Kind
    stage: int
    microbatch: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Order:
    """What every pipeline rank computes, in order, idle time aside. Compared and hashed by identity.

    `ranks` holds one row a pipeline rank, `placement` the rank of every stage.
    """

    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into gradients of inputs and of weights."""
        return any(action.kind == "I" for row in self.ranks for action in row)


def spell(row: tuple[Action, ...]) -> str:
    """The row as `pipeline.actions` writes it."""
    words: list[str] = []
    for action in row:
        if action.paired and action.kind == "B":
            words[-1] = f"({words[-1]};{action})OVERLAP_F_B"
        else:
            words.append(str(action))
    return ",".join(words)


@functools.lru_cache(maxsize=64)
def parse_actions(rows: tuple[str, ...], placement: tuple[int, ...], microbatches: int) -> Order:
    """The order that `pipeline.actions` spells out, one row a rank, for stages that lie on the ranks of `placement`.

    Raises `InvariantError`, in one sentence, when a row cannot be read, when an action is missing, doubled, on a rank that
    does not hold its stage or before what it needs on its own rank, and when ranks would wait for each other for ever.
    """
    ranks = 1 + max(placement)
    if len(rows) != ranks:
        raise _wrong(f"{len(rows)} rows of actions for {ranks} pipeline ranks", "write one row for each pipeline rank")
    order = Order(tuple(_parse_row(row, rank) for rank, row in enumerate(rows)), placement, microbatches)
    _check_rows(order)
    topological(order)
    return order


def _wrong(
    message: str, hint: str = "rows look like `0F0,0F1,0B0,0B1`: stage, F, B, I or W, microbatch"
) -> InvariantError:
    return InvariantError("actions", message, hint)


def _parse_row(row: str, rank: int) -> tuple[Action, ...]:
    found: list[Action] = []
    for text in re.split(r"[,\s]+", row.strip()):
        pair = _PAIR.fullmatch(text)
        if pair:
            first, second = (_parse_one(part, rank, paired=True) for part in pair.groups())
            if first.kind != "F" or second.kind != "B":
                raise _wrong(f"`{text}` in row {rank} overlaps {first} with {second}, not a forward with a backward")
            found += [first, second]
        elif text:
            found.append(_parse_one(text, rank, paired=False))
    return tuple(found)


def _parse_one(text: str, rank: int, *, paired: bool) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise _wrong(f"`{text}` in row {rank} is no action")
    return Action(cast(Kind, match[2]), int(match[1]), int(match[3]), paired)


def _check_rows(order: Order) -> None:
    stages, count = len(order.placement), order.microbatches
    for rank, row in enumerate(order.ranks):
        done: set[tuple[Kind, int, int]] = set()
        for action in row:
            kind, stage, microbatch, _ = action
            if stage >= stages or order.placement[stage] != rank:
                held = [s for s in range(stages) if order.placement[s] == rank]
                raise _wrong(
                    f"{action} is in row {rank}, but pipeline rank {rank} does not hold stage {stage}",
                    f"row {rank} is for stage {' and '.join(map(str, held))}: put the action into the row of its rank",
                )
            if microbatch >= count:
                raise _wrong(
                    f"{action} names microbatch {microbatch}, but there are {count}, counted from 0",
                    f"use a microbatch from 0 to {count - 1}, or change the microbatch size",
                )
            if (kind, stage, microbatch) in done:
                raise _wrong(f"{action} is twice in row {rank}", "remove one of the two")
            other = _INSTEAD.get(kind)
            if other is not None and (other, stage, microbatch) in done:
                raise _wrong(
                    f"{action} in row {rank} repeats a backward that is done",
                    f"keep {stage}B{microbatch} alone, or {stage}I{microbatch} and {stage}W{microbatch}",
                )
            before = _BEFORE[kind]
            if before is not None and (before, stage, microbatch) not in done:
                raise _wrong(
                    f"{action} in row {rank} comes before {stage}{before}{microbatch}",
                    f"put {stage}{before}{microbatch} before it",
                )
            done.add((kind, stage, microbatch))
        for stage in (s for s in range(stages) if order.placement[s] == rank):
            for microbatch in range(count):
                for kinds in (("F",), ("B", "I"), ("B", "W")):
                    if not any((kind, stage, microbatch) in done for kind in kinds):
                        names = " or ".join(f"{stage}{kind}{microbatch}" for kind in kinds)
                        raise _wrong(f"row {rank} lacks {names}", "every stage does every microbatch once: add it")


def needed(action: Action, stages: int) -> tuple[str, int, int] | None:
    """What another stage must hand over before `action` can start: (F or B, stage, microbatch); None if nothing.

    A forward needs the stage before it, a backward (`B` or `I`) the stage after it.
    """
    kind, stage, microbatch, _ = action
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    if kind == "W" or stage == stages - 1:
        return None
    return ("B", stage + 1, microbatch)


def topological(order: Order) -> tuple[tuple[int, int], ...]:
    """All actions as (rank, position), each after what it needs. Raises `InvariantError` when none is left that can run.

    torch runs a pair that may overlap only when both halves have what they need, and sends both results after it.
    """
    stages = len(order.placement)
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(order.ranks)
    found: list[tuple[int, int]] = []
    total = sum(map(len, order.ranks))
    while len(found) < total:
        before = len(found)
        for rank, row in enumerate(order.ranks):
            position = at[rank]
            while position < len(row):
                action = row[position]
                together = row[position : position + 2] if action.paired else (action,)
                if not all(need is None or need in done for need in (needed(one, stages) for one in together)):
                    break
                for one in together:
                    if one.kind != "W":
                        done.add(("F" if one.kind == "F" else "B", one.stage, one.microbatch))
                    found.append((rank, position))
                    position += 1
            at[rank] = position
        if len(found) == before:
            stuck = next(row[at[rank]] for rank, row in enumerate(order.ranks) if at[rank] < len(row))
            raise _wrong(
                f"the ranks wait for each other for ever: {stuck} never gets what it needs",
                "put it behind the forward of the stage before it, or the backward of the stage after it, in every row",
            )
    return tuple(found)
