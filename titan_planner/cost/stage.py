"""Computing of every pipeline stage for one microbatch: its layers grouped into the few kinds that differ."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

from titan_planner.cost.collectives import recomputations
from titan_planner.cost.compute import (
    Kernels,
    ModuleSeconds,
    block_seconds,
    embedding_seconds,
    head_seconds,
)
from titan_planner.cost.local import BYTES, fuses
from titan_planner.cost.ops import Fusion, fusion_of, shape_of
from titan_planner.cost.program import TITAN, Program
from titan_planner.cost.roofline import Precision, float8_products
from titan_planner.ir.fqn import matches
from titan_planner.ir.inventory import linear_modules, parameters
from titan_planner.ir.model import Block, Blocks, Model
from titan_planner.ir.plan import Plan


def stage_seconds(plan: Plan, program: Program = TITAN) -> tuple[ModuleSeconds, ...]:
    """Time of one microbatch on every stage, in order of stages."""
    kernels = kernels_of(plan, program)
    shape = shape_of(plan, program)
    blocks = layer_blocks(plan.model)
    converted = converted_names(plan.model, plan.float8.converted)
    policies = {policy.name: policy for policy in plan.activation_checkpoint.policies}
    forced = {name: converted_names(plan.model, policy.force_recompute_fqns) for name, policy in policies.items()}
    none: frozenset[str] = frozenset()
    kinds: list[Counter[tuple[int, str, frozenset[str], frozenset[str]]]] = [Counter() for _ in plan.pipeline.stages]
    found = [ModuleSeconds() for _ in plan.pipeline.stages]
    dim = plan.model.dim
    # The first layer is the embedding, the last two the final norm and the output projection.
    for number, layer in enumerate(plan.layers[1:-2]):
        again = forced[layer.checkpoint].get(number, none)
        kinds[layer.stage][id(blocks[number]), layer.checkpoint, converted.get(number, none), again] += 1
    by_id = {id(block): block for block in blocks}
    for stage, counter in enumerate(kinds):
        for (block, policy, names, again), count in counter.items():
            took = block_seconds(by_id[block], dim, shape, policies[policy], names, kernels, again)
            if took.recompute.total and program.data_policy == "plan":
                took = replace(took, recompute=took.recompute * _times_again(plan, stage, by_id[block]))
            found[stage] += took * count
    vocab = plan.model.vocab_size // plan.mesh.tp
    found[plan.layers[0].stage] += embedding_seconds(dim, vocab, shape, kernels)
    head: Precision = kernels.precision if -1 in converted else kernels.base
    local_logits = vocab if plan.tensor_parallel.loss_parallel or plan.mesh.tp == 1 else plan.model.vocab_size
    found[plan.layers[-1].stage] += head_seconds(
        dim, vocab, local_logits, shape, plan.loss.chunks, head, loss_fusion(plan, program), kernels
    )
    return tuple(found)


def _times_again(plan: Plan, stage: int, block: Block) -> float:
    """How often a microbatch's backward computes a checkpointed block again: once, unless the schedule splits backward."""
    if plan.mesh.pp == 1:
        return 1.0
    runs = plan.batch.accumulation_steps * plan.pipeline.microbatches
    return recomputations(plan, stage, num_weights(block))[0] / runs


@functools.lru_cache(maxsize=256)
def num_weights(block: Block) -> int:
    """Parameters (tensors) of one block."""
    alone = Model(
        family="", flavor="", vocab_size=2, dim=8, max_seq_len=1, blocks=(Blocks(repeat=1, block=block),),
        norm=block.norm, tied=True,
    )  # fmt: skip
    return sum(parameter.fqn.startswith("layers.") for parameter in parameters(alone))


def kernels_of(plan: Plan, program: Program = TITAN) -> Kernels:
    """How ops run under `plan`."""
    fusion = fusion_of(plan, program)
    gradient = program.gradient_bytes or BYTES[plan.fsdp.param_dtype]
    return Kernels(
        gpu=plan.cluster.gpu,
        base="float32" if plan.fsdp.param_dtype == "float32" else "bf16",
        precision=plan.float8.recipe or "bf16",
        emulated=plan.float8.emulate,
        fused_casts=fusion == "fused",
        float8_products=float8_products(plan.cluster.gpu, program.float8_products),
        gradient_bytes=gradient,
        launches=not program.graphs,
        early_stop=program.recompute == "needed" and plan.activation_checkpoint.early_stop,
        attention=program.attention,
        recompute_attention=program.recompute_attention,
        recompute_elementwise=program.recompute == "needed",
    )


def loss_fusion(plan: Plan, program: Program = TITAN) -> Fusion:
    """Who fuses the loss."""
    if program.loss != "plan":
        return program.loss
    return "compiled" if fuses(plan) and "loss" in plan.compile.components else "eager"


@functools.lru_cache(maxsize=64)
def layer_blocks(model: Model) -> tuple[Block, ...]:
    """The block of every layer."""
    return tuple(model.layers())


def converted_names(model: Model, selectors: tuple[str, ...]) -> dict[int, frozenset[str]]:
    """Layer number -> its linears that `selectors` name, named below the block; -1 has the output projection."""
    # Most policies force nothing, and to look an answer up means to hash the whole model.
    return _converted_names(model, selectors) if selectors else {}


@functools.lru_cache(maxsize=256)
def _converted_names(model: Model, selectors: tuple[str, ...]) -> dict[int, frozenset[str]]:
    found: dict[int, set[str]] = {}
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
