"""What goes with what, as one table: model, attention, parallelism, schedule, checkpointing, compilation, 8-bit recipe, machine.

A row says what a feature does not go with, or what it needs, under which rule, and why; whatever no row names goes together.
`rules.py` looks the rows up for plans and `titan_planner/rules.py` for the pins of a spec, before any search;
`docs/capabilities.md` and `titan-plan models` print them. There is no other copy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from titan_planner.ir.cluster import Cluster
from titan_planner.ir.features import AUTO_FILTER, EXCLUSIVE, FEATURES, Asked, degree_pin, splits_backward
from titan_planner.ir.model import Gqa, Model
from titan_planner.ir.parallel import SPLIT_BACKWARD_SCHEDULES
from titan_planner.ir.plan import Plan

Verdict: TypeAlias = Literal["not with", "needs", "by numbers"]


@dataclass(frozen=True, slots=True)
class Row:
    """A feature and others: it goes with none of them, needs one of them, or their numbers decide, under the rule `rule`.

    `why` and `instead` are format strings over `facts`. `at` is the plan's address to complain about, the feature's own if
    empty. Rows `by numbers` are for readers: the rule computes what they say.
    """

    feature: str
    verdict: Verdict
    others: tuple[str, ...]
    rule: str
    why: str
    instead: str = ""
    at: str = ""

    @property
    def address(self) -> str:
        """The plan's address that a violation concerns."""
        return self.at or FEATURES[self.feature].at


_SPLIT = (*SPLIT_BACKWARD_SCHEDULES, "split_actions")
_NO_EXPERTS = ("swiglu", "mlp")

ROWS: tuple[Row, ...] = (
    # ---- experts
    *(
        Row(name, "not with", _NO_EXPERTS, "ep-region", f"{name} = {{{name}}}, but the model has no experts", f"use {name} = 1")
        for name in ("ep", "etp")
    ),
    *(
        Row(name, "not with", _NO_EXPERTS, "ep-options", f"`comm_backend` is {name}, but the model has no experts", "use standard")
        for name in ("deepep", "hybridep")
    ),
    Row(
        "capacity_factor", "not with", _NO_EXPERTS, "ep-options",
        "`capacity_factor` is set, but the model has no experts", "set it to null",
    ),
    Row(
        "force_load_balance", "not with", _NO_EXPERTS, "ep-options",
        "`force_load_balance` is on, but the model has no experts", "turn it off",
    ),
    *(
        Row(name, verdict, (other,), "ep-options", f"`comm_backend` {name} {why}", instead)
        for name in ("deepep", "hybridep")
        for verdict, other, why, instead in cast(
            "tuple[tuple[Verdict, str, str, str], ...]",
            (
                ("needs", "ep", "sends tokens between expert ranks, but ep is 1", "use standard, or ep > 1"),
                ("not with", "etp", "sends tokens to whole experts, but etp is {etp}", "use standard, or etp = 1"),
                ("needs", "nvidia", "is kernels for NVIDIA GPUs, which {gpu} is not", "use standard"),
            ),
        )
    ),
    # ---- tensor parallelism
    *(
        Row(name, "needs", ("tp",), "tp-options", f"`{name}` is on, but tp is 1", "turn it off, or use tp > 1")
        for name in ("sequence_parallel", "loss_parallel", "async_tp")
    ),
    Row(
        "async_tp", "needs", ("compiled_model",), "tp-options", "async tensor parallelism needs the model compiled",
        "turn compile on with the component `model`, or turn async tensor parallelism off",
    ),
    Row(
        "async_tp", "needs", ("cuda",), "tp-options",
        "async tensor parallelism needs CUDA, but the cluster's device is {device}", "turn it off",
    ),
    Row(
        "async_tp", "not with", ("whole_stream",), "tp-options",
        "async tensor parallelism splits all-gathers and reduce-scatters, and without sequence parallel there are none",
        "turn sequence parallel on, or turn async tensor parallelism off",
    ),
    Row(
        "async_tp", "needs", ("tp_in_node",), "tp-options",
        "async tensor parallelism reads its neighbours' memory, but tp = {tp} spans nodes of {per_node} GPUs",
        "use a tp that divides {per_node}, or turn async tensor parallelism off",
    ),
    Row("tp", "by numbers", ("gqa",), "tp-heads", "tp divides the query heads, and the KV heads or their copies"),
    Row("tp", "by numbers", ("swiglu", "mlp", "moe"), "tp-dims", "tp divides the width of the feed-forward layers"),
    Row("ep", "by numbers", ("moe",), "ep-region", "ep divides the experts, and ep x etp divides dp_shard x cp x tp"),
    # ---- context parallelism
    Row("cp_alltoall", "by numbers", ("gqa",), "cp-heads", "cp x tp divides the KV heads"),
    Row(
        "ptrr", "not with", ("gqa",), "cp-balance",
        "the balance ptrr sorts the block masks of FlexAttention, and no layer kind of this version has any", "use headtail",
    ),
    # ---- data parallelism
    *(
        Row(
            "ddp", "not with", (axis,), "fsdp-units",
            f"DDP replicates parameters, but {axis} is {{{axis}}}",
            "use the strategy fsdp, or move the ranks to dp_replicate",
        )
        for axis in ("dp_shard", "cp")
    ),
    Row(
        "cpu_offload", "needs", ("cuda",), "fsdp-offload", "parameters of a CPU cluster are in host memory already",
        "turn the CPU offload off",
    ),
    Row(
        "cpu_offload", "not with", ("ddp",), "fsdp-offload", "the strategy ddp keeps every parameter on the GPU",
        "turn the CPU offload off, or use the strategy fsdp",
    ),
    Row(
        "partial_reshard", "not with", ("tp",), "tp-partial-reshard",
        "torch cannot reshard to {partial} of {fsdp} ranks together with tp = {tp}",
        "set reshard_after_forward to always or never, or tp to 1",
    ),
    Row(
        "partial_reshard", "by numbers", ("moe",), "experts-partial-reshard",
        "units of experts reshard to all ranks with the same experts, unless whole experts are shared out",
    ),
    # ---- pipelines that split backward
    *(
        Row(
            name, "not with", ("reshard",), "pp-split-backward-reshard",
            "{splitter} with FSDP units that reshard after forward trains wrong without an error",
            "set reshard_after_forward to false (never)", at="fsdp.units",
        )
        for name in _SPLIT
    ),
    *(
        Row(
            name, "not with", ("selective",), "pp-split-backward-selective",
            "{splitter} runs backward twice over a stage, which selective checkpointing does not allow",
            "use the checkpointing mode full or none, or the schedule Interleaved1F1B",
            at="activation_checkpoint.policies",
        )
        for name in _SPLIT
    ),
    # ---- checkpointing
    Row(
        "memory_budget", "needs", ("compiled_model",), "ac-layers", "the checkpointing mode memory_budget needs the model compiled",
        "turn compile on with the component `model`, or use the mode selective",
    ),
    Row(
        "selective", "by numbers", ("dp_shard",), "ac-nested-units", "no FSDP unit lies inside a selectively checkpointed block",
    ),
    # ---- 8 bits
    *(
        Row(
            name, "needs", ("gpu_float8", "emulate"), "float8-hardware", "{gpu} has no Float8",
            "use no Float8, or `emulate: true` to try the numerics",
        )
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ),
    Row(
        "mxfp8", "needs", ("gpu_mxfp8", "emulate"), "float8-hardware", "{gpu} has no MXFP8",
        "use {instead_of_mxfp8}, or `emulate: true` to try the numerics",
    ),
    Row(
        "float8_all_gather", "needs", ("tensorwise",), "float8-hardware",
        "the Float8 all-gather works with the recipe tensorwise only, not {recipe}",
        "use tensorwise, or turn the all-gather off",
    ),
    Row(
        "float8_scales", "needs", ("float8_all_gather",), "float8-hardware",
        "precomputed scales go with the Float8 all-gather only", "turn the all-gather on, or the precomputation off",
    ),
    Row(
        "float8_all_gather", "not with", ("ddp",), "float8-all-gather",
        "the strategy ddp gathers no weights, so none can be gathered in Float8",
        "turn the all-gather off, or use the strategy fsdp",
    ),
    Row(
        "float8_all_gather", "by numbers", ("partial_reshard", "tied", "tp"), "float8-all-gather",
        "weights gathered in Float8 are cut evenly, read by nobody else, and resharded to all ranks or not at all",
    ),
    Row(
        "float8_experts", "not with", _NO_EXPERTS, "float8-experts", "the model has no experts to compute in 8 bits",
        "name no experts",
    ),
    Row(
        "float8_experts", "needs", ("mxfp8",), "float8-experts",
        "experts' grouped products run in the recipe mxfp8 only, not {recipe}", "use mxfp8, or name no experts",
    ),
    Row(
        "auto_filter", "not with", ("rowwise_with_gw_hp", "mxfp8"), "float8-filter",
        f"`{AUTO_FILTER}` has no thresholds for the recipe {{recipe}}",
        "list the linears to skip, or use tensorwise or rowwise",
    ),
)  # fmt: skip
"""Everything that does not go with everything. A pair of features without a row goes together."""


# ------------------------------------------------------------------ looking up


@functools.cache
def rows_of(rule: str) -> tuple[Row, ...]:
    """The rows that the rule `rule` enforces, without those that numbers decide."""
    return tuple(row for row in ROWS if row.rule == rule and row.verdict != "by numbers")


def broken_rows(plan: Plan, rule: str) -> Iterator[Row]:
    """The rows of `rule` that `plan` breaks."""
    for row in rows_of(rule):
        uses = FEATURES[row.feature].used(plan)
        if uses and any(FEATURES[other].used(plan) for other in row.others) is (row.verdict == "not with"):
            yield row


def broken_pins(asked: Asked) -> Iterator[Row]:
    """The rows that every plan of a spec would break, whatever the passes choose."""
    for row in ROWS:
        if row.verdict == "by numbers" or FEATURES[row.feature].pinned(asked) is not True:
            continue
        found = [FEATURES[other].pinned(asked) for other in row.others]
        if (True in found) if row.verdict == "not with" else all(answer is False for answer in found):
            yield row


def verdict(a: str, b: str) -> Row | None:
    """The row about the features `a` and `b`, whichever of them it is filed under; None when they go together."""
    for row in ROWS:
        if row.verdict != "needs" and (
            (row.feature == a and b in row.others) or (row.feature == b and a in row.others)
        ):
            return row
    return None


Together: TypeAlias = Literal["yes", "no", "by numbers", "one of them"]


def together(a: str, b: str) -> Together:
    """Whether a plan may have the features `a` and `b` at once."""
    if any(a in group and b in group for group in EXCLUSIVE):
        return "one of them"
    row = verdict(a, b)
    if row is not None:
        return "no" if row.verdict == "not with" else "by numbers"
    # What needs one recipe does not go with the others, of which there is one at most.
    for one, other in ((a, b), (b, a)):
        for need in needs(one):
            group = next((g for g in EXCLUSIVE if other in g), frozenset())
            if set(need.others) <= group and other not in need.others:
                return "no"
    return "yes"


def needs(name: str) -> tuple[Row, ...]:
    """What the feature `name` needs."""
    return tuple(row for row in ROWS if row.feature == name and row.verdict == "needs")


def plan_facts(plan: Plan) -> dict[str, object]:
    """The numbers and names that rows speak of, as `plan` has them."""
    partial = next(
        (
            unit.reshard_after_forward
            for unit in plan.fsdp.units
            if not isinstance(unit.reshard_after_forward, bool) and unit.reshard_after_forward != plan.mesh.fsdp
        ),
        None,
    )
    return {
        **{axis: plan.mesh.degree(axis) for axis in ("dp_shard", "cp", "tp", "ep", "etp")},
        "fsdp": plan.mesh.fsdp,
        "partial": partial,
        "splitter": splits_backward(plan),
        "recipe": plan.float8.recipe,
        **_machine(plan.cluster),
    }


def pin_facts(asked: Asked) -> dict[str, object]:
    """The same of a spec, as far as it pins them."""
    pins = asked.request.parallelism
    schedule = "a table of actions with I and W" if pins.pipeline_parallel_schedule_actions else None
    return {
        **{axis: degree_pin(asked, axis) for axis in ("dp_shard", "cp", "tp", "ep", "etp")},
        "partial": pins.fsdp_reshard_after_forward,
        "fsdp": "all",
        "splitter": schedule or pins.pipeline_parallel_schedule,
        "recipe": asked.request.float8.recipe,
        **(_machine(asked.cluster) if asked.cluster is not None else {}),
    }


def _machine(cluster: Cluster) -> dict[str, object]:
    gpu = cluster.gpu
    return {
        "gpu": gpu.name,
        "device": gpu.device,
        "per_node": cluster.gpus_per_node,
        "instead_of_mxfp8": "tensorwise" if gpu.float8 else "no Float8",
    }


# ------------------------------------------------------------------ degrees


def kv_replicas(model: Model, tp: int) -> int:
    """How often each KV head must be held so that tp ranks have equally many; 1 where tp divides them as they are."""
    smallest = min(run.block.attention.num_kv_heads for run in model.blocks if isinstance(run.block.attention, Gqa))
    return tp // smallest if tp > smallest and tp % smallest == 0 else 1
