"""The time of a step: parts that add up, and every decision of a plan moves the part that it should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.builders import compile_text
from titan_planner.cost.compute import recomputed
from titan_planner.cost.estimate import estimate
from titan_planner.cost.network import Group, Network, _dispatch, collective_seconds
from titan_planner.cost.ops import Matmul, Mixing, Shape, block_ops
from titan_planner.cost.program import MEGATRON, NEMO, TITAN
from titan_planner.cost.roofline import (
    attention_seconds,
    float8_products,
    matmul_seconds,
    product_seconds,
    shape_efficiency,
)
from titan_planner.cost.stage import kernels_of, layer_blocks, num_weights, stage_seconds
from titan_planner.cost.step import step_seconds
from titan_planner.hardware import find_gpu
from titan_planner.ir.plan import Plan, StepTime
from titan_planner.ir.verify import load_plan

PLANS = Path(__file__).resolve().parents[2] / "plans"
H100 = find_gpu("h100-sxm-80gb")

SPEC = """
spec_version: 1
model: {{family: llama3, flavor: 8B}}
cluster: {{node: dgx-h100, nodes: {nodes}}}
training: {{seq_len: 8192, local_batch_size: {local}, global_batch_size: {total}}}
parallelism: {{tensor_parallel_degree: {tp}, pipeline_parallel_degree: {pp}, context_parallel_degree: {cp},
  data_parallel_replicate_degree: 1}}
activation_checkpoint: {{mode: {ac}}}
compile: {{enable: {compiled}}}
{more}
"""


def plan(
    nodes: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ac: str = "full",
    compiled: str = "true",
    local: int = 1,
    total: int | None = None,
    more: str = "",
) -> Plan:
    """Llama 3 8B on H100s, pinned."""
    ranks = nodes * 8 // (tp * pp * cp)
    text = SPEC.format(
        nodes=nodes, tp=tp, pp=pp, cp=cp, ac=ac, compiled=compiled, local=local, total=total or local * ranks, more=more
    )
    return compile_text(text)


def parts(of: Plan) -> StepTime:
    found = estimate(of).step_time
    assert found is not None
    return found


@pytest.mark.parametrize("path", sorted(PLANS.glob("*/plan.json")), ids=lambda path: path.parent.name)
def test_the_parts_add_up_to_the_step_and_the_rates_follow(path: Path) -> None:
    golden = load_plan(path)
    found = estimate(golden)
    assert found.step_time is not None
    assert found.step_time_ms is not None
    total = sum(getattr(found.step_time, name) for name in StepTime.__dataclass_fields__)
    assert total == pytest.approx(found.step_time_ms, rel=2e-3)
    assert found.tokens_per_second_per_gpu == pytest.approx(
        golden.batch.tokens_per_step / found.step_time_ms * 1e3 / golden.mesh.world_size, rel=2e-3
    )
    assert found.tokens_per_second_per_gpu is not None
    assert found.tflops_per_gpu == pytest.approx(
        found.tokens_per_second_per_gpu * found.flops_per_token / 1e12, rel=2e-3
    )
    assert found.bottleneck in StepTime.__dataclass_fields__


def test_waves_of_tiles_decide_what_a_small_product_reaches() -> None:
    """132 multiprocessors: 132 tiles of 128 x 256 fill one wave, 133 need a second that is almost empty."""
    full = shape_efficiency(128 * 132, 256, 1 << 20, 132)
    assert full == pytest.approx(1.0, abs=1e-3)
    assert shape_efficiency(128 * 133, 256, 1 << 20, 132) < 0.95  # the smaller tile is better then, and not full either
    assert shape_efficiency(128, 256, 1 << 20, 132) == pytest.approx(2 * 0.94 / 132, rel=1e-3)  # two small tiles
    # Inner loops: at k = 96 as long as what is around them.
    assert shape_efficiency(128 * 132, 256, 96, 132) == pytest.approx(full / 2, rel=1e-3)


def test_a_product_takes_its_flops_at_the_fitted_rate_or_its_bytes() -> None:
    fit = H100.efficiency
    large = product_seconds(16384, 16384, 16384, 1, "bf16", H100, 2)
    reached = shape_efficiency(16384, 16384, 16384, H100.compute_units)
    assert large == pytest.approx(2 * 16384**3 / (H100.bf16_tflops * 1e12 * fit.matmul * reached), rel=1e-3)
    # One row: the weight is read once, and nothing else takes time.
    thin = product_seconds(1, 16384, 16384, 1, "bf16", H100, 2)
    assert thin == pytest.approx(2 * 16384**2 / (H100.memory_gb_per_s * 1e9 * fit.memory), rel=0.05)
    assert product_seconds(0, 8, 8, 1, "bf16", H100, 2) == 0.0


def test_float8_halves_products_and_pays_for_casts() -> None:
    op = Matmul("feed_forward.w1", 16384, 14336, 4096)
    plain = matmul_seconds(op, "bf16", H100, False, 2)
    eight = matmul_seconds(op, "tensorwise", H100, False, 2)
    assert eight.forward < 0.7 * plain.forward
    assert plain.forward_casts == plain.backward_casts == 0.0
    # torchao: 6 bytes an element of the input, 8 of the weight.
    moved = 6 * op.m * op.k + 8 * op.n * op.k
    assert eight.forward_casts == pytest.approx(moved / (H100.memory_gb_per_s * 1e9 * H100.efficiency.memory))
    row = matmul_seconds(op, "rowwise", H100, False, 2)
    assert row.forward > eight.forward
    assert row.forward_casts > eight.forward_casts
    # Without 8-bit units nothing is gained.
    a100 = find_gpu("a100-sxm-80gb")
    assert matmul_seconds(op, "tensorwise", a100, False, 2) == matmul_seconds(op, "bf16", a100, False, 2)


def test_torchs_8_bit_products_reach_less_than_transformer_engines() -> None:
    assert float8_products(H100, None) == 0.8
    assert float8_products(H100, 1.0) == 1.0
    assert float8_products(find_gpu("b200-180gb"), None) == 0.5


def test_newer_attention_kernels_are_faster_and_stored_scores_slower() -> None:
    op = Mixing(pairs=8192 * 8193 / 2, heads=32, qk_dim=128, v_dim=128)
    second, third = attention_seconds(op, H100), attention_seconds(op, H100, "third")
    assert third[0] < second[0] < attention_seconds(op, H100, "first")[0]
    assert attention_seconds(op, H100, "materialised")[0] > 3 * second[0]
    peak = H100.bf16_tflops * 1e12
    assert second[0] == pytest.approx(op.flops / (peak * H100.efficiency.attention), rel=0.01)
    assert second[1] == pytest.approx(2.5 * op.flops / (peak * H100.efficiency.attention_backward), rel=0.01)
    a100 = find_gpu("a100-sxm-80gb")
    assert attention_seconds(op, a100, "third") == attention_seconds(op, a100)


def test_recomputation_costs_what_it_repeats() -> None:
    none, selective, full = (parts(plan(ac=mode)) for mode in ("none", "selective", "full"))
    assert none.recompute_ms == 0
    assert 0 < selective.recompute_ms < full.recompute_ms
    assert none.matmul_ms == selective.matmul_ms == full.matmul_ms
    # Full repeats a forward, less each block's last product: a bit below a third of all products and attention's forward.
    assert 0.7 / 3 < full.recompute_ms / (full.matmul_ms + full.attention_ms + full.memory_bound_ms) < 1 / 3


def test_early_stop_leaves_out_the_last_product() -> None:
    full = plan()
    shape = Shape(tokens=8192, seq_len=8192)
    block = layer_blocks(full.model)[0]
    policy = full.activation_checkpoint.policy("full")
    assert policy is not None
    ops = block_ops(block, 4096, shape)
    again = recomputed(ops, policy, kernels_of(full))
    assert [op.name for op in ops if isinstance(op, Matmul)][-1] == "feed_forward.w2"
    assert [op.name for op in again if isinstance(op, Matmul)][-1] == "feed_forward.w3"
    assert recomputed(ops, policy, kernels_of(full, MEGATRON)) == ops


def test_compiling_saves_memory_bound_time_only() -> None:
    eager, compiled = parts(plan(compiled="false")), parts(plan())
    assert compiled.memory_bound_ms < 0.5 * eager.memory_bound_ms
    assert compiled.matmul_ms == eager.matmul_ms


def test_a_fast_network_hides_all_of_fsdp_but_its_ends() -> None:
    here = plan(nodes=2)
    link = replace(here.cluster.inter_node, gb_per_s=here.cluster.inter_node.gb_per_s / 40)
    slow = replace(here, cluster=replace(here.cluster, inter_node=link))
    assert parts(slow).data_parallel_ms > 5 * parts(here).data_parallel_ms
    hidden = parts(here).data_parallel_ms / parts(here).matmul_ms
    assert hidden < 0.25


def test_async_tensor_parallelism_hides_half_of_what_is_waited_for() -> None:
    chosen = plan(tp=8, local=4)
    waits, hides = (
        replace(chosen, tensor_parallel=replace(chosen.tensor_parallel, async_tp=on)) for on in (False, True)
    )
    slow, fast = parts(waits).tensor_parallel_ms, parts(hides).tensor_parallel_ms
    assert slow > 0
    # Norm weights' gradients and the loss's sums still wait; what hides slows the products down.
    assert 0.45 * slow < fast < 0.75 * slow
    assert step_seconds(waits, NEMO).waits["tensor"] < step_seconds(waits, MEGATRON).waits["tensor"]


def test_more_microbatches_shrink_the_bubble() -> None:
    few, many = plan(nodes=2, pp=4, local=4), plan(nodes=2, pp=4, local=32)
    share = [parts(one).bubble_ms / (estimate(one).step_time_ms or 1) for one in (few, many)]
    assert share[0] > 2 * share[1] > 0


def test_uneven_stages_wait_for_the_slowest() -> None:
    even = compile_text(
        SPEC.format(nodes=1, tp=1, pp=2, cp=1, ac="full", compiled="true", local=16, total=64, more="").replace(
            "data_parallel_replicate_degree: 1", "pipeline_parallel_schedule: 1F1B"
        )
    )
    skewed = replace(
        even,
        layers=tuple(replace(layer, stage=0 if index < 29 else 1) for index, layer in enumerate(even.layers)),
    )
    slow, fast = estimate(skewed), estimate(even)
    assert slow.step_time_ms is not None
    assert fast.step_time_ms is not None
    assert slow.step_time_ms > 1.4 * fast.step_time_ms
    assert step_seconds(skewed).rank == 0


def test_a_split_backward_computes_a_checkpointed_block_again_for_every_weight() -> None:
    """torch 2.13 runs one pass a weight (see `collectives.recomputations`): nine weights, and one pass for the inputs."""
    text = SPEC.format(nodes=1, tp=1, pp=2, cp=1, ac="full", compiled="true", local=8, total=32, more="")
    once, often = (
        compile_text(text.replace("data_parallel_replicate_degree: 1", f"pipeline_parallel_schedule: {schedule}"))
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    )
    assert num_weights(layer_blocks(once.model)[0]) == 9
    assert [layer.stage for layer in once.layers] == [layer.stage for layer in often.layers]
    assert stage_seconds(often)[2].recompute.total == pytest.approx(10 * stage_seconds(once)[2].recompute.total)
    # The first stage has no gradients of inputs to hand on, and its halves are one pass.
    assert stage_seconds(often)[0].recompute == stage_seconds(once)[0].recompute


def test_experts_take_the_imbalance_that_the_request_expects() -> None:
    text = """
spec_version: 1
model: {family: debug_moe, flavor: debugmodel}
cluster: {node: dgx-h100}
training: {seq_len: 4096, local_batch_size: 8, global_batch_size: 64}
parallelism: {expert_parallel_degree: 8, moe_force_load_balance: %s}
activation_checkpoint: {mode: none}
limits: {expert_imbalance: %s}
"""
    even = parts(compile_text(text % ("false", "1.0")))
    crowded = parts(compile_text(text % ("false", "2.0")))
    forced = parts(compile_text(text % ("true", "2.0")))
    assert crowded.expert_parallel_ms > 1.5 * even.expert_parallel_ms
    assert forced.expert_parallel_ms == even.expert_parallel_ms


def test_a_dispatcher_that_sends_a_token_once_to_a_node_needs_less_of_the_network() -> None:
    group = Group(16, 8, 2, 1, 450e9, 50e9, 50e9, 3.4, 14.0, True)
    network = Network()
    tokens = 4096 * 4096 * 2
    plain = collective_seconds("all_to_all", 8 * tokens, group, network)
    once = _dispatch(8 * tokens, 8, group, network)
    # Of 8 copies 4 are for the other node, which gets one (0.996 of the time): a quarter.
    assert once == pytest.approx(plain / 4, rel=0.15)


def test_days_hours_and_price_follow_from_the_token_budget() -> None:
    base = plan(more="")
    asked = replace(
        base,
        job=replace(base.job, token_budget=1e12),
        cluster=replace(base.cluster, price_per_gpu_hour=2.5),
    )
    found = estimate(asked)
    assert found.tokens_per_second_per_gpu is not None
    hours = 1e12 / found.tokens_per_second_per_gpu / 3600
    assert found.training_gpu_hours == pytest.approx(hours, rel=1e-3)
    assert found.training_days == pytest.approx(hours / 8 / 24, rel=1e-3)
    assert found.training_cost == pytest.approx(2.5 * hours, rel=1e-3)
    assert estimate(base).training_days is None


def test_another_program_is_priced_by_its_own_facts() -> None:
    here = plan(tp=2, local=2)
    assert (
        step_seconds(here, MEGATRON).compute.memory_bound
        < step_seconds(replace(here, compile=replace(here.compile, enable=False)), TITAN).compute.memory_bound
    )
    again = replace(MEGATRON, recompute_attention=True)
    kept = plan(tp=2, local=2, ac="none")
    assert step_seconds(kept, MEGATRON).recompute == 0
    assert step_seconds(kept, again).recompute > 0
