"""What each option of a plan does to memory, by arithmetic on the plan: whoever drops an effect fails here.

Llama 3 8B: 32 blocks, width 4096, 32 heads and 8 KV heads of 128, 14336 between w1 and w2, a vocabulary of 128256.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from tests import plans
from tests.unit.plan_factory import llama, with_checkpoint
from titan_planner.cost.activations import backward_working
from titan_planner.cost.estimate import estimate
from titan_planner.cost.local import BALANCED, effective_imbalance, fuses, local
from titan_planner.cost.memory import Parts, rank_memory, stage_memory
from titan_planner.cost.program import TITAN
from titan_planner.cost.reserve import reserve
from titan_planner.ir.execution import KEEP_ALL, Compile, Float8Recipe
from titan_planner.ir.model import Moe, SwiGlu
from titan_planner.ir.parallel import Mesh
from titan_planner.ir.plan import Plan

GIB, MIB = 2**30, 2**20
DIM, HIDDEN, VOCAB, BLOCKS = 4096, 14336, 128256, 32
BLOCK = DIM * (4096 + 2 * 1024 + 4096) + 3 * DIM * HIDDEN + 2 * DIM
"""Elements of one block."""
LOSS, FIRST = "loss", "first block's backward"


def parts(plan: Plan, name: str, rank: int = 0, **options: Any) -> Parts:
    """What is in memory at the moment called `name`."""
    moments = rank_memory(plan, **options)[rank].moments
    return next(moment.parts for moment in moments if moment.name == name)


def narrow(grid: Mesh | None = None, **sections: Any) -> Plan:
    """Llama 3 8B computed in bfloat16: 8 x 8192 tokens a microbatch, and 8192 in a pipeline."""
    plan = llama("8B", grid, **sections)
    return replace(plan, fsdp=replace(plan.fsdp, param_dtype="bfloat16"))


# ------------------------------------------------------------------ what there is


def test_headroom_is_taken_off_what_is_available_and_decides_whether_a_plan_fits() -> None:
    plan = narrow()
    (stage,) = stage_memory(plan)

    def with_headroom(memory_gib: float, headroom: float) -> Plan:
        limits = replace(plan.request.limits, memory_headroom=headroom)
        gpu = replace(plan.cluster.gpu, memory_gib=memory_gib)
        return replace(
            plan, cluster=replace(plan.cluster, gpu=gpu), request=replace(plan.request, limits=limits), estimate=None
        )

    assert estimate(with_headroom(80.0, 0.25)).memory_available_gib == 60.0
    # A tenth more than the plan needs is enough, unless a quarter has to stay free.
    roomy = 1.1 * stage.total_gib
    assert estimate(with_headroom(roomy, 0.0)).fits
    assert not estimate(with_headroom(roomy, 0.25)).fits


def test_every_communicator_takes_a_quarter_of_a_gibibyte() -> None:
    plan = narrow(plans.mesh(dp_shard=2, pp=2, tp=2))
    # All ranks, and one group of two for each of pp, fsdp and tp.
    context, communicators, workspace = (line.nbytes for line in reserve(plan))
    assert (context, communicators, workspace) == (0.5 * GIB, 4 * 0.25 * GIB, 8.125 * MIB)
    assert [stage.reserve_gib for stage in stage_memory(plan)] == [round(1.5 + 8.125 / 1024, 3)] * 2
    alone = narrow(plans.mesh())
    assert [line.nbytes for line in reserve(alone)] == [0.5 * GIB, 0, 8.125 * MIB]


# ------------------------------------------------------------------ experts


EXPERTS = plans.tiny_moe_model()
ROWS = 32 * 2  # choices of a rank's 32 tokens, two each


def crowd(capacity: float | None = None, ep: int = 4, *, forced: bool = False) -> Plan:
    """Two blocks of eight experts over `ep` ranks, in float32."""
    plan = plans.tiny_plan(plans.mesh(ep, ep=ep), model=EXPERTS)
    experts = replace(plan.expert_parallel, capacity_factor=capacity, force_load_balance=forced)
    return replace(plan, expert_parallel=experts)


def mixture() -> Moe:
    layer = EXPERTS.blocks[1].block.feed_forward
    assert isinstance(layer, Moe)
    return layer


# What an eager mixture keeps of a row that is sent: two places in int64 and the result; of one that arrived: its place in the
# order, the result, the row itself, and SwiGLU's four intermediate results.
SENT = 2 * 8 + EXPERTS.dim * 4
ARRIVED = 8 + 2 * EXPERTS.dim * 4 + 4 * mixture().hidden_dim * 4


@pytest.mark.parametrize(
    ("capacity", "imbalance", "sent", "arrived"),
    [
        (None, 1.0, 1.0, 1.0),
        (0.5, 1.0, 0.5, 0.5),  # half of the choices are cut off before they are sent
        (0.5, 3.0, 0.5, 0.5),  # and no expert has room for more
        (1.5, 3.0, 1.0, 1.5),
        (1.5, 1.25, 1.0, 1.25),
        (8.0, 3.0, 1.0, 3.0),
        (None, 100.0, 1.0, 4.0),  # one of four ranks gets all there is
    ],
)
def test_a_capacity_bounds_what_experts_get_and_keep(
    capacity: float | None, imbalance: float, sent: float, arrived: float
) -> None:
    balanced, plan = crowd(), crowd(capacity)
    more = parts(plan, LOSS, imbalance=imbalance).activations - parts(balanced, LOSS).activations
    assert more == pytest.approx(2 * ROWS * ((sent - 1) * SENT + (arrived - 1) * ARRIVED))
    buffers = parts(plan, FIRST, imbalance=imbalance).communication
    assert buffers == pytest.approx(ROWS * (sent + arrived) * EXPERTS.dim * 4)


@pytest.mark.parametrize(("capacity", "worst"), [(None, 4.0), (8.0, 4.0), (1.5, 1.5), (1.0, 1.0), (0.25, 1.0)], ids=str)
def test_the_worst_that_is_reported_keeps_to_the_capacity(capacity: float | None, worst: float) -> None:
    plan = crowd(capacity)
    (rank,), (most,) = rank_memory(plan), rank_memory(plan, imbalance=worst)
    more = parts(plan, FIRST, imbalance=worst).activations - parts(plan, FIRST).activations
    assert rank.experts_worst == pytest.approx(more)
    assert (rank.experts_worst > 0) == (worst > 1)
    assert most.experts_worst == 0
    assert rank_memory(plan, imbalance=1000.0)[0].moments == most.moments


def test_the_effective_imbalance_is_possible() -> None:
    layer = mixture()
    assert effective_imbalance(crowd(), layer, 1.1) == 1.1
    assert effective_imbalance(crowd(ep=2), layer, 100.0) == 2
    assert effective_imbalance(crowd(ep=1), layer, 100.0) == 1
    # One expert a rank: a token that meets two meets two ranks, so that nobody gets more than all tokens once.
    assert effective_imbalance(crowd(ep=8), layer, 100.0) == 4
    assert effective_imbalance(crowd(ep=8), replace(layer, top_k=1, route_norm=False), 100.0) == 8
    assert effective_imbalance(crowd(1.25, ep=8), layer, 100.0) == 1.25
    assert rank_memory(crowd(forced=True))[0].experts_worst == 0


# ------------------------------------------------------------------ buffers of collectives


@pytest.mark.parametrize("method", ["allgather", "ring", "alltoall"])
def test_context_parallelism_needs_buffers_while_a_block_runs(
    method: Literal["allgather", "ring", "alltoall"],
) -> None:
    plan = narrow(plans.mesh(dp_shard=2, cp=4))
    plan = replace(plan, context_parallel=replace(plan.context_parallel, method=method))
    tokens = 8 * 8192 // 4
    keys_and_values, queries = 2 * tokens * 8 * 128, tokens * 32 * 128
    expected = {
        # Of all four ranks in bfloat16, and their gradients in float32.
        "allgather": 4 * keys_and_values * (2 + 4),
        # Those in use and those on their way.
        "ring": 2 * keys_and_values * (2 + 4),
        # Before and after the exchange.
        "alltoall": 2 * (keys_and_values + queries) * 2,
    }
    assert parts(plan, FIRST).communication == expected[method]
    assert parts(plan, LOSS).communication == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_unit_gathered_ahead_in_backward_is_another_in_memory(depth: int) -> None:
    plan = narrow()
    at = {
        ahead: parts(replace(plan, fsdp=replace(plan.fsdp, prefetch_backward=ahead)), FIRST).unsharded
        for ahead in (0, 1, 1 + depth)
    }
    # Without a depth FSDP gathers one ahead. Beyond the embedding's unit, which is larger, all are blocks in bfloat16.
    assert at[0] == at[1]
    assert at[1 + depth] - at[1] == depth * 2 * BLOCK


# ------------------------------------------------------------------ 8 bits


@pytest.mark.parametrize(
    ("recipe", "copies"), [("tensorwise", 1), ("rowwise", 2), ("rowwise_with_gw_hp", 2), ("mxfp8", 2)]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_operands_in_8_bits_are_there_while_a_block_runs(recipe: Float8Recipe, copies: int, tp: int) -> None:
    plan = narrow(plans.mesh(dp_shard=8 // tp, tp=tp), float8=True)
    plan = replace(plan, float8=replace(plan.float8, recipe=recipe))
    # Of w1's product: the input, the gradient of the result, and the weight.
    operands = 8 * 8192 * (DIM + HIDDEN // tp) + DIM * HIDDEN // tp
    assert parts(plan, FIRST).float8 == copies * operands
    assert parts(plan, LOSS).float8 == parts(narrow(), FIRST).float8 == 0


# ------------------------------------------------------------------ pipelines


FIRST_ROW = "0F0,0F1,0B0,0B1"


def piped(row: str, schedule: Any = "1F1B") -> Plan:
    """Two microbatches through two stages, of which the second does `row`."""
    plan = narrow(plans.mesh(pp=2))
    return replace(plan, pipeline=replace(plan.pipeline, schedule=schedule, microbatches=2, actions=(FIRST_ROW, row)))


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "InterleavedZeroBubble"])
def test_a_split_backward_keeps_gradients_between_its_halves_whatever_the_schedules_name(name: str) -> None:
    one, two, split = (
        parts(piped(row, name), LOSS, 1).activations
        for row in ("1F0,1B0,1F1,1B1", "1F0,1F1,1B0,1B1", "1F0,1I0,1F1,1I1,1W0,1W1")
    )
    blocks = sum(layer.stage == 1 and layer.fqn.startswith("layers.") for layer in piped("1F0,1B0,1F1,1B1").layers)
    # Results of wq, wk, wv and wo, of w1 and w3, and of w2; nothing of a microbatch is freed before its weights' gradients.
    columns = 4096 + 1024 + 1024 + DIM + 2 * HIDDEN + DIM
    assert two == 2 * one
    assert split - two == 2 * blocks * 8192 * columns * 2


@pytest.mark.parametrize(
    ("row", "name", "waiting"),
    [
        ("1F0,1B0,1F1,1B1", "GPipe", 0),
        ("1F0,1I0,1F1,1I1,1W0,1W1", "GPipe", 0),
        ("1F0,1F1,1B0,1B1", "1F1B", 1),
    ],
)
def test_losses_wait_as_the_actions_say(row: str, name: str, waiting: int) -> None:
    # Eager: the stage's output (2 bytes a logit) and log_softmax's result (4) wait, and three such are alive in backward.
    assert parts(piped(row, name), LOSS, 1).logits == (2 + 12 + waiting * (2 + 4)) * 8192 * VOCAB


# ------------------------------------------------------------------ compilers


def compiled(backend: str, budget: float | None = None) -> Plan:
    """Blocks and loss compiled; within a budget if one is given."""
    plan = narrow(compile=Compile(enable=True, components=("model", "loss"), backend=backend))
    if budget is None:
        return plan
    policy = replace(KEEP_ALL, name="budget", mode="memory_budget", memory_budget=budget)
    policies = (*plan.activation_checkpoint.policies, policy)
    checkpoint = replace(plan.activation_checkpoint, policies=policies)
    return with_checkpoint(replace(plan, activation_checkpoint=checkpoint), dict.fromkeys(range(BLOCKS), "budget"))


TOKENS = 8 * 8192
# Of a token beside the block's input, in bytes: the inputs of wq, wk and wv, of w1 and w3, and of w2 ...
INPUTS = (DIM + DIM + HIDDEN) * 2
# ... and the roots of two norms, queries, keys, values, attention's result and log-sums, its contribution, w1's and w3's results.
OTHERS = 2 * 4 + (2 * 4096 + 2 * 1024) * 2 + 32 * 4 + DIM * 2 + 2 * HIDDEN * 2


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (1.0, INPUTS + OTHERS),
        (0.9, OTHERS),  # inputs of products are made again first, and that is enough
        (0.5, 0.5 * (INPUTS + OTHERS)),
        (0.0, 0.0),
    ],
)
def test_a_budget_bounds_what_the_compiler_keeps(budget: float, kept: float) -> None:
    less = parts(compiled("inductor"), LOSS).activations - parts(compiled("inductor", budget), LOSS).activations
    assert less == pytest.approx(BLOCKS * TOKENS * (INPUTS + OTHERS - kept))
    again = parts(compiled("inductor", budget), "last block's backward").activations
    # What is not kept is there while its own block runs backward.
    assert again == pytest.approx(parts(compiled("inductor"), "last block's backward").activations)


def amounts(plan: Plan) -> Sequence[tuple[str, Parts]]:
    return [(moment.name, moment.parts) for moment in rank_memory(plan)[0].moments]


@pytest.mark.parametrize("backend", ["eager", "aot_eager_default_partitioner"])
def test_backends_without_a_partitioner_are_as_eager(backend: str) -> None:
    off = replace(compiled(backend), compile=Compile(enable=False, components=("model", "loss"), backend="inductor"))
    assert amounts(compiled(backend)) == amounts(off)
    assert amounts(compiled(backend, 0.3)) == amounts(compiled(backend))
    assert not fuses(compiled(backend)) and not fuses(off)


def test_a_backend_that_partitions_without_fusing_keeps_less_and_works_as_eager() -> None:
    apart, whole = compiled("aot_eager"), compiled("inductor")
    assert fuses(whole) and fuses(compiled("tvm")) and not fuses(apart)
    assert parts(apart, LOSS).activations == parts(whole, LOSS).activations
    logits = TOKENS * VOCAB
    assert (parts(apart, LOSS).logits, parts(whole, LOSS).logits) == (12 * logits, 4 * logits)
    # Where the feed-forward is narrow, an eager norm's three gradients in float32 are the most in flight, fused ones are one.
    (run,) = whole.model.blocks
    block = replace(run.block, feed_forward=SwiGlu(hidden_dim=1024))
    eager, fused = (backward_working(block, local(plan, TITAN, BALANCED), KEEP_ALL) for plan in (apart, whole))
    assert eager - fused == TOKENS * (3 - 1) * DIM * 4
