"""Orders of actions, what ranks hold at their fullest, the steady state, and tables of actions that plans spell out."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests import plans
from titan_planner.ir import rules
from titan_planner.ir.actions import Action, parse_actions, spell
from titan_planner.ir.errors import InvariantError
from titan_planner.ir.parallel import FsdpUnit, Pipeline, Stage
from titan_planner.schedules import (
    Held,
    Kept,
    Shape,
    in_flight,
    microbatches_in_flight,
    order_of,
    peak_bytes,
    peaks,
    repetition,
    work_of,
)

SHAPES = [
    *(Shape(name, pp, 1, m) for name in ("GPipe", "1F1B") for pp in (2, 3, 4, 8) for m in (pp, 2 * pp + 1, 50)),
    *(Shape("LoopedBFS", pp, v, m) for pp in (2, 3) for v in (1, 2) for m in (1, 5)),
    *(
        Shape(name, pp, v, m)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble")
        for pp in (2, 4, 8)
        for v in (1, 2, 3)
        for m in (1, pp, 2 * pp + 2, 7 * pp)
    ),
    *(Shape("ZBVZeroBubble", pp, 2, m) for pp in (2, 3, 4, 8) for m in (1, pp, 2 * pp, 9 * pp)),
    *(Shape("DualPipeV", pp, 2, m) for pp in (2, 3, 4, 8) for m in (2 * pp, 2 * pp + 1, 9 * pp)),
]


def words(shape: Shape, rank: int) -> str:
    return spell(order_of(shape).ranks[rank])


def test_small_orders_written_out():
    assert words(Shape(None, 1, 1, 2), 0) == "0F0,0B0,0F1,0B1"
    assert words(Shape("GPipe", 2, 1, 2), 1) == "1F0,1F1,1B0,1B1"
    assert words(Shape("1F1B", 2, 1, 3), 0) == "0F0,0F1,0B0,0F2,0B1,0B2"
    assert words(Shape("LoopedBFS", 2, 2, 2), 0) == "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0"
    assert words(Shape("Interleaved1F1B", 2, 2, 2), 1) == "1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1"
    assert words(Shape("InterleavedZeroBubble", 2, 1, 2), 1) == "1F0,1I0,1F1,1I1,1W0,1W1"
    assert (
        words(Shape("ZBVZeroBubble", 2, 2, 3), 1)
        == "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2"
    )
    dual = "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3"
    assert words(Shape("DualPipeV", 2, 2, 4), 0) == dual


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_order_is_one_that_a_plan_could_spell_out(shape):
    """Complete, on the right ranks, in an order that can run: the parser checks all of it."""
    order = order_of(shape)
    assert parse_actions(tuple(map(spell, order.ranks)), order.placement, order.microbatches).ranks == order.ranks


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape("1F1B", 2, 2, 4), "needs one stage a rank"),
        (Shape("GPipe", 2, 2, 4), "needs one stage a rank"),
        (Shape("ZBVZeroBubble", 2, 1, 4), "needs two stages a rank"),
        (Shape("DualPipeV", 4, 2, 7), "at least as many microbatches as the 8 stages"),
        (Shape("Interleaved1F1B", 4, 2, 9), "runs 2 rounds"),
        (Shape("InterleavedZeroBubble", 4, 2, 13), "runs 3 rounds"),
        (Shape(None, 2, 1, 1), "no schedule runs on one rank"),
    ],
)
def test_what_a_schedule_cannot_run_is_an_error(shape, message):
    with pytest.raises(ValueError, match=message):
        order_of(shape)


# ------------------------------------------------------------------ repetition


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_a_long_order_is_its_base_with_a_part_repeated(name):
    found = 0
    for pp, v in itertools.product(
        (2, 3, 4, 8), {"1F1B": (1,), "ZBVZeroBubble": (2,), "DualPipeV": (2,)}.get(name, (1, 2, 3))
    ):
        for m in (5 * pp, 7 * pp, 9 * pp, 9 * pp + 9, 10 * pp + 1, 16 * pp):
            shape = Shape(name, pp, v, m)
            try:
                long = order_of(shape)
            except ValueError:
                continue
            steady = repetition(shape)
            if steady is None:
                continue
            found += 1
            assert steady.base.microbatches + steady.count * steady.step == m
            for row, more, cut, length in zip(
                order_of(steady.base).ranks, long.ranks, steady.cuts, steady.lengths, strict=True
            ):
                built = list(row[:cut])
                for i in range(1, steady.count + 1):
                    built += [a._replace(microbatch=a.microbatch + i * steady.step) for a in row[cut - length : cut]]
                built += [a._replace(microbatch=a.microbatch + steady.count * steady.step) for a in row[cut:]]
                assert built == list(more), shape
    assert found >= 10


# ------------------------------------------------------------------ what is held


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_in_flight_counts_equal_the_closed_forms(pp):
    """In units of a rank's whole layer share. The forms: GPipe paper; 2104.04473; 2401.10241; DeepSeek's DualPipe README."""
    m = 4 * pp
    for rank in range(pp):
        assert microbatches_in_flight("GPipe", pp, rank, m, 1) == m
        assert microbatches_in_flight("LoopedBFS", pp, rank, m, 2) == m
        for count in (pp, pp + 1, m):
            assert microbatches_in_flight("1F1B", pp, rank, count, 1) == min(count, pp - rank)
        for v in (2, 3, 4):
            expected = (pp * (v + 1) - 2 * rank - 1) / v
            assert microbatches_in_flight("Interleaved1F1B", pp, rank, m, v) == pytest.approx(expected)
        for v in (1, 2, 4):
            assert microbatches_in_flight("InterleavedZeroBubble", pp, rank, m, v) == pp
        assert microbatches_in_flight("ZBVZeroBubble", pp, rank, m, 2) == pp
        assert microbatches_in_flight("DualPipeV", pp, rank, m, 2) == (2 * pp + 1) / 2
    assert microbatches_in_flight(None, 1, 0, 1, 1) == 1.0


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zero_bubble_schedules_free_what_only_inputs_need_earlier(pp):
    """Until the gradients of the inputs ZB1P holds what 1F1B holds, and with two stages a rank (2 pp - rank) / 2."""
    for rank, points in enumerate(in_flight("InterleavedZeroBubble", pp, 1, 4 * pp)):
        assert peak_bytes(points, [Kept(until_input=1.0)]) == pp - rank
        assert peak_bytes(points, [Kept(until_weight=1.0)]) == pp
        assert peak_bytes(points, [Kept(between=1.0)]) == min(4 * pp, rank + 1)
    for rank, points in enumerate(in_flight("InterleavedZeroBubble", pp, 2, 4 * pp)):
        assert peak_bytes(points, [Kept(until_input=0.5)] * 2) == (2 * pp - rank) / 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_peak_bytes_are_those_of_walking_the_order(shape):
    chance = random.Random(str(shape))
    order = order_of(shape)
    for rank, (row, points) in enumerate(zip(order.ranks, peaks(shape), strict=True)):
        stages = [stage for stage, holder in enumerate(order.placement) if holder == rank]
        for _ in range(3):
            kept = {stage: Kept(*(chance.choice((0.0, chance.random())) for _ in range(3))) for stage in stages}
            now = most = 0.0
            for action in row:
                size = kept[action.stage]
                now += {
                    "F": size.until_input + size.until_weight,
                    "B": -size.until_input - size.until_weight,
                    "I": size.between - size.until_input,
                    "W": -size.until_weight - size.between,
                }[action.kind]
                most = max(most, now)
            assert peak_bytes(points, [kept[stage] for stage in stages]) == pytest.approx(most, abs=1e-9)
            assert now == pytest.approx(0.0, abs=1e-9)


def test_peaks_are_few_and_name_their_stages():
    for points in peaks(Shape("Interleaved1F1B", 16, 4, 512)):
        assert len(points) <= 8
    for points in peaks(Shape("InterleavedZeroBubble", 8, 2, 32)):
        assert len(points) <= 12
    assert peaks(Shape("1F1B", 2, 1, 8)) == ((Held((0,), (2,), (2,)),), (Held((1,), (1,), (1,)),))
    assert peaks(Shape("ZBVZeroBubble", 2, 2, 8))[0][0].stages == (0, 3)


# ------------------------------------------------------------------ tables of actions

GOOD = ("0F0,0F1,0B0,0B1", "1F0,1B0 1F1\n1B1,")


def test_a_table_of_actions_is_read():
    order = parse_actions(GOOD, (0, 1), 2)
    assert order.ranks[1] == tuple(Action(kind, 1, i) for i in (0, 1) for kind in "FB")
    assert not order.splits_backward
    split = parse_actions(("0F0,0I0,0W0", "1F0,1B0"), (0, 1), 1)
    assert split.splits_backward
    assert peaks(order)[0] == (Held((0,), (2,), (2,)),)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0,0F1,0B0,0B1",), "1 rows of actions for 2 pipeline ranks"),
        (("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1X1"), "`1X1` in row 1 is no action"),
        (("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1SEND_F1"), "`1SEND_F1` in row 1 is no action"),
        (("0F0,0F1,0B0,1B1", "1F0,1B0,1F1,1B1"), "1B1 is in row 0, but pipeline rank 0 does not hold stage 1"),
        (("0F0,0F1,0B0,2B1", "1F0,1B0,1F1,1B1"), "does not hold stage 2"),
        (("0F0,0F1,0B0,0B2", "1F0,1B0,1F1,1B1"), "names microbatch 2, but there are 2"),
        (("0F0,0F1,0B0,0B0", "1F0,1B0,1F1,1B1"), "0B0 is twice in row 0"),
        (("0F0,0F1,0B0", "1F0,1B0,1F1,1B1"), "row 0 lacks 0B1 or 0I1"),
        (("0F0,0F1,0B0,0I1", "1F0,1B0,1F1,1B1"), "row 0 lacks 0B1 or 0W1"),
        (("0F0,0F1,0B0,0I1,0W1,0B1", "1F0,1B0,1F1,1B1"), "0B1 in row 0 repeats a backward"),
        (("0F0,0B0,0F1,0B1", "1B0,1F0,1F1,1B1"), "1B0 in row 1 comes before 1F0"),
        (("0F0,0W0,0I0,0F1,0B1", "1F0,1B0,1F1,1B1"), "0W0 in row 0 comes before 0I0"),
        (("0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"), "wait for each other for ever"),
        (("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1", "1F0,1B0,1F1,1B1"), "overlaps 0F1 with 0I0"),
        # Both halves must be ready before a pair starts, and 0B0 needs what only follows from 0F0.
        (("(0F0;0B0)OVERLAP_F_B,0F1,0B1", "1F0,1B0,1F1,1B1"), "wait for each other for ever"),
    ],
)
def test_a_table_that_cannot_run_is_refused_with_the_reason(rows, message):
    with pytest.raises(InvariantError, match=message.replace("(", r"\(")):
        parse_actions(rows, (0, 1), 2)


def pipelined(actions: tuple[str, ...] | None, schedule: str = "1F1B", reshard: bool = False):
    plan = plans.tiny_plan(plans.mesh(dp_shard=2, pp=2), local=2)
    stages = tuple(Stage(index=i, pp_rank=i) for i in range(2))
    units = tuple(FsdpUnit(modules=unit.modules, reshard_after_forward=reshard) for unit in plan.fsdp.units)
    return replace(
        plan,
        pipeline=Pipeline(schedule=schedule, stages=stages, microbatches=2, actions=actions),
        fsdp=replace(plan.fsdp, units=units),
    )


def violations(rule: str, plan) -> list[str]:
    return [violation.message for violation in rules.rule(rule).check(plan)]


SPLIT = ("0F0,0F1,0B0,0B1", "1F0,1I0,1F1,1W0,1B1")


def test_a_table_of_actions_is_checked_before_the_run():
    assert violations("pp-actions", pipelined(GOOD)) == []
    assert "lacks 0B1" in violations("pp-actions", pipelined(("0F0,0F1,0B0", GOOD[1])))[0]


def test_a_table_that_splits_backward_obeys_the_rules_of_schedules_that_do():
    assert "I and W" in violations("pp-split-backward-reshard", pipelined(SPLIT, reshard=True))[0]
    assert violations("pp-split-backward-reshard", pipelined(SPLIT)) == []
    # The table replaces the schedule, whatever that would have asked for.
    assert violations("pp-split-backward-reshard", pipelined(GOOD, "InterleavedZeroBubble", reshard=True)) == []
    one = pipelined(("0F0,0B0", "1F0,1B0"))
    assert violations("pp-microbatches", replace(one, pipeline=replace(one.pipeline, microbatches=1))) == []


def test_the_work_of_a_plan_is_its_table_or_else_its_schedule():
    assert work_of(pipelined(GOOD).pipeline) is parse_actions(GOOD, (0, 1), 2)
    assert work_of(pipelined(None).pipeline) == Shape("1F1B", 2, 1, 2)
    assert work_of(plans.tiny_plan().pipeline) == Shape(None, 1, 1, 1)
