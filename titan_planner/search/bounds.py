"""What no split of a candidate can beat: paths through the schedule that every execution has, priced with the least times.

A step's span is the longest path of the graph of its actions (`cost/timeline.py`), so any path bounds it from below:

- arrive: the first microbatch reaches a rank through the stages before it, the rank does all its work, and the last gradient
  travels back to the first stage;
- turn: a microbatch goes forward through all stages and back to the rank's last one, before which the rank has done only so many
  forwards; then the rank does the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

from titan_planner.search.candidate import Candidate
from titan_planner.search.pieces import StageSeconds
from titan_planner.stages import even_counts

EXHAUSTIVE = 400
"""Splits up to which all are looked at."""

SAFETY = 1 - 1e-9
"""Bounds add the same terms in another order, so they may exceed the sum by rounding."""


def span_bound(of: Candidate, times: Sequence[StageSeconds]) -> float:
    """A lower bound on `of.span(times)`, seconds, without running the schedule."""
    pp = of.plan.mesh.pp
    if pp == 1:
        return (times[0].forward + times[0].backward) * SAFETY
    if of.plan.pipeline.actions is not None:
        # Of a table of one's own only the work of every rank is known at once.
        return max(_busy(of, times, rank) for rank in range(pp)) * SAFETY
    forward = [t.forward for t in times]
    # What hands a gradient on: with a split backward the half for the inputs; the first stage's is in its other half.
    back = [t.backward - (t.weight if of.splits_backward and s else 0.0) for s, t in enumerate(times)]
    hop = of.pieces.transfer
    all_forward = sum(forward) + sum(of.transfers)
    best = 0.0
    fill = drain = 0.0
    before = forwards_before(of.plan.pipeline.schedule, pp, of.stages // pp, of.runs)
    behind = [0.0] * (of.stages + 1)  # backward of the stages after each one, on the way to it
    for stage in range(of.stages - 1, 0, -1):
        behind[stage - 1] = behind[stage] + back[stage] + of.transfers[stage - 1]
    for rank in range(pp):
        busy = _busy(of, times, rank)
        end = 0.0 if of.splits_backward else drain
        top = of.stages_of[rank][-1]
        early = sum(count * forward[s] for s, count in zip(of.stages_of[rank], before[rank], strict=True))
        best = max(best, fill + busy + end, all_forward + behind[top] + busy - early + end)
        fill += forward[rank] + hop
        drain += back[rank] + hop
    return best * SAFETY


def _busy(of: Candidate, times: Sequence[StageSeconds], rank: int) -> float:
    return of.runs * sum(times[s].forward + times[s].backward for s in of.stages_of[rank])


@functools.lru_cache(maxsize=1024)
def forwards_before(schedule: str | None, pp: int, per_rank: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """For every rank, forwards of each of its stages that come before its first backward; see `schedules.py`."""
    found = []
    for rank in range(pp):
        match schedule:
            case "ZBVZeroBubble":
                counts = [2 * pp - rank - 1, rank + 1]
            case "DualPipeV":
                counts = [2 * pp - rank - 1 + (rank == pp - 1), rank + 1]
            case "GPipe" | "LoopedBFS" | None:
                counts = [microbatches] * per_rank
            case _:
                group = microbatches // max(1, microbatches // pp)
                ahead = {"1F1B": 0, "Interleaved1F1B": 2, "InterleavedZeroBubble": 1}[schedule]
                first = pp - rank if schedule == "1F1B" else (per_rank - 1) * group + ahead * (pp - 1 - rank) + 1
                rounds, rest = divmod(first, group * per_rank)
                counts = [rounds * group + min(group, max(0, rest - local * group)) for local in range(per_rank)]
        found.append(tuple(min(count, microbatches) for count in counts))
    return tuple(found)


def least_stage(of: Candidate) -> tuple[float, float, float, float]:
    """Least (forward + backward) seconds of one microbatch: of the cheapest layer, of all layers, of the embedding, of the head.

    With everything hidden that may be hidden, and nothing recomputed that need not be.
    """
    pieces = of.pieces
    hides = 1 - pieces.slowdown

    def least(vector: tuple[float, ...]) -> float:
        compute, _, _, waits, matmul, attention = vector
        return compute + waits + matmul * (1 - hides * pieces.overlap) + attention * (1 - hides)

    costs = []
    for number, kind in enumerate(of.kinds):
        options = [pieces.block(number, option, 0) for option in range(len(kind.policies))]
        cost = min(least(piece.forward) + least(piece.backward) for piece in options)
        unit = pieces.unit(kind.shapes, pieces.block_reshard, 0)
        # Without what waits at the end of a stage's backward, which only some stages have.
        costs.append(cost + sum(side.hidden * pieces.slowdown for side in unit))
    total = sum(costs[kind] for kind in of.kind_of)
    embedding = least(pieces.embedding.forward) + least(pieces.embedding.backward)
    head = least(pieces.head.forward) + least(pieces.head.backward)
    return min(costs), total, embedding, head


def sizes(of: Candidate) -> tuple[int, int]:
    """Fewest and most layers of a stage where a rank has several and there are too many splits to look at all of them.

    One less than the even split and one more: the space that `best_split` searches then.
    """
    layers, stages = of.plan.model.num_layers, of.stages
    if stages == of.plan.mesh.pp or looks_at_all(of):
        return 1, layers
    return max(1, layers // stages - 1), -(-layers // stages) + 1


def looks_at_all(of: Candidate) -> bool:
    """Whether the candidate has so few splits that all are looked at."""
    return math.comb(of.plan.model.num_layers - 1, of.stages - 1) <= EXHAUSTIVE


def least_seconds_of_step(of: Candidate) -> float:
    """A lower bound on the step time of every split that `best_split` may return."""
    return least_span(of) * of.plan.batch.accumulation_steps + least_around(of)


def least_span(of: Candidate) -> float:
    """A lower bound on the span of every split, seconds."""
    pp, stages, layers = of.plan.mesh.pp, of.stages, of.plan.model.num_layers
    cheapest, total, embedding, head = least_stage(of)
    if pp == 1:
        return (total + embedding + head) * SAFETY
    fewest, most = sizes(of)
    runs = of.runs
    hop = 2 * of.pieces.transfer

    def holds(limit: float) -> bool:
        """Whether every rank could stay within `limit`, by its own work and what must come before and after it."""
        taken = 0
        left = total
        for rank in range(pp):
            # Of stages in line, all that was taken lies before this one; what lies before the first of several is at least little.
            ahead = taken if stages == pp else rank * fewest
            beside = rank * hop + (0.0 if of.splits_backward else ahead * cheapest)
            if rank:
                beside += embedding * (not of.splits_backward)
            ends = embedding * (rank == 0) + head * (of.rank_of[stages - 1] == rank)
            room = max(0.0, limit - beside - runs * ends)
            taken += min(int(room / (runs * cheapest)), most * (stages // pp))
            left -= room / runs
        return taken >= layers and left <= 0.0

    low = runs * (total + embedding + head) / pp
    if holds(low):
        return low * SAFETY
    high = 2 * low
    while not holds(high):
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low * SAFETY


def least_around(of: Candidate) -> float:
    """A lower bound on what comes once a step: the update of the mean rank."""
    elements = sum(
        count * numel for count, numel in zip(of.kinds_in(0, len(of.kind_of))[0], of.sharded[0], strict=True)
    )
    return of.update_each * (elements + of.sharded[1] + of.sharded[2]) / of.plan.mesh.pp * SAFETY


def starts(of: Candidate) -> Iterator[tuple[int, ...]]:
    """Splits to begin with: even ones in which embedding and output weigh some layers, those first that balance times."""
    layers, stages = of.plan.model.num_layers, of.stages
    _, total, embedding, head = least_stage(of)
    each = total / layers
    wanted = embedding / each, head / each
    weights = sorted(
        ((first, last) for first in range(4) for last in range(5)),
        key=lambda pair: (abs(pair[0] - wanted[0]) + abs(pair[1] - wanted[1]), pair),
    )
    fewest, most = sizes(of)
    for first, last in weights:
        for late in (False, True):
            found = even_counts(layers, stages, first, last, late)
            if found is not None and min(found) >= fewest and max(found) <= most:
                yield found
