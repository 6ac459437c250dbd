"""What the request asked for where a decision now stands: left to the planner, or pinned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titan_planner.ir.codec import encode
from titan_planner.ir.plan import Plan
from titan_planner.ir.request import DEGREE_FIELDS

PINS: Mapping[str, str] = {
    **{f"mesh.{axis}": f"parallelism.{name}" for axis, name in DEGREE_FIELDS.items()},
    "mesh.ep": "parallelism.expert_parallel_degree",
    "mesh.etp": "parallelism.expert_tensor_parallel_degree",
    "batch.local_batch_size": "local_batch_size",
    "batch.global_batch_size": "global_batch_size",
    "batch.microbatch_size": "parallelism.pipeline_parallel_microbatch_size",
    "pipeline.schedule": "parallelism.pipeline_parallel_schedule",
    "pipeline.actions": "parallelism.pipeline_parallel_schedule_actions",
    "pipeline.stages": "parallelism.pipeline_parallel_layers_per_stage",
    "layers.*.stage": "parallelism.module_fqns_per_model_part",
    "fsdp.strategy": "parallelism.data_parallel_strategy",
    "fsdp.units": "parallelism.fsdp_reshard_after_forward",
    "fsdp.units.*.reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "fsdp.prefetch_forward": "parallelism.fsdp_prefetch_forward",
    "fsdp.prefetch_backward": "parallelism.fsdp_prefetch_backward",
    "fsdp.defer_gradient_sync": "parallelism.defer_gradient_sync",
    "tensor_parallel.sequence_parallel": "parallelism.enable_sequence_parallel",
    "tensor_parallel.loss_parallel": "parallelism.disable_loss_parallel",
    "tensor_parallel.async_tp": "parallelism.enable_async_tensor_parallel",
    "tensor_parallel.kv_replicas": "parallelism.kv_head_replication",
    "expert_parallel.comm_backend": "parallelism.expert_parallel_comm_backend",
    "expert_parallel.capacity_factor": "parallelism.expert_capacity_factor",
    "expert_parallel.force_load_balance": "parallelism.moe_force_load_balance",
    "context_parallel.method": "parallelism.context_parallel_method",
    "context_parallel.load_balance": "parallelism.context_parallel_load_balancer",
    "layers.*.checkpoint": "activation_checkpoint.mode",
    "activation_checkpoint.policies": "activation_checkpoint.mode",
    "activation_checkpoint.preserve_rng_state": "activation_checkpoint.preserve_rng_state",
    "activation_checkpoint.early_stop": "activation_checkpoint.early_stop",
    "activation_checkpoint.determinism_check": "activation_checkpoint.determinism_check",
    "float8.recipe": "float8.recipe",
    "float8.converted": "float8.filter_fqns",
    "float8.skipped": "float8.filter_fqns",
    "float8.experts": "float8.grouped_mm_fqns",
    "float8.enable_fsdp_float8_all_gather": "float8.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "float8.precompute_float8_dynamic_scale_for_fsdp",
    "float8.emulate": "float8.emulate",
    "compile.enable": "compile.enable",
    "compile.components": "compile.components",
    "compile.backend": "compile.backend",
    "loss.chunks": "loss.chunks",
    "loss.z_loss": "loss.z_loss",
}
"""Address in the plan -> address in the request of what the user may have said about it."""

SPEC_ADDRESSES: Mapping[str, str] = {
    **{address: plan for plan, address in reversed(list(PINS.items()))},
    "activation_checkpoint.mode": "activation_checkpoint",
    "float8.filter_fqns": "float8",
    "parallelism.module_fqns_per_model_part": "pipeline.stages",
    "parallelism.fsdp_reshard_after_forward": "fsdp.units",
    "training.local_batch_size": "batch.local_batch_size",
    "training.global_batch_size": "batch.global_batch_size",
    "training.seq_len": "batch.seq_len",
    "training.steps": "job.steps",
    "training.max_norm": "optimizer.max_norm",
    "training.dtype": "dtype",
    "training.mixed_precision_param": "fsdp.param_dtype",
    "training.mixed_precision_reduce": "fsdp.reduce_dtype",
    "training.enable_cpu_offload": "fsdp.cpu_offload",
    "training.seed": "seeds.seed",
    "training.deterministic": "seeds.deterministic",
    "training.token_budget": "job.token_budget",
    "parallelism": "mesh",
    "lr_scheduler": "lr_schedule",
    "checkpoint": "job.checkpoint",
    "metrics": "job.metrics",
    "profiling": "job.profiling",
    "comm": "job.comm",
    "validation": "job.validation",
    "environment": "job.environment",
    "dump_folder": "job.dump_folder",
}
"""Address in a spec -> where the plan decides it, so that either may be asked about."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the request says at `address`: `auto` (the planner chose), `pinned`, or the spec's `default`."""

    address: str
    value: Any
    how: Literal["auto", "pinned", "default"]


def asked(plan: Plan, pattern: str) -> Asked | None:
    """What was asked for the plan address `pattern` (list keys written as `*`); None where a spec cannot ask."""
    address = PINS.get(pattern)
    if address is None:
        return None
    owner: Any = plan.request
    *sections, name = address.split(".")
    for section in sections:
        owner = getattr(owner, section)
    found = getattr(owner, name)
    if found == "auto" or (address == "global_batch_size" and found == -1):
        return Asked(address, encode(found), "auto")
    default = next(f.default for f in dataclasses.fields(owner) if f.name == name)
    # `float8.recipe: none` is what an absent section means, and a choice nevertheless.
    return Asked(address, encode(found), "default" if found == default else "pinned")


def summary(plan: Plan, patterns: Iterable[str]) -> str:
    """`auto`, `pinned`, `partly` (some pinned, some auto) or `default`; empty where a spec cannot ask."""
    how = {answer.how for pattern in patterns if (answer := asked(plan, pattern)) is not None}
    if {"auto", "pinned"} <= how:
        return "partly"
    return next((word for word in ("pinned", "auto", "default") if word in how), "")
