"""The rules a plan must keep, as data: an id, a statement and a check each. `verify` runs them all, and so does the runtime.

They live in the contract because a hand-edited plan is legal input: whoever reads a plan re-verifies it with these.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from titan_planner.ir.actions import parse_actions
from titan_planner.ir.capabilities import broken_rows, plan_facts
from titan_planner.ir.errors import InvariantError
from titan_planner.ir.features import mixtures, splits_backward
from titan_planner.ir.fqn import select
from titan_planner.ir.inventory import (
    expert_modules,
    fsdp_dim,
    is_router,
    linear_modules,
    module_names,
    parameters,
    sharding_targets,
    top_level_modules,
)
from titan_planner.ir.model import Gqa, Mlp, Model, Moe, SwiGlu
from titan_planner.ir.numbers import divisors, listing
from titan_planner.ir.parallel import SCHEDULES, FsdpUnit
from titan_planner.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: the plan address it concerns, one sentence with the numbers, and one thing to try."""

    address: str
    message: str
    hint: str | None = None


Check = Callable[[Plan], Iterator[Violation]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A statement that every plan keeps, and why it holds, with its source.

    `at` are the plan's addresses that it concerns. Rules with `structural` are checked first: the others rely on them.
    """

    id: str
    statement: str
    doc: str
    at: tuple[str, ...]
    check: Check
    structural: bool = False


@dataclass(frozen=True, slots=True)
class Invariant:
    """A statement that values keep as soon as they are built: an `InvariantError` carries its id. `at` as in `Rule`."""

    id: str
    statement: str
    doc: str
    at: tuple[str, ...]


RULES: list[Rule] = []


def _rule(
    id: str, statement: str, *, doc: str, at: tuple[str, ...], structural: bool = False
) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(id, statement, doc, at, check, structural))
        return check

    return register


def _by_table(plan: Plan, rule: str) -> Iterator[Violation]:
    """What the table of capabilities says against `plan` under `rule`."""
    facts: dict[str, object] | None = None
    for row in broken_rows(plan, rule):
        facts = facts or plan_facts(plan)
        yield Violation(row.address, row.why.format(**facts), row.instead.format(**facts) or None)


# ------------------------------------------------------------------ structure


@_rule(
    "plan-layers",
    "`layers` lists every top-level module of the model, in order.",
    doc=(
        "Everything else about a layer (stage, checkpointing, placement) is found by its name, so a list that lacks "
        "or repeats one would leave the runtime to guess."
    ),
    at=("layers",),
    structural=True,
)
def _layers(plan: Plan) -> Iterator[Violation]:
    wanted = top_level_modules(plan.model)
    given = tuple(layer.fqn for layer in plan.layers)
    if given == wanted:
        return
    missing = [fqn for fqn in wanted if fqn not in given]
    extra = [fqn for fqn in given if fqn not in wanted]
    twice = [fqn for fqn, count in Counter(given).items() if count > 1]
    if missing or extra or twice:
        parts = [
            f"{word} `{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for word, names in (("lacks", missing), ("has the unknown", extra), ("repeats", twice))
            if names
        ]
        yield Violation(
            "layers",
            f"`layers` {', '.join(parts)}; the model has {len(wanted)} top-level modules",
            "keep one entry each for " + f"{wanted[0]}, layers.0 to {wanted[-3]}, norm and output",
        )
    else:
        yield Violation("layers", "`layers` names every module but not in the model's order", f"start with {wanted[0]}")


@_rule(
    "plan-stages",
    "Stages are numbered from 0 without gaps, and pipeline ranks 0 to pp-1 hold equally many.",
    doc=(
        "torch 2.13's pipelining derives the peers of every transfer from the stage numbers, and gives every rank of "
        "the pp axis equally many stages."
    ),
    at=("pipeline.stages",),
    structural=True,
)
def _stages(plan: Plan) -> Iterator[Violation]:
    stages, pp = plan.pipeline.stages, plan.mesh.pp
    if [stage.index for stage in stages] != list(range(len(stages))):
        yield Violation(
            "pipeline.stages",
            f"the stage indices are {[s.index for s in stages][:12]}, not 0 to {len(stages) - 1}",
            "number the stages from 0 in order",
        )
        return
    held = Counter(stage.pp_rank for stage in stages)
    if set(held) != set(range(pp)) or len(set(held.values())) != 1:
        yield Violation(
            "pipeline.stages",
            f"{len(stages)} stages lie on the pipeline ranks {dict(sorted(held.items()))}, but "
            f"`mesh.pp` = {pp} ranks must hold equally many each",
            "give every pipeline rank the same number",
        )


@_rule(
    "plan-stage-order",
    "Stages hold contiguous modules in order, and none is empty.",
    doc=(
        "A stage hands one tensor to the next, so it must be a contiguous part of the model. TorchTitan lets stages "
        "without layers pass; they would only add transfers."
    ),
    at=("layers",),
    structural=True,
)
def _stage_order(plan: Plan) -> Iterator[Violation]:
    count = len(plan.pipeline.stages)
    previous = 0
    for layer in plan.layers:
        if layer.stage >= count:
            yield Violation(
                "layers",
                f"`{layer.fqn}` is on stage {layer.stage}, but there are {count} stages (0 to {count - 1})",
                f"use a stage from {previous} to {count - 1}",
            )
            return
        if layer.stage < previous:
            yield Violation(
                "layers",
                f"`{layer.fqn}` is on stage {layer.stage}, after a module of stage {previous}: stages must "
                "hold contiguous modules in order",
                f"use stage {previous} or later",
            )
            return
        previous = layer.stage
    empty = sorted(set(range(count)) - {layer.stage for layer in plan.layers})
    if empty:
        yield Violation("layers", f"stage {empty[0]} holds no module", "give every stage at least one module")


@_rule(
    "plan-policies",
    "Layers refer to activation-checkpointing policies that exist; names are unique.",
    doc=(
        "A policy is looked up by name. Two of one name, or none, would make what a block recomputes a matter of order."
    ),
    at=("activation_checkpoint.policies", "layers.checkpoint"),
    structural=True,
)
def _policies(plan: Plan) -> Iterator[Violation]:
    names = [policy.name for policy in plan.activation_checkpoint.policies]
    for name, count in Counter(names).items():
        if count > 1:
            yield Violation(
                "activation_checkpoint.policies", f"the policy `{name}` is defined {count} times", "rename one of them"
            )
    for layer in plan.layers:
        if layer.checkpoint not in names:
            yield Violation(
                "layers.checkpoint",
                f"`{layer.fqn}` uses the checkpointing policy `{layer.checkpoint}`, which is not defined",
                "use one of " + ", ".join(f"`{name}`" for name in names),
            )
            return


@_rule(
    "mesh-world",
    "The mesh has exactly as many ranks as the cluster has GPUs.",
    doc=(
        "Ranks are numbered by pp, dp_replicate, dp_shard, cp and tp, the last fastest; one rank a GPU, and ep x etp "
        "is a second view of the same ranks. TorchTitan rounds the degree -1 down first; here the product must be "
        "exact."
    ),
    at=("mesh",),
    structural=True,
)
def _world(plan: Plan) -> Iterator[Violation]:
    mesh, gpus = plan.mesh, plan.cluster.num_gpus
    if mesh.world_size != gpus:
        degrees = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        others = mesh.world_size // mesh.dp_shard
        hint = (
            f"with the other degrees, dp_shard = {gpus // others} makes {gpus}"
            if gpus % others == 0
            else f"the degrees other than dp_shard make {others}, which must divide {gpus}"
        )
        yield Violation("mesh", f"{degrees} = {mesh.world_size} ranks, but the cluster has {gpus} GPUs", hint)


# ------------------------------------------------------------------ batch


@_rule(
    "batch-product",
    "global_batch_size = local_batch_size x dp x accumulation_steps.",
    doc=(
        "Every data-parallel rank takes equally many samples in every accumulation step, as in TorchTitan; otherwise "
        "the loss of a step would not be the mean over the batch that was asked for."
    ),
    at=("batch.global_batch_size",),
)
def _batch(plan: Plan) -> Iterator[Violation]:
    batch, dp = plan.batch, plan.mesh.dp
    product = batch.local_batch_size * dp * batch.accumulation_steps
    if product != batch.global_batch_size:
        step = batch.local_batch_size * dp
        lower = batch.global_batch_size // step * step
        near = [str(n) for n in (lower, lower + step) if n > 0]
        yield Violation(
            "batch.global_batch_size",
            f"the global batch {batch.global_batch_size} is not local batch {batch.local_batch_size} x {dp} "
            f"data-parallel ranks x {batch.accumulation_steps} accumulation steps = {product}",
            f"use a multiple of {step}, e.g. {' or '.join(near)}",
        )


@_rule(
    "batch-micro",
    "Pipeline microbatches x microbatch_size = local_batch_size.",
    doc=(
        "A pipeline cuts the local batch into microbatches of one size, because torch 2.13's stages exchange tensors "
        "of a shape that is fixed at the first one."
    ),
    at=(
        "batch.microbatch_size",
        "pipeline.microbatches",
    ),
)
def _microbatch(plan: Plan) -> Iterator[Violation]:
    batch, count = plan.batch, plan.pipeline.microbatches
    if batch.microbatch_size * count != batch.local_batch_size:
        legal = listing(divisors(batch.local_batch_size))
        yield Violation(
            "batch.microbatch_size",
            f"microbatch size {batch.microbatch_size} x {count} microbatches is not the local "
            f"batch {batch.local_batch_size}",
            f"use a microbatch size that divides it: {legal}",
        )
    if plan.mesh.pp == 1 and count != 1:
        yield Violation(
            "pipeline.microbatches",
            f"{count} pipeline microbatches without a pipeline (pp = 1)",
            "use accumulation steps instead, and 1 microbatch",
        )


@_rule(
    "seq-max",
    "Sequences are no longer than the model's position embedding covers.",
    doc=(
        "Rotary angles beyond the trained or stretched length mean positions that the model has never seen. "
        "TorchTitan only warned until #3395."
    ),
    at=("batch.seq_len",),
)
def _seq_max(plan: Plan) -> Iterator[Violation]:
    if plan.batch.seq_len > plan.model.max_seq_len:
        yield Violation(
            "batch.seq_len",
            f"sequences of {plan.batch.seq_len} tokens are longer than the model's maximum of {plan.model.max_seq_len}",
            f"use at most {plan.model.max_seq_len}, or override model max_seq_len (and its rope scaling)",
        )


# ------------------------------------------------------------------ tensor, context and expert parallelism


@_rule(
    "tp-heads",
    "tp divides the query heads, and tp / kv_replicas divides the KV heads.",
    doc=(
        "Tensor parallelism gives every rank whole heads (Megatron-LM, arXiv 1909.08053). With fewer KV heads than "
        "ranks, each may be held by several ranks, as Megatron does; TorchTitan refuses it since #2577, after crashes "
        "in the middle of forward."
    ),
    at=(
        "mesh.tp",
        "tensor_parallel.kv_replicas",
    ),
)
def _tp_heads(plan: Plan) -> Iterator[Violation]:
    yield from tp_head_violations(plan.model, plan.mesh.tp, plan.tensor_parallel.kv_replicas)


def tp_head_violations(model: Model, tp: int, replicas: int) -> Iterator[Violation]:
    """Why tensor parallelism over `tp` ranks, each KV head held `replicas` times, cannot share the heads of `model`."""
    seen: set[tuple[int, int]] = set()
    for run in model.blocks:
        match run.block.attention:
            case Gqa(num_heads=heads, num_kv_heads=kv_heads):
                if (heads, kv_heads) in seen:
                    continue
                seen.add((heads, kv_heads))
                if heads % tp:
                    yield Violation(
                        "mesh.tp",
                        f"tp = {tp} does not divide the {heads} query heads",
                        f"use one of {listing(tuple(d for d in divisors(heads) if d <= tp))}",
                    )
                if tp % replicas or kv_heads % (tp // replicas):
                    legal = tuple(d for d in divisors(kv_heads) if heads % d == 0)
                    # Beyond the KV heads tp must be a multiple of them, and still give every rank whole query heads.
                    copied = tuple(d for d in divisors(heads) if d > kv_heads and d % kv_heads == 0)
                    yield Violation(
                        "mesh.tp",
                        f"tp = {tp} does not divide the {kv_heads} KV heads"
                        + (f" held {replicas} times each" if replicas > 1 else ""),
                        f"use one of {listing(legal)}"
                        + (
                            f", or one of {listing(copied)} with KV heads replicated (`kv_head_replication: true` in a spec)"
                            if copied
                            else ""
                        ),
                    )


@_rule(
    "tp-dims",
    "tp divides the feed-forward width and the vocabulary, and etp the experts' width.",
    doc=(
        "Columns of w1 and w3, rows of w2 and the vocabulary are cut evenly, because torch's collectives exchange "
        "parts of one size. TorchTitan does not check it."
    ),
    at=(
        "mesh.tp",
        "mesh.etp",
    ),
)
def _tp_dims(plan: Plan) -> Iterator[Violation]:
    yield from tp_dim_violations(plan.model, plan.mesh.tp, plan.mesh.etp)


def tp_dim_violations(model: Model, tp: int, etp: int = 1) -> Iterator[Violation]:
    """Why `tp` ranks (and `etp` ranks an expert) cannot share the feed-forward layers and the vocabulary of `model`."""
    for run in model.blocks:
        match run.block.feed_forward:
            case SwiGlu(hidden_dim=hidden) | Mlp(hidden_dim=hidden) if hidden % tp:
                yield Violation(
                    "mesh.tp",
                    f"tp = {tp} does not divide the feed-forward width {hidden}",
                    f"use one of {listing(tuple(d for d in divisors(hidden) if d <= tp))}",
                )
                break
            case Moe(shared_dim=shared) if shared % tp:
                yield Violation(
                    "mesh.tp",
                    f"tp = {tp} does not divide the shared experts' width {shared}",
                    f"use one of {listing(tuple(d for d in divisors(shared) if d <= tp))}",
                )
                break
            case Moe(hidden_dim=hidden) if hidden % etp:
                yield Violation("mesh.etp", f"etp = {etp} does not divide the experts' width {hidden}", "use etp = 1")
                break
    if model.vocab_size % tp:
        yield Violation(
            "mesh.tp",
            f"tp = {tp} does not divide the vocabulary of {model.vocab_size}",
            f"use one of {listing(tuple(d for d in divisors(model.vocab_size) if d <= tp))}, or pad the vocabulary to "
            f"{-(-model.vocab_size // tp) * tp}",
        )


@_rule(
    "seq-split",
    "seq_len divides evenly over cp (twice, when head-tail balanced) and tp (with sequence parallel).",
    doc=(
        "Head-tail balance gives rank r the chunks r and 2 cp - 1 - r of 2 cp, and sequence parallelism cuts what is "
        "left over tp; parts of unequal length gave wrong shapes or hangs in TorchTitan (#1306, #1312, #686)."
    ),
    at=("batch.seq_len",),
)
def _seq_split(plan: Plan) -> Iterator[Violation]:
    mesh, seq_len = plan.mesh, plan.batch.seq_len
    over_cp = mesh.cp * (2 if mesh.cp > 1 and plan.context_parallel.load_balance == "headtail" else 1)
    parts = over_cp * (mesh.tp if plan.tensor_parallel.sequence_parallel else 1)
    if seq_len % parts:
        why = " x ".join(
            text
            for text, on in (
                (f"2 x cp {mesh.cp}" if over_cp > mesh.cp else f"cp {mesh.cp}", mesh.cp > 1),
                (f"tp {mesh.tp}", parts > over_cp),
            )
            if on
        )
        lower = seq_len // parts * parts
        near = " or ".join(str(n) for n in (lower, lower + parts) if 0 < n <= plan.model.max_seq_len)
        yield Violation(
            "batch.seq_len",
            f"the sequence length {seq_len} is not a multiple of {why} = {parts}",
            f"use {near}" if near else "use a smaller cp or tp",
        )


@_rule(
    "tp-options",
    "Sequence parallel, loss parallel, async TP and KV replication go with tp > 1.",
    doc=(
        "They describe how tensor ranks share work. Async TP is torch 2.13's micro-pipelining in the Inductor "
        "compiler over symmetric memory: without compilation, outside a node, or without the collectives of sequence "
        "parallelism it silently does nothing (torchtitan #3869)."
    ),
    at=(
        "tensor_parallel.sequence_parallel",
        "tensor_parallel.loss_parallel",
        "tensor_parallel.async_tp",
    ),
)
def _tp_options(plan: Plan) -> Iterator[Violation]:
    yield from _by_table(plan, "tp-options")


@_rule(
    "sharding-rows",
    "Sharding rows name existing modules, once per axis, on axes larger than 1, and dims that exist.",
    doc=(
        "The runtime places exactly what rows name. A row that names nothing is a misspelling, and two rows for one "
        "weight contradict each other."
    ),
    at=("sharding",),
)
def _sharding(plan: Plan) -> Iterator[Violation]:
    names = sharding_targets(plan.model)
    claimed: dict[tuple[str, str], str] = {}
    for index, row in enumerate(plan.sharding):
        at = f"sharding[{index}]"
        found = select(row.module, names)
        if not found:
            yield Violation(at, f"the selector `{row.module}` matches no module of the model", "remove the row")
            continue
        if plan.mesh.degree(row.axis) == 1:
            yield Violation(
                at, f"`{row.module}` is placed on the axis `{row.axis}`, whose degree is 1", "remove the row"
            )
        for module in found:
            if (module, row.axis) in claimed:
                yield Violation(
                    at,
                    f"`{module}` is placed twice on `{row.axis}`, by `{claimed[module, row.axis]}` and `{row.module}`",
                    "keep one of the rows",
                )
                break
            claimed[module, row.axis] = row.module
            if row.weight is not None and row.weight.startswith("S(") and int(row.weight[2:-1]) >= names[module]:
                yield Violation(at, f"`{module}` has no weight dim {row.weight[2:-1]} to shard", "use S(0), S(1) or R")
                break
    if plan.mesh.tp > 1 and not any(row.axis == "tp" for row in plan.sharding):
        yield Violation(
            "sharding",
            f"tp = {plan.mesh.tp}, but no module is placed on the axis `tp`",
            "compile the plan anew, or set mesh.tp to 1",
        )


@_rule(
    "cp-heads",
    "The all-to-all method needs cp x tp to divide the (replicated) KV heads.",
    doc=(
        "DeepSpeed-Ulysses (arXiv 2309.14509) exchanges tokens for heads, so that every context rank needs whole KV "
        "heads of its own."
    ),
    at=("context_parallel.method",),
)
def _cp_heads(plan: Plan) -> Iterator[Violation]:
    mesh = plan.mesh
    if mesh.cp == 1 or plan.context_parallel.method != "alltoall":
        return
    for run in plan.model.blocks:
        match run.block.attention:
            case Gqa(num_kv_heads=kv_heads):
                held = kv_heads * plan.tensor_parallel.kv_replicas
                if held % (mesh.cp * mesh.tp):
                    yield Violation(
                        "context_parallel.method",
                        f"all-to-all context parallelism splits {held} KV heads over cp {mesh.cp} x "
                        f"tp {mesh.tp} = {mesh.cp * mesh.tp}",
                        "use the method allgather or ring",
                    )
                    return


@_rule(
    "cp-balance",
    "Context parallelism is balanced head-tail or not at all.",
    doc=(
        "ptrr is TorchTitan's way to sort FlexAttention's block masks over ranks; causal attention without such masks "
        "is balanced head-tail (Llama 3, arXiv 2407.21783, section 3.3.2)."
    ),
    at=("context_parallel.load_balance",),
)
def _cp_balance(plan: Plan) -> Iterator[Violation]:
    yield from _by_table(plan, "cp-balance")


@_rule(
    "ep-region",
    "ep divides dp_shard x cp x tp, etp is 1 or tp, and experts exist.",
    doc=(
        "Experts are shared among ranks taken from dp_shard, cp and tp, as in TorchTitan: ep x etp x efsdp = dp_shard "
        "x cp x tp. TorchTitan before #4258 rounded down and failed late, while building the mesh."
    ),
    at=(
        "mesh.ep",
        "mesh.etp",
    ),
)
def _experts(plan: Plan) -> Iterator[Violation]:
    mesh = plan.mesh
    region = mesh.dp_shard * mesh.cp * mesh.tp
    if mesh.etp not in (1, mesh.tp):
        yield Violation("mesh.etp", f"etp = {mesh.etp} is neither 1 nor tp = {mesh.tp}", f"use 1 or {mesh.tp}")
    if region % (mesh.ep * mesh.etp):
        legal = tuple(d // mesh.etp for d in divisors(region) if d % mesh.etp == 0)
        yield Violation(
            "mesh.ep",
            f"ep {mesh.ep} x etp {mesh.etp} does not divide dp_shard x cp x tp = {region}",
            f"use an ep of {listing(legal)}" if legal else "use etp = 1",
        )
    yield from _by_table(plan, "ep-region")
    counts = sorted({moe.num_experts for moe in mixtures(plan.model)})
    for count in counts:
        if count % mesh.ep:
            yield Violation(
                "mesh.ep",
                f"ep = {mesh.ep} does not divide the {count} experts",
                f"use one of {listing(tuple(d for d in ep_degrees(plan.model) if region % d == 0))}",
            )


def ep_degrees(model: Model) -> tuple[int, ...]:
    """The degrees of expert parallelism that give every rank equally many whole experts of `model`."""
    counts = [moe.num_experts for moe in mixtures(model)]
    return divisors(math.gcd(*counts)) if counts else (1,)


@_rule(
    "ep-options",
    "Options of token dispatch go with a model that has experts.",
    doc=(
        "Without experts there is nothing to dispatch. DeepEP and HybridEP are NVIDIA kernels that send tokens to "
        "whole experts; TorchTitan asks for ep > 1 and etp = 1 with them."
    ),
    at=(
        "expert_parallel.comm_backend",
        "expert_parallel.capacity_factor",
        "expert_parallel.force_load_balance",
    ),
)
def _expert_options(plan: Plan) -> Iterator[Violation]:
    yield from _by_table(plan, "ep-options")


_EXPERT_DIMS = {"ep": {"w1": 0, "w2": 0, "w3": 0}, "etp": {"w1": 1, "w2": 2, "w3": 1}}


@_rule(
    "ep-experts",
    "Sharding rows place all experts' weights: on `ep` by whole experts, on `etp` inside, as on tp.",
    doc=(
        "The runtime spreads experts as the mesh says, and rows must agree with it: TorchTitan cuts w1, w2 and w3 of "
        "stacked experts by dim 0 over ep and inside over etp."
    ),
    at=("sharding",),
)
def _expert_rows(plan: Plan) -> Iterator[Violation]:
    targets = sharding_targets(plan.model)
    for axis, dims in _EXPERT_DIMS.items():
        degree = plan.mesh.degree(axis)
        rows = [row for row in plan.sharding if row.axis == axis]
        placed = {name: row.weight for row in rows for name in select(row.module, targets)}
        for parameter in parameters(plan.model):
            wanted = f"S({dims.get(parameter.fqn.rsplit('.', 1)[-1])})"
            if degree > 1 and parameter.is_expert and placed.get(parameter.target) != wanted:
                yield Violation(
                    "sharding",
                    f"{axis} = {degree}, but `{parameter.target}` is not placed on the axis `{axis}` by {wanted}",
                    f"compile the plan anew, or set mesh.{axis} to 1",
                )
                break


_INT32 = 2**31


@_rule(
    "ep-rows",
    "On GPUs, a grouped product of experts has operands of fewer than 2^31 elements.",
    doc=(
        "torch's grouped matmul counts elements in 32 bits: 525,312 rows of 4,096 end in an illegal memory access, and any "
        "fewer work (torchtitan #1932, open). Judged by the mean load, which the busiest rank exceeds."
    ),
    at=("batch.microbatch_size",),
)
def _expert_operands(plan: Plan) -> Iterator[Violation]:
    mesh, batch = plan.mesh, plan.batch
    if plan.cluster.gpu.device != "cuda":
        return
    # Each rank sends as many rows as it gets on average; with whole experts, tensor ranks route a part of the tokens each.
    shared = mesh.cp * (mesh.tp if mesh.etp == 1 else 1)
    for moe in dict.fromkeys(mixtures(plan.model)):
        row = max(plan.model.dim, moe.hidden_dim // mesh.etp)
        kept = moe.top_k * min(1.0, plan.expert_parallel.capacity_factor or 1.0)
        rows = batch.microbatch_size * batch.seq_len * kept / shared
        if rows * row >= _INT32:
            most = int((_INT32 - 1) * shared / (row * batch.seq_len * kept))
            yield Violation(
                "batch.microbatch_size",
                f"a rank's experts multiply about {rows:,.0f} rows of {row:,} elements, {rows * row:,.0f} in all, but torch "
                f"counts fewer than {_INT32:,}",
                f"use at most {most} sequences a microbatch" if most else "use a larger cp or tp",
            )
            return


# ------------------------------------------------------------------ pipeline


@_rule(
    "pp-schedule",
    "The schedule suits the number of stages: one a rank for GPipe and 1F1B, two for ZBV and DualPipeV.",
    doc=(
        "Every schedule of torch 2.13 fixes how many stages a rank holds and where they lie: loops put stage s on "
        "rank s modulo pp, V schedules on rank min(s, 2 pp - 1 - s). With other numbers torch raises late, or "
        "TorchTitan ended in a KeyError (#774)."
    ),
    at=(
        "pipeline.schedule",
        "pipeline.stages",
        "pipeline.actions",
    ),
)
def _schedule(plan: Plan) -> Iterator[Violation]:
    pipe, pp = plan.pipeline, plan.mesh.pp
    if pp == 1:
        if pipe.schedule is not None or len(pipe.stages) != 1:
            yield Violation(
                "pipeline.schedule",
                f"the schedule is {pipe.schedule} over {len(pipe.stages)} stages, but pp is 1",
                "use no schedule and one stage, or pp > 1",
            )
        if pipe.actions is not None:
            yield Violation(
                "pipeline.actions", "a table of actions is given, but pp is 1", "remove the table, or use pp > 1"
            )
        return
    if pipe.schedule is None:
        if pipe.actions is None:
            yield Violation(
                "pipeline.schedule", f"pp = {pp}, but there is neither a schedule nor a table of actions", "use 1F1B"
            )
        return
    each, facts = len(pipe.stages) // pp, SCHEDULES[pipe.schedule]
    fewest, most = facts.per_rank
    if each < fewest or (most is not None and each > most):
        wanted = f"exactly {fewest}" if fewest == most else f"at least {fewest}"
        verb = "is" if each == 1 else "are"
        yield Violation(
            "pipeline.stages",
            f"{pipe.schedule} needs {wanted} {'stage' if fewest == 1 else 'stages'} a rank, but there {verb} {each}",
            f"use {fewest * pp} stages" + (", or 1F1B" if each == 1 else ""),
        )
    if facts.placement == "V":
        if each == 2 and any(stage.pp_rank != min(stage.index, 2 * pp - 1 - stage.index) for stage in pipe.stages):
            yield Violation(
                "pipeline.stages", f"{pipe.schedule} places stage s on rank min(s, {2 * pp - 1} - s)", "place them so"
            )
    elif any(stage.pp_rank != stage.index % pp for stage in pipe.stages):
        yield Violation("pipeline.stages", f"{pipe.schedule} places stage s on rank s modulo {pp}", "place them so")


@_rule(
    "pp-microbatches",
    "There are enough microbatches for the schedule, in rounds it can run.",
    doc=(
        "1F1B and DualPipeV fill the pipeline once before they alternate; torch 2.13 raises when there are fewer "
        "microbatches than stages, where TorchTitan once hung (#775). Interleaved schedules run in equal rounds of "
        "microbatches."
    ),
    at=("pipeline.microbatches",),
)
def _microbatches(plan: Plan) -> Iterator[Violation]:
    pipe, pp = plan.pipeline, plan.mesh.pp
    count, stages = pipe.microbatches, len(pipe.stages)
    if pp == 1 or pipe.schedule is None or pipe.actions is not None:  # a table of actions replaces the schedule
        return
    facts = SCHEDULES[pipe.schedule]
    if facts.runs(count, pp, stages):
        return
    if facts.microbatches == "at least the stages":
        yield Violation(
            "pipeline.microbatches",
            f"{pipe.schedule} needs at least as many microbatches as the {stages} stages, but has {count}",
            f"use a local batch of at least {stages * plan.batch.microbatch_size}, or GPipe",
        )
    else:
        legal = [m for m in range(max(1, count - 2 * pp), count + 2 * pp) if facts.runs(m, pp, stages)]
        near = sorted(legal, key=lambda m: (abs(m - count), m))[:2]
        yield Violation(
            "pipeline.microbatches",
            f"{pipe.schedule} runs {max(1, count // pp)} rounds over pp {pp}, which do not divide {count} microbatches",
            "use " + " or ".join(str(m) for m in sorted(near)) + " microbatches",
        )


@_rule(
    "pp-actions",
    "A table of actions computes everything once, where its stage lies, in an order that can run.",
    doc=(
        "Ranks wait for each other's tensors, so an action that is missing, doubled or out of order makes all of them "
        "wait for ever."
    ),
    at=("pipeline.actions",),
)
def _actions(plan: Plan) -> Iterator[Violation]:
    pipe = plan.pipeline
    if plan.mesh.pp == 1 or pipe.actions is None:
        return
    try:
        parse_actions(pipe.actions, tuple(stage.pp_rank for stage in pipe.stages), pipe.microbatches)
    except InvariantError as error:
        yield Violation("pipeline.actions", error.message, error.hint)


@_rule(
    "pp-split-backward-reshard",
    "Zero-bubble and V schedules keep FSDP parameters gathered until backward.",
    doc=(
        "torch 2.13 looks for a stage's weights after the gradients of its inputs. FSDP has put the shards back by "
        "then, which are not in the graph, so no weight gradient is computed, without an error."
    ),
    at=("fsdp.units",),
)
def _split_backward(plan: Plan) -> Iterator[Violation]:
    for index, unit in enumerate(plan.fsdp.units):
        if unit.reshard_after_forward is not False:
            # All units are one violation, at the first of them.
            for found in _by_table(plan, "pp-split-backward-reshard"):
                yield Violation(f"fsdp.units[{index}].reshard_after_forward", found.message, found.hint)
            return


@_rule(
    "pp-split-backward-selective",
    "Zero-bubble and V schedules do not checkpoint selectively.",
    doc=(
        "Gradients of inputs and of weights are two passes over the same graph, and torch 2.13's selective "
        "checkpointing allows one."
    ),
    at=("activation_checkpoint.policies",),
)
def _split_backward_selective(plan: Plan) -> Iterator[Violation]:
    yield from _by_table(plan, "pp-split-backward-selective")


# ------------------------------------------------------------------ data parallelism


@_rule(
    "fsdp-units",
    "FSDP units name existing modules, each in one unit; a partial reshard divides the shard degree.",
    doc=(
        "A parameter is gathered by one unit. DDP keeps all of them whole, so no rank is left to shard over. A "
        "partial reshard splits the ranks into groups of one size."
    ),
    at=(
        "fsdp.strategy",
        "fsdp.units",
    ),
)
def _units(plan: Plan) -> Iterator[Violation]:
    names = module_names(plan.model)
    yield from _by_table(plan, "fsdp-units")
    if plan.fsdp.strategy == "ddp":
        if plan.fsdp.units:
            yield Violation("fsdp.units", "DDP has no units", "empty the list, or use the strategy fsdp")
        return
    claimed: dict[str, int] = {}
    experts = tuple(dict.fromkeys(p.module for p in parameters(plan.model) if p.is_expert))
    for index, unit in enumerate(plan.fsdp.units):
        mine = {module for selector in unit.modules for module in select(selector, names)}
        for selector in unit.modules:
            found = select(selector, names)
            if not found:
                yield Violation(
                    f"fsdp.units[{index}]", f"the selector `{selector}` matches no module of the model", "remove it"
                )
            for module in found:
                if module in claimed:
                    yield Violation(
                        f"fsdp.units[{index}]",
                        f"`{module}` is in the FSDP units {claimed[module]} and {index}",
                        "keep it in one",
                    )
                    break
                claimed[module] = index
        reshard = unit.reshard_after_forward
        ranks = plan.mesh.fsdp
        if any(fqn == module or fqn.startswith(f"{module}.") for fqn in experts for module in mine):
            # Experts are sharded over fewer ranks than the rest of their unit.
            ranks = math.gcd(ranks, plan.mesh.efsdp)
        if not isinstance(reshard, bool) and ranks % reshard:
            yield Violation(
                f"fsdp.units[{index}].reshard_after_forward",
                f"resharding to {reshard} ranks does not divide the {ranks} ranks that shard",
                f"use always, never or one of {listing(divisors(ranks)[1:])}" if ranks > 1 else "use always or never",
            )


@_rule(
    "fsdp-offload",
    "Only FSDP on GPUs keeps parameters in host memory.",
    doc="Host memory is FSDP2's CPUOffloadPolicy: shards are copied to the GPU when they are gathered.",
    at=("fsdp.cpu_offload",),
)
def _offload(plan: Plan) -> Iterator[Violation]:
    yield from _by_table(plan, "fsdp-offload")


@_rule(
    "fsdp-tied",
    "A tied embedding and output share one FSDP unit, or both belong to the root.",
    doc=(
        "FSDP shards a parameter once. With the shared weight in two units, the second would gather what the first "
        "already freed."
    ),
    at=("fsdp.units",),
)
def _tied_units(plan: Plan) -> Iterator[Violation]:
    if not plan.model.tied or plan.layers[0].stage != plan.layers[-1].stage:
        return
    for index, unit in enumerate(plan.fsdp.units):
        has = [any(select(selector, (module,)) for selector in unit.modules) for module in ("tok_embeddings", "output")]
        if has[0] != has[1]:
            yield Violation(
                f"fsdp.units[{index}]",
                "`tok_embeddings` and `output` share a weight (the model is tied), but this unit has only one of them",
                "put both into one unit",
            )
            return


@_rule(
    "tp-partial-reshard",
    "With tp > 1, FSDP units reshard to all ranks that shard them, or not at all.",
    doc=(
        "torch 2.13 does not reshard DTensor parameters to a smaller mesh, and tensor parallelism makes DTensors of "
        "all of them."
    ),
    at=("fsdp.units",),
)
def _partial_reshard(plan: Plan) -> Iterator[Violation]:
    for index, unit in enumerate(plan.fsdp.units):
        reshard = unit.reshard_after_forward
        if not isinstance(reshard, bool) and reshard != plan.mesh.fsdp:
            for found in _by_table(plan, "tp-partial-reshard"):
                yield Violation(f"fsdp.units[{index}].reshard_after_forward", found.message, found.hint)
            return


@_rule(
    "experts-partial-reshard",
    "FSDP units of experts reshard to all ranks with the same experts, or not at all, unless whole experts are shared out.",
    doc=(
        "With ep or tp, experts are DTensors over ranks of their own, which torch 2.13 reshards to all of them only; "
        "of weights that are cut inside experts it cannot gather what a partial reshard leaves."
    ),
    at=("fsdp.units",),
)
def _partial_expert_reshard(plan: Plan) -> Iterator[Violation]:
    # With ep or tp they are sharded over ranks of their own, as DTensors, which torch 2.13 reshards to all of them only; and
    # of weights that are cut inside of experts, along dim 1, it cannot gather what is left after a partial reshard.
    own = plan.mesh.ep * plan.mesh.tp > 1
    if plan.mesh.efsdp < 1:
        return  # another rule's: ep x etp exceeds the ranks there are
    experts = {p.module for p in parameters(plan.model) if p.is_expert and (own or fsdp_dim(p, plan.mesh) > 0)}
    ranks = plan.mesh.efsdp
    for index, unit in enumerate(plan.fsdp.units):
        reshard = unit.reshard_after_forward
        if isinstance(reshard, bool) or reshard == ranks or not experts & _below(plan, unit):
            continue
        yield Violation(
            f"fsdp.units[{index}].reshard_after_forward",
            f"torch cannot reshard experts to {reshard} of the {ranks} ranks that shard the same ones",
            "set reshard_after_forward to always or never"
            + (f", or to {ranks}" if ranks > 1 and plan.mesh.tp == 1 else ""),
        )
        return


def _below(plan: Plan, unit: FsdpUnit) -> frozenset[str]:
    """Modules that have a parameter and lie in the unit, as far as no unit inside of it has them."""
    names = module_names(plan.model)
    all_units = {name for each in plan.fsdp.units for selector in each.modules for name in select(selector, names)}
    mine = {name for selector in unit.modules for name in select(selector, names)}
    found = set()
    for module in dict.fromkeys(parameter.module for parameter in parameters(plan.model)):
        parts = module.split(".")
        around = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        if next((name for name in around if name in all_units), None) in mine:
            found.add(module)
    return frozenset(found)


# ------------------------------------------------------------------ execution


@_rule(
    "ac-layers",
    "Only transformer blocks are checkpointed, and memory_budget needs the model compiled.",
    doc=(
        "Checkpointing wraps a block's forward, as TorchTitan's does; a memory budget is kept by the partitioner of "
        "torch.compile, so without compilation nobody keeps it."
    ),
    at=("activation_checkpoint.policies", "layers.checkpoint"),
)
def _checkpointing(plan: Plan) -> Iterator[Violation]:
    for layer in plan.layers:
        policy = plan.activation_checkpoint.policy(layer.checkpoint)
        if policy is not None and policy.mode != "none" and not layer.fqn.startswith("layers."):
            yield Violation(
                "layers.checkpoint",
                f"`{layer.fqn}` has the checkpointing policy `{policy.name}`, but only blocks can be checkpointed",
                "use `none`",
            )
            break
    yield from _by_table(plan, "ac-layers")


@_rule(
    "ac-recompute",
    "Linears whose matmuls are always recomputed exist.",
    doc=(
        "The policy compares shapes of matmuls, which it takes from the linears that are named; a name that matches "
        "none would do nothing."
    ),
    at=("activation_checkpoint.policies",),
)
def _recomputed_linears(plan: Plan) -> Iterator[Violation]:
    linears = linear_modules(plan.model)
    for index, policy in enumerate(plan.activation_checkpoint.policies):
        for number, selector in enumerate(policy.force_recompute_fqns):
            if not select(selector, linears):
                yield Violation(
                    f"activation_checkpoint.policies[{index}].force_recompute_fqns[{number}]",
                    f"the selector `{selector}` matches no linear of the model",
                    "remove it, or write e.g. `layers.*.attention.wk`",
                )


@_rule(
    "ac-nested-units",
    "No FSDP unit lies inside a selectively checkpointed block.",
    doc=(
        "Hooks of an inner FSDP unit run other operators when a block is recomputed than in forward, and torch 2.13's "
        "selective checkpointing fails on the difference."
    ),
    at=("fsdp.units",),
)
def _nested_units(plan: Plan) -> Iterator[Violation]:
    # Its hooks run operators inside of the checkpointed region, others in forward than in recomputation: torch 2.13 fails.
    modes = {policy.name: policy.mode for policy in plan.activation_checkpoint.policies}
    selective = {layer.fqn for layer in plan.layers if modes.get(layer.checkpoint) == "selective"}
    names = module_names(plan.model)
    for index, unit in enumerate(plan.fsdp.units):
        for module in (name for selector in unit.modules for name in select(selector, names)):
            block = ".".join(module.split(".")[:2])
            if module != block and block in selective:
                yield Violation(
                    f"fsdp.units[{index}]",
                    f"`{module}` is an FSDP unit inside of `{block}`, which is checkpointed selectively: torch cannot "
                    "recompute it",
                    "remove the unit, or checkpoint the block in the mode full or none",
                )
                return


@_rule(
    "float8-hardware",
    "Float8 and MXFP8 run on GPUs that have them, or are emulated.",
    doc=(
        "Scaled 8-bit matmuls need compute capability 8.9 or MI300, MXFP8 needs 10.0; torchao 0.18 gathers weights in "
        "Float8 with one scale a tensor only, and computes scales ahead only for those."
    ),
    at=(
        "float8.recipe",
        "float8.enable_fsdp_float8_all_gather",
        "float8.precompute_float8_dynamic_scale_for_fsdp",
    ),
)
def _float8_hardware(plan: Plan) -> Iterator[Violation]:
    yield from _by_table(plan, "float8-hardware")


@_rule(
    "float8-linears",
    "Float8 lists name existing linears, each either converted or skipped, with dims that are multiples of 16 (MXFP8: 32).",
    doc=(
        "torch's scaled matmul takes dims that are multiples of 16, MXFP8 blocks of 32 elements; routers compute in "
        "float32. A name that matches nothing was ignored in TorchTitan (#4008, #3199), which then trained without "
        "Float8."
    ),
    at=(
        "float8.converted",
        "float8.skipped",
    ),
)
def _float8_linears(plan: Plan) -> Iterator[Violation]:
    if plan.float8.recipe is None:
        return
    linears = linear_modules(plan.model)
    name, block = ("MXFP8", 32) if plan.float8.recipe == "mxfp8" else ("Float8", 16)
    converted: set[str] = set()
    for index, selector in enumerate(plan.float8.converted):
        found = select(selector, linears)
        if not found:
            yield Violation(
                f"float8.converted[{index}]", f"the selector `{selector}` matches no linear of the model", "remove it"
            )
        converted.update(found)
        for module in found:
            if is_router(module):
                yield Violation(
                    f"float8.converted[{index}]",
                    f"`{module}` is a router, which computes in float32",
                    f"move `{selector}` to skipped",
                )
                break
            out_features, in_features = linears[module]
            if out_features % block or in_features % block:
                yield Violation(
                    f"float8.converted[{index}]",
                    f"`{module}` is {out_features} x {in_features}, but {name} needs multiples of {block}",
                    f"move `{selector}` to skipped",
                )
                break
    for index, skipped in enumerate(plan.float8.skipped):
        found = select(skipped.module, linears)
        if not found:
            yield Violation(
                f"float8.skipped[{index}]",
                f"the selector `{skipped.module}` matches no linear of the model",
                "remove it",
            )
        both = [module for module in found if module in converted]
        if both:
            yield Violation(
                f"float8.skipped[{index}]", f"`{both[0]}` is both converted and skipped", "keep it in one list"
            )


@_rule(
    "float8-tokens",
    "Float8 matmuls run over tokens in multiples of 16, as their kernels do, not if emulated; MXFP8 over blocks of 32.",
    doc=(
        "Tokens are one dim of the matmul for the gradient of a weight, so they must be multiples of 16 too; MXFP8 "
        "shares a scale over 32 of them even when emulated."
    ),
    at=(
        "batch.microbatch_size",
        "float8.converted",
    ),
)
def _float8_tokens(plan: Plan) -> Iterator[Violation]:
    float8 = plan.float8
    block = float8_token_block(float8.recipe, float8.emulate)
    if block == 1 or not float8.converted:
        return
    name = "MXFP8" if float8.recipe == "mxfp8" else "Float8"
    tokens = plan.batch.microbatch_size * plan.batch.seq_len // plan.mesh.cp
    if "output" in float8.converted and tokens % (block * plan.loss.chunks):
        yield Violation(
            "float8.converted",
            f"`output` sees {tokens} tokens in {plan.loss.chunks} chunks, but {name} needs multiples of {block} in each",
            "move `output` to skipped, or use fewer chunks",
        )
    elif tokens % block:
        yield Violation(
            "batch.microbatch_size",
            f"a rank's microbatch has {tokens} tokens, but {name} needs a multiple of {block}",
            f"use a sequence length that is a multiple of {block * plan.mesh.cp}",
        )


@_rule(
    "float8-experts",
    "Grouped products of experts run in MXFP8 only, in bfloat16 besides, with local dims that are multiples of 32.",
    doc=(
        "torchao 0.18 has grouped products of experts in MXFP8; blocks of 32 elements share a scale, and its kernels "
        "take bfloat16 operands."
    ),
    at=(
        "float8.recipe",
        "float8.experts",
    ),
)
def _float8_experts(plan: Plan) -> Iterator[Violation]:
    float8 = plan.float8
    if not float8.experts:
        return
    table = tuple(_by_table(plan, "float8-experts"))
    yield from table
    if table:
        return
    modules = expert_modules(plan.model)
    for index, selector in enumerate(float8.experts):
        found = select(selector, modules)
        if not found:
            yield Violation(
                f"float8.experts[{index}]", f"the selector `{selector}` matches no experts of the model", "remove it"
            )
        for fqn in found:
            obstacle = mxfp8_experts_obstacle(plan, fqn)
            if obstacle is not None:
                yield Violation(
                    f"float8.experts[{index}]", f"`{fqn}` cannot run in MXFP8: {obstacle}", f"remove `{selector}`"
                )
                break


def mxfp8_experts_obstacle(plan: Plan, fqn: str) -> str | None:
    """Why the grouped products of the experts `fqn` cannot run in MXFP8, or None."""
    if plan.fsdp.param_dtype != "bfloat16":
        return f"its grouped products take bfloat16, but parameters are computed with in {plan.fsdp.param_dtype}"
    hidden, dim = expert_modules(plan.model)[fqn]
    hidden //= plan.mesh.etp
    if hidden % 32 or dim % 32:
        return f"the local shape of an expert, {hidden} x {dim}, is no multiple of 32"
    return None


def float8_token_block(recipe: str | None, emulate: bool) -> int:
    """What the tokens of a Float8 matmul must be a multiple of."""
    if recipe == "mxfp8":
        return 32  # tokens share scales in the gradient of a weight, however it is computed
    return 1 if recipe is None or emulate else 16


def float8_all_gather_obstacle(plan: Plan, fqn: str, out_features: int) -> str | None:
    """Why FSDP cannot gather the weight of the linear `fqn` in Float8, or None."""
    if fqn == "output" and plan.model.tied:
        return "its weight is the embedding's, which is needed in high precision"
    rows = out_features
    if any(row.axis == "tp" and row.weight == "S(0)" and select(row.module, (fqn,)) for row in plan.sharding):
        rows //= plan.mesh.tp
    if rows % plan.mesh.fsdp:
        # torch 2.13 and torchao 0.18 send shards of unequal size without padding, and gloo aborts the process.
        return f"its {rows} rows do not divide over the {plan.mesh.fsdp} ranks that shard them"
    return None


@_rule(
    "float8-all-gather",
    "The Float8 all-gather is FSDP's, of weights that it cuts evenly and that nothing else reads.",
    doc=(
        "torchao 0.18's weights send themselves in Float8 when FSDP asks: the same shard on every rank, one scale a "
        "tensor, all ranks at once. An embedding that shares the weight would be rounded as well."
    ),
    at=(
        "float8.enable_fsdp_float8_all_gather",
        "fsdp.units",
        "float8.converted",
    ),
)
def _float8_all_gather(plan: Plan) -> Iterator[Violation]:
    if not plan.float8.enable_fsdp_float8_all_gather:
        return
    table = tuple(_by_table(plan, "float8-all-gather"))
    yield from table
    if table:
        return
    linears = linear_modules(plan.model)
    converted = {fqn for selector in plan.float8.converted for fqn in select(selector, linears)}
    for index, unit in enumerate(plan.fsdp.units):
        reshard = unit.reshard_after_forward
        if isinstance(reshard, bool) or reshard == plan.mesh.fsdp:
            continue
        # What remains after forward is a piece of what was gathered, which torchao 0.18 does not send again.
        if sent := sorted(converted & _below(plan, unit)):
            yield Violation(
                f"fsdp.units[{index}].reshard_after_forward",
                f"weights gathered in Float8, like that of `{sent[0]}`, cannot be resharded to {reshard} of "
                f"{plan.mesh.fsdp} ranks",
                "set reshard_after_forward to always or never, or turn the Float8 all-gather off",
            )
            return
    for index, selector in enumerate(plan.float8.converted):
        for fqn in select(selector, linears):
            obstacle = float8_all_gather_obstacle(plan, fqn, linears[fqn][0])
            if obstacle is not None:
                yield Violation(
                    f"float8.converted[{index}]",
                    f"`{fqn}` cannot be gathered in Float8: {obstacle}",
                    f"move `{selector}` to skipped, or turn the all-gather off",
                )
                break


@_rule(
    "loss-chunks",
    "The loss's chunks divide the local sequence.",
    doc=(
        "Head and loss take one chunk of the local sequence after the other; chunks of one size keep the compiled "
        "loss to one shape."
    ),
    at=("loss.chunks",),
)
def _chunks(plan: Plan) -> Iterator[Violation]:
    local = plan.batch.seq_len // plan.mesh.cp
    if local % plan.loss.chunks:
        yield Violation(
            "loss.chunks",
            f"{plan.loss.chunks} chunks do not divide the local sequence of {local} tokens",
            f"use one of {listing(divisors(local))}",
        )


@_rule(
    "optimizer-groups",
    "Optimizer patterns are regular expressions, of which each claims a parameter before the next.",
    doc=(
        "The first pattern that matches a parameter wins, as in TorchTitan 0.3; a pattern that changes nothing is a "
        "mistake that would otherwise show as a slightly different loss."
    ),
    at=("optimizer.param_groups",),
)
def _groups(plan: Plan) -> Iterator[Violation]:
    if not plan.optimizer.param_groups:
        return
    names = [parameter.fqn for parameter in parameters(plan.model)]
    unclaimed = names
    for index, group in enumerate(plan.optimizer.param_groups):
        at = f"optimizer.param_groups[{index}].pattern"
        try:
            pattern = re.compile(group.pattern)
        except re.error as error:
            yield Violation(at, f"`{group.pattern}` is not a regular expression: {error}", "escape special characters")
            continue
        matched = [name for name in names if pattern.search(name)]
        if not matched:
            yield Violation(
                at, f"`{group.pattern}` matches no parameter", "names look like `layers.0.attention_norm.weight`"
            )
        elif not any(pattern.search(name) for name in unclaimed):
            yield Violation(
                at,
                f"`{group.pattern}` has no effect: earlier patterns claim all {len(matched)} parameters that it matches, "
                f"e.g. `{matched[0]}`",
                "put it before them, or remove it",
            )
        unclaimed = [name for name in unclaimed if not pattern.search(name)]


_BF16_ROUNDING = 2.0**-8
"""A bfloat16 number that changes by less than this part of itself may round back to what it was."""


@_rule(
    "optimizer-state",
    "Moments in another dtype than the parameters' are not fused, and bfloat16 moments can decay.",
    doc=(
        "torch's fused kernels take moments of the parameters' dtype. bfloat16 has 8 bits of precision, so a moment "
        "that changes by less than one part in 256 a step never changes at all."
    ),
    at=(
        "optimizer.implementation",
        "optimizer.beta1",
        "optimizer.beta2",
    ),
)
def _optimizer_state(plan: Plan) -> Iterator[Violation]:
    optimizer = plan.optimizer
    if optimizer.state_dtype != plan.dtype and optimizer.implementation == "fused":
        yield Violation(
            "optimizer.implementation",
            f"the fused optimizer keeps moments in the parameters' {plan.dtype}, not in {optimizer.state_dtype}",
            f"use the implementation foreach, or the state_dtype {plan.dtype}",
        )
    if optimizer.state_dtype != "bfloat16":
        return
    for name in ("beta1", "beta2"):
        beta = getattr(optimizer, name)
        if beta > 1 - _BF16_ROUNDING:
            yield Violation(
                f"optimizer.{name}",
                f"a bfloat16 moment that decays by 1 - {beta:g} = {1 - beta:.2g} of itself rounds back to what it was",
                f"use a {name} of at most {1 - _BF16_ROUNDING:.3f}, or the state_dtype float32",
            )


# ------------------------------------------------------------------ the job


@_rule(
    "data-source",
    "Text sources name a path and no dataset, Hugging Face sources a dataset.",
    doc="What is read must be said once: a file or folder, or the name of a dataset.",
    at=(
        "data.path",
        "data.dataset",
    ),
)
def _data(plan: Plan) -> Iterator[Violation]:
    data = plan.data
    if data.source == "huggingface":
        if data.dataset is None:
            yield Violation("data.dataset", "the source huggingface names no dataset", "write `dataset: c4`")
        return
    if data.path is None:
        yield Violation("data.path", f"the source {data.source} names no path", "name a file or folder")
    if data.dataset is not None:
        yield Violation(
            "data.dataset",
            f"the source {data.source} reads `path`, not the dataset `{data.dataset}`",
            "set dataset to null, or use the source huggingface",
        )


@_rule(
    "paths-relative",
    "Paths in a plan are relative, so that the plan means the same on every machine.",
    doc=(
        "A plan has the same digest and the same meaning on every machine; where things lie is said when it is started."
    ),
    at=(
        "job.dump_folder",
        "job.checkpoint.folder",
        "job.checkpoint.initial_load_path",
        "job.metrics.save_tb_folder",
        "job.profiling.save_traces_folder",
        "job.validation.path",
        "data.path",
        "data.tokenizer",
    ),
)
def _paths(plan: Plan) -> Iterator[Violation]:
    job = plan.job
    for address, value in (
        ("job.dump_folder", job.dump_folder),
        ("job.checkpoint.folder", job.checkpoint.folder),
        ("job.checkpoint.initial_load_path", job.checkpoint.initial_load_path),
        ("job.metrics.save_tb_folder", job.metrics.save_tb_folder),
        ("job.profiling.save_traces_folder", job.profiling.save_traces_folder),
        ("job.validation.path", job.validation.path),
        ("data.path", plan.data.path),
        ("data.tokenizer", plan.data.tokenizer),
    ):
        if value is not None and (value.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:[\\/]", value)):
            yield Violation(
                address,
                f"`{value}` is an absolute path, which a plan never holds",
                "use a path relative to where the run starts, or override it there (--dump-folder, --data-path)",
            )
        if value is not None and ("\0" in value or not value.strip()):
            yield Violation(address, f"{value!r} is not a path", "name a file or folder")


@_rule(
    "job-validation",
    "Validation names a held-out text, and takes at least one batch of it.",
    doc=(
        "Ranks agree on the number of batches before they validate; a held-out text must exist and give at least one, "
        "or ranks would wait for each other (torchtitan #1618)."
    ),
    at=(
        "job.validation.path",
        "job.validation.steps",
    ),
)
def _validation(plan: Plan) -> Iterator[Violation]:
    if plan.job.validation.enable and plan.job.validation.path is None:
        yield Violation(
            "job.validation.path", "validation is on, but names no text", "set validation.path, or turn it off"
        )
    if plan.job.validation.enable and plan.job.validation.steps == 0:
        yield Violation(
            "job.validation.steps", "validation takes 0 batches", "use a number of batches, or -1 for the whole text"
        )


@_rule(
    "job-memory-snapshot",
    "Memory snapshots are recorded on CUDA.",
    doc="torch.cuda.memory records the CUDA allocator's history; there is none on a CPU.",
    at=("job.profiling.enable_memory_snapshot",),
)
def _memory_snapshot(plan: Plan) -> Iterator[Violation]:
    if plan.job.profiling.enable_memory_snapshot and plan.cluster.gpu.device != "cuda":
        yield Violation(
            "job.profiling.enable_memory_snapshot",
            f"memory snapshots are of CUDA's allocator, but the cluster's device is {plan.cluster.gpu.device}",
            "turn enable_memory_snapshot off",
        )


_LAUNCHERS_OWN = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    "|TORCHELASTIC_.*"
)


@_rule(
    "job-environment",
    "Environment variables have names that a shell accepts, values without NUL, and are not the launcher's own.",
    doc=(
        "They are exported by a shell before Python starts. torchrun sets RANK, MASTER_ADDR and their kind for every "
        "rank; one value for all would be wrong for all but one."
    ),
    at=("job.environment",),
)
def _environment(plan: Plan) -> Iterator[Violation]:
    for name, value in plan.job.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Violation(
                "job.environment", f"{name!r} is not the name of an environment variable", "use letters, digits and _"
            )
        elif "\0" in value:
            yield Violation(
                "job.environment",
                f"the value of the environment variable `{name}` has a NUL character, which no variable can hold",
                "remove the NUL character",
            )
        elif _LAUNCHERS_OWN.fullmatch(name):
            yield Violation(
                "job.environment",
                f"`{name}` is set by the launcher, differently for every rank or run",
                "remove it",
            )


INVARIANTS: tuple[Invariant, ...] = (
    Invariant(
        "model-heads",
        "The query heads divide into groups of one KV head each, and a head has an even width.",
        "Grouped-query attention (arXiv 2305.13245) shares a KV head among equally many query heads, and rotary embedding "
        "turns pairs of elements. TorchTitan rounded such numbers down silently (#4276).",
        ("model",),
    ),
    Invariant(
        "model-routing",
        "Tokens choose among at least `top_k` experts, in equal groups of two or more where routing is limited to groups.",
        "DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) judges a group by its two best experts; one that has fewer, or groups of "
        "different size, have no such score.",
        ("model",),
    ),
    Invariant(
        "mesh-degrees",
        "A degree is at least 1, `auto`, or -1 for the rest, which one axis may have.",
        "Two unknowns have no single answer; TorchTitan's convention of -1 for what is left works for one axis.",
        ("mesh",),
    ),
    Invariant(
        "fsdp-prefetch",
        "Units are gathered ahead by FSDP only.",
        "DDP keeps all parameters whole, so there is nothing to gather.",
        ("fsdp.prefetch_forward", "fsdp.prefetch_backward"),
    ),
    Invariant(
        "ac-options",
        "Options of a checkpointing mode go with that mode.",
        "A list of operators to keep means nothing to a block that is recomputed whole; ignoring it would hide a mistake.",
        ("activation_checkpoint.policies",),
    ),
    Invariant(
        "float8-options",
        "Options of Float8 go with a recipe.",
        "Without a recipe nothing is computed in 8 bits. TorchTitan ignored some such flags silently (#3123).",
        ("float8.recipe", "float8.emulate"),
    ),
    Invariant(
        "compile-components",
        "What is compiled is named.",
        "TorchTitan compiled nothing, without a word, when the list of components was misspelt (#4473).",
        ("compile.components",),
    ),
    Invariant(
        "checkpoint-keep",
        "At least two checkpoints are kept, or all.",
        "The older one is what remains when a save fails half way. TorchTitan refuses 1 too.",
        ("job.checkpoint.keep_latest_k",),
    ),
    Invariant(
        "profiling-period",
        "A trace with its warmup fits between two traces.",
        "torch.profiler's schedule repeats every profile_freq steps, of which warmup and active steps are the last.",
        ("job.profiling.profile_freq",),
    ),
    Invariant(
        "lr-curve",
        "Warmup and decay fit into the learning-rate curve.",
        "The curve is warmup, stable, decay, in this order and without overlap.",
        ("lr_schedule.decay_steps",),
    ),
)
"""Rules that a value keeps by construction."""


def rule(rule_id: str) -> Rule | Invariant | None:
    """The rule called `rule_id`, or None."""
    known: list[Rule | Invariant] = [*RULES, *INVARIANTS]
    return next((entry for entry in known if entry.id == rule_id), None)


__all__ = [
    "INVARIANTS",
    "RULES",
    "Invariant",
    "Rule",
    "Violation",
    "divisors",
    "ep_degrees",
    "float8_all_gather_obstacle",
    "float8_token_block",
    "mixtures",
    "mxfp8_experts_obstacle",
    "rule",
    "splits_backward",
    "tp_dim_violations",
    "tp_head_violations",
]
