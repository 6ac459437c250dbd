"""Stand-in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    seconds: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Kind:
    count: int
    held: tuple[float, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    seconds: float
    counts: tuple[tuple[int, ...], ...]


def _splits(count: int, options: int):
    if options == 1:
        yield (count,)
        return
    for first in range(count, -1, -1):
        for rest in _splits(count - first, options - 1):
            yield (first, *rest)


def least_seconds(kinds: Sequence[Kind], budgets: Sequence[float]) -> Choice | None:
    best = None
    for combo in itertools.product(*(list(_splits(k.count, len(k.options))) for k in kinds)):
        used = [0.0] * len(budgets)
        seconds = 0.0
        for kind, counts in zip(kinds, combo, strict=True):
            nbytes = sum(c * o.nbytes for c, o in zip(counts, kind.options, strict=True))
            seconds += sum(c * o.seconds for c, o in zip(counts, kind.options, strict=True))
            for p, held in enumerate(kind.held):
                used[p] += held * nbytes
        if all(u <= b for u, b in zip(used, budgets, strict=True)) and (best is None or seconds < best.seconds):
            best = Choice(seconds, combo)
    return best
