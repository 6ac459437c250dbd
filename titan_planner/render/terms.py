"""What the numbers of an estimate add up from: named terms of one rank's step and memory, worked out again from the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

from titan_planner.cost.collectives import Collective, collectives, recomputations
from titan_planner.cost.communication import PART_OF, Part, communication, network_of
from titan_planner.cost.compute import (
    ModuleSeconds,
    block_seconds,
    embedding_seconds,
    head_seconds,
    linear_seconds,
    recomputed,
)
from titan_planner.cost.local import BYTES
from titan_planner.cost.memory import sharded_numel
from titan_planner.cost.network import seconds
from titan_planner.cost.ops import Elementwise, Matmul, Mixing, Op, block_ops, expert_load, shape_of
from titan_planner.cost.program import TITAN
from titan_planner.cost.roofline import (
    MatmulSeconds,
    Precision,
    attention_seconds,
    elementwise_seconds,
    memory_rate,
    shape_efficiency,
)
from titan_planner.cost.stage import (
    converted_names,
    kernels_of,
    layer_blocks,
    loss_fusion,
    num_weights,
    stage_seconds,
)
from titan_planner.cost.step import (
    NORM_AND_CLIP_BYTES,
    OFFLOAD_BYTES_PER_S,
    UPDATE_BYTES,
    StepSeconds,
    hidden_seconds,
    muon_seconds,
    offloaded_bytes,
)
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.fqn import fold
from titan_planner.ir.inventory import parameters
from titan_planner.ir.model import Block
from titan_planner.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a number, in the number's unit, and how it comes about. Terms of one number add up to it."""

    name: str
    amount: float
    words: str


WAITING: dict[str, Part] = {
    "data_parallel_ms": "data",
    "tensor_parallel_ms": "tensor",
    "context_parallel_ms": "context",
    "expert_parallel_ms": "expert",
}
"""Field of `StepTime` -> whose collectives it waits for."""


def step_terms(plan: Plan, found: StepSeconds, part: str) -> tuple[Term, ...]:
    """The terms of `step_time.<part>` in ms, of pipeline rank `found.rank` and a whole step."""
    if part in WAITING:
        return tuple(_waits(plan, found, WAITING[part]))
    match part:
        case "matmul_ms" | "attention_ms" | "memory_bound_ms" | "float8_casts_ms":
            return tuple(_ops(plan, found, part))
        case "recompute_ms":
            return tuple(_recompute(plan, found))
        case "launch_ms":
            return tuple(_launches(plan, found))
        case "optimizer_ms":
            return tuple(_optimizer(plan, found))
        case "bubble_ms":
            busy = found.total - found.bubble - found.optimizer
            return (
                Term("schedule", 1e3 * (busy + found.bubble), "until the last of the schedule's actions ends"),
                Term("at work", -1e3 * busy, f"what rank {found.rank} computes and waits for collectives meanwhile"),
            )
        case _:
            return ()


# ------------------------------------------------------------------ computing


@dataclass(frozen=True, slots=True)
class _Kind:
    """Equal layers of one pipeline rank."""

    layers: tuple[str, ...]
    block: Block
    policy: CheckpointPolicy
    converted: frozenset[str]
    forced: frozenset[str]  # whose shapes are always recomputed
    again: float  # recomputations of a microbatch

    @property
    def where(self) -> str:
        return ", ".join(fold(self.layers))


def passes(plan: Plan) -> int:
    """Microbatches that one rank computes in a step."""
    return plan.batch.accumulation_steps * (plan.pipeline.microbatches if plan.mesh.pp > 1 else 1)


def _stages(plan: Plan, rank: int) -> list[int]:
    return [stage.index for stage in plan.pipeline.stages if stage.pp_rank == rank]


def _kinds(plan: Plan, rank: int) -> list[_Kind]:
    blocks, stages = layer_blocks(plan.model), set(_stages(plan, rank))
    converted = converted_names(plan.model, plan.float8.converted)
    policies = {policy.name: policy for policy in plan.activation_checkpoint.policies}
    forced = {name: converted_names(plan.model, policy.force_recompute_fqns) for name, policy in policies.items()}
    found: dict[tuple[int, str, frozenset[str], frozenset[str], float], list[int]] = {}
    for number, layer in enumerate(plan.layers[1:-2]):
        if layer.stage in stages:
            block = blocks[number]
            again = 1.0
            if plan.mesh.pp > 1:
                again = recomputations(plan, layer.stage, num_weights(block))[0] / passes(plan)
            always = forced[layer.checkpoint].get(number, frozenset())
            key = (id(block), layer.checkpoint, converted.get(number, frozenset()), always, again)
            found.setdefault(key, []).append(number)
    return [
        _Kind(tuple(f"layers.{n}" for n in numbers), blocks[numbers[0]], policies[policy], names, always, again)
        for (_, policy, names, always, again), numbers in found.items()
    ]


def _ends(plan: Plan, rank: int) -> Iterator[tuple[str, ModuleSeconds]]:
    """Embedding, and norm, output projection and loss, of one microbatch, where they are on the rank."""
    stages, model, mesh = _stages(plan, rank), plan.model, plan.mesh
    kernels, shape = kernels_of(plan), shape_of(plan)
    vocab = model.vocab_size // mesh.tp
    if plan.layers[0].stage in stages:
        yield "tok_embeddings", embedding_seconds(model.dim, vocab, shape, kernels)
    if plan.layers[-1].stage in stages:
        precision: Precision = (
            kernels.precision if -1 in converted_names(model, plan.float8.converted) else kernels.base
        )
        local = vocab if plan.tensor_parallel.loss_parallel or mesh.tp == 1 else model.vocab_size
        took = head_seconds(model.dim, vocab, local, shape, plan.loss.chunks, precision, loss_fusion(plan), kernels)
        yield "norm, output, loss", took


def _ops(plan: Plan, found: StepSeconds, part: str) -> Iterator[Term]:
    """Every op of every kind of layer, then the modules around the layers."""
    shape, runs = shape_of(plan), passes(plan)
    for kind in _kinds(plan, found.rank):
        for op in block_ops(kind.block, plan.model.dim, shape):
            priced = _op(plan, op, part, op_name(op) in kind.converted)
            if priced is not None:
                took, words = priced
                count = len(kind.layers)
                yield Term(f"{kind.where} {op_name(op)}", 1e3 * took * count * runs, f"{words}; {_times(count, runs)}")
    field: Literal["matmul", "memory_bound", "casts"]
    match part:
        case "matmul_ms":
            field = "matmul"
        case "memory_bound_ms":
            field = "memory_bound"
        case "float8_casts_ms":
            field = "casts"
        case _:
            return
    for name, took_all in _ends(plan, found.rank):
        there = getattr(took_all.forward, field)
        back = getattr(took_all.to_input, field) + getattr(took_all.to_weight, field)
        if there + back > 0:
            product = f"{shape.tokens:,} x {plan.model.vocab_size // plan.mesh.tp:,} x {plan.model.dim:,}: "
            words = (
                f"{product if field == 'matmul' else ''}{_us(there)} forward, {_us(back)} backward; {_times(1, runs)}"
            )
            yield Term(name, 1e3 * (there + back) * runs, words)


def op_name(op: Op) -> str:
    """What to call an op."""
    return "attention" if isinstance(op, Mixing) else op.name


def _product(plan: Plan, op: Matmul, converted: bool) -> tuple[MatmulSeconds, Precision]:
    kernels = kernels_of(plan)
    precision = kernels.precision if converted else kernels.base
    return linear_seconds(op, precision, kernels), precision


def _op(plan: Plan, op: Op, part: str, converted: bool) -> tuple[float, str] | None:
    """Seconds of one op, forward and backward, that count for `part`, and how they come about."""
    kernels = kernels_of(plan)
    gpu = kernels.gpu
    match op:
        case Matmul() if part in ("matmul_ms", "float8_casts_ms"):
            took, precision = _product(plan, op, converted)
            if part == "float8_casts_ms":
                casts = took.forward_casts + took.backward_casts
                words = f"{precision}: {_us(took.forward_casts)} forward, {_us(took.backward_casts)} backward"
                return (casts, words) if casts > 0 else None
            reached = shape_efficiency(op.m / op.groups, op.n, op.k, gpu.compute_units, op.groups)
            return (
                took.forward + took.input_gradient + took.weight_gradient,
                f"{op.m:,.0f} x {op.n:,} x {op.k:,} {precision}: {op.flops / 1e12:.3g} TFLOP, shape factor {reached:.2f}: "
                f"{_us(took.forward)} forward, {_us(took.input_gradient)} + {_us(took.weight_gradient)} backward",
            )
        case Mixing() if part == "attention_ms":
            forward, backward = attention_seconds(op, gpu, kernels.attention, kernels.base == "float32")
            words = f"{op.flops / 1e12:.3g} TFLOP under the mask: {_us(forward)} forward, {_us(backward)} backward"
            return forward + backward, words
        case Elementwise() if part == "memory_bound_ms":
            forward, backward = elementwise_seconds(op, gpu)
            return (
                forward + backward,
                f"{op.forward_bytes / 1e6:,.0f} MB: {_us(forward)} forward, "
                f"{op.backward_bytes / 1e6:,.0f} MB: {_us(backward)} backward",
            )
        case _:
            return None


def _recompute(plan: Plan, found: StepSeconds) -> Iterator[Term]:
    """The ops of every kind of layer that backward runs again."""
    shape, kernels, runs = shape_of(plan), kernels_of(plan), passes(plan)
    for kind in _kinds(plan, found.rank):
        priced = block_seconds(kind.block, plan.model.dim, shape, kind.policy, kind.converted, kernels, kind.forced)
        budget = kind.policy.memory_budget if kind.policy.mode == "memory_budget" else None
        share = 1.0 if budget is None else 1.0 - budget
        taken = []
        for op in recomputed(block_ops(kind.block, plan.model.dim, shape), kind.policy, kernels, kind.forced):
            match op:
                case Matmul():
                    took, _ = _product(plan, op, op.name in kind.converted)
                    again = took.forward + took.forward_casts
                case Mixing():
                    again = attention_seconds(op, kernels.gpu, kernels.attention, kernels.base == "float32")[0]
                case Elementwise():
                    again = elementwise_seconds(op, kernels.gpu)[0]
                case _:
                    assert_never(op)
            taken.append((op_name(op), again))
        waited = priced.recompute.launch / share if share else 0.0
        if waited:
            taken.append(("launches", waited))
        count = len(kind.layers)
        amount = share * sum(each for _, each in taken)
        words = " + ".join(f"{name} {_us(each)}" for name, each in taken) or "nothing"
        part = "" if share == 1 else f", {share:.0%} of it by the budget"
        often = "" if kind.again == 1 else f" x {kind.again:g} backward passes"
        yield Term(
            f"{kind.where} recomputed",
            1e3 * amount * count * runs * kind.again,
            f"policy {kind.policy.name}: {words}{part}; {_times(count, runs)}{often}",
        )
    for name, around in _ends(plan, found.rank):
        if around.recompute.total:
            words = f"{_us(around.recompute.total)}: the loss's chunks compute their logits again; {_times(1, runs)}"
            yield Term(name, 1e3 * around.recompute.total * runs, words)


def _launches(plan: Plan, found: StepSeconds) -> Iterator[Term]:
    """How much longer than the device the host takes for its kernels, by kind of layer."""
    shape, kernels, runs = shape_of(plan), kernels_of(plan), passes(plan)
    each = plan.cluster.gpu.efficiency.launch_us
    for kind in _kinds(plan, found.rank):
        took = block_seconds(kind.block, plan.model.dim, shape, kind.policy, kind.converted, kernels, kind.forced)
        behind = (took.forward.launch, took.to_input.launch + took.to_weight.launch)
        count = len(kind.layers)
        words = (
            f"at {each:g} us a kernel the host is {_us(behind[0])} behind the device in forward and {_us(behind[1])} in "
            f"backward; {_times(count, runs)}"
        )
        yield Term(f"{kind.where} launches", 1e3 * sum(behind) * count * runs, words)


# ------------------------------------------------------------------ collectives and the update


def _waits(plan: Plan, found: StepSeconds, part: Part) -> Iterator[Term]:
    """The part's collectives of the rank, less what of them runs beside computing."""
    stages, runs = _stages(plan, found.rank), passes(plan)
    crowd = expert_load(plan)[1] if part == "expert" else 1.0
    for one in collectives(plan):
        if one.stage in stages and one.phase != "step" and PART_OF[one.axis] == part:
            yield _collective(plan, one, crowd)
    slowdown = plan.cluster.gpu.efficiency.overlap_slowdown
    computing, talking = stage_seconds(plan), communication(plan, TITAN, expert_load(plan)[1])
    hidden = 0.0
    for stage in stages:
        compute, talk = computing[stage], talking[stage]
        for work, side in ((compute.forward, talk.forward), (compute.backward, talk.backward)):
            hidden += runs * hidden_seconds(work, side, TITAN.tensor_overlap)[part]
            if part == "data":
                hidden += min(side.once - side.once_ends, work.total)
    if hidden > 0:
        words = f"{_ms(1e3 * hidden)} run beside computing, which they slow down by {slowdown:g} of that"
        yield Term("hidden", -1e3 * hidden * (1 - slowdown), words)


def _collective(plan: Plan, one: Collective, crowd: float = 1.0) -> Term:
    took = seconds(plan, one, network_of(plan.cluster.gpu.efficiency))
    hides = "" if one.overlaps is None else f", beside {one.overlaps}" + (f" but {one.exposed}" if one.exposed else "")
    busiest = f" x {crowd:g} for the busiest expert rank" if crowd != 1 else ""
    return Term(
        f"stage {one.stage} {one.module} {one.phase}",
        1e3 * took * one.count * crowd,
        f"{one.count:,} x {one.kind} of {one.nbytes / 1e6:,.3g} MB over {one.ranks} ranks of {one.axis}: "
        f"{_us(took)} each{busiest}{hides}",
    )


def _optimizer(plan: Plan, found: StepSeconds) -> Iterator[Term]:
    stages = _stages(plan, found.rank)
    held = sharded_numel(plan)
    numel = sum(held[layer.fqn] for layer in plan.layers if layer.stage in stages)
    implementation = plan.optimizer.implementation
    width = BYTES[plan.dtype] / 4
    offload = plan.fsdp.cpu_offload
    rate = OFFLOAD_BYTES_PER_S if offload else memory_rate(plan.cluster.gpu)
    moves = [
        ("norm and clipping", NORM_AND_CLIP_BYTES * width),
        (f"{plan.optimizer.name} {implementation}", UPDATE_BYTES[implementation] * width),
        *([("to the host and back", offloaded_bytes(plan))] if offload else []),
    ]
    for name, each in moves:
        words = f"{numel:,.0f} elements on the rank x {each:g} bytes moved at {rate / 1e9:,.0f} GB/s"
        yield Term(name, 1e3 * numel * each / rate, words)
    if plan.optimizer.name == "Muon":
        words = "five Newton-Schulz steps of every whole matrix of the rank's layers, in bf16"
        yield Term("Muon's products", 1e3 * muon_seconds(plan)[found.rank], words)
    for one in collectives(plan):
        if one.stage in stages and one.phase == "step":
            yield _collective(plan, one)


# ------------------------------------------------------------------ parameters


def parameter_terms(plan: Plan) -> Iterator[Term]:
    """Elements of the model by module: equal layers together."""
    sizes: dict[str, int] = {}
    for parameter in parameters(plan.model):
        parts = parameter.fqn.split(".")
        owner = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        sizes[owner] = sizes.get(owner, 0) + math.prod(parameter.shape)
    alike: dict[tuple[int, bool], list[str]] = {}
    for owner, size in sizes.items():
        key = (size, True) if owner.startswith("layers.") else (len(alike), False)
        alike.setdefault(key, []).append(owner)
    for owners in alike.values():
        size = sizes[owners[0]]
        words = f"{len(owners)} x {size:,}" if len(owners) > 1 else f"{size:,}"
        yield Term(", ".join(fold(owners)), size * len(owners), words)


def _times(layers: int, runs: int) -> str:
    return f"x {layers} layer{'s' * (layers > 1)} x {runs} microbatch{'es' * (runs > 1)}"


def _ms(value: float) -> str:
    return f"{value:,.4g} ms"


def _us(value: float) -> str:
    return f"{1e6 * value:,.0f} us"
