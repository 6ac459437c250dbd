"""Set what only changes speed: compilation, overlap, deferred gradient reduction, environment variables."""

from __future__ import annotations

from dataclasses import replace

from titan_planner.cost.estimate import estimate
from titan_planner.cost.memory import GIB, module_numel
from titan_planner.ir.plan import Plan
from titan_planner.passes.context import Context


def tune_runtime(plan: Plan, ctx: Context) -> Plan:
    """Turn compile on where it pays, async TP where it can work, and defer gradient reduction where memory allows."""
    plan = _compile(plan, ctx)
    plan = _async_tp(plan, ctx)
    plan = _defer_gradient_sync(plan, ctx)
    return _environment(plan, ctx)


def _compile(plan: Plan, ctx: Context) -> Plan:
    if plan.request.compile.enable != "auto":
        return plan
    if plan.compile.enable:
        ctx.applied("compile", "compiled block by block: only the compiler can keep the pinned memory budget")
    elif plan.cluster.gpu.device == "cuda":
        ctx.applied("compile", "compiled block by block: fused memory-bound ops")
    else:
        ctx.missed("compile", "compiling takes minutes on a CPU, longer than it saves in a short run")
        return plan
    return replace(plan, compile=replace(plan.compile, enable=True))


def _async_tp(plan: Plan, ctx: Context) -> Plan:
    asked = plan.request.parallelism.enable_async_tensor_parallel
    possible = (
        plan.mesh.tp > 1
        and plan.cluster.gpu.device == "cuda"
        and plan.compile.enable
        and "model" in plan.compile.components
        and plan.cluster.gpus_per_node % plan.mesh.tp == 0
        and plan.tensor_parallel.sequence_parallel
    )
    on = possible if asked == "auto" else asked
    if asked == "auto" and possible:
        ctx.applied(
            "tensor_parallel.async_tp", "tp stays inside a node and the model is compiled: matmuls overlap collectives"
        )
    return replace(plan, tensor_parallel=replace(plan.tensor_parallel, async_tp=on))


def _defer_gradient_sync(plan: Plan, ctx: Context) -> Plan:
    asked = plan.request.parallelism.defer_gradient_sync
    if asked != "auto":
        return replace(plan, fsdp=replace(plan.fsdp, defer_gradient_sync=asked))
    if plan.batch.accumulation_steps == 1:
        return plan
    numel = module_numel(plan)
    stages = plan.pipeline.stages
    local = max(
        sum(numel[layer.fqn] for layer in plan.layers if stages[layer.stage].pp_rank == rank)
        for rank in range(plan.mesh.pp)
    )
    # Deferring keeps whole gradients in the reduce dtype on every rank until the last accumulation step.
    needs = local * (4 if plan.fsdp.reduce_dtype == "float32" else 2) / GIB
    priced = estimate(plan)
    free = priced.memory_available_gib - priced.peak_memory_gib
    if needs > free:
        ctx.missed(
            "fsdp.defer_gradient_sync", f"whole gradients need {needs:.1f} GiB, but {max(free, 0):.1f} GiB are free"
        )
        return plan
    ctx.applied(
        "fsdp.defer_gradient_sync",
        f"gradients are reduced once instead of {plan.batch.accumulation_steps} times; whole they need {needs:.1f} GiB",
    )
    return replace(plan, fsdp=replace(plan.fsdp, defer_gradient_sync=True))


def _environment(plan: Plan, ctx: Context) -> Plan:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    if plan.cluster.gpu.device != "cuda" or name in plan.job.environment:
        return plan
    ctx.applied("job.environment", f"{name}=expandable_segments:True against fragmentation of device memory")
    environment = {**plan.job.environment, name: "expandable_segments:True"}
    return replace(plan, job=replace(plan.job, environment=environment))
