"""Rules about a spec that a plan cannot show, what is checked before any plan is made, where a plan's addresses come from in a
spec, feasibility, and the registry of every rule that a complaint can name."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Union, get_args, get_origin

from titan_planner.cost.memory import GIB, Parts, RankMemory, rank_memory
from titan_planner.ir.capabilities import ROWS, broken_pins, pin_facts
from titan_planner.ir.cluster import Cluster
from titan_planner.ir.errors import Complaint
from titan_planner.ir.features import AUTO_FILTER, Asked
from titan_planner.ir.fqn import fold, pattern_matches
from titan_planner.ir.inventory import expert_modules, linear_modules
from titan_planner.ir.model import Model
from titan_planner.ir.plan import Plan
from titan_planner.ir.record import field_types
from titan_planner.ir.request import Spec
from titan_planner.ir.rules import INVARIANTS, RULES, Invariant, Rule
from titan_planner.layout import tp_limits

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
    ("layers.checkpoint", "activation_checkpoint.mode"),
    ("fsdp.strategy", "parallelism.data_parallel_strategy"),
    ("fsdp.cpu_offload", "training.enable_cpu_offload"),
    ("fsdp.units", "parallelism.fsdp_reshard_after_forward"),
    ("fsdp.prefetch_forward", "parallelism.fsdp_prefetch_forward"),
    ("fsdp.prefetch_backward", "parallelism.fsdp_prefetch_backward"),
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
    ("request", ""),
)
"""Where in a spec a plan's address comes from: the longest matching prefix is replaced."""


def to_spec_address(address: str) -> str:
    """The spec's address of a plan's address (or of an address that already is the spec's)."""
    for prefix, target in sorted(SPEC_ADDRESSES, key=lambda pair: -len(pair[0])):
        if address == prefix or address.startswith((prefix + ".", prefix + "[")):
            rest = address[len(prefix) :].lstrip(".")
            if prefix in ("job", "lr_schedule", "data", "request"):
                return f"{target}.{rest}".strip(".")
            return target
    return address


# ------------------------------------------------------------------ rules about specs alone


@dataclass(frozen=True, slots=True)
class SpecRule:
    """A statement about specs, why it holds, and the addresses of a spec that it concerns."""

    id: str
    statement: str
    doc: str
    at: tuple[str, ...]


SPEC_RULES: tuple[SpecRule, ...] = (
    SpecRule(
        "float8-filter",
        "Filters of linears match some, and torchao's thresholds go with the recipes that they were measured for.",
        "A filter that matches nothing is a misspelling, which TorchTitan let pass (#4008). torchao 0.18 has thresholds for "
        "tensorwise and rowwise; for rowwise_with_gw_hp it raises NotImplementedError, for MXFP8 it has none.",
        ("float8.filter_fqns",),
    ),
    SpecRule(
        "limit-tp",
        "A pinned tensor degree respects `limits.max_tp` and `limits.keep_tp_in_node`.",
        "Tensor parallelism communicates in every layer, several times slower over a network than inside a node. Tensor ranks "
        "are neighbours, so they share a node exactly when their number divides it; TorchTitan checks it nowhere.",
        ("parallelism.tensor_parallel_degree", "limits.max_tp", "limits.keep_tp_in_node"),
    ),
    SpecRule(
        "limit-deadline",
        "`limits.deadline_days` needs `training.token_budget`.",
        "How long a training takes follows from how many tokens it is to see; `training.steps` is how long one run goes on.",
        ("limits.deadline_days", "training.token_budget"),
    ),
    SpecRule(
        "pp-layers",
        "Pipeline stages have at least a layer each, and so many layers a stage make whole ranks.",
        "TorchTitan splits layers evenly, the embedding and the output counting as so many layers, and raises when the stages "
        "that this makes do not divide over the pipeline ranks.",
        ("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_layers_per_stage"),
    ),
    SpecRule(
        "pp-listed",
        "Stages that are listed hold every top-level module once.",
        "A module that is listed twice would be trained twice, and one that is not listed would be left out of the model.",
        ("parallelism.module_fqns_per_model_part",),
    ),
    SpecRule(
        "memory-fits",
        "Parameters, gradients, optimizer states and gathered units fit in the memory of a GPU.",
        "They are there at every update, whatever is recomputed. Activations come on top: a plan that may not fit with them is "
        "flagged, not refused.",
        ("cluster",),
    ),
)


def spec_complaints(spec: Spec, model: Model | None, cluster: Cluster | None) -> list[Complaint]:
    """What is wrong with a spec beyond its types, whatever plan it would get."""
    asked = Asked(spec, spec.request(), model, cluster)
    facts = pin_facts(asked)
    found = [
        Complaint(row.why.format(**facts), row.address, hint=row.instead.format(**facts) or None, rule=row.rule)
        for row in broken_pins(asked)
    ]
    found += _patterns(asked)
    found += _limits(asked)
    return found


def _patterns(asked: Asked) -> Iterator[Complaint]:
    """Parts of names that match nothing of the model."""
    model, float8 = asked.model, asked.request.float8
    if model is None:
        return
    if float8.recipe != "none":
        known = expert_modules(model)
        # Of a model without experts the table of capabilities says so.
        for index, part in enumerate(float8.grouped_mm_fqns if known else ()):
            if not any(pattern_matches(part, fqn) for fqn in known):
                yield Complaint(
                    f"`{part}` matches no experts of the model",
                    f"float8.grouped_mm_fqns[{index}]",
                    rule="float8-experts",
                    hint=f"experts are called {', '.join(f'`{fqn}`' for fqn in fold(known))}",
                )
        yield from _unmatched(float8.filter_fqns, model, "float8.filter_fqns", "float8-filter")
    yield from _unmatched(
        asked.request.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns,
        model,
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        "ac-recompute",
    )


def _unmatched(
    patterns: tuple[str, ...], model: Model, address: str, rule: Literal["float8-filter", "ac-recompute"]
) -> Iterator[Complaint]:
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


def _limits(asked: Asked) -> Iterator[Complaint]:
    limits, budget = asked.spec.limits, asked.spec.training.token_budget
    if limits.deadline_days is not None and budget is None:
        yield Complaint(
            f"`deadline_days` is {limits.deadline_days:g}, but `training.token_budget` does not say how many tokens the "
            "training is to see",
            "limits.deadline_days",
            rule="limit-deadline",
            hint="write `training: {token_budget: 15e12}`, or remove the deadline",
        )
    tp = asked.request.parallelism.tensor_parallel_degree
    if isinstance(tp, int) and tp > 0:
        yield from tp_limits(tp, asked.cluster, limits)


# ------------------------------------------------------------------ feasibility


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


# ------------------------------------------------------------------ the registry


@dataclass(frozen=True, slots=True)
class Known:
    """A rule as `titan-plan explain` prints it: what it says, why it holds, and where it looks.

    `spec` are the addresses of a spec that can break it, none where only a plan can. `table` are the lines of the table of
    capabilities that it enforces.
    """

    id: str
    statement: str
    doc: str
    spec: tuple[str, ...]
    plan: tuple[str, ...]
    table: tuple[str, ...]


def known_rules() -> Mapping[str, Known]:
    """Every rule that a complaint can name, by id, in the order in which they are checked."""
    found: dict[str, Known] = {}
    entries: list[Rule | Invariant] = [*RULES, *INVARIANTS]
    for entry in entries:
        spec = tuple(dict.fromkeys(a for a in map(to_spec_address, entry.at) if is_spec_address(a)))
        found[entry.id] = Known(entry.id, entry.statement, entry.doc, spec, entry.at, _table(entry.id))
    for rule in SPEC_RULES:
        found[rule.id] = Known(rule.id, rule.statement, rule.doc, rule.at, (), _table(rule.id))
    return found


def _table(rule: str) -> tuple[str, ...]:
    lines = (f"{row.feature} {row.verdict} {' or '.join(row.others)}" for row in ROWS if row.rule == rule)
    return tuple(dict.fromkeys(lines))


def close_rules(word: str) -> list[str]:
    """Ids of rules that look like `word`, the closest first."""
    return difflib.get_close_matches(word, list(known_rules()), 3, 0.6)


def is_spec_address(address: str) -> bool:
    """Whether a spec has a field at the dotted `address`."""
    record: type = Spec
    parts = address.split(".")
    for index, name in enumerate(parts):
        fields = field_types(record)
        if name not in fields:
            return False
        hint = fields[name]
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        inner = next((m for m in members if isinstance(m, type) and hasattr(m, "__dataclass_fields__")), None)
        if inner is None:
            return index == len(parts) - 1
        record = inner
    return True
