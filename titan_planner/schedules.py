"""Pipeline schedules: where stages lie, what every rank computes in which order, and how much it holds at its fullest.

The orders are those of torch 2.13's `torch.distributed.pipelining` (equal action by action; idle slots, which are only
notation there, are left out). Papers: GPipe 1811.06965; 1F1B and interleaved 2104.04473; breadth-first 2211.05953; zero
bubble and ZBV 2401.10241; DualPipe 2412.19437 and its V form, github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import TypeAlias, assert_never, cast

from titan_planner.ir.actions import Action, Kind, Order, parse_actions
from titan_planner.ir.parallel import MULTI_STAGE_SCHEDULES, V_SCHEDULES, Pipeline, Schedule, Stage


def place_stages(schedule: Schedule | None, pp: int, stages: int) -> tuple[Stage, ...]:
    """Stage -> pipeline rank: in a V for ZBV and DualPipeV, in a loop for all others."""
    if schedule in V_SCHEDULES:
        return tuple(Stage(index=s, pp_rank=min(s, 2 * pp - 1 - s)) for s in range(stages))
    return tuple(Stage(index=s, pp_rank=s % pp) for s in range(stages))


def default_stages_per_rank(schedule: Schedule | None) -> int:
    """Virtual stages a rank when the user names none."""
    return 2 if schedule in MULTI_STAGE_SCHEDULES else 1


# ------------------------------------------------------------------ order


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A named schedule over `pp` ranks with `per_rank` virtual stages each; no schedule means one rank that takes turns."""

    schedule: Schedule | None
    pp: int
    per_rank: int
    microbatches: int


Work: TypeAlias = Shape | Order
"""A schedule by name, or one that a plan spells out."""


def work_of(pipeline: Pipeline) -> Work:
    """What a plan's pipeline runs: its own table of actions where it has one, as in the runtime, else its schedule.

    Raises `InvariantError` if the table cannot run.
    """
    placement = tuple(stage.pp_rank for stage in pipeline.stages)
    if pipeline.actions is not None:
        return parse_actions(pipeline.actions, placement, pipeline.microbatches)
    return Shape(pipeline.schedule, 1 + max(placement), pipeline.stages_per_rank, pipeline.microbatches)


def order_of(work: Work) -> Order:
    """The order of the actions of every rank. Raises `ValueError` for a shape that its schedule cannot run."""
    return work if isinstance(work, Order) else _order(work)


@functools.lru_cache(maxsize=256)
def _order(shape: Shape) -> Order:
    stages = shape.pp * shape.per_rank
    placement = tuple(stage.pp_rank for stage in place_stages(shape.schedule, shape.pp, stages))
    rows = tuple(tuple(_row(shape, rank)) for rank in range(shape.pp))
    return Order(rows, placement, shape.microbatches)


def _row(shape: Shape, rank: int) -> Iterable[Action]:
    pp, v, m = shape.pp, shape.per_rank, shape.microbatches
    local = [s for s in range(pp * v) if (min(s, 2 * pp - 1 - s) if shape.schedule in V_SCHEDULES else s % pp) == rank]
    match shape.schedule:
        case None:
            _require(shape, pp == v == 1, "runs on one rank with one stage")
            return _alternate(_stream("F", local, 1, m), _stream("B", local, 1, m), 0)
        case "GPipe":
            _require(shape, v == 1, "needs one stage a rank")
            return [*_stream("F", local, m, m), *_stream("B", local, m, m)]
        case "LoopedBFS":
            forward = [Action("F", stage, i) for stage in local for i in range(m)]
            return [*forward, *(Action("B", action.stage, action.microbatch) for action in reversed(forward))]
        case "1F1B":
            _require(shape, v == 1, "needs one stage a rank")
            return _alternate(_stream("F", local, 1, m), _stream("B", local, 1, m), pp - 1 - rank)
        case "Interleaved1F1B":
            group = _group(shape)
            ahead = (v - 1) * group + 2 * (pp - 1 - rank)
            return _alternate(_stream("F", local, group, m), _stream("B", local, group, m), ahead)
        case "InterleavedZeroBubble":
            group = _group(shape)
            ahead = (v - 1) * group + (pp - 1 - rank)
            backward = _alternate(_stream("F", local, group, m), _stream("I", local, group, m), ahead)
            return _late_weights(backward, rank)
        case "ZBVZeroBubble":
            _require(shape, v == 2, "needs two stages a rank")
            return _zbv(pp, rank, m)
        case "DualPipeV":
            _require(shape, v == 2, "needs two stages a rank")
            _require(shape, m >= 2 * pp, f"needs at least as many microbatches as the {2 * pp} stages")
            return _dualpipe_v(pp, rank, m)
        case _:
            assert_never(shape.schedule)


def _require(shape: Shape, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(
            f"{shape.schedule or 'no schedule'} {what}, but there are {shape.pp} ranks with {shape.per_rank} stages each "
            f"and {shape.microbatches} microbatches"
        )


def _group(shape: Shape) -> int:
    """Microbatches that a rank takes through one stage before it turns to its next one."""
    rounds = max(1, shape.microbatches // shape.pp)
    _require(shape, shape.microbatches % rounds == 0, f"runs {rounds} rounds, which must divide the microbatches,")
    return shape.microbatches // rounds


def _stream(kind: Kind, local: Sequence[int], group: int, microbatches: int) -> Iterator[Action]:
    """`group` microbatches through every local stage in turn, then the next group; backward takes the stages from the last."""
    for first in range(0, microbatches, group):
        for stage in local if kind == "F" else reversed(local):
            for microbatch in range(first, first + group):
                yield Action(kind, stage, microbatch)


def _alternate(forward: Iterator[Action], backward: Iterator[Action], ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then one forward and one backward in turn while there are forwards, then the other backwards."""
    yield from itertools.islice(forward, ahead)
    for action in backward:
        yield from itertools.islice(forward, 1)
        yield action


def _late_weights(actions: Iterator[Action], lag: int) -> Iterator[Action]:
    """Gradients of weights, each `lag` backwards after those of its inputs; the last ones at the end."""
    waiting: deque[Action] = deque()
    for action in actions:
        yield action
        if action.kind == "I":
            waiting.append(action._replace(kind="W"))
            if len(waiting) > lag:
                yield waiting.popleft()
    yield from waiting


class _Counted:
    """Actions on a rank's first and second stage (`0`, `1`), each with the next microbatch that it has not had."""

    def __init__(self, pp: int, rank: int) -> None:
        self._stage = {"0": rank, "1": 2 * pp - 1 - rank}
        self._next: Counter[tuple[str, str]] = Counter()
        self.row: list[Action] = []

    def add(self, repeat: int, pattern: str) -> None:
        """`repeat` times the actions of `pattern`, such as `F0 I1 W1`; `F0&B1` is a pair that may overlap."""
        for _ in range(repeat):
            for word in pattern.split():
                for name in word.split("&"):
                    kind, chunk = name[0], name[1]
                    count = self._next[kind, chunk]
                    self._next[kind, chunk] = count + 1
                    if kind == "B":  # whole backwards count as both halves
                        count = self._next["I", chunk]
                        self._next["I", chunk] = self._next["W", chunk] = count + 1
                    self.row.append(Action(cast(Kind, kind), self._stage[chunk], count, "&" in word))


def _zbv(pp: int, rank: int, microbatches: int) -> list[Action]:
    # Fewer microbatches than fill the V run as if there were enough, with those left out that do not exist.
    filled = max(2 * pp - 1, microbatches)
    build = _Counted(pp, rank)
    below = pp - rank  # ranks from here to the turn of the V
    build.add(2 * below - 1, "F0")
    build.add(rank, "F1 F0")
    build.add(below, "F1 I1 W1")
    build.add(filled - (2 * pp - 1) + rank, "F0 I0 W0 F1 I1 W1")
    build.add(below - 1, "I0 W0 F1 I1 W1")
    build.add(rank, "I0 I1")
    build.add(below, "I0 W0")
    build.add(rank, "W1")
    build.add(rank, "W0")
    return [action for action in build.row if action.microbatch < microbatches]


def _dualpipe_v(pp: int, rank: int, microbatches: int) -> list[Action]:
    build = _Counted(pp, rank)
    below = pp - 1 - rank
    main = microbatches - 2 * pp + rank + 1
    build.add(2 * below, "F0")
    build.add(rank + 1, "F0 F1")
    build.add(below, "I1 W1 F1")
    if below == 0:  # the rank at the turn does not overlap its first two
        build.add(1, "F0 B1 F1&B0")
        main -= 1
    build.add(main, "F0&B1 F1&B0")
    build.add(below, "B1 F1&B0")
    # Of the last backwards, taken from both stages in turn, the first half is whole and the second half is split. The
    # weights' halves follow in the order of the inputs'.
    last = list(itertools.islice(itertools.cycle("10"), 2 * (rank + 1)))
    for chunk in last[: rank + 1]:
        build.add(1, f"B{chunk}")
    waiting = deque(last[rank + 1 :])
    for chunk in last[rank + 1 :]:
        build.add(1, f"I{chunk}")
    for _ in range(below):
        build.add(1, f"W{waiting.popleft()} I0")
        waiting.append("0")
    for chunk in waiting:
        build.add(1, f"W{chunk}")
    return build.row


# ------------------------------------------------------------------ repetition


@dataclasses.dataclass(frozen=True, slots=True)
class Repetition:
    """A shape as a shorter one with a part that is repeated: `count` times, `step` microbatches each.

    With `step` more microbatches, row r of `base` has the actions between `cuts[r] - lengths[r]` and `cuts[r]` once more, right
    after them, and every microbatch from there on is higher by `step`.
    """

    base: Shape
    step: int
    count: int
    cuts: tuple[int, ...]
    lengths: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def repetition(shape: Shape) -> Repetition | None:
    """The steady state of `shape`; None when it has none or is too short for it to matter."""
    match shape.schedule:
        case None | "GPipe" | "LoopedBFS":
            return None
        # One microbatch would do as a step of these; but with transfers exposed their times repeat only after pp of them,
        # the number that the longest round through the pipeline holds.
        case "1F1B":
            step, rounds = shape.pp, 4
        case "ZBVZeroBubble" | "DualPipeV":
            step, rounds = shape.pp, 6
        case "Interleaved1F1B" | "InterleavedZeroBubble":
            step, rounds = _group(shape), 4
        case _:
            assert_never(shape.schedule)
    base = dataclasses.replace(shape, microbatches=step * rounds + shape.microbatches % step)
    if base.microbatches + step > shape.microbatches:
        return None
    short, longer = order_of(base), order_of(dataclasses.replace(base, microbatches=base.microbatches + step))
    cuts, lengths = [], []
    for row, more in zip(short.ranks, longer.ranks, strict=True):
        length = len(more) - len(row)
        cut = next((i for i, (a, b) in enumerate(zip(row, more, strict=False)) if a != b), len(row))
        repeated = (action._replace(microbatch=action.microbatch + step) for action in row[cut - length :])
        if cut < length or any(a != b for a, b in zip(repeated, more[cut:], strict=True)):
            return None
        cuts.append(cut)
        lengths.append(length)
    return Repetition(base, step, (shape.microbatches - base.microbatches) // step, tuple(cuts), tuple(lengths))


# ------------------------------------------------------------------ what is held


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Microbatches whose tensors a rank holds at one moment, for each of its stages in the order of `stages`."""

    stages: tuple[int, ...]
    until_input: tuple[int, ...]  # forward done, gradients of the inputs not
    until_weight: tuple[int, ...]  # forward done, gradients of the weights not

    @property
    def between(self) -> tuple[int, ...]:
        """Gradients of the inputs done, of the weights not."""
        return tuple(w - i for i, w in zip(self.until_input, self.until_weight, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one microbatch keeps on one stage, by when they are freed. A whole backward frees all of them at once.

    torch 2.13 computes the gradients of the inputs with the graph retained, so there nothing is freed until those of the
    weights are done: all that forward saves is `until_weight`, and what the split adds is `between`, the gradients at the
    outputs of every operation with a weight. On stage 0 it leaves all work to `W`, and `between` is 0.
    """

    until_input: float = 0.0
    until_weight: float = 0.0
    between: float = 0.0


def peaks(work: Work) -> tuple[tuple[Held, ...], ...]:
    """Every pipeline rank's fullest moments: whatever the sizes of its stages' tensors are, it holds the most bytes at one of them.

    `peak_bytes` gives those bytes.
    """
    if isinstance(work, Shape):
        steady = repetition(work)
        if steady is not None:  # a repetition ends as it began, so it reaches nothing new
            work = steady.base
    return _peaks(work)


@functools.lru_cache(maxsize=1024)
def _peaks(work: Work) -> tuple[tuple[Held, ...], ...]:
    order = order_of(work)
    return tuple(_peaks_of_row(order, rank) for rank in range(len(order.ranks)))


def _peaks_of_row(order: Order, rank: int) -> tuple[Held, ...]:
    stages = tuple(stage for stage, holder in enumerate(order.placement) if holder == rank)
    column = {stage: i for i, stage in enumerate(stages)}
    inputs, weights = [0] * len(stages), [0] * len(stages)
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    row = order.ranks[rank]
    for action, after in itertools.zip_longest(row, row[1:]):
        i = column[action.stage]
        if action.kind == "F":
            inputs[i] += 1
            weights[i] += 1
        if action.kind in "BI":
            inputs[i] -= 1
        if action.kind in "BW":
            weights[i] -= 1
        # What is held grows with F and, where the split adds tensors, with I: it is fullest before the next that frees.
        if action.kind in "FI" and (after is None or after.kind != "F" or action.kind == "I"):
            seen[tuple(inputs), tuple(weights)] = None
    return _extreme([Held(stages, i, w) for i, w in seen])


_NEAR = 3  # more finds no fewer, and costs its square


def _extreme(points: list[Held]) -> tuple[Held, ...]:
    """`points` without those that never hold the most bytes alone: no sizes make them exceed both of two others."""
    vectors = {point: point.until_input + point.until_weight + point.between for point in points}
    found = [
        point
        for point, vector in vectors.items()
        if not any(other != vector and all(map(int.__ge__, other, vector)) for other in vectors.values())
    ]
    # A schedule moves from one fullest moment to another in equal steps, so most lie between others close in time.
    before = None
    while before != len(found):
        before = len(found)
        for point in tuple(found):
            at = found.index(point)
            earlier, later = found[max(0, at - _NEAR) : at], found[at + 1 : at + 1 + _NEAR]
            pairs = itertools.product(earlier, later)
            if any(_between(vectors[one], vectors[point], vectors[other]) for one, other in pairs):
                del found[at]
    return tuple(found)


def _between(one: tuple[int, ...], point: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a mix (1 - t) one + t other, 0 <= t <= 1, holds as much as `point` or more of everything."""
    least, most = 0.0, 1.0
    for a, b, c in zip(one, point, other, strict=True):
        # t (c - a) >= b - a. Quotients of small integers are equal as floats when they are equal.
        if c > a:
            least = max(least, (b - a) / (c - a))
        elif c < a:
            most = min(most, (b - a) / (c - a))
        elif b > a:
            return False
    return least <= most


def in_flight(schedule: Schedule | None, pp: int, per_rank: int, microbatches: int) -> tuple[tuple[Held, ...], ...]:
    """`peaks` of a named schedule. Raises `ValueError` for what the schedule cannot run."""
    return peaks(Shape(schedule, pp, per_rank, microbatches))


def peak_bytes(points: Sequence[Held], kept: Sequence[Kept]) -> float:
    """Most bytes that a rank holds at once: `points` are its `peaks`, `kept` has the bytes of each of its stages in order."""
    early = [size.until_input - size.between for size in kept]
    late = [size.until_weight + size.between for size in kept]
    most: float
    if any(early):
        most = max([sum(map(mul, p.until_input, early)) + sum(map(mul, p.until_weight, late)) for p in points])
    else:
        most = max([sum(map(mul, p.until_weight, late)) for p in points])
    return most


def microbatches_in_flight(schedule: Schedule | None, pp: int, rank: int, microbatches: int, per_rank: int) -> float:
    """Most microbatches whose activations pipeline rank `rank` holds at once, in units of its whole layer share.

    Activations are held until the gradients of the weights are done, as in torch 2.13 (see `Kept`).
    """
    points = in_flight(schedule, pp, per_rank, microbatches)[rank]
    return peak_bytes(points, [Kept(until_weight=1.0)] * per_rank) / per_rank
