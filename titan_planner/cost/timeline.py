"""When every rank of a pipeline does what: the schedule's actions executed with uneven stages and transfers between them.

Start times are the longest paths of the graph in which an action follows the one before it on its rank and what it needs
from another stage (a max-plus linear system). There is no bubble formula here; the formulas are tests.

What is not modelled: a send never waits for its receiver, transfers do not share a link, and a rank's compute is not slowed
by transfers beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Literal, TypeAlias

from titan_planner.ir.actions import Action, Order, needed, topological
from titan_planner.schedules import Shape, Work, order_of, repetition

Sends: TypeAlias = Literal["overlap", "turn", "blocking"]
"""Whether the sender computes on while it sends: always; not when it turns from forward to backward or back; never.

torch 2.13 waits for its sends at every turn in 1F1B (send and receive are one batch there), and only at the end of the step in
all other schedules; see `torch_sends`.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch on one stage. `input_s` and `weight_s` are the halves of a backward that is split.

    torch 2.13 does nothing in `I` on stage 0, which needs no gradients of its inputs, and the whole backward in `W`: price
    stage 0 of a schedule that splits with `input_s` 0 and `weight_s` equal to `backward_s`.
    """

    forward_s: float
    backward_s: float
    input_s: float = 0.0
    weight_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One action on a pipeline rank, in seconds from the start of the step."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """One pass of all microbatches through the pipeline, in seconds; one entry a pipeline rank.

    makespan = busy + sending + bubble on every rank. `busy_s` is time that computes, `sending_s` time that waits for sends.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    sending_s: tuple[float, ...]
    extrapolated: bool  # whether the steady state was repeated in place of simulated; the result is the same
    work: Work
    times: tuple[StageTime, ...]
    transfer_s: tuple[float, ...]
    sends: Sends
    hidden: float

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Time that each rank waits for others."""
        occupied = zip(self.busy_s, self.sending_s, strict=True)
        return tuple(max(0.0, self.makespan_s - busy - sending) for busy, sending in occupied)

    @property
    def critical_rank(self) -> int:
        """The rank with the least bubble, the first of equals: to make another one faster gains less."""
        bubbles = self.bubble_s
        return bubbles.index(min(bubbles))

    def events(self) -> tuple[Event, ...]:
        """Start and end of every action, by rank and in order. Simulates in full."""
        return _events(self)


def torch_sends(work: Work) -> Sends:
    """How torch 2.13's runtime sends in this schedule."""
    return "turn" if isinstance(work, Shape) and work.schedule == "1F1B" else "overlap"


def simulate(
    work: Work,
    times: Sequence[StageTime],
    transfer_s: float | Sequence[float] = 0.0,
    *,
    sends: Sends = "overlap",
    hidden: float = 0.0,
) -> Timeline:
    """Execute `work` with the `times` of its stages.

    `transfer_s`: seconds from stage s to s + 1, and of gradients back, one value or one for each of the stages - 1
    boundaries; stages on the same rank hand over at once, whatever it says.
    `hidden`: part of the shorter half of DualPipeV's pairs that disappears behind the longer one. At 0, as in torch 2.13,
    the halves run one after the other: forward starts when its input is there, backward when its gradient is, and the forward's
    result leaves with the backward's, at the end. Above 0 the halves start together, when both have what they need.
    Raises `ValueError` for the wrong number of times, for another `hidden`, and for a shape that its schedule cannot run.
    """
    stages = work.pp * work.per_rank if isinstance(work, Shape) else len(work.placement)
    times = tuple(times)
    boundaries = (float(transfer_s),) * (stages - 1) if isinstance(transfer_s, int | float) else tuple(transfer_s)
    if len(times) != stages or len(boundaries) != stages - 1:
        raise ValueError(f"{len(times)} times and {len(boundaries)} transfers for {stages} stages")
    if not 0.0 <= hidden <= 1.0:
        raise ValueError(f"`hidden` is {hidden}, but it is a part: 0 to 1")
    together = hidden > 0.0
    if isinstance(work, Shape):
        steady = _steady(work, sends, together)
        if steady is not None:
            found = steady.run(times, boundaries, hidden)
            if found is not None:
                makespan, busy, sending = found
                return Timeline(makespan, busy, sending, True, work, times, boundaries, sends, hidden)
    program = _program(work, sends, together)
    costs = program.costs(times, boundaries, hidden)
    makespan = program.makespan(program.starts(costs), costs)
    busy, sending = program.occupied(costs)
    return Timeline(makespan, busy, sending, False, work, times, boundaries, sends, hidden)


# ------------------------------------------------------------------ the graph

_Key: TypeAlias = tuple[int, ...]
"""What a wait consists of: indices of the primitive costs that it sums."""


def _getter(indices: Sequence[int]) -> Callable[[Sequence[float]], tuple[float, ...]]:
    # `itemgetter` of one index gives no tuple.
    if len(indices) == 1:
        (only,) = indices
        return lambda values: (values[only],)
    return itemgetter(*indices)


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """The graph of an order, ready to run with any costs.

    Node 0 is the start of the step; every other node is the start of an action other than W, whose time is part of the wait
    for the next node on its rank. Node n starts at the later of start[previous[n]] + chain[n] and start[source[n]] + arrival[n].
    """

    order: Order
    previous: tuple[int, ...]
    chain: Callable[[Sequence[float]], tuple[float, ...]]
    source: tuple[int, ...]
    arrival: Callable[[Sequence[float]], tuple[float, ...]]
    sums: tuple[_Key, ...]  # the costs beyond the primitive ones
    pairs: tuple[tuple[int, int], ...]  # stages (forward, backward) of pairs that start together
    last: tuple[tuple[int, int], ...]  # for each rank its last node, and the cost from there to its end
    counts: tuple[tuple[tuple[int, int], ...], ...]  # for each rank how often which primitive cost computes
    waits: tuple[tuple[tuple[int, int], ...], ...]  # for each rank how often which primitive cost is a send waited for
    nodes: tuple[tuple[int, ...], ...]  # for each rank the node of each action; 0 for W
    held_up: tuple[tuple[int, ...], ...]  # for each rank the cost that follows each action before the rank computes on

    def costs(self, times: Sequence[StageTime], transfer_s: Sequence[float], hidden: float) -> list[float]:
        """Primitive costs (F, B, I, W of all stages; transfers forward, backward; zero; pairs), then their sums; seconds."""
        values = [t.forward_s for t in times]
        values += [t.backward_s for t in times]
        values += [t.input_s for t in times]
        values += [t.weight_s for t in times]
        values += transfer_s  # stage s to s + 1
        values.append(0.0)  # nothing leaves the last stage, nor does any time pass
        for forward, backward in self.pairs:
            one, other = times[forward].forward_s, times[backward].backward_s
            values.append(one + other - hidden * min(one, other))
        values += [sum([values[i] for i in key], 0.0) for key in self.sums]
        return values

    def starts(self, costs: Sequence[float]) -> list[float]:
        """Start of every node, seconds."""
        found = [0.0]
        push = found.append
        for i, wait, j, arrival in zip(self.previous, self.chain(costs), self.source, self.arrival(costs), strict=True):
            free, there = found[i] + wait, found[j] + arrival
            push(free if free > there else there)
        return found

    def makespan(self, starts: Sequence[float], costs: Sequence[float]) -> float:
        """End of the last rank, seconds."""
        return max(starts[node] + costs[key] for node, key in self.last)

    def occupied(self, costs: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each rank the seconds that it computes, and those that it waits for its sends."""
        return _weighted(self.counts, costs), _weighted(self.waits, costs)


def _weighted(counts: Sequence[Sequence[tuple[int, int]]], costs: Sequence[float]) -> tuple[float, ...]:
    return tuple(sum([costs[key] * count for key, count in row], 0.0) for row in counts)


class _Build:
    """Builds a `_Program`; costs are numbered as `_Program.costs` lists them."""

    def __init__(self, order: Order, sends: Sends, together: bool) -> None:
        self.order, self.sends = order, sends
        self.stages = len(order.placement)
        self.zero = 5 * self.stages - 1
        # Half-pairs are pairs only when they start together; one after the other they are ordinary actions.
        self.together = together
        self.pairs: dict[tuple[int, int], int] = {}
        if together:
            for row in order.ranks:
                for one, other in itertools.pairwise(row):
                    if one.kind == "F" and one.paired:
                        stages = (one.stage, other.stage)
                        self.pairs.setdefault(stages, self.zero + 1 + len(self.pairs))
        self.sums: dict[_Key, int] = {}

    def key(self, parts: Sequence[int]) -> int:
        """The cost that sums `parts`."""
        parts = tuple(part for part in parts if part != self.zero)
        if not parts:
            return self.zero
        if len(parts) == 1:
            return parts[0]
        return self.sums.setdefault(parts, self.zero + 1 + len(self.pairs) + len(self.sums))

    def transfer(self, action: Action) -> int:
        """The cost of handing on the result; zero within a rank."""
        stage, place = action.stage, self.order.placement
        if action.kind == "F" and stage < self.stages - 1 and place[stage] != place[stage + 1]:
            return 4 * self.stages + stage
        if action.kind in "BI" and stage > 0 and place[stage] != place[stage - 1]:
            return 4 * self.stages + stage - 1
        return self.zero

    def waited(self, row: Sequence[Action], position: int) -> bool:
        """Whether the rank waits for the send of the action before it computes on."""
        action = row[position]
        if self.sends != "turn":
            return self.sends == "blocking"
        if action.paired:
            return False
        later = next((a for a in row[position + 1 :] if a.kind != "W"), None)
        return later is not None and (later.kind == "F") != (action.kind == "F")

    def program(self) -> _Program:
        order, zero = self.order, self.zero
        durations = {"F": 0, "B": self.stages, "I": 2 * self.stages, "W": 3 * self.stages}
        ranks = len(order.ranks)
        last, pending = [0] * ranks, [[zero] for _ in range(ranks)]
        counts: list[Counter[int]] = [Counter() for _ in range(ranks)]
        waits: list[Counter[int]] = [Counter() for _ in range(ranks)]
        nodes: list[list[int]] = [[] for _ in range(ranks)]
        held_up = [[zero] * len(row) for row in order.ranks]
        previous, chain, source, arrival = [], [], [], []
        # What every result's arrival elsewhere is counted from: a node, and the cost from its start.
        ready: dict[tuple[str, int, int], tuple[int, int]] = {}
        for rank, position in topological(order):
            row = order.ranks[rank]
            action = row[position]
            duration = durations[action.kind] + action.stage
            if action.kind == "W":
                counts[rank][duration] += 1
                pending[rank].append(duration)
                nodes[rank].append(0)
                continue
            need = needed(action, self.stages)
            # Within a rank the order says it all.
            local = need is None or order.placement[need[1]] == rank
            start, cost = (0, zero) if need is None or local else ready[need]
            previous.append(last[rank])
            chain.append(self.key(pending[rank]))
            source.append(start)
            arrival.append(cost)
            node = last[rank] = len(previous)
            nodes[rank].append(node)
            done = [action]
            if action.paired and action.kind == "F":
                # Its result leaves with the backward's. Together, this node only waits; the next one runs both.
                pending[rank] = [zero if self.together else duration]
                if not self.together:
                    counts[rank][duration] += 1
                continue
            if action.paired:
                done.insert(0, row[position - 1])
                if self.together:
                    duration = self.pairs[row[position - 1].stage, action.stage]
            counts[rank][duration] += 1
            pending[rank] = [duration]
            for one in done:
                sent = self.transfer(one)
                ready["F" if one.kind == "F" else "B", one.stage, one.microbatch] = node, self.key([duration, sent])
                if sent != zero and self.waited(row, position):
                    pending[rank].append(sent)
                    waits[rank][sent] += 1
            held_up[rank][position] = self.key(pending[rank][1:])
        ends = tuple((last[rank], self.key(pending[rank])) for rank in range(ranks))
        return _Program(
            order=order,
            previous=tuple(previous),
            chain=_getter(chain),
            source=tuple(source),
            arrival=_getter(arrival),
            sums=tuple(self.sums),
            pairs=tuple(self.pairs),
            last=ends,
            counts=tuple(tuple(sorted(counter.items())) for counter in counts),
            waits=tuple(tuple(sorted(counter.items())) for counter in waits),
            nodes=tuple(map(tuple, nodes)),
            held_up=tuple(map(tuple, held_up)),
        )


@functools.lru_cache(maxsize=256)
def _program(work: Work, sends: Sends, together: bool) -> _Program:
    return _Build(order_of(work), sends, together).program()


def _events(timeline: Timeline) -> tuple[Event, ...]:
    program = _program(timeline.work, timeline.sends, timeline.hidden > 0.0)
    costs = program.costs(timeline.times, timeline.transfer_s, timeline.hidden)
    starts = program.starts(costs)
    stages = len(timeline.times)
    first = {"F": 0, "B": stages, "I": 2 * stages, "W": 3 * stages}
    found: list[Event] = []
    for rank, row in enumerate(program.order.ranks):
        free = 0.0
        for position, action in enumerate(row):
            node = program.nodes[rank][position]
            start, seconds = (
                starts[node] if node else free,
                costs[first[action.kind] + action.stage],
            )  # W waits for no one
            if action.paired and timeline.hidden > 0.0:
                second = position if action.kind == "B" else position + 1
                pair = program.pairs.index((row[second - 1].stage, row[second].stage))
                start, seconds = starts[program.nodes[rank][second]], costs[5 * stages + pair]
            found.append(Event(rank, action, start, start + seconds))
            free = start + seconds + costs[program.held_up[rank][position]]
    return tuple(found)


# ------------------------------------------------------------------ the steady state


@dataclasses.dataclass(frozen=True, slots=True)
class _Steady:
    """A shape as its shorter base with the steady state repeated.

    Why the repetition is exact: the actions after the cut depend on each other, and on some before it, only through sums and
    maxima. Shift all that they depend on by the same time and all of them shift by it. So when everything that crosses into
    the last repetition of the base starts exactly one period after what it repeats, each further repetition adds that period.
    """

    base: _Program
    longer: _Program  # the base with one repetition more
    crossing: tuple[
        tuple[int, int], ...
    ]  # nodes that repetitions hand on to the next, and the same one repetition later
    count: int

    def run(
        self, times: Sequence[StageTime], transfer_s: Sequence[float], hidden: float
    ) -> tuple[float, tuple[float, ...], tuple[float, ...]] | None:
        """Makespan, busy and sending time as `simulate` returns them; None if the base does not reach the steady state."""
        costs = self.base.costs(times, transfer_s, hidden)
        starts = self.base.starts(costs)
        makespan = self.base.makespan(starts, costs)
        first, second = self.crossing[0]
        period = starts[second] - starts[first]
        # Sums of the same terms in another order differ in the last bits.
        tolerance = 1e-12 * makespan
        for first, second in self.crossing:
            if not -tolerance <= starts[second] - starts[first] - period <= tolerance:
                return None
        busy, sending = self.base.occupied(costs)
        more_costs = self.longer.costs(times, transfer_s, hidden)
        more_busy, more_sending = self.longer.occupied(more_costs)
        return (
            makespan + self.count * period,
            tuple(a + self.count * (b - a) for a, b in zip(busy, more_busy, strict=True)),
            tuple(a + self.count * (b - a) for a, b in zip(sending, more_sending, strict=True)),
        )


@functools.lru_cache(maxsize=256)
def _steady(shape: Shape, sends: Sends, together: bool) -> _Steady | None:
    found = repetition(shape)
    if found is None:
        return None
    base = _program(found.base, sends, together)
    longer = _program(
        dataclasses.replace(found.base, microbatches=found.base.microbatches + found.step), sends, together
    )
    order = base.order
    place = {node: (rank, i) for rank, row in enumerate(base.nodes) for i, node in enumerate(row) if node}
    begins = [cut - length for cut, length in zip(found.cuts, found.lengths, strict=True)]

    def after(node: int, bounds: Sequence[int]) -> bool:
        rank, position = place[node]
        return position >= bounds[rank]

    crossing: dict[int, int] = {}
    for node, (before, needs) in enumerate(zip(base.previous, base.source, strict=True), start=1):
        for other in (before, needs):
            if other == 0:
                # The start of the step is no shift of anything. Only a rank's first action may be ruled by it.
                if other == before and after(node, begins):
                    return None
                continue
            if after(other, found.cuts) and not after(node, found.cuts):
                return None
            if after(node, begins) and not after(other, begins):
                rank, position = place[other]
                later = position + found.lengths[rank]
                if later < begins[rank]:
                    return None
                # What lies between it and the repetition (its own weight gradients) must repeat as well.
                row = order.ranks[rank]
                repeated = [a._replace(microbatch=a.microbatch + found.step) for a in row[position : begins[rank]]]
                if repeated != list(row[later : found.cuts[rank]]):
                    return None
                crossing[other] = base.nodes[rank][later]
    return _Steady(base, longer, tuple(crossing.items()), found.count) if crossing else None
