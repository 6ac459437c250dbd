"""Computing of every pipeline stage for one microbatch: its layers grouped into the few kinds that differ."""

from __future__ import annotations

import functools
from collections import Counter

from titan_planner.cost.compute import (
    Kernels,
    ModuleSeconds,
    block_seconds,
    embedding_seconds,
    head_seconds,
)
from titan_planner.cost.ops import Fusion, fusion_of, shape_of
from titan_planner.cost.program import TITAN, Program
from titan_planner.cost.roofline import Precision
from titan_planner.ir.fqn import matches
from titan_planner.ir.inventory import linear_modules, parameters
from titan_planner.ir.model import Block, Model
from titan_planner.ir.plan import Plan

BYTES = {"float32": 4, "bfloat16": 2}


def stage_seconds(plan: Plan, program: Program = TITAN) -> tuple[ModuleSeconds, ...]:
    """Time of one microbatch on every stage, in order of stages."""
    kernels = kernels_of(plan, program)
    shape = shape_of(plan, program, imbalance_of(plan))
    blocks = layer_blocks(plan.model)
    converted = converted_names(plan.model, plan.float8.converted)
    policies = {policy.name: policy for policy in plan.activation_checkpoint.policies}
    kinds: list[Counter[tuple[int, str, frozenset[str]]]] = [Counter() for _ in plan.pipeline.stages]
    found = [ModuleSeconds() for _ in plan.pipeline.stages]
    dim = plan.model.dim
    # The first layer is the embedding, the last two the final norm and the output projection.
    for number, layer in enumerate(plan.layers[1:-2]):
        kinds[layer.stage][id(blocks[number]), layer.checkpoint, converted.get(number, frozenset())] += 1
    by_id = {id(block): block for block in blocks}
    for stage, counter in enumerate(kinds):
        for (block, policy, names), count in counter.items():
            found[stage] += block_seconds(by_id[block], dim, shape, policies[policy], names, kernels) * count
    vocab = plan.model.vocab_size // plan.mesh.tp
    found[plan.layers[0].stage] += embedding_seconds(dim, vocab, shape, kernels)
    head: Precision = kernels.precision if -1 in converted else "bf16"
    local_logits = vocab if plan.tensor_parallel.loss_parallel or plan.mesh.tp == 1 else plan.model.vocab_size
    found[plan.layers[-1].stage] += head_seconds(
        dim, vocab, local_logits, shape, plan.loss.chunks, head, loss_fusion(plan, program), kernels
    )
    return tuple(found)


def kernels_of(plan: Plan, program: Program = TITAN) -> Kernels:
    """How ops run under `plan`."""
    fusion = fusion_of(plan, program)
    gradient = program.gradient_bytes or BYTES[plan.fsdp.param_dtype]
    return Kernels(
        gpu=plan.cluster.gpu,
        precision=plan.float8.recipe or "bf16",
        fused_casts=fusion == "fused",
        float8_products=program.float8_products,
        gradient_bytes=gradient,
        launches=not program.graphs,
        early_stop=program.recompute == "needed" and plan.activation_checkpoint.early_stop,
        attention=program.attention,
        recompute_elementwise=program.recompute == "needed",
    )


def loss_fusion(plan: Plan, program: Program = TITAN) -> Fusion:
    """Who fuses the loss."""
    if program.loss != "plan":
        return program.loss
    return "compiled" if plan.compile.enable and "loss" in plan.compile.components else "eager"


def imbalance_of(plan: Plan) -> float:
    """Rows of the busiest expert rank over the mean: what the request expects, 1 where routing is forced even."""
    return 1.0 if plan.expert_parallel.force_load_balance else plan.request.limits.expert_imbalance


@functools.lru_cache(maxsize=64)
def layer_blocks(model: Model) -> tuple[Block, ...]:
    """The block of every layer."""
    return tuple(model.layers())


@functools.lru_cache(maxsize=256)
def converted_names(model: Model, selectors: tuple[str, ...]) -> dict[int, frozenset[str]]:
    """Layer number -> its linears in 8-bit, named below the block; -1 has the output projection."""
    found: dict[int, set[str]] = {}
    if not selectors:
        return {}
    experts = [p.target for p in parameters(model) if p.is_expert]
    for fqn in (*linear_modules(model), *experts):
        if any(matches(selector, fqn) for selector in selectors):
            parts = fqn.split(".", 2)
            if parts[0] == "layers":
                found.setdefault(int(parts[1]), set()).add(parts[2])
            else:
                found.setdefault(-1, set()).add(fqn)
    shared: dict[
        frozenset[str], frozenset[str]
    ] = {}  # equal sets as one object: they are compared and hashed for every layer
    return {number: shared.setdefault(frozenset(names), frozenset(names)) for number, names in found.items()}
