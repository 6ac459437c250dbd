"""The plan's decisions, put onto a model in the one order that works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_planner.ir.plan import Plan
from titan_planner.ir.rules import mixtures
from titan_runtime.apply.checkpointing import apply_checkpointing
from titan_runtime.apply.compile import apply_compile
from titan_runtime.apply.context import apply_context
from titan_runtime.apply.ddp import apply_ddp
from titan_runtime.apply.experts import apply_experts
from titan_runtime.apply.float8 import apply_float8
from titan_runtime.apply.fsdp import DTYPES, apply_fsdp, partial_sizes
from titan_runtime.apply.pipeline import Pipeline, build_stage, stages_of
from titan_runtime.apply.tensor import apply_tensor
from titan_runtime.init import initialise
from titan_runtime.mesh import build_expert_mesh, data_mesh, expert_data_mesh, partial_mesh
from titan_runtime.modules import Transformer, build

__all__ = ["build_model"]


def build_model(plan: Plan, world: DeviceMesh, device: torch.device) -> Transformer | Pipeline:
    """The plan's model on this rank: built, transformed, allocated and filled. Collective."""
    # The pipeline first: what follows is done to each stage alone, so that a rank never touches layers it does not hold.
    # Everything is on the meta device: a model that fits no single rank must never exist in one piece.
    apart = bool(mixtures(plan.model)) and plan.mesh.ep * plan.mesh.tp > 1
    experts = build_expert_mesh(plan.mesh, device.type) if apart else None
    partial = {ranks: partial_mesh(world, plan.mesh, ranks) for ranks in partial_sizes(plan)}
    if plan.mesh.pp == 1:
        module = build(plan.model, seq_len=plan.batch.seq_len, dtype=DTYPES[plan.dtype])
        return _finish(module, plan, world, experts, partial, device)
    indices = stages_of(plan, world.get_local_rank("pp"))
    parts = [
        _finish(build_stage(plan, index, DTYPES[plan.dtype]), plan, world, experts, partial, device)
        for index in indices
    ]
    return Pipeline(plan, world, parts, device)


def _finish(
    module: Transformer,
    plan: Plan,
    world: DeviceMesh,
    experts: DeviceMesh | None,
    partial: Mapping[int, DeviceMesh],
    device: torch.device,
) -> Transformer:
    """One stage (or the whole model): transformed, allocated and filled."""
    # Float8 before all else: it exchanges linears, and what follows wraps, cuts and compiles the ones that will compute.
    apply_float8(module, plan)

    # The attention that reaches other ranks' keys is part of what blocks keep or compute again.
    apply_context(module, plan, world["cp"])

    # Experts have ranks of their own, which need not be those of tensor parallelism; it leaves alone what is placed already.
    apply_experts(module, plan, world, experts)

    # Tensor parallelism, while weights are whole: it decides which part of each weight this rank has, which data
    # parallelism then cuts further. Its collectives are part of a module's own forward, so they are recomputed with it and
    # compiled with it, and selective policies see the local shapes that are really multiplied.
    apply_tensor(module, plan, world)

    # Checkpointing next: it replaces a block's forward, and what wraps the block later must see the replacement.
    apply_checkpointing(module, plan)

    # Compilation takes in the checkpointed forward, so that the compiler sees what is recomputed. It must come before
    # FSDP: hooks that gather weights stay outside of the compiled code.
    apply_compile(module, plan)

    # Data parallelism last: it turns parameters into shards, and everything before may still look at whole shapes.
    match plan.fsdp.strategy:
        case "fsdp":
            apply_fsdp(
                module,
                plan,
                data_mesh(world, plan.mesh),
                experts=None if experts is None else expert_data_mesh(experts, plan.mesh),
                partial=partial,
            )
        case "ddp":
            apply_ddp(module, plan, world["dp_replicate"])
        case _:
            assert_never(plan.fsdp.strategy)

    # Only the shards get memory, and only then values.
    module.to_empty(device="cpu" if plan.fsdp.cpu_offload else device)
    if plan.fsdp.cpu_offload:
        _place_buffers(module, device)
    initialise(module, plan.model, plan.seeds.seed)
    return module


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    """Give buffers memory on `device`: they are no weights, and are needed where the module computes."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.empty_like(buffer, device=device)
