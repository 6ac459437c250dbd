"""The planner's pipeline schedules against torch's own: the order of every rank, what torch accepts, and what it holds.

Compared are the computing actions (F, B, I, W and overlapped pairs) of every rank, in order, with stage and microbatch.
Left out is what the planner's orders do not have: idle slots (None), and the transfers, gathers and reductions that torch
adds when it lowers a schedule.
"""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from tests import plans
from titan_planner.ir import rules
from titan_planner.ir.actions import Action, Order, parse_actions, spell
from titan_planner.ir.errors import InvariantError
from titan_planner.ir.parallel import V_SCHEDULES, Pipeline
from titan_planner.schedules import Shape, order_of, place_stages

SINGLE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
ALL = (*SINGLE, *LOOPED, *V_SCHEDULES)
MICROBATCHES = (*range(1, 19), 20, 21, 24, 27, 31, 32, 33, 40, 48, 49, 63, 64)


class Recorder:
    """A stage without a module that writes down what a schedule tells it to compute."""

    submod = None
    group = None
    has_backward = True

    def __init__(self, index: int, stages: int, ranks: int, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, rank
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.done: list[Action] = []

    def no_ops(self, chunk: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_ops

    def forward_one_chunk(self, chunk: int, *_: Any, **__: Any) -> None:
        self.done.append(Action("F", self.stage_index, chunk))

    def backward_one_chunk(self, chunk: int, **_: Any) -> None:
        self.done.append(Action("B", self.stage_index, chunk))

    def perform_reduce_grad(self, factor: int) -> None:
        pass


@pytest.fixture
def whole_modules(monkeypatch):
    """torch asks whether a stage's module is compiled; a recorder has none."""
    monkeypatch.setattr(torch_schedules, "_check_torch_compile_compatibility", lambda *_: None)


@pytest.fixture
def not_lowered(whole_modules, monkeypatch):
    """Schedules without transfers, which cost seconds for long ones and do not change the order."""
    monkeypatch.setattr(torch_schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_, **__: None)


def torch_schedule(shape: Shape, rank: int = 0) -> Any:
    """torch's schedule object as one rank makes it. Raises what torch raises for what it does not accept."""
    kind = torch_schedules.get_schedule_class(shape.schedule)
    stages = shape.pp * shape.per_rank
    style = "v" if shape.schedule in V_SCHEDULES else "loop"
    local = generate_rank_to_stage_mapping(shape.pp, stages, style)[rank]
    recorders = [Recorder(index, stages, shape.pp, rank) for index in local]
    if issubclass(kind, torch_schedules.PipelineScheduleSingle):
        schedule = kind(recorders[0], shape.microbatches)
        schedule._initialize_stage = lambda *_, **__: None
        return schedule
    return kind(recorders, shape.microbatches)


def computed(row: list[Any]) -> list[Action]:
    """torch's row without what is not compared."""
    found = []
    for action in row:
        if action is None:
            continue
        if action.sub_actions is not None:
            assert action.computation_type.value == "OVERLAP_F_B"
            parts = action.sub_actions
            found += [Action(a.computation_type.value, a.stage_index, a.microbatch_index, True) for a in parts]
        elif action.is_compute_op:
            found.append(Action(action.computation_type.value, action.stage_index, action.microbatch_index))
    return found


def shapes(schedule: str, ranks: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 16)) -> list[Shape]:
    each = {"GPipe": (1,), "1F1B": (1,), "ZBVZeroBubble": (2,), "DualPipeV": (2,)}.get(schedule, (1, 2, 3, 4))
    counts = MICROBATCHES[::3] if schedule == "LoopedBFS" else MICROBATCHES  # simple, and most expensive to make
    return [Shape(schedule, pp, v, m) for pp in ranks for v in each for m in counts]


def accepted(shape: Shape, rank: int = 0) -> Any:
    try:
        return torch_schedule(shape, rank)
    except ValueError:
        return None


@pytest.mark.parametrize("schedule", [*LOOPED, *V_SCHEDULES])
def test_every_rank_of_every_multi_stage_schedule_computes_what_torch_does(not_lowered, schedule):
    compared = 0
    for shape in shapes(schedule):
        theirs = accepted(shape)
        if theirs is None:
            continue
        ours = order_of(shape)
        assert list(theirs.stage_index_to_group_rank.values()) == list(ours.placement)
        for rank, row in enumerate(ours.ranks):
            assert list(row) == computed(theirs.pipeline_order[rank]), (shape, rank)
            compared += 1
    assert compared > 500


@pytest.mark.parametrize("schedule", SINGLE)
def test_every_rank_of_single_stage_schedules_computes_what_torch_runs(schedule):
    """Against the loop that torch runs. Its table of 1F1B is no reference: on the last rank it counts forwards from 1."""
    compared = 0
    for shape in shapes(schedule):
        if accepted(shape) is None:
            continue
        ours = order_of(shape)
        for rank, row in enumerate(ours.ranks):
            theirs = torch_schedule(shape, rank)
            theirs._step_microbatches([()] * shape.microbatches, [{}] * shape.microbatches)
            assert list(row) == theirs._stage.done, (shape, rank)
            table = theirs._get_pipeline_order()
            if schedule == "GPipe" or rank < shape.pp - 1:
                assert list(row) == computed(table[rank]), (shape, rank)
            compared += 1
    assert compared > 500


@pytest.mark.parametrize("schedule", ALL)
def test_torch_the_rules_and_the_generator_accept_the_same(whole_modules, schedule):
    """With torch's lowering, so that an order in which ranks would wait for ever is not accepted."""
    answers = set()
    base = plans.tiny_plan(plans.mesh())
    checks = [rules.rule("pp-schedule").check, rules.rule("pp-microbatches").check]
    for shape in shapes(schedule, (2, 3, 4)):
        if shape.microbatches > 21:
            continue
        theirs = accepted(shape) is not None
        try:
            order_of(shape)
            ours = True
        except ValueError:
            ours = False
        stages = place_stages(shape.schedule, shape.pp, shape.pp * shape.per_rank)
        plan = replace(
            base,
            mesh=replace(base.mesh, pp=shape.pp),
            pipeline=Pipeline(schedule=schedule, stages=stages, microbatches=shape.microbatches, actions=None),
        )
        legal = not any(violation for check in checks for violation in check(plan))
        # Fewer microbatches than stages mean the same in 1F1B, and other programs run them: the generator can, the rules refuse.
        assert theirs == ours or (schedule == "1F1B" and ours), shape
        # torch would also run these two with one stage a rank; the planner has 1F1B and GPipe for that.
        if schedule not in ("Interleaved1F1B", "LoopedBFS") or shape.per_rank > 1:
            assert theirs == legal, shape
        answers.add(theirs)
    assert answers == ({True} if schedule in ("GPipe", "LoopedBFS", "ZBVZeroBubble") else {True, False})


def torch_accepts(rows: list[str], order: Order) -> bool:
    stages = [Recorder(i, len(order.placement), len(rows), 0) for i, r in enumerate(order.placement) if r == 0]
    schedule = torch_schedules._PipelineScheduleRuntime(stages, order.microbatches)
    try:
        table = {
            rank: [torch_schedules._Action.from_str(text) for text in row.split(",")] for rank, row in enumerate(rows)
        }
        schedule._prepare_schedule_with_comms(table)
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True


@pytest.mark.parametrize("schedule", ALL)
def test_a_table_of_actions_means_the_same_to_torch(schedule):
    """Spelled, read back and run; and with two actions exchanged, legal exactly when torch can lower it."""
    chance = random.Random(schedule)
    verdicts = []
    for pp in (2, 3):
        v = 1 if schedule in SINGLE else 2
        order = order_of(Shape(schedule, pp, v, 2 * pp))
        rows = [spell(row) for row in order.ranks]
        assert parse_actions(tuple(rows), order.placement, order.microbatches).ranks == order.ranks
        read = [computed([torch_schedules._Action.from_str(text) for text in row.split(",")]) for row in rows]
        assert read == [list(row) for row in order.ranks]
        for _ in range(60):
            changed = [row.split(",") for row in rows]
            row = chance.choice(changed)
            i = chance.randrange(len(row) - 1)
            j = min(len(row) - 1, i + chance.choice((1, 1, 2, 3)))
            row[i], row[j] = row[j], row[i]
            spelled = [",".join(words) for words in changed]
            try:
                parse_actions(tuple(spelled), order.placement, order.microbatches)
                ours = True
            except InvariantError:
                ours = False
            assert ours == torch_accepts(spelled, order), spelled
            verdicts.append(ours)
    assert set(verdicts) == {True, False}


def test_torch_frees_nothing_saved_for_backward_before_the_gradients_of_the_weights():
    """Why `Kept.until_input` is 0 for this runtime, and `Kept.between` is not."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 8, bias=False))
    saved: list[weakref.ref[Any]] = []

    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: torch.Tensor) -> Any:
        box = Box(tensor)
        saved.append(weakref.ref(box))
        return box

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        y = module(x)

    def alive() -> int:
        gc.collect()
        return sum(ref() is not None for ref in saved)

    everything = alive()
    _, groups = stage_backward_input([y], [torch.randn_like(y)], [x], module.parameters())
    assert alive() == everything >= 5  # both inputs, both weights, the input of SiLU
    kept = [grad for group in groups for grads in group["grads"] for grad in grads if grad is not None]
    assert sorted(grad.numel() for grad in kept) == [4 * 8, 4 * 16]  # gradients of both linears' outputs
    stage_backward_weight(module.parameters(), groups)
    del groups, kept, y
    assert alive() == 0
