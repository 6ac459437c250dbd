"""The least added time under budgets of memory: a knapsack over counts of equal items, solved exactly by branch and bound.

Layers fall into few kinds, so the unknowns are how many layers of each kind take each option, not 126 separate choices. The bound
is the linear relaxation under one of the budgets at a time: per kind the lower convex hull of (bytes, seconds), whose steps are
taken in the order of seconds per byte.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat an item."""

    seconds: float  # added if an item takes it
    nbytes: float  # that the item keeps for one microbatch


@dataclass(frozen=True, slots=True)
class Kind:
    """Equal items."""

    count: int
    held: tuple[float, ...]  # microbatches held at each of the moments that have a budget
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """How many items of every kind take each option, and the seconds that adds up to."""

    seconds: float
    counts: tuple[tuple[int, ...], ...]


_ROUNDING = 1e-12


def least_seconds(kinds: Sequence[Kind], budgets: Sequence[float]) -> Choice | None:
    """Minimise the sum of seconds so that at each moment p the sum of held[p] x nbytes is at most budgets[p].

    Exact up to the rounding of sums (1e-12 of the result). None when even the smallest options do not fit. Among equals the
    one found first: more items at the fastest option of the first kinds.
    """
    return _Knapsack(kinds, budgets).solve()


class _Knapsack:
    def __init__(self, kinds: Sequence[Kind], budgets: Sequence[float]) -> None:
        self.kinds = list(kinds)
        self.budgets = list(budgets)
        # Per kind the options that none beats in both, fastest first, so that bytes fall.
        self.useful = [_frontier(kind.options) for kind in self.kinds]
        self.hulls = [_hull(kind.options, useful) for kind, useful in zip(self.kinds, self.useful, strict=True)]
        count = len(self.kinds)
        # What the kinds from k on need at least, per budget, and the seconds that they take at least.
        self.least_bytes = [[0.0] * (count + 1) for _ in self.budgets]
        self.least_seconds = [0.0] * (count + 1)
        for k in range(count - 1, -1, -1):
            kind, useful = self.kinds[k], self.useful[k]
            smallest = kind.options[useful[-1]].nbytes * kind.count
            for p, need in enumerate(self.least_bytes):
                need[k] = need[k + 1] + smallest * kind.held[p]
            self.least_seconds[k] = self.least_seconds[k + 1] + kind.options[useful[0]].seconds * kind.count
        self.best: tuple[float, tuple[tuple[int, ...], ...]] | None = None

    def solve(self) -> Choice | None:
        pairs = zip(self.least_bytes, self.budgets, strict=True)
        if any(need[0] > budget + _ROUNDING * abs(budget) for need, budget in pairs):
            return None
        self._kind(0, self.budgets, 0.0, ())
        if self.best is None:
            return None
        return Choice(*self.best)

    def _kind(self, k: int, left: list[float], seconds: float, taken: tuple[tuple[int, ...], ...]) -> None:
        if k == len(self.kinds):
            if self.best is None or seconds < self.best[0]:
                self.best = (seconds, taken)
            return
        self._option(k, 0, self.kinds[k].count, left, seconds, [0] * len(self.kinds[k].options), taken)

    def _option(
        self,
        k: int,
        place: int,
        items: int,
        left: list[float],
        seconds: float,
        counts: list[int],
        taken: tuple[tuple[int, ...], ...],
    ) -> None:
        """Choose how many of the kind's `items` that are left take the option at `place` of its frontier."""
        kind, useful = self.kinds[k], self.useful[k]
        option = kind.options[useful[place]]
        last = place == len(useful) - 1
        smallest = kind.options[useful[-1]].nbytes
        low = items if last else 0
        # As many as leave room for all others at their smallest; then fewer.
        most = items
        for p, budget in enumerate(left):
            room = budget - self.least_bytes[p][k + 1] - smallest * items * kind.held[p]
            each = (option.nbytes - smallest) * kind.held[p]
            if each > 0:
                most = min(most, math.floor(room / each * (1 + _ROUNDING) + _ROUNDING))
            elif room < -_ROUNDING * abs(self.budgets[p]):
                return
        for number in range(most, low - 1, -1):
            rest = [b - option.nbytes * number * kind.held[p] for p, b in enumerate(left)]
            now = seconds + option.seconds * number
            if self.best is not None and now + self._bound(k, place + 1, items - number, rest) >= self.best[0] * (
                1 - _ROUNDING
            ):
                if self._only_worse(k, place):
                    return
                continue
            counts[useful[place]] = number
            if items == number:
                if all(b >= -_ROUNDING * abs(budget) for b, budget in zip(rest, self.budgets, strict=True)):
                    self._kind(k + 1, rest, now, (*taken, tuple(counts)))
            else:
                self._option(k, place + 1, items - number, rest, now, counts, taken)
            counts[useful[place]] = 0

    def _only_worse(self, k: int, place: int) -> bool:
        """Whether nothing comes after this kind's next option: then fewer items here are only slower."""
        return k == len(self.kinds) - 1 and place >= len(self.useful[k]) - 2

    def _bound(self, k: int, place: int, items: int, left: list[float]) -> float:
        """Least seconds of what is not chosen yet: `items` of kind k from `place` on, and all later kinds."""
        best = 0.0
        for p, budget in enumerate(left):
            best = max(best, self._relaxed(k, place, items, p, budget))
        return best

    def _relaxed(self, k: int, place: int, items: int, p: int, budget: float) -> float:
        seconds = self.least_seconds[k + 1]
        need = 0.0
        steps: list[tuple[float, float, float]] = []
        for j in range(k, len(self.kinds)):
            kind = self.kinds[j]
            count = items if j == k else kind.count
            if not count:
                continue
            hull = self.hulls[j]
            if j == k:
                fastest = kind.options[self.useful[k][min(place, len(self.useful[k]) - 1)]]
                seconds += fastest.seconds * count
                hull = _hull(kind.options, self.useful[k][min(place, len(self.useful[k]) - 1) :]) if place else hull
            need += kind.options[hull[0]].nbytes * count * kind.held[p]
            for one, other in itertools.pairwise(hull):
                a, b = kind.options[one], kind.options[other]
                saved = (a.nbytes - b.nbytes) * count * kind.held[p]
                if saved > 0:
                    steps.append(((b.seconds - a.seconds) * count / saved, saved, (b.seconds - a.seconds) * count))
        over = need - budget
        if over <= _ROUNDING * abs(self.budgets[p]):
            return seconds
        for rate, saved, cost in sorted(steps):
            if saved >= over:
                return seconds + rate * over
            over -= saved
            seconds += cost
        return seconds if over <= 1e-9 * abs(need) else math.inf


def _frontier(options: Sequence[Option]) -> list[int]:
    """Options by rising seconds and falling bytes; of equals the first."""
    found: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].seconds, options[i].nbytes, i)):
        if not found or options[index].nbytes < options[found[-1]].nbytes:
            found.append(index)
    return found


def _hull(options: Sequence[Option], frontier: Sequence[int]) -> list[int]:
    """The frontier's lower convex hull: what mixes of its options reach."""
    found: list[int] = []
    for index in frontier:
        while len(found) > 1:
            a, b, c = options[found[-2]], options[found[-1]], options[index]
            # b lies on or above the line from a to c.
            if (b.seconds - a.seconds) * (a.nbytes - c.nbytes) >= (c.seconds - a.seconds) * (a.nbytes - b.nbytes):
                found.pop()
            else:
                break
        found.append(index)
    return found
