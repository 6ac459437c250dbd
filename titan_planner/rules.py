"""Rules about a spec that a plan cannot show, where a plan's addresses come from in a spec, and feasibility."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from titan_planner.cost.memory import GIB, Parts, RankMemory, rank_memory
from titan_planner.ir.cluster import Cluster
from titan_planner.ir.errors import Complaint
from titan_planner.ir.fqn import fold, pattern_matches
from titan_planner.ir.inventory import expert_modules, linear_modules
from titan_planner.ir.model import Model
from titan_planner.ir.plan import Plan
from titan_planner.ir.request import Spec
from titan_planner.passes.filter_float8 import AUTO_FILTER

SPEC_ADDRESSES: tuple[tuple[str, str], ...] = (
    ("mesh.pp", "parallelism.pipeline_parallel_degree"),
    ("mesh.dp_replicate", "parallelism.data_parallel_replicate_degree"),
    ("mesh.dp_shard", "parallelism.data_parallel_shard_degree"),
    ("mesh.cp", "parallelism.context_parallel_degree"),
    ("mesh.tp", "parallelism.tensor_parallel_degree"),
    ("mesh.ep", "parallelism.expert_parallel_degree"),
    ("mesh.etp", "parallelism.expert_tensor_parallel_degree"),
    ("mesh", "parallelism"),
    ("batch.seq_len", "training.seq_len"),
    ("batch.global_batch_size", "training.global_batch_size"),
    ("batch.local_batch_size", "training.local_batch_size"),
    ("batch.microbatch_size", "parallelism.pipeline_parallel_microbatch_size"),
    ("batch", "training"),
    ("pipeline.schedule", "parallelism.pipeline_parallel_schedule"),
    ("pipeline.stages", "parallelism.pipeline_parallel_schedule"),
    ("pipeline.microbatches", "training.local_batch_size"),
    ("pipeline.actions", "parallelism.pipeline_parallel_schedule_actions"),
    ("pipeline", "parallelism"),
    ("layers", "parallelism.module_fqns_per_model_part"),
    ("fsdp.strategy", "parallelism.data_parallel_strategy"),
    ("fsdp.cpu_offload", "training.enable_cpu_offload"),
    ("fsdp.units", "parallelism.fsdp_reshard_after_forward"),
    ("tensor_parallel.sequence_parallel", "parallelism.enable_sequence_parallel"),
    ("tensor_parallel.loss_parallel", "parallelism.disable_loss_parallel"),
    ("tensor_parallel.async_tp", "parallelism.enable_async_tensor_parallel"),
    ("tensor_parallel.kv_replicas", "parallelism.kv_head_replication"),
    ("expert_parallel.comm_backend", "parallelism.expert_parallel_comm_backend"),
    ("expert_parallel.capacity_factor", "parallelism.expert_capacity_factor"),
    ("expert_parallel.force_load_balance", "parallelism.moe_force_load_balance"),
    ("context_parallel.method", "parallelism.context_parallel_method"),
    ("context_parallel.load_balance", "parallelism.context_parallel_load_balancer"),
    ("activation_checkpoint", "activation_checkpoint.mode"),
    ("float8.converted", "float8.filter_fqns"),
    ("float8.experts", "float8.grouped_mm_fqns"),
    ("lr_schedule", "lr_scheduler"),
    ("data", "data"),
    ("optimizer.max_norm", "training.max_norm"),
    ("job.dump_folder", "dump_folder"),
    ("job.steps", "training.steps"),
    ("job", ""),
)
"""Where in a spec a plan's address comes from: the longest matching prefix is replaced."""


def to_spec_address(address: str) -> str:
    """The spec's address of a plan's address (or of an address that already is the spec's)."""
    for prefix, target in sorted(SPEC_ADDRESSES, key=lambda pair: -len(pair[0])):
        if address == prefix or address.startswith((prefix + ".", prefix + "[")):
            rest = address[len(prefix) :].lstrip(".")
            if prefix in ("job", "lr_schedule", "data"):
                return f"{target}.{rest}".strip(".")
            return target
    return address


def spec_complaints(spec: Spec, model: Model | None, cluster: Cluster | None) -> list[Complaint]:
    """What is wrong with a spec beyond its types, whatever plan it would get."""
    found = list(_float8(spec, model, cluster))
    found += _checkpointing(spec, model)
    found += _limits(spec, cluster)
    return found


def _float8(spec: Spec, model: Model | None, cluster: Cluster | None) -> Iterator[Complaint]:
    asked = spec.request().float8
    if asked.recipe == "none":
        return
    if cluster is not None and asked.recipe == "mxfp8" and not (cluster.gpu.mxfp8 or asked.emulate):
        yield Complaint(
            f"{cluster.gpu.name} has no MXFP8",
            "float8.recipe",
            rule="float8-hardware",
            hint="use `recipe: tensorwise`"
            if cluster.gpu.float8
            else "remove the section float8, or set `emulate: true`",
        )
    elif cluster is not None and asked.recipe not in ("auto", "mxfp8") and not cluster.gpu.float8 and not asked.emulate:
        yield Complaint(
            f"{cluster.gpu.name} has no Float8",
            "float8.recipe",
            rule="float8-hardware",
            hint="remove the section float8, or set `emulate: true` to try the numerics",
        )
    if asked.enable_fsdp_float8_all_gather and asked.recipe not in ("auto", "tensorwise"):
        yield Complaint(
            f"the Float8 all-gather works with the recipe tensorwise only, not {asked.recipe}",
            "float8.enable_fsdp_float8_all_gather",
            rule="float8-hardware",
            hint="use `recipe: tensorwise`, or turn the all-gather off",
        )
    if asked.enable_fsdp_float8_all_gather and spec.request().parallelism.data_parallel_strategy == "ddp":
        yield Complaint(
            "the strategy ddp gathers no weights, so none can be gathered in Float8",
            "float8.enable_fsdp_float8_all_gather",
            rule="float8-all-gather",
            hint="use the strategy fsdp, or turn the all-gather off",
        )
    if asked.precompute_float8_dynamic_scale_for_fsdp and not asked.enable_fsdp_float8_all_gather:
        yield Complaint(
            "precomputed scales go with the Float8 all-gather only",
            "float8.precompute_float8_dynamic_scale_for_fsdp",
            rule="float8-hardware",
            hint="set `enable_fsdp_float8_all_gather: true`, or remove the line",
        )
    if asked.recipe in ("rowwise_with_gw_hp", "mxfp8") and AUTO_FILTER in asked.filter_fqns:
        yield Complaint(
            f"`{AUTO_FILTER}` has no thresholds for the recipe {asked.recipe}",
            "float8.filter_fqns",
            rule="float8-filter",
            hint="list the linears to skip, or use tensorwise or rowwise",
        )
    if asked.grouped_mm_fqns and asked.recipe != "mxfp8":
        yield Complaint(
            f"experts' grouped products run in the recipe mxfp8 only, not {asked.recipe}",
            "float8.grouped_mm_fqns",
            rule="float8-experts",
            hint="use `recipe: mxfp8`, or remove the line",
        )
    if model is not None:
        known = expert_modules(model)
        for index, part in enumerate(asked.grouped_mm_fqns):
            if not any(pattern_matches(part, fqn) for fqn in known):
                yield Complaint(
                    f"`{part}` matches no experts of the model",
                    f"float8.grouped_mm_fqns[{index}]",
                    rule="float8-experts",
                    hint=f"experts are called {', '.join(f'`{fqn}`' for fqn in fold(known))}" if known else "remove it",
                )
        yield from _unmatched(asked.filter_fqns, model, "float8.filter_fqns", "float8-filter")


def _unmatched(patterns: tuple[str, ...], model: Model, address: str, rule: str) -> Iterator[Complaint]:
    linears = linear_modules(model)
    words = sorted({part for fqn in linears for part in (fqn.split(".", 2)[-1], fqn.split(".")[-1])})
    for index, pattern in enumerate(patterns):
        if pattern == AUTO_FILTER or any(pattern_matches(pattern, fqn) for fqn in linears):
            continue
        close = difflib.get_close_matches(pattern, [*words, AUTO_FILTER], 1, 0.6)
        hint = (
            f"did you mean `{close[0]}`?"
            if close
            else f"linears are called {', '.join(f'`{word}`' for word in words[:9])}"
        )
        yield Complaint(f"`{pattern}` matches no linear of the model", f"{address}[{index}]", hint=hint, rule=rule)


def _checkpointing(spec: Spec, model: Model | None) -> Iterator[Complaint]:
    request = spec.request()
    asked, compiled = request.activation_checkpoint, request.compile
    if asked.mode == "memory_budget" and (compiled.enable is False or "model" not in compiled.components):
        yield Complaint(
            "the checkpointing mode memory_budget needs the model compiled",
            "activation_checkpoint.mode",
            rule="ac-layers",
            hint="set `compile: {enable: true}` with the component model, or use the mode selective",
        )
    if model is not None:
        yield from _unmatched(
            asked.per_op_sac_force_recompute_mm_shapes_by_fqns,
            model,
            "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
            "ac-layers",
        )


def _limits(spec: Spec, cluster: Cluster | None) -> Iterator[Complaint]:
    tp = spec.request().parallelism.tensor_parallel_degree
    if not isinstance(tp, int) or tp < 1:
        return
    if cluster is not None and spec.limits.keep_tp_in_node and cluster.nodes > 1 and cluster.gpus_per_node % tp:
        yield Complaint(
            f"tp = {tp} spans nodes of {cluster.gpus_per_node} GPUs, which `limits.keep_tp_in_node` forbids",
            "parallelism.tensor_parallel_degree",
            rule="limit-tp",
            hint=f"use a divisor of {cluster.gpus_per_node}, or set `limits: {{keep_tp_in_node: false}}`",
        )
    if spec.limits.max_tp is not None and tp > spec.limits.max_tp:
        yield Complaint(
            f"tp = {tp} exceeds `limits.max_tp` {spec.limits.max_tp}",
            "parallelism.tensor_parallel_degree",
            rule="limit-tp",
            hint="raise the limit or lower the degree",
        )


def feasibility(plan: Plan) -> Complaint | None:
    """A complaint when parameters, gradients, optimizer and gathered units exceed the device's memory, as the update has them.

    Activations are not counted: a plan that may not fit with them is flagged in its estimate instead. Nor is the fullest moment
    looked at, which may come before there is any gradient.
    """
    if plan.fsdp.cpu_offload:
        return None
    memory = plan.cluster.gpu.memory_gib
    worst = max((_at_update(rank) for rank in rank_memory(plan)), key=_states)
    counted = _states(worst) / GIB
    if counted <= memory:
        return None
    parameters, gradients, optimizer, gathered = (
        part / GIB for part in (worst.parameters, worst.gradients, worst.optimizer, worst.unsharded)
    )
    return Complaint(
        f"the model does not fit: parameters {parameters:.1f} + gradients {gradients:.1f} + optimizer {optimizer:.1f} + "
        f"gathered units {gathered:.1f} = {counted:.1f} GiB a GPU before any activation, "
        f"but {plan.cluster.gpu.name} has {memory:.1f}",
        "cluster",
        hint=f"use about {_nodes_needed(plan)} nodes, or GPUs with more memory",
        rule="memory-fits",
    )


def _at_update(rank: RankMemory) -> Parts:
    return next(moment.parts for moment in rank.moments if moment.name == "optimizer")


def _states(parts: Parts) -> float:
    return parts.parameters + parts.gradients + parts.optimizer + parts.unsharded


def _nodes_needed(plan: Plan) -> int:
    """Nodes at which the sharded state takes half of the memory, leaving the rest to activations and gathered units."""
    states = [_states(_at_update(rank)) for rank in rank_memory(plan)]
    state = sum(states) / len(states) / GIB
    return max(
        plan.cluster.nodes + 1,
        -(-int(state * plan.cluster.num_gpus * 2) // int(plan.cluster.gpu.memory_gib * plan.cluster.gpus_per_node)),
    )
