"""The pipeline timeline against closed forms for even stages and against an event simulation for random uneven ones.

Bubbles are per rank: makespan minus the time that it computes. f, b, i, w are seconds of one (virtual) stage, b = i + w.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

import pytest

from titan_planner.cost.timeline import StageTime, Timeline, simulate, torch_sends
from titan_planner.ir.actions import Action, parse_actions, spell
from titan_planner.schedules import Shape, Work, order_of

COSTS = [
    (1.0, 1.0, 1.0),
    (2.0, 2.0, 1.0),
    (3.0, 2.0, 1.0),
    (2.0, 3.0, 2.0),
    (5.0, 4.0, 4.0),
    (1.0, 2.0, 2.0),
    (1.0, 1.0, 2.0),
]


def even(shape: Shape, f: float, i: float, w: float, **options) -> Timeline:
    return simulate(shape, [StageTime(f, i + w, i, w)] * (shape.pp * shape.per_rank), **options)


def bubble(shape: Shape, f: float, i: float, w: float, **options) -> float:
    """The bubble, which is the same on every rank when stages are even."""
    timeline = even(shape, f, i, w, **options)
    assert timeline.bubble_s == pytest.approx([timeline.bubble_s[0]] * shape.pp)
    for busy in timeline.busy_s:
        assert busy == pytest.approx(shape.microbatches * shape.per_rank * (f + i + w))
    assert timeline.makespan_s == pytest.approx(timeline.busy_s[0] + timeline.bubble_s[0])
    return timeline.bubble_s[0]


# ------------------------------------------------------------------ closed forms


@pytest.mark.parametrize(("f", "i", "w"), COSTS)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_bubbles_of_even_stages_equal_the_closed_forms(pp, f, i, w):
    b = i + w
    for m in (2 * pp, 5 * pp, 12 * pp):
        # GPipe (1811.06965) and 1F1B (2104.04473): (p - 1)(F + B).
        assert bubble(Shape("GPipe", pp, 1, m), f, i, w) == pytest.approx((pp - 1) * (f + b))
        assert bubble(Shape("1F1B", pp, 1, m), f, i, w) == pytest.approx((pp - 1) * (f + b))
        for v in (2, 3):
            # Interleaved (2104.04473), whole rounds, and breadth-first (2211.05953): (p - 1)(F + B) / v.
            assert bubble(Shape("Interleaved1F1B", pp, v, m), f, i, w) == pytest.approx((pp - 1) * (f + b))
            assert bubble(Shape("LoopedBFS", pp, v, m), f, i, w) == pytest.approx((pp - 1) * (f + b))
        for v in (1, 2, 3):
            # ZB1P (2401.10241; DeepSeek's DualPipe README): (p - 1)(F + B - 2W), over v stages. It holds while weight gradients
            # take no longer than what they fill; a longer one fills no more than that.
            expected = (pp - 1) * (f + b - w - min(f, i, w))
            assert bubble(Shape("InterleavedZeroBubble", pp, v, m), f, i, w) == pytest.approx(expected)
        if f == i >= w:
            # ZBV (2401.10241): no bubble but the way down the V.
            assert bubble(Shape("ZBVZeroBubble", pp, 2, m), f, i, w) == pytest.approx((pp - 1) * f)
            # DualPipeV (DeepSeek's README): (P/2 - 1)(F&B + B - 3W), P = 2p stages, pairs one after the other: F&B = F + B. Its
            # derivation takes F = I for the way down; for other stages torch's order has other bubbles.
            assert bubble(Shape("DualPipeV", pp, 2, m), f, i, w) == pytest.approx((pp - 1) * (f + b + b - 3 * w))


def test_where_the_published_forms_do_not_hold_for_torchs_order():
    """The forms of ZBV and DualPipeV want f = i. Values of the order that torch runs, checked by the event simulation below."""
    assert bubble(Shape("ZBVZeroBubble", 4, 2, 16), 3.0, 2.0, 1.0) == 11.0  # not 3 x 3
    assert bubble(Shape("DualPipeV", 4, 2, 16), 3.0, 2.0, 1.0) == 21.0  # not 3 x (6 + 3 - 3) = 18
    assert bubble(Shape("DualPipeV", 4, 2, 16), 2.0, 3.0, 2.0) == 16.0  # not 3 x (7 + 5 - 6) = 18


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zbv_idles_nowhere_between_the_first_and_the_last_action_of_a_rank(pp):
    """2401.10241, section 6, for F = B_input = W."""
    events = even(Shape("ZBVZeroBubble", pp, 2, 3 * pp), 1.0, 1.0, 1.0).events()
    for rank in range(pp):
        mine = [event for event in events if event.rank == rank]
        assert all(one.end_s == other.start_s for one, other in itertools.pairwise(mine))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
def test_breadth_first_waits_for_its_own_first_stage_with_few_microbatches(m):
    pp, v, f, b = 4, 3, 1.0, 2.0
    makespan = even(Shape("LoopedBFS", pp, v, m), f, 1.0, 1.0).makespan_s
    assert makespan == pytest.approx(((v - 1) * max(pp, m) + m + pp - 1) * (f + b))


def test_transfers_lengthen_the_way_down_and_up():
    pp, m, tr = 4, 16, 0.25
    assert (
        even(Shape("GPipe", pp, 1, m), 1.0, 1.0, 1.0, transfer_s=tr).makespan_s
        == (m + pp - 1) * 3.0 + 2 * (pp - 1) * tr
    )
    # The longest round through 1F1B goes down and up the whole pipeline and takes the p microbatches that its first rank holds.
    short, long = (
        even(Shape("1F1B", pp, 1, count), 1.0, 1.0, 1.0, transfer_s=tr).makespan_s for count in (m, m + 10 * pp)
    )
    assert long - short == 10 * (pp * 3.0 + 2 * (pp - 1) * tr)
    # Interleaved stages have microbatches to spare.
    inner = even(Shape("Interleaved1F1B", pp, 2, m), 1.0, 1.0, 1.0, transfer_s=tr)
    assert inner.makespan_s < even(Shape("1F1B", pp, 1, m), 2.0, 2.0, 2.0, transfer_s=tr).makespan_s


def test_sends_that_block_cost_their_sender():
    shape, tr = Shape("GPipe", 2, 1, 4), 0.5
    blocking = even(shape, 1.0, 1.0, 1.0, transfer_s=tr, sends="blocking")
    assert blocking.sending_s == (4 * tr, 4 * tr)
    assert blocking.busy_s == (12.0, 12.0)
    # Forward leaves rank 0 every 1.5 s, the first arrives at 1.5; backward leaves rank 1 every 2.5 s from 7.0 on.
    assert blocking.makespan_s == 7.0 + 4 * 2.5 + 2.0
    overlap = even(shape, 1.0, 1.0, 1.0, transfer_s=tr)
    assert overlap.sending_s == (0.0, 0.0)
    assert overlap.makespan_s == 15.0 + 2 * tr
    # At turns only: here rank 0 waits for its last forward's send, rank 1 for none.
    assert even(shape, 1.0, 1.0, 1.0, transfer_s=tr, sends="turn").sending_s == (tr, 0.0)
    assert torch_sends(Shape("1F1B", 2, 1, 4)) == "turn"
    assert torch_sends(shape) == "overlap"


def test_pairs_that_overlap_hide_part_of_the_shorter_half():
    shape = Shape("DualPipeV", 4, 2, 32)
    times = [StageTime(1.0, 2.0, 1.0, 1.0)] * 8
    serial, half, full = (simulate(shape, times, hidden=hidden) for hidden in (0.0, 0.5, 1.0))
    assert serial.makespan_s > half.makespan_s > full.makespan_s
    pairs = [sum(action.paired for action in row) // 2 for row in order_of(shape).ranks]
    for timeline, hidden in ((half, 0.5), (full, 1.0)):
        assert timeline.busy_s == pytest.approx([32 * 6.0 - hidden * count for count in pairs])
    ends = [event for event in full.events() if event.action.paired]
    assert all(
        a.start_s == b.start_s and a.end_s == b.end_s == a.start_s + 2.0
        for a, b in zip(ends[::2], ends[1::2], strict=True)
    )


def test_the_slowest_stage_sets_the_pace_and_is_named():
    times = [StageTime(1.0, 2.0)] * 4
    times[2] = StageTime(1.5, 3.0)
    timeline = simulate(Shape("1F1B", 4, 1, 100), times)
    assert timeline.critical_rank == 2
    assert timeline.busy_s == (300.0, 300.0, 450.0, 300.0)
    # Down to it; once it waits for the last stage, which answers 1.5 s after its second forward; all of its work; up from it.
    assert timeline.makespan_s == pytest.approx(2 * 1.0 + 1.5 + 450.0 + 2 * 2.0)


def test_one_rank_takes_turns():
    timeline = simulate(Shape(None, 1, 1, 3), [StageTime(1.0, 2.0)])
    assert timeline.makespan_s == 9.0
    assert timeline.bubble_s == (0.0,)


def test_the_wrong_number_of_times_is_an_error():
    with pytest.raises(ValueError, match="3 times and 3 transfers for 4 stages"):
        simulate(Shape("1F1B", 4, 1, 4), [StageTime(1.0, 2.0)] * 3)
    with pytest.raises(ValueError, match="4 times and 2 transfers"):
        simulate(Shape("1F1B", 4, 1, 4), [StageTime(1.0, 2.0)] * 4, [0.1, 0.1])
    with pytest.raises(ValueError, match="0 to 1"):
        simulate(Shape("DualPipeV", 2, 2, 4), [StageTime(1.0, 2.0)] * 4, hidden=1.5)


# ------------------------------------------------------------------ event simulation


def by_events(
    work: Work, times: Sequence[StageTime], transfer_s: Sequence[float], sends: str, hidden: float
) -> tuple[float, dict[tuple[int, int], tuple[float, float]]]:
    """Ranks as machines with a clock, and messages between them: makespan, and (start, end) of every (rank, position).

    Knows nothing of graphs: a rank whose next action lacks a message sleeps until one comes.
    """
    order = order_of(work)
    place, last = order.placement, len(order.placement) - 1
    at, asleep, free = [0] * len(order.ranks), [True] * len(order.ranks), [0.0] * len(order.ranks)
    inbox: set[tuple[str, int, int]] = set()
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    queue: list[tuple[float, int, int, tuple[str, int, int] | None]] = [
        (0.0, r, r, None) for r in range(len(order.ranks))
    ]
    heapq.heapify(queue)
    serial = len(queue)

    def duration(action: Action) -> float:
        time = times[action.stage]
        return {"F": time.forward_s, "B": time.backward_s, "I": time.input_s, "W": time.weight_s}[action.kind]

    def has_inputs(action: Action) -> bool:
        if action.kind == "F":
            return action.stage == 0 or ("activation", action.stage, action.microbatch) in inbox
        if action.kind == "W" or action.stage == last:
            return True
        return ("gradient", action.stage, action.microbatch) in inbox

    def post(now: float, action: Action) -> float:
        """Send the result; seconds that its transfer takes."""
        nonlocal serial
        if (
            action.kind == "W"
            or (action.kind == "F" and action.stage == last)
            or (action.kind != "F" and action.stage == 0)
        ):
            return 0.0
        to = action.stage + (1 if action.kind == "F" else -1)
        seconds = transfer_s[min(to, action.stage)] if place[to] != place[action.stage] else 0.0
        name = ("activation" if action.kind == "F" else "gradient", to, action.microbatch)
        serial += 1
        heapq.heappush(queue, (now + seconds, serial, place[to], name))
        return seconds

    while queue:
        now, _, rank, message = heapq.heappop(queue)
        if message is None:
            asleep[rank] = False
        else:
            inbox.add(message)
            if not asleep[rank] or now < free[rank]:
                continue
        row = order.ranks[rank]
        position = at[rank]
        if position == len(row):
            continue
        action = row[position]
        group = row[position : position + 2] if action.paired and action.kind == "F" and hidden else (action,)
        if not all(map(has_inputs, group)):
            asleep[rank] = True
            continue
        spent = sum(map(duration, group))
        if len(group) == 2:
            spent -= hidden * min(map(duration, group))
        for i in range(len(group)):
            spans[rank, position + i] = now, now + spent
        end = now + spent
        at[rank] += len(group)
        if action.paired and action.kind == "F" and not hidden:
            blocked = 0.0  # what it computed is sent with the pair's other half
        else:
            sent = (row[position - 1], action) if action.paired and not hidden else group
            blocked = sum(post(end, one) for one in sent)
            later = [one for one in row[at[rank] :] if one.kind != "W"]
            turns = bool(later) and (later[0].kind == "F") != (action.kind == "F") and not action.paired
            blocked = blocked if sends == "blocking" or (sends == "turn" and turns) else 0.0
        free[rank] = end + blocked
        asleep[rank] = False
        serial += 1
        heapq.heappush(queue, (free[rank], serial, rank, None))
    assert all(at[rank] == len(row) for rank, row in enumerate(order.ranks))
    return max(free), spans


def random_shape(chance: random.Random, longest: int) -> Shape:
    while True:
        name = chance.choice(
            ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        )
        pp, m = chance.randint(2, 6), chance.randint(1, longest)
        v = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2, "DualPipeV": 2}.get(name) or chance.randint(1, 3)
        shape = Shape(name, pp, v, m)
        try:
            order_of(shape)
        except ValueError:
            continue
        return shape


def random_problem(chance: random.Random, stages: int) -> tuple[list[StageTime], list[float], str, float]:
    spread = chance.choice((0.0, 0.02, 0.5))

    def around(mean: float) -> float:
        return mean * (1 + spread * chance.random())

    times = [
        StageTime(around(1.0), around(2.0), around(1.0), around(chance.choice((0.5, 1.0, 1.5)))) for _ in range(stages)
    ]
    exposed = chance.choice((0.0, 0.01, 0.3))
    transfers = [exposed * around(1.0) for _ in range(stages - 1)]
    return times, transfers, chance.choice(("overlap", "turn", "blocking")), chance.choice((0.0, 0.0, 0.4))


@pytest.mark.parametrize("seed", range(300))
def test_random_uneven_problems_equal_an_event_simulation(seed):
    chance = random.Random(seed)
    shape = random_shape(chance, 24)
    times, transfers, sends, hidden = random_problem(chance, shape.pp * shape.per_rank)
    # Every third as a table of a plan's own.
    order = order_of(shape)
    work = (
        parse_actions(tuple(map(spell, order.ranks)), order.placement, order.microbatches) if seed % 3 == 0 else shape
    )
    timeline = simulate(work, times, transfers, sends=sends, hidden=hidden)
    makespan, spans = by_events(shape, times, transfers, sends, hidden)
    assert timeline.makespan_s == pytest.approx(makespan, rel=1e-12)
    events = timeline.events()
    assert len(events) == len(spans)
    position = [0] * shape.pp
    for event in events:
        start, end = spans[event.rank, position[event.rank]]
        assert event.action == order.ranks[event.rank][position[event.rank]]
        assert (event.start_s, event.end_s) == pytest.approx((start, end), rel=1e-12, abs=1e-12)
        position[event.rank] += 1
    for rank in range(shape.pp):
        occupied = timeline.busy_s[rank] + timeline.sending_s[rank] + timeline.bubble_s[rank]
        assert occupied == pytest.approx(makespan, rel=1e-12)


def test_repeating_the_steady_state_equals_simulating_it():
    """Long problems, of which many reach the steady state early; those that do not are simulated in full all the same."""
    extrapolated = 0
    for seed in range(80):
        chance = random.Random(1000 + seed)
        shape = random_shape(chance, 120)
        times, transfers, sends, hidden = random_problem(chance, shape.pp * shape.per_rank)
        if seed % 2:
            times = [times[1]] * len(times)
            times[-1] = StageTime(
                *(1.1 * t for t in (times[0].forward_s, times[0].backward_s, times[0].input_s, times[0].weight_s))
            )
        timeline = simulate(shape, times, transfers, sends=sends, hidden=hidden)
        extrapolated += timeline.extrapolated
        # The same actions as a table have no name, so nothing is known to repeat.
        full = simulate(order_of(shape), times, transfers, sends=sends, hidden=hidden)
        assert not full.extrapolated
        assert timeline.makespan_s == pytest.approx(full.makespan_s, rel=1e-10)
        assert timeline.busy_s == pytest.approx(full.busy_s, rel=1e-10)
        assert timeline.sending_s == pytest.approx(full.sending_s, rel=1e-10)
        assert timeline.bubble_s == pytest.approx(full.bubble_s, rel=1e-8, abs=1e-8)
        assert timeline.critical_rank == full.critical_rank or timeline.bubble_s[
            timeline.critical_rank
        ] == pytest.approx(timeline.bubble_s[full.critical_rank], abs=1e-8)
    assert extrapolated >= 15
