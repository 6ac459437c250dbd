"""The best split into pipeline stages and the policies of their layers, for one mesh, batch and schedule.

Both are one problem: a stage with more layers has less memory for what they keep, so it recomputes more. A stage's time is
therefore asked of `Candidate.recompute`, which knows what its rank's memory allows.

Few splits: all of them, each no further than a bound that holds for it (`_bound`). Many: the splits whose fullest rank does
least, from a search over the load that no rank may exceed, improved by moving single layers. Either way the answer comes with a
lower bound on what any split can reach; both are equal when the split is proved best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_planner.search.bounds import least_seconds_of_step, looks_at_all, span_bound, starts
from titan_planner.search.candidate import Assignment, Candidate, StageCounts

TRIALS = 24
"""Splits that are priced in full where there are more."""


@dataclass(frozen=True, slots=True)
class Split:
    """The best split found, its step time, and what no split can beat."""

    assignment: Assignment
    seconds: float
    bound: float


def best_split(candidate: Candidate, limit: float = math.inf, fixed: tuple[int, ...] | None = None) -> Split | None:
    """The split with the least step time, None when nothing fits or when nothing can be below `limit` seconds.

    `fixed`: layers per stage that are not to be chosen.
    """
    return _Search(candidate, limit).run(fixed)


class _Search:
    def __init__(self, candidate: Candidate, limit: float) -> None:
        self.of = candidate
        self.limit = limit
        self.layers = candidate.plan.model.num_layers
        self.pp = candidate.plan.mesh.pp
        self.repeats = candidate.plan.batch.accumulation_steps
        self.best: tuple[float, tuple[int, ...], Assignment] | None = None

    def run(self, fixed: tuple[int, ...] | None) -> Split | None:
        stages = self.of.stages
        if stages > self.layers:
            return None
        if fixed is not None or stages == 1:
            layers = fixed or (self.layers,)
            bound = self.price(layers)
            return self._found(bound if bound is not None else math.inf)
        if looks_at_all(self.of):
            return self._found(self._exhaustive())
        return self._found(self._guided())

    def _found(self, bound: float) -> Split | None:
        if self.best is None:
            return None
        seconds, _, assignment = self.best
        return Split(assignment, seconds, min(bound, seconds))

    # -------------------------------------------------------------- one split

    def price(self, layers: tuple[int, ...]) -> float | None:
        """Price one split and keep it if it is the best. The least that its policies could make it, None if nothing fits.

        On a rank with several stages the policies with the least added time need not be those of the least step time: which of
        its stages waits matters too. The bound takes each rank's least.
        """
        of = self.of
        intervals = of.intervals(layers)
        counts: list[StageCounts | None] = [None] * of.stages
        for rank, stages in enumerate(of.stages_of):
            found = of.recompute(rank, [intervals[s] for s in stages])
            if found is None:
                return None
            for stage, taken in zip(stages, found.counts, strict=True):
                counts[stage] = taken
        chosen = tuple(c for c in counts if c is not None)
        times = [of.stage_seconds(s, intervals[s], chosen[s]) for s in range(of.stages)]
        around = max(of.around(intervals, times))
        bound = span_bound(of, times) * self.repeats + around
        if bound >= self.limit or (self.best is not None and bound > self.best[0]):
            return bound
        seconds = of.span(times) * self.repeats + around
        key = (seconds, layers)
        if seconds < self.limit and (self.best is None or key < self.best[:2]):
            self.best = (seconds, layers, Assignment(layers, chosen))
        if self.pp == 1 or of.stages == self.pp or _nothing_added(chosen):
            return seconds  # policies are each stage's own: no others make any stage faster
        return bound

    # -------------------------------------------------------------- few splits

    def _exhaustive(self) -> float:
        bounds = [
            bound for layers in compositions(self.layers, self.of.stages) if (bound := self.price(layers)) is not None
        ]
        return min(bounds, default=math.inf)

    # -------------------------------------------------------------- many splits

    def _guided(self) -> float:
        of = self.of
        tried: set[tuple[int, ...]] = set()
        for layers in itertools.islice(starts(of), TRIALS // 2):
            if layers not in tried:
                tried.add(layers)
                self.price(layers)
        improved = self.best is not None
        while improved and len(tried) < TRIALS:
            improved = False
            assert self.best is not None
            for layers in neighbours(self.best[1]):
                if layers in tried or len(tried) >= TRIALS:
                    continue
                tried.add(layers)
                before = self.best[0]
                self.price(layers)
                if self.best[0] < before:
                    improved = True
                    break
        return least_seconds_of_step(of)


def _nothing_added(counts: Sequence[StageCounts]) -> bool:
    return all(not any(options[1:]) for stage in counts for options in stage)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut `total` layers into `parts` stages of one or more, in lexicographic order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def neighbours(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Splits with one layer moved from one stage to another, near ones first."""
    stages = len(layers)
    pairs = sorted(itertools.permutations(range(stages), 2), key=lambda pair: (abs(pair[0] - pair[1]), pair))
    for source, target in pairs:
        if layers[source] > 1:
            moved = list(layers)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)
