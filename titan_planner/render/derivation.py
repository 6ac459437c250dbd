"""How a number of the estimate comes about: its formula with this plan's values, down to ops and collectives."""

from __future__ import annotations

from collections.abc import Iterator

from titan_planner.cost.collectives import Collective, collectives
from titan_planner.cost.communication import PART_OF, Part, network_of
from titan_planner.cost.compute import recomputed
from titan_planner.cost.network import seconds
from titan_planner.cost.ops import Elementwise, Matmul, Mixing, Op, block_ops, shape_of
from titan_planner.cost.roofline import (
    Precision,
    attention_seconds,
    elementwise_seconds,
    matmul_seconds,
    shape_efficiency,
)
from titan_planner.cost.stage import converted_names, kernels_of, layer_blocks
from titan_planner.cost.step import StepSeconds, step_seconds
from titan_planner.ir.fqn import fold
from titan_planner.ir.inventory import num_active_params
from titan_planner.ir.plan import Plan, StepTime

Fact = tuple[str, str]

_PARTS: dict[str, str] = {name: name.removesuffix("_ms").replace("_", " ") for name in StepTime.__dataclass_fields__}
_WAITING: dict[str, Part] = {
    "data_parallel_ms": "data",
    "tensor_parallel_ms": "tensor",
    "context_parallel_ms": "context",
    "expert_parallel_ms": "expert",
}


def derivation(plan: Plan, name: str) -> Iterator[Fact]:
    """The terms of `estimate.<name>`, or of the whole estimate for an empty name. Recomputed from the plan, not read from it."""
    found = step_seconds(plan)
    match name:
        case "":
            yield from _step(plan, found)
            yield from _rates(plan, found)
            yield from _fitted(plan)
        case "step_time_ms" | "step_time":
            yield from _step(plan, found)
            yield from _fitted(plan)
        case "tokens_per_second_per_gpu" | "mfu" | "tflops_per_gpu" | "training_days" | "training_gpu_hours":
            yield from _rates(plan, found)
        case "flops_per_token" | "flops_per_token_causal":
            yield from _flops(plan)
        case _ if name.startswith("step_time."):
            yield from _part(plan, found, name.removeprefix("step_time."))
        case _:
            return


def _step(plan: Plan, found: StepSeconds) -> Iterator[Fact]:
    estimate = plan.estimate
    assert estimate is not None
    if estimate.step_time is None:
        return
    parts = [
        f"{words} {_ms(getattr(estimate.step_time, part))}"
        for part, words in _PARTS.items()
        if getattr(estimate.step_time, part) > 0
    ]
    rank = f" of pipeline rank {found.rank}, which is busy longest" if plan.mesh.pp > 1 else ""
    yield "step time", f"{_ms(1e3 * found.total)}{rank}: {' + '.join(parts)}"


def _rates(plan: Plan, found: StepSeconds) -> Iterator[Fact]:
    estimate, gpus = plan.estimate, plan.mesh.world_size
    assert estimate is not None
    tokens = plan.batch.tokens_per_step
    speed = tokens / found.total / gpus
    yield "tokens/s/GPU", f"{tokens:,} tokens a step / {found.total:.4g} s / {gpus:,} GPUs = {speed:,.4g}"
    rate = speed * estimate.flops_per_token / 1e12
    yield "TFLOP/s/GPU", f"{speed:,.4g} x {estimate.flops_per_token:.4g} FLOPs a token = {rate:,.4g}"
    peak = plan.cluster.gpu.bf16_tflops
    causal = speed * estimate.flops_per_token_causal / 1e12
    yield (
        "MFU",
        f"{rate:,.4g} / {peak:g} TFLOP/s, the bf16 peak of {plan.cluster.gpu.name} = {rate / peak:.1%} "
        f"({causal / peak:.1%} when masked attention is not counted)",
    )
    if plan.job.token_budget is not None and estimate.training_gpu_hours is not None:
        yield (
            "GPU-hours",
            f"{plan.job.token_budget:.4g} tokens / {speed:,.4g} / 3600 = {estimate.training_gpu_hours:,.4g}, "
            f"{estimate.training_gpu_hours / gpus / 24:,.4g} days; without restarts and evaluation",
        )


def _flops(plan: Plan) -> Iterator[Fact]:
    model, length = plan.model, plan.batch.seq_len
    weights = num_active_params(model) - (0 if model.tied else model.vocab_size * model.dim)
    yield "matrices", f"6 x {weights:,} weights that a token meets (embedding not counted) = {6 * weights:.4g}"
    attention = plan.estimate.flops_per_token - 6 * weights if plan.estimate else 0.0
    yield "attention", f"6 x layers x heads x (qk + v dims) x {length:,} tokens = {attention:.4g}; causal: half"
    yield "source", "PaLM (arXiv 2204.02311) appendix B; causal as Megatron-Bridge"


def _fitted(plan: Plan) -> Iterator[Fact]:
    fit = plan.cluster.gpu.efficiency
    yield (
        "efficiencies",
        f"matmul {fit.matmul:g} of {plan.cluster.gpu.bf16_tflops:g} TFLOP/s, 8-bit {fit.matmul_float8:g}, attention "
        f"{fit.attention:g} forward {fit.attention_backward:g} backward, memory {fit.memory:g} of "
        f"{plan.cluster.gpu.memory_gb_per_s:g} GB/s, links {fit.intra_node:g} and {fit.inter_node:g}, slowdown beside "
        f"collectives {fit.overlap_slowdown:g}, launch {fit.launch_us:g} us",
    )
    yield "fitted on", fit.source


def _part(plan: Plan, found: StepSeconds, part: str) -> Iterator[Fact]:
    if part in _WAITING:
        yield from _collectives(plan, _WAITING[part])
    elif part in ("matmul_ms", "attention_ms", "memory_bound_ms", "float8_casts_ms", "recompute_ms"):
        yield from _ops(plan, part)
    elif part == "bubble_ms":
        busy = found.total - found.bubble - found.optimizer
        yield "bubble", f"last end of the schedule's actions less {_ms(1e3 * busy)} in which rank {found.rank} works"
    yield from _fitted(plan)


def _ops(plan: Plan, part: str) -> Iterator[Fact]:
    """Every op of every kind of layer once, with the number of layers on the whole model."""
    shape, kernels = shape_of(plan), kernels_of(plan)
    blocks = layer_blocks(plan.model)
    converted = converted_names(plan.model, plan.float8.converted)
    policies = {policy.name: policy for policy in plan.activation_checkpoint.policies}
    kinds: dict[tuple[int, str, frozenset[str]], list[str]] = {}
    for number, layer in enumerate(plan.layers[1:-2]):
        key = (id(blocks[number]), layer.checkpoint, converted.get(number, frozenset()))
        kinds.setdefault(key, []).append(layer.fqn)
    for (_, checkpoint, names), layers in kinds.items():
        block = blocks[int(layers[0].split(".")[1])]
        ops = block_ops(block, plan.model.dim, shape)
        where = ", ".join(fold(layers))
        if part == "recompute_ms":
            again = recomputed(ops, policies[checkpoint], kernels)
            yield where, f"policy {checkpoint}: {', '.join(op_name(op) for op in again) or 'nothing'}"
            continue
        for op in ops:
            words = _op(plan, op, part, kernels.precision if op_name(op) in names else "bf16")
            if words:
                yield f"{where} {op_name(op)}", words


def op_name(op: Op) -> str:
    """What to call an op."""
    return "attention" if isinstance(op, Mixing) else op.name


def _op(plan: Plan, op: Op, part: str, precision: Precision) -> str | None:
    gpu, kernels = plan.cluster.gpu, kernels_of(plan)
    match op:
        case Matmul() if part in ("matmul_ms", "float8_casts_ms"):
            took = matmul_seconds(
                op, precision, gpu, kernels.fused_casts, kernels.gradient_bytes, kernels.float8_products
            )
            if part == "float8_casts_ms":
                return (
                    None
                    if precision == "bf16"
                    else f"{precision}: {_us(took.forward_casts)} forward, {_us(took.backward_casts)} backward"
                )
            reached = shape_efficiency(op.m / op.groups, op.n, op.k, gpu.compute_units, op.groups)
            return (
                f"{op.m:,.0f} x {op.n:,} x {op.k:,} {precision}: {op.flops / 1e12:.3g} TFLOP, shape factor {reached:.2f}: "
                f"{_us(took.forward)} forward, {_us(took.input_gradient)} + {_us(took.weight_gradient)} backward"
            )
        case Mixing() if part == "attention_ms":
            forward, backward = attention_seconds(op, gpu)
            return f"{op.flops / 1e12:.3g} TFLOP under the mask: {_us(forward)} forward, {_us(backward)} backward"
        case Elementwise() if part == "memory_bound_ms":
            forward, backward = elementwise_seconds(op, gpu)
            return (
                f"{op.forward_bytes / 1e6:,.0f} MB: {_us(forward)} forward, "
                f"{op.backward_bytes / 1e6:,.0f} MB: {_us(backward)} backward"
            )
        case _:
            return None


def _collectives(plan: Plan, part: Part) -> Iterator[Fact]:
    for one in collectives(plan):
        if PART_OF[one.axis] == part:
            yield f"stage {one.stage} {one.module} {one.phase}", _collective(plan, one)


def _collective(plan: Plan, one: Collective) -> str:
    hides = "" if one.overlaps is None else f", beside {one.overlaps}" + (f" but {one.exposed}" if one.exposed else "")
    return (
        f"{one.count:,} x {one.kind} of {one.nbytes / 1e6:,.3g} MB over {one.ranks} ranks of {one.axis}: "
        f"{_us(seconds(plan, one, network_of(plan.cluster.gpu.efficiency)))} each{hides}"
    )


def _ms(value: float) -> str:
    return f"{value:,.4g} ms"


def _us(value: float) -> str:
    return f"{1e6 * value:,.0f} us"
