"""Each term of a step's time, against a value worked out by hand from the plan: what is left out or doubled shows here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.builders import compile_text
from tests.unit.test_step_time import H100, SPEC, parts, plan
from titan_planner.cost.communication import communication
from titan_planner.cost.compute import recomputed
from titan_planner.cost.estimate import estimate
from titan_planner.cost.ops import Matmul, Mixing, Shape, block_ops, expert_load, shape_of
from titan_planner.cost.program import MEGATRON, TITAN
from titan_planner.cost.roofline import attention_seconds, matmul_seconds, memory_rate, product_seconds
from titan_planner.cost.stage import kernels_of, layer_blocks, stage_seconds
from titan_planner.cost.step import _update_seconds, step_seconds
from titan_planner.cost.timeline import StageTime, simulate
from titan_planner.ir.inventory import num_params
from titan_planner.ir.plan import Plan
from titan_planner.schedules import work_of

MOE = """
spec_version: 1
model: {family: debug_moe, flavor: debugmodel}
cluster: {node: dgx-h100}
training: {seq_len: 4096, local_batch_size: 8, global_batch_size: 64}
parallelism: {expert_parallel_degree: %d%s}
activation_checkpoint: {mode: %s}
limits: {expert_imbalance: %s}
"""


def moe(ep: int = 8, imbalance: float = 1.0, more: str = "", ac: str = "none") -> Plan:
    return compile_text(MOE % (ep, more, ac, imbalance))


def test_accumulation_repeats_all_but_the_update() -> None:
    once, four = plan(), plan(total=32)
    assert four.batch.accumulation_steps == 4
    assert parts(four).matmul_ms == pytest.approx(4 * parts(once).matmul_ms, rel=1e-3)
    assert parts(four).optimizer_ms == parts(once).optimizer_ms
    one, many = (estimate(each).step_time_ms for each in (once, four))
    assert one is not None
    assert many is not None
    assert 3.7 * one < many < 4 * one


def test_a_pipelines_span_is_its_schedule_with_the_halves_of_backward_as_they_are() -> None:
    text = SPEC.format(nodes=1, tp=1, pp=2, cp=1, ac="none", compiled="true", local=8, total=8, more="").replace(
        "data_parallel_replicate_degree: 1", "pipeline_parallel_schedule: InterleavedZeroBubble"
    )
    split = compile_text(text.replace("{node: dgx-h100, nodes: 1}", "{gpu: h200, gpus_per_node: 2}"))
    assert split.mesh.world_size == 2
    computing, talking = stage_seconds(split), communication(split)
    times = []
    for stage, one in enumerate(computing):
        weight = one.backward.total if stage == 0 else one.to_weight.total
        times.append(StageTime(one.forward.total, one.backward.total, one.backward.total - weight, weight))
    transfers = [one.transfer for one in talking[:-1]]
    assert min(transfers) > 0
    span = simulate(work_of(split.pipeline), times, transfers).makespan_s
    assert simulate(work_of(split.pipeline), times, 0.0).makespan_s < span
    found = step_seconds(split)
    assert found.total - found.optimizer == pytest.approx(span, rel=1e-6)
    swapped = [StageTime(t.forward_s, t.backward_s, t.weight_s, t.input_s) for t in times]
    assert simulate(work_of(split.pipeline), swapped, transfers).makespan_s != pytest.approx(span, rel=1e-3)


def test_the_load_of_experts_is_what_can_be() -> None:
    assert expert_load(moe(8, 2.0)) == (2.0, 2.0)
    # A rank of one expert gets one of a token's two choices: half of all rows, four times an eighth.
    assert expert_load(moe(8, 100.0)) == (4.0, 4.0)
    assert expert_load(moe(1, 2.0)) == (1.0, 1.0)  # one rank has all experts
    assert expert_load(moe(8, 2.0, ", expert_capacity_factor: 1.0")) == (1.0, 1.0)
    assert expert_load(moe(8, 2.0, ", expert_capacity_factor: 0.5")) == (0.5, 1.0)
    assert expert_load(moe(8, 2.0, ", moe_force_load_balance: true")) == (1.0, 1.0)


def test_a_crowded_rank_computes_and_moves_in_proportion() -> None:
    even, crowded = moe(8, 1.0), moe(8, 2.0)
    ops = {
        op.name: op for op in block_ops(layer_blocks(even.model)[1], 256, shape_of(even)) if not isinstance(op, Mixing)
    }
    more = {
        op.name: op
        for op in block_ops(layer_blocks(even.model)[1], 256, shape_of(crowded))
        if not isinstance(op, Mixing)
    }
    for name in ("moe.experts.w1", "moe.experts.w2"):
        assert more[name].m == 2 * ops[name].m  # type: ignore[union-attr]
    tokens = 8 * 4096
    # Compiled sorting moves 14 bytes forward and 18 backward per element of a routed row; top_k is 2.
    assert ops["moe.route"].forward_bytes == 14 * 2 * tokens * 256  # type: ignore[union-attr]
    assert more["moe.route"].backward_bytes == 2 * 18 * 2 * tokens * 256  # type: ignore[union-attr]
    assert ops["attention.wq"] == more["attention.wq"]
    assert parts(crowded).expert_parallel_ms > 1.5 * parts(even).expert_parallel_ms


def test_a_ring_hides_behind_attention_and_slows_it_down() -> None:
    ring = plan(cp=8, more="").batch  # only to name what follows
    assert ring.seq_len == 8192
    text = SPEC.format(nodes=1, tp=1, pp=1, cp=8, ac="none", compiled="true", local=1, total=1, more="")
    long = compile_text(
        text.replace("seq_len: 8192", "seq_len: 131072").replace(
            "data_parallel_replicate_degree: 1", "context_parallel_method: ring"
        )
    )
    talk = communication(long)[0]
    both = talk.forward.attention + talk.backward.attention
    assert both > 0
    slowdown = long.cluster.gpu.efficiency.overlap_slowdown
    assert step_seconds(long).waits["context"] == pytest.approx(
        slowdown * both + sum(one.waits.get("context", 0.0) for one in (talk.forward, talk.backward)), rel=1e-6
    )
    gathered = replace(long, context_parallel=replace(long.context_parallel, method="allgather"))
    assert step_seconds(gathered).waits["context"] > step_seconds(long).waits["context"]


def test_contiguous_parts_of_a_sequence_wait_for_the_last() -> None:
    text = SPEC.format(nodes=1, tp=1, pp=1, cp=8, ac="none", compiled="true", local=1, total=1, more="")
    even = compile_text(text.replace("seq_len: 8192", "seq_len: 131072"))
    skewed = replace(even, context_parallel=replace(even.context_parallel, load_balance="none"))
    assert parts(skewed).attention_ms == pytest.approx(15 / 8 * parts(even).attention_ms, rel=2e-3)
    whole = replace(skewed, context_parallel=replace(skewed.context_parallel, method="alltoall"))
    assert parts(whole).attention_ms == pytest.approx(parts(even).attention_ms, rel=2e-3)


def test_chunks_of_the_loss_compute_the_head_again() -> None:
    one = plan(ac="none")
    four = replace(one, loss=replace(one.loss, chunks=4))
    again = step_seconds(four).recompute - step_seconds(one).recompute
    head = product_seconds(8192, 128256, 4096, 1, "bf16", H100, 2)
    # The product, the loss's 6 bytes a logit, the norm's 4 an element.
    wanted = head + (6 * 8192 * 128256 + 4 * 8192 * 4096) / memory_rate(H100)
    assert again == pytest.approx(wanted, rel=1e-3)


def test_the_head_is_among_the_products() -> None:
    one = plan(ac="none")
    wider = replace(one, model=replace(one.model, vocab_size=2 * one.model.vocab_size))
    more = step_seconds(wider).compute.matmul - step_seconds(one).compute.matmul
    op = Matmul("output", 8192, 128256, 4096)
    took = matmul_seconds(op, "bf16", H100, False, 2)
    twice = matmul_seconds(replace(op, n=2 * 128256), "bf16", H100, False, 2)
    wanted = sum(
        getattr(twice, name) - getattr(took, name) for name in ("forward", "input_gradient", "weight_gradient")
    )
    assert more == pytest.approx(wanted, rel=1e-3)


def test_small_eager_models_wait_for_the_host() -> None:
    small = compile_text(
        "spec_version: 1\nmodel: {family: llama3, flavor: debug}\ncluster: {node: dgx-h100}\n"
        "training: {seq_len: 256, local_batch_size: 1, global_batch_size: 8}\ncompile: {enable: false}\n"
        "activation_checkpoint: {mode: none}\n"
    )
    spent = parts(small)
    assert spent.launch_ms > 2 * spent.matmul_ms
    graphs = step_seconds(small, replace(TITAN, graphs=True))
    assert graphs.compute.launch == 0
    # One launch a kernel: a slower host takes longer in proportion, less what the device hides.
    fit = replace(small.cluster.gpu.efficiency, launch_us=2 * small.cluster.gpu.efficiency.launch_us)
    slower = replace(small, cluster=replace(small.cluster, gpu=replace(small.cluster.gpu, efficiency=fit)))
    assert parts(slower).launch_ms > 1.9 * spent.launch_ms


def test_finer_scales_reach_less() -> None:
    def took(recipe: str) -> float:
        return product_seconds(16384, 16384, 16384, 1, recipe, H100, 2)  # type: ignore[arg-type]

    assert took("rowwise") == pytest.approx(took("tensorwise") / 0.8, rel=1e-3)
    assert took("mxfp8") == pytest.approx(took("tensorwise") / 0.95, rel=1e-3)
    assert took("float32") == pytest.approx(15 * took("bf16"), rel=1e-3)


def test_casts_of_both_passes_are_bytes() -> None:
    took = matmul_seconds(Matmul("w", 16384, 14336, 4096), "rowwise", H100, False, 2)
    rate = memory_rate(H100)
    assert took.forward_casts == pytest.approx((8 * 16384 * 4096 + 10 * 14336 * 4096) / rate)
    assert took.backward_casts == pytest.approx(8 * 16384 * 14336 / rate)


def test_narrow_heads_fill_tensor_cores_less() -> None:
    wide, narrow = Mixing(1e9, 32, 128, 128), Mixing(1e9, 64, 64, 64)
    assert wide.flops == narrow.flops
    assert attention_seconds(narrow, H100)[0] == pytest.approx(attention_seconds(wide, H100)[0] / 0.775, rel=0.01)


def test_eager_norms_move_forty_bytes_an_element() -> None:
    ops = {op.name: op for op in block_ops(layer_blocks(plan().model)[0], 4096, Shape(8192, 8192, fusion="eager"))
           if not isinstance(op, Mixing)}  # fmt: skip
    assert ops["attention_norm"].forward_bytes == 40 * 8192 * 4096  # type: ignore[union-attr]
    assert ops["feed_forward.gate"].forward_bytes == 10 * 8192 * 14336  # type: ignore[union-attr]
    assert ops["rope"].forward_bytes == 36 * 8192 * (4096 + 1024)  # type: ignore[union-attr]


def test_the_update_moves_forty_bytes_an_element_fused() -> None:
    one = plan()
    held = num_params(one.model) / 8
    fused = _update_seconds(one, TITAN)[0]
    assert fused == pytest.approx(40 * held / memory_rate(H100), rel=1e-4)
    foreach = replace(one, optimizer=replace(one.optimizer, implementation="foreach"))
    assert _update_seconds(foreach, TITAN)[0] == pytest.approx(92 / 40 * fused)
    # Megatron's optimizer is sharded over all data ranks though its weights are whole.
    assert _update_seconds(one, MEGATRON)[0] == pytest.approx(fused, rel=1e-4)
    assert _update_seconds(one, replace(MEGATRON, data_policy="ddp"))[0] >= fused
    # Norms and losses are summed between ranks around it.
    assert step_seconds(one).optimizer > fused


def test_muon_orthogonalises_whole_matrices_on_every_rank() -> None:
    one = plan()
    muon = replace(one, optimizer=replace(one.optimizer, name="Muon"))
    layer = 0.0
    for n, m in ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (4096, 14336), (4096, 14336), (4096, 14336)):
        layer += 5 * (4.0 * n * n * m + 2.0 * n**3)
    wanted = 32 * layer / (H100.bf16_tflops * 1e12 * H100.efficiency.matmul)
    assert _update_seconds(muon, TITAN)[0] - _update_seconds(one, TITAN)[0] == pytest.approx(wanted, rel=1e-3)


def test_offloading_goes_over_pcie_and_the_hosts_memory() -> None:
    one = plan()
    host = replace(one, fsdp=replace(one.fsdp, cpu_offload=True))
    held = num_params(one.model) / 8
    # 40 bytes of the update, two gathers and one reduction of 4.
    assert _update_seconds(host, TITAN)[0] == pytest.approx((40 + 12) * held / 20e9, rel=1e-3)


def test_a_memory_budget_recomputes_in_proportion() -> None:
    spent = {}
    for budget in (0.0, 0.5, 1.0):
        mode = f"memory_budget, memory_budget: {budget}"
        spent[budget] = step_seconds(plan(ac=mode)).recompute
    assert spent[1.0] == 0
    assert spent[0.5] == pytest.approx(0.5 * spent[0.0])
    assert spent[0.0] > 0


def test_forced_shapes_are_recomputed_and_not_counted() -> None:
    one = plan(ac="selective")
    policy = one.activation_checkpoint.policy("selective_op")
    assert policy is not None
    ops = block_ops(layer_blocks(one.model)[0], 4096, shape_of(one))

    def again(*forced: str) -> list[str]:
        found = recomputed(ops, policy, kernels_of(one), frozenset(forced))
        return [op.name for op in found if isinstance(op, Matmul)]

    # Every second of wq, wk, wv, wo, w1, w3.
    assert again() == ["attention.wk", "attention.wo", "feed_forward.w3"]
    # wq's shape is wo's too; of the others wk is the first and wv the second.
    assert again("attention.wq") == ["attention.wq", "attention.wv", "attention.wo", "feed_forward.w3"]
    # Only in the layer that is named.
    named = replace(one, activation_checkpoint=replace(one.activation_checkpoint, policies=tuple(
        replace(each, force_recompute_fqns=("layers.0.attention.wq",)) if each.name == "selective_op" else each
        for each in one.activation_checkpoint.policies)))  # fmt: skip
    everywhere = replace(named, activation_checkpoint=replace(named.activation_checkpoint, policies=tuple(
        replace(each, force_recompute_fqns=("layers.*.attention.wq",)) if each.name == "selective_op" else each
        for each in named.activation_checkpoint.policies)))  # fmt: skip
    base = step_seconds(one).recompute
    assert step_seconds(everywhere).recompute - base == pytest.approx(
        32 * (step_seconds(named).recompute - base), rel=1e-6
    )


def test_experts_outputs_are_kept_whatever_their_number_on_a_rank() -> None:
    for ep in (1, 8):
        one = moe(ep, ac="selective")
        policy = one.activation_checkpoint.policy("selective_op")
        assert policy is not None
        ops = block_ops(layer_blocks(one.model)[1], 256, shape_of(one))
        names = [op.name for op in recomputed(ops, policy, kernels_of(one)) if isinstance(op, Matmul)]
        assert not any(".experts." in name and "shared" not in name for name in names)


def test_what_hides_slows_computing_down() -> None:
    one = plan(nodes=2)
    talk = communication(one)[0]
    fit = replace(one.cluster.gpu.efficiency, overlap_slowdown=0.0)
    free = replace(one, cluster=replace(one.cluster, gpu=replace(one.cluster.gpu, efficiency=fit)))
    hidden = talk.forward.hidden - talk.forward.ends + talk.backward.hidden - talk.backward.ends
    slowdown = one.cluster.gpu.efficiency.overlap_slowdown
    more = step_seconds(one).waits["data"] - step_seconds(free).waits["data"]
    assert more == pytest.approx(slowdown * hidden, rel=1e-6)
    ends = talk.forward.ends + talk.backward.ends
    assert ends > 0
    assert step_seconds(free).waits["data"] == pytest.approx(ends, rel=1e-6)


def test_a_faster_gpu_is_never_slower() -> None:
    one = plan(tp=8, local=4)
    total = step_seconds(one).total
    for factor in (2, 8, 32):
        gpu = replace(one.cluster.gpu, bf16_tflops=factor * one.cluster.gpu.bf16_tflops)
        faster = step_seconds(replace(one, cluster=replace(one.cluster, gpu=gpu))).total
        assert faster <= total
        total = faster


def test_computing_in_float32_takes_float32s_time() -> None:
    one = plan(ac="none")
    wide = replace(one, fsdp=replace(one.fsdp, param_dtype="float32"))
    assert step_seconds(wide).compute.matmul > 12 * step_seconds(one).compute.matmul
    assert step_seconds(wide).compute.attention == pytest.approx(15 * step_seconds(one).compute.attention, rel=0.01)
    narrow, full = (sum(op.forward_bytes for op in block_ops(layer_blocks(one.model)[0], 4096, shape_of(each))
                        if not isinstance(op, Matmul | Mixing)) for each in (one, wide))  # fmt: skip
    assert full == 2 * narrow


def test_emulated_8_bit_products_are_slower_than_none() -> None:
    text = SPEC.format(nodes=1, tp=1, pp=1, cp=1, ac="none", compiled="true", local=1, total=8, more="")
    plain = compile_text(text)
    real, emulated = (
        compile_text(text + f"float8: {{recipe: tensorwise, emulate: {flag}}}\n") for flag in ("false", "true")
    )
    assert step_seconds(emulated).compute.matmul == pytest.approx(step_seconds(plain).compute.matmul, rel=1e-6)
    assert step_seconds(real).total < step_seconds(plain).total < step_seconds(emulated).total


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_for_debugging_fuse_nothing(backend: str) -> None:
    compiled = plan(ac="none")
    traced = replace(compiled, compile=replace(compiled.compile, backend=backend))
    eager = replace(compiled, compile=replace(compiled.compile, enable=False))
    assert parts(traced).memory_bound_ms == parts(eager).memory_bound_ms > parts(compiled).memory_bound_ms


def test_mfu_is_of_the_bf16_peak() -> None:
    found = estimate(plan())
    assert found.tflops_per_gpu is not None
    assert found.mfu == pytest.approx(found.tflops_per_gpu / 989.4, rel=1e-3)
