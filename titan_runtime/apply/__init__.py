"""The plan's decisions, put onto a model in the one order that works."""

from __future__ import annotations

from typing import assert_never

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_planner.ir.plan import Plan
from titan_runtime.apply.checkpointing import apply_checkpointing
from titan_runtime.apply.compile import apply_compile
from titan_runtime.apply.ddp import apply_ddp
from titan_runtime.apply.float8 import apply_float8
from titan_runtime.apply.fsdp import DTYPES, apply_fsdp
from titan_runtime.init import initialise
from titan_runtime.mesh import data_mesh
from titan_runtime.modules import Transformer, build

__all__ = ["build_model"]


def build_model(plan: Plan, world: DeviceMesh, device: torch.device) -> Transformer:
    """The plan's model on this rank: built, transformed, allocated and filled. Collective."""
    # On the meta device: a model that fits no single rank must never exist in one piece.
    module = build(plan.model, seq_len=plan.batch.seq_len, dtype=DTYPES[plan.dtype])

    # Float8 before all else: it exchanges linears, and what follows wraps, cuts and compiles the ones that will compute.
    apply_float8(module, plan)

    # Checkpointing next: it replaces a block's forward, and what wraps the block later must see the replacement.
    apply_checkpointing(module, plan)

    # Compilation takes in the checkpointed forward, so that the compiler sees what is recomputed. It must come before
    # FSDP: hooks that gather weights stay outside of the compiled code.
    apply_compile(module, plan)

    # Data parallelism last: it turns parameters into shards, and everything before may still look at whole shapes.
    match plan.fsdp.strategy:
        case "fsdp":
            apply_fsdp(module, plan, data_mesh(world, plan.mesh))
        case "ddp":
            apply_ddp(module, plan, world["dp_replicate"])
        case _:
            assert_never(plan.fsdp.strategy)

    # Only the shards get memory, and only then values.
    module.to_empty(device="cpu" if plan.fsdp.cpu_offload else device)
    for table in module.rotary:
        table.to_empty(device=device)  # no weight, so it stays where attention needs it
    initialise(module, plan.model, plan.seeds.seed)
    return module
