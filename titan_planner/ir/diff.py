"""Compare two plans: every changed leaf with its consequence, whether a running job can go on, and what it buys."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from titan_planner.ir.codec import digest, encode
from titan_planner.ir.fqn import fold, runs, select
from titan_planner.ir.inventory import linear_modules
from titan_planner.ir.model import Block, Model
from titan_planner.ir.plan import Plan
from titan_planner.ir.record import field_types

Consequence: TypeAlias = Literal["model", "numerics", "reshard", "speed", "job", "none"]
Resume: TypeAlias = Literal[
    "continues exactly", "continues with resharding", "different numerics (needs --accept-changes)", "incompatible"
]

MEANING: Mapping[Consequence, str] = {
    "model": "checkpoints no longer fit, or their weights mean something else",
    "numerics": "the checkpoint loads, but training goes on differently",
    "reshard": "the checkpoint is laid out anew on loading, same numbers up to rounding",
    "speed": "speed or memory only, same numbers up to rounding",
    "job": "what the run writes, where and for how long",
    "none": "nothing that runs",
}
"""What each consequence means; the order is loudest first."""

LOUDEST_FIRST: tuple[Consequence, ...] = tuple(MEANING)

# Addresses of the Plan type: `*` stands for the key of a list entry or mapping, a final `**` for everything below. The
# most specific pattern wins. A list has an address for its order (`layers`), one for entries that come or go
# (`layers.*`), and those of its entries' fields.
CONSEQUENCES: tuple[tuple[str, Consequence, str], ...] = (
    ("plan_version", "none", "format of the file"),
    ("name", "none", "a label"),
    ("description", "none", "a label"),
    # ---- model
    ("model.family", "none", "a label"),
    ("model.flavor", "none", "a label"),
    ("model.vocab_size", "model", "weights change shape"),
    ("model.dim", "model", "weights change shape"),
    ("model.max_seq_len", "speed", "length of the rotary table; positions keep their values"),
    ("model.blocks", "none", "the same blocks in other runs"),
    ("model.blocks.*", "model", "layers come or go"),
    ("model.blocks.*.repeat", "model", "layers come or go"),
    ("model.blocks.*.block.attention.kind", "model", "another layer"),
    ("model.blocks.*.block.attention.num_heads", "model", "the same weights mean other heads"),
    ("model.blocks.*.block.attention.num_kv_heads", "model", "weights change shape"),
    ("model.blocks.*.block.attention.head_dim", "model", "the same weights mean other heads"),
    ("model.blocks.*.block.attention.rope.theta", "numerics", "trained weights meet other positions"),
    ("model.blocks.*.block.attention.rope.scaling", "numerics", "trained weights meet other positions"),
    ("model.blocks.*.block.attention.rope.scaling.factor", "numerics", "trained weights meet other positions"),
    ("model.blocks.*.block.attention.rope.scaling.low_freq_factor", "numerics", "trained weights meet other positions"),
    (
        "model.blocks.*.block.attention.rope.scaling.high_freq_factor",
        "numerics",
        "trained weights meet other positions",
    ),
    (
        "model.blocks.*.block.attention.rope.scaling.original_max_seq_len",
        "numerics",
        "trained weights meet other positions",
    ),
    ("model.blocks.*.block.feed_forward.kind", "model", "another layer"),
    ("model.blocks.*.block.feed_forward.hidden_dim", "model", "weights change shape"),
    ("model.blocks.*.block.feed_forward", "model", "another layer"),
    ("model.blocks.*.block.feed_forward.num_experts", "model", "weights change shape"),
    ("model.blocks.*.block.feed_forward.top_k", "numerics", "tokens go to other experts"),
    ("model.blocks.*.block.feed_forward.num_shared_experts", "model", "weights change shape"),
    ("model.blocks.*.block.feed_forward.score_function", "numerics", "tokens go to other experts"),
    ("model.blocks.*.block.feed_forward.score_before_experts", "numerics", "the same weights compute something else"),
    ("model.blocks.*.block.feed_forward.route_norm", "numerics", "the same weights compute something else"),
    ("model.blocks.*.block.feed_forward.route_scale", "numerics", "the same weights compute something else"),
    ("model.blocks.*.block.feed_forward.activation", "numerics", "the same weights compute something else"),
    ("model.blocks.*.block.feed_forward.num_groups", "numerics", "tokens go to other experts"),
    ("model.blocks.*.block.feed_forward.num_limited_groups", "numerics", "tokens go to other experts"),
    ("model.blocks.*.block.feed_forward.load_balance_coeff", "numerics", "the experts' bias moves otherwise"),
    ("model.blocks.*.block.norm.eps", "numerics", "the same weights compute something else"),
    ("model.norm.eps", "numerics", "the same weights compute something else"),
    ("model.tied", "model", "the output weight comes or goes"),
    ("model.init_std", "numerics", "other initial weights; a checkpoint keeps its own"),
    # ---- cluster: context; what depends on it stands elsewhere in the plan
    ("cluster.**", "none", "a number that estimates use"),
    ("cluster.gpu.name", "job", "runs on other machines"),
    ("cluster.gpu.vendor", "job", "runs on other machines"),
    ("cluster.gpu.device", "job", "runs on other machines"),
    ("cluster.gpu.backend", "job", "runs on other machines"),
    ("cluster.gpus_per_node", "job", "runs on other machines"),
    ("cluster.nodes", "job", "runs on other machines"),
    # ---- mesh
    ("mesh.pp", "reshard", "layers move between ranks"),
    ("mesh.dp_replicate", "reshard", "weights are sharded over other ranks"),
    ("mesh.dp_shard", "reshard", "weights are sharded over other ranks"),
    ("mesh.cp", "reshard", "weights and sequences are sharded over other ranks"),
    ("mesh.tp", "reshard", "matrices are cut otherwise"),
    ("mesh.ep", "reshard", "experts move between ranks"),
    ("mesh.etp", "reshard", "experts are cut otherwise"),
    # ---- batch
    ("batch.seq_len", "numerics", "other samples"),
    ("batch.global_batch_size", "numerics", "other gradients in a step"),
    ("batch.local_batch_size", "speed", "only the global batch counts for the numbers"),
    ("batch.microbatch_size", "speed", "only the global batch counts for the numbers"),
    ("batch.accumulation_steps", "speed", "only the global batch counts for the numbers"),
    # ---- pipeline
    ("pipeline.schedule", "speed", "the same work in another order"),
    ("pipeline.stages", "none", "the same stages listed in another order"),
    ("pipeline.stages.*", "reshard", "layers move between ranks"),
    ("pipeline.stages.*.index", "reshard", "layers move between ranks"),
    ("pipeline.stages.*.pp_rank", "reshard", "layers move between ranks"),
    ("pipeline.microbatches", "speed", "only the global batch counts for the numbers"),
    ("pipeline.actions", "speed", "the same work in another order"),
    # ---- data parallelism
    ("fsdp.strategy", "reshard", "weights are sharded or replicated"),
    ("fsdp.units", "speed", "gathered in another order"),
    ("fsdp.units.*", "speed", "gathered in other groups"),
    ("fsdp.units.*.modules", "speed", "gathered in other groups"),
    ("fsdp.units.*.reshard_after_forward", "speed", "memory against communication"),
    ("fsdp.param_dtype", "numerics", "computes in another precision"),
    ("fsdp.reduce_dtype", "numerics", "reduces gradients in another precision"),
    ("fsdp.defer_gradient_sync", "speed", "memory against communication"),
    ("fsdp.prefetch_forward", "speed", "overlap"),
    ("fsdp.prefetch_backward", "speed", "overlap"),
    ("fsdp.cpu_offload", "speed", "memory against transfers"),
    # ---- tensor, context and expert parallelism
    ("tensor_parallel.sequence_parallel", "speed", "layout of activations only"),
    ("tensor_parallel.loss_parallel", "speed", "layout of logits only"),
    ("tensor_parallel.async_tp", "speed", "overlap"),
    ("tensor_parallel.kv_replicas", "reshard", "KV heads are cut otherwise"),
    ("context_parallel.method", "speed", "the same attention, communicated otherwise"),
    ("context_parallel.load_balance", "speed", "the same attention, distributed otherwise"),
    ("expert_parallel.comm_backend", "speed", "the same tokens, communicated otherwise"),
    ("expert_parallel.capacity_factor", "numerics", "other tokens are dropped"),
    ("expert_parallel.force_load_balance", "numerics", "tokens go to other experts"),
    # ---- execution
    ("activation_checkpoint.policies", "none", "the same policies listed in another order"),
    ("activation_checkpoint.policies.*", "speed", "memory against recomputation"),
    ("activation_checkpoint.policies.*.name", "speed", "memory against recomputation"),
    ("activation_checkpoint.policies.*.mode", "speed", "memory against recomputation"),
    ("activation_checkpoint.policies.*.save_ops", "speed", "memory against recomputation"),
    ("activation_checkpoint.policies.*.recompute_every_second_matmul", "speed", "memory against recomputation"),
    ("activation_checkpoint.policies.*.force_recompute_fqns", "speed", "memory against recomputation"),
    ("activation_checkpoint.policies.*.memory_budget", "speed", "memory against recomputation"),
    ("activation_checkpoint.preserve_rng_state", "speed", "matters with dropout only, and there is none"),
    ("activation_checkpoint.early_stop", "speed", "less recomputation"),
    ("activation_checkpoint.determinism_check", "speed", "a check of recomputation"),
    ("float8.recipe", "numerics", "rounds in other places"),
    ("float8.converted", "numerics", "rounds in other places"),
    ("float8.experts", "numerics", "rounds in other places"),
    ("float8.skipped", "none", "the same list in another order"),
    ("float8.skipped.*", "none", "a reason; `float8.converted` decides"),
    ("float8.skipped.*.module", "none", "a reason; `float8.converted` decides"),
    ("float8.skipped.*.reason", "none", "a reason; `float8.converted` decides"),
    ("float8.enable_fsdp_float8_all_gather", "numerics", "weights round before they are gathered"),
    ("float8.precompute_float8_dynamic_scale_for_fsdp", "speed", "the same scales, in one step"),
    ("float8.emulate", "numerics", "sums round otherwise"),
    ("compile.enable", "speed", "fused kernels round otherwise in the last bits"),
    ("compile.components", "speed", "fused kernels round otherwise in the last bits"),
    ("compile.backend", "speed", "fused kernels round otherwise in the last bits"),
    ("loss.kind", "numerics", "another loss"),
    ("loss.chunks", "speed", "memory against kernel launches"),
    ("loss.z_loss", "numerics", "another loss"),
    # ---- layers and their sharding
    ("layers", "model", "layers in another order"),
    ("layers.*", "model", "layers come or go"),
    ("layers.*.fqn", "model", "layers come or go"),
    ("layers.*.stage", "reshard", "moves to another pipeline stage"),
    ("layers.*.checkpoint", "speed", "memory against recomputation"),
    ("sharding", "none", "the same placements listed in another order"),
    ("sharding.*", "reshard", "matrices are cut otherwise"),
    ("sharding.*.module", "reshard", "matrices are cut otherwise"),
    ("sharding.*.axis", "reshard", "matrices are cut otherwise"),
    ("sharding.*.weight", "reshard", "matrices are cut otherwise"),
    ("sharding.*.input", "speed", "layout of activations only"),
    ("sharding.*.input_needed", "speed", "layout of activations only"),
    ("sharding.*.output", "speed", "layout of activations only"),
    ("sharding.*.output_needed", "speed", "layout of activations only"),
    # ---- training
    ("dtype", "numerics", "weights are kept in another precision"),
    ("optimizer.name", "numerics", "another update rule"),
    ("optimizer.lr", "numerics", "other updates"),
    ("optimizer.beta1", "numerics", "other updates"),
    ("optimizer.beta2", "numerics", "other updates"),
    ("optimizer.eps", "numerics", "other updates"),
    ("optimizer.weight_decay", "numerics", "other updates"),
    ("optimizer.implementation", "speed", "the same update, computed otherwise"),
    ("optimizer.state_dtype", "numerics", "moments are kept in another precision"),
    ("optimizer.max_norm", "numerics", "gradients are clipped otherwise"),
    ("optimizer.param_groups", "numerics", "the first group that matches wins: their order counts"),
    ("optimizer.param_groups.*", "numerics", "other updates of some parameters"),
    ("optimizer.param_groups.*.pattern", "numerics", "other updates of some parameters"),
    ("optimizer.param_groups.*.lr_scale", "numerics", "other updates of some parameters"),
    ("optimizer.param_groups.*.weight_decay", "numerics", "other updates of some parameters"),
    ("lr_schedule.warmup_steps", "numerics", "another learning-rate curve"),
    ("lr_schedule.total_steps", "numerics", "another learning-rate curve"),
    ("lr_schedule.decay_steps", "numerics", "another learning-rate curve"),
    ("lr_schedule.decay_type", "numerics", "another learning-rate curve"),
    ("lr_schedule.min_lr_factor", "numerics", "another learning-rate curve"),
    ("data.source", "numerics", "other samples"),
    ("data.dataset", "numerics", "other samples"),
    ("data.path", "job", "a place: what lies there is not compared"),
    ("data.tokenizer", "job", "a place: what lies there is not compared"),
    ("data.text_field", "numerics", "other samples"),
    ("data.add_bos", "numerics", "other samples"),
    ("seeds.seed", "numerics", "other initial weights and another order of samples"),
    ("seeds.deterministic", "speed", "reproducible kernels"),
    # ---- job
    ("job.steps", "job", "stops earlier or later; the curve has its own length"),
    ("job.dump_folder", "job", "checkpoints are looked for in another folder"),
    ("job.checkpoint.**", "job", "what is saved, and when"),
    ("job.checkpoint.enable", "job", "whether checkpoints are saved and loaded"),
    ("job.checkpoint.folder", "job", "checkpoints are looked for in another folder"),
    ("job.checkpoint.initial_load_path", "job", "counts only when the run has no checkpoint of its own"),
    ("job.checkpoint.initial_load_model_only", "job", "counts only when the run has no checkpoint of its own"),
    ("job.checkpoint.load_step", "job", "resumes from another step"),
    ("job.checkpoint.exclude_from_loading", "job", "what starts anew on resuming"),
    ("job.metrics.**", "job", "what is logged"),
    ("job.profiling.**", "job", "what is recorded"),
    ("job.comm.**", "job", "when a hang is noticed"),
    ("job.validation.**", "job", "what is measured beside training"),
    ("job.environment.*", "job", "environment of the processes; the planner does not judge it"),
    ("job.token_budget", "none", "a number that estimates use"),
    # ---- explanations
    ("request.**", "none", "what was asked; the decisions are compared themselves"),
    ("estimate.**", "none", "a prediction"),
    ("remarks.**", "none", "an explanation"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One changed leaf, or `count` equal changes of a run of layers. A list entry that comes or goes is one change.

    `pattern` is the address in the Plan type that the consequence was looked up by.
    """

    address: str
    before: Any
    after: Any
    consequence: Consequence
    note: str
    pattern: str = ""
    kind: Literal["changed", "added", "removed"] = "changed"
    count: int = 1


@dataclass(frozen=True, slots=True)
class Delta:
    """A predicted number before and after; None where a plan has no estimate of it."""

    name: str
    before: float | None
    after: float | None

    @property
    def delta(self) -> float | None:
        """After less before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def percent(self) -> float | None:
        """The difference in percent of before."""
        return None if self.before is None or self.delta is None or self.before == 0 else 100 * self.delta / self.before


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a job that runs under the first plan can resume under the second, why, and what else that takes."""

    resume: Resume
    reason: str
    conditions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """Which plan stands on one side of the comparison."""

    name: str
    digest: str
    fits: bool | None


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """What differs between two plans. `changes` are loudest first, and in plan order within a consequence."""

    before: Side
    after: Side
    changes: tuple[Change, ...]
    verdict: Verdict
    estimate: tuple[Delta, ...]

    @property
    def same(self) -> bool:
        """Decisions and job are equal; labels, remarks and the estimate may differ."""
        return all(change.consequence == "none" for change in self.changes) and self.before.digest == self.after.digest

    def of(self, consequence: Consequence) -> tuple[Change, ...]:
        """The changes of one consequence."""
        return tuple(change for change in self.changes if change.consequence == consequence)


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Everything that changes when plan `b` replaces plan `a`."""
    found = [_special(change, a, b) for change in _fold_layers(_walk(a, b, "", ""))]
    changes = tuple(sorted(found, key=lambda change: LOUDEST_FIRST.index(change.consequence)))
    return PlanDiff(
        before=_side(a),
        after=_side(b),
        changes=changes,
        verdict=_verdict(a, b, changes),
        estimate=_estimate(a, b),
    )


def _side(plan: Plan) -> Side:
    return Side(plan.name, digest(plan), plan.estimate.fits if plan.estimate else None)


# ------------------------------------------------------------------ consequences


@functools.cache
def consequence_of(pattern: str) -> tuple[str, Consequence, str]:
    """The row of `CONSEQUENCES` for an address of the Plan type such as `layers.*.stage`; KeyError if there is none."""
    segments = pattern.split(".")
    rows = [row for row in CONSEQUENCES if _covers(row[0].split("."), segments)]
    if not rows:
        raise KeyError(pattern)
    return max(rows, key=lambda row: _specificity(row[0]))


def _covers(wanted: Sequence[str], given: Sequence[str]) -> bool:
    if wanted[-1] == "**":
        wanted = wanted[:-1]
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))


def _specificity(pattern: str) -> tuple[bool, int, int]:
    segments = pattern.split(".")
    return segments[-1] != "**", len(segments), sum(segment != "*" for segment in segments)


def leaf_patterns(cls: type, prefix: str = "") -> Iterator[str]:
    """Every address of the record type `cls` that a change can have, entries of lists and mappings written as `*`."""
    for name, hint in field_types(cls).items():
        yield from _patterns_of(hint, f"{prefix}.{name}" if prefix else name)


def _patterns_of(hint: Any, at: str) -> Iterator[str]:
    origin = get_origin(hint)
    if origin is tuple and _has_record(get_args(hint)[0]):
        yield at
        yield f"{at}.*"
        yield from leaf_patterns(get_args(hint)[0], f"{at}.*")
    elif isinstance(hint, type) and is_dataclass(hint):
        yield from leaf_patterns(hint, at)
    elif origin is not None and _is_union(hint) and _has_record(hint):
        yield at  # one kind replaces another, or null does
        for member in get_args(hint):
            if isinstance(member, type) and is_dataclass(member):
                yield from leaf_patterns(member, at)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield f"{at}.*"
    else:
        yield at


def _is_union(hint: Any) -> bool:
    return get_origin(hint) is Union or type(hint).__name__ == "UnionType"


def _has_record(hint: Any) -> bool:
    members = get_args(hint) if _is_union(hint) else (hint,)
    return any(isinstance(member, type) and is_dataclass(member) for member in members)


# ------------------------------------------------------------------ the walk

_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

KEYS: Mapping[str, Callable[[Any], str]] = {
    "layers": lambda layer: str(layer.fqn),
    "sharding": lambda entry: f"{entry.module}[{entry.axis}]",
    "pipeline.stages": lambda stage: str(stage.index),
    "fsdp.units": lambda unit: "+".join(unit.modules),
    "activation_checkpoint.policies": lambda policy: str(policy.name),
    "float8.skipped": lambda skipped: str(skipped.module),
    "optimizer.param_groups": lambda group: str(group.pattern),
    "estimate.memory": lambda memory: str(memory.stage),
    "remarks": lambda remark: f"{remark.address}[{remark.by}]",
}
"""List address -> what an entry is called, and matched by. Other lists are matched by position."""

KEY_FIELDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("fqn",),
    "sharding": ("module", "axis"),
    "pipeline.stages": ("index",),
    "fsdp.units": ("modules",),
    "activation_checkpoint.policies": ("name",),
    "float8.skipped": ("module",),
    "optimizer.param_groups": ("pattern",),
    "estimate.memory": ("stage",),
    "remarks": ("address", "by"),
}
"""List address -> the fields that the key of an entry already says."""


def keyed(items: Sequence[Any], pattern: str) -> dict[str, Any]:
    """The entries of the list at `pattern` by key; a key that repeats gets `#2`, `#3` ... appended."""
    name = KEYS.get(pattern)
    found: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for index, item in enumerate(items):
        key = name(item) if name else str(index)
        seen[key] += 1
        found[key if seen[key] == 1 else f"{key}#{seen[key]}"] = item
    return found


def _walk(a: Any, b: Any, address: str, pattern: str) -> Iterator[Change]:
    if a == b:
        return
    if is_dataclass(a) and type(a) is type(b):
        for name in field_types(type(a)):
            at, kind = (f"{address}.{name}", f"{pattern}.{name}") if address else (name, name)
            yield from _walk(getattr(a, name), getattr(b, name), at, kind)
    elif pattern == "model.blocks" and len(a) != len(b):
        yield from _blocks(a, b)
    elif isinstance(a, tuple) and isinstance(b, tuple) and any(is_dataclass(item) for item in a + b):
        yield from _entries(keyed(a, pattern), keyed(b, pattern), address, pattern)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _entries(dict(a), dict(b), address, pattern)
    else:
        yield _change(address, pattern, a, b)


def _entries(a: dict[str, Any], b: dict[str, Any], address: str, pattern: str) -> Iterator[Change]:
    for key, item in a.items():
        if key in b:
            yield from _walk(item, b[key], _entry_address(address, key), f"{pattern}.*")
        else:
            yield _change(_entry_address(address, key), f"{pattern}.*", entry(item, pattern), None, "removed")
    for key, item in b.items():
        if key not in a:
            yield _change(_entry_address(address, key), f"{pattern}.*", None, entry(item, pattern), "added")
    before, after = tuple(key for key in a if key in b), tuple(key for key in b if key in a)
    if pattern in KEYS and pattern != "remarks" and before != after:
        yield _change(address, pattern, before, after)


def _entry_address(address: str, key: str) -> str:
    """`fsdp.units.norm+output`; an entry of `layers` is called as its module is, `layers.3` or `norm`."""
    return key if address == "layers" else f"{address}.{key}"


def entry(item: Any, pattern: str) -> Any:
    """An entry of the list at `pattern` as plain data, without the fields that its key already says."""
    value = encode(item)
    if isinstance(value, dict):
        return {name: part for name, part in value.items() if name not in KEY_FIELDS.get(pattern, ())}
    return value


def _blocks(a: Sequence[Any], b: Sequence[Any]) -> Iterator[Change]:
    """Lists of runs of different lengths, compared layer by layer."""
    before = [run.block for run in a for _ in range(run.repeat)]
    after = [run.block for run in b for _ in range(run.repeat)]
    if before == after:
        yield _change("model.blocks", "model.blocks", [run.repeat for run in a], [run.repeat for run in b])
    pairs: dict[tuple[Block, Block], list[int]] = {}
    for index, pair in enumerate(zip(before, after, strict=False)):
        pairs.setdefault(pair, []).append(index)
    for (old, new), layers in pairs.items():
        for first, last in runs(layers):
            at = str(first) if first == last else f"{first}-{last}"
            yield from _walk(old, new, f"model.layers.{at}", "model.blocks.*.block")
    if len(before) != len(after):
        yield _change("model.layers", "model.blocks.*.repeat", len(before), len(after))


def _change(
    address: str, pattern: str, a: Any, b: Any, kind: Literal["changed", "added", "removed"] = "changed"
) -> Change:
    _, consequence, why = consequence_of(pattern)
    before, after = (
        value if isinstance(value, dict) else encode(value) for value in (a, b)
    )  # entries are plain already
    return Change(address, before, after, consequence, why, pattern, kind)


def layer_key(change: Change) -> object | None:
    """What changes of different layers must share to be told as one; None for changes of no numbered layer."""
    head, _, rest = change.address.partition(".")
    number, _, field = rest.partition(".")
    if head != "layers" or not _NUMBERS.fullmatch(number):
        return None
    return field, repr(change.before), repr(change.after), change.kind


def _fold_layers(changes: Iterable[Change]) -> list[Change]:
    """Changes that differ only in the number of the layer become one for each run of layers, where the first stood."""
    groups: dict[object, list[Change]] = {}
    for index, change in enumerate(changes):
        groups.setdefault(layer_key(change) or index, []).append(change)
    folded: list[Change] = []
    for group in groups.values():
        if len(group) == 1:
            folded.append(group[0])
            continue
        for address in fold(change.address for change in group):
            first, _, last = address.split(".")[1].partition("-")
            folded.append(replace(group[0], address=address, count=int(last or first) - int(first) + 1))
    return folded


# ------------------------------------------------------------------ changes that are more, or less, than they look


def _special(change: Change, a: Plan, b: Plan) -> Change:
    if change.pattern == "float8.converted":
        old, new = _linears(a.model, a.float8.converted), _linears(b.model, b.float8.converted)
        if old == new:
            return replace(change, consequence="none", note="the same linears, selected in other words")
        parts = [
            f"{word} {len(names)}: {_short(fold(names))}"
            for word, names in (
                ("converts", [name for name in new if name not in old]),
                ("no longer converts", [name for name in old if name not in new]),
            )
            if names
        ]
        return replace(change, note="; ".join(parts))
    if change.pattern == "batch.local_batch_size" and a.batch.global_batch_size == b.batch.global_batch_size:
        return replace(change, note="the global batch stays")
    return change


def _short(names: Sequence[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _linears(model: Model, selectors: Iterable[str]) -> dict[str, None]:
    names = dict.fromkeys(linear_modules(model))
    chosen = {name for selector in selectors for name in expand(selector, names)}
    return dict.fromkeys(name for name in names if name in chosen)


def expand(selector: str, names: Mapping[str, object]) -> tuple[str, ...]:
    """As `fqn.select(selector, names)`, by look-up where the only wildcard is the number of the layer."""
    head, dot, rest = selector.partition(".")
    number, _, tail = rest.partition(".")
    bounds = _NUMBERS.fullmatch(number)
    if head != "layers" or not dot or not bounds or "*" in tail or "-" in tail:
        return (selector,) if selector in names else select(selector, names)
    suffix = f".{tail}" if tail else ""
    first, last = int(bounds[1]), int(bounds[2] or bounds[1])
    if last - first > len(names):
        return select(selector, names)
    return tuple(name for i in range(first, last + 1) if (name := f"layers.{i}{suffix}") in names)


# ------------------------------------------------------------------ verdict and estimate


def _verdict(a: Plan, b: Plan, changes: Sequence[Change]) -> Verdict:
    loudest = next((c for c in LOUDEST_FIRST if any(change.consequence == c for change in changes)), "none")
    names = tuple(dict.fromkeys(change.address for change in changes if change.consequence == loudest))
    listed = _short([f"`{name}`" for name in names])
    resume: Resume
    match loudest:
        case "model":
            resume, reason = "incompatible", f"the model itself changes: {listed}"
        case "numerics":
            resume = "different numerics (needs --accept-changes)"
            reason = f"the checkpoint loads, but training goes on differently: {listed}"
        case "reshard":
            resume, reason = "continues with resharding", f"the checkpoint is laid out anew: {listed}"
        case "speed":
            resume, reason = "continues exactly", f"only speed and memory change: {listed}"
        case "job":
            resume, reason = "continues exactly", f"only the run's own affairs change: {listed}"
        case _:
            resume, reason = "continues exactly", "nothing that runs changes"
    return Verdict(resume, reason, () if resume == "incompatible" else tuple(_conditions(a, b)))


def _conditions(a: Plan, b: Plan) -> Iterator[str]:
    """What a resume needs that no consequence says: places and the way checkpoints are saved and found."""
    if a == b:
        return
    old, new = a.job.checkpoint, b.job.checkpoint
    if not old.enable:
        yield "the first plan saves no checkpoints (`job.checkpoint.enable`), so there is nothing to resume from"
    if not new.enable:
        yield "the second plan loads no checkpoint (`job.checkpoint.enable`): it starts from step 0"
    source, target = (f"{plan.job.dump_folder.rstrip('/')}/{plan.job.checkpoint.folder}" for plan in (a, b))
    if old.enable and new.enable and source != target:
        yield f"move the checkpoints from `{source}` to `{target}`: they are looked for there"
    if old.enable and old.last_save_model_only and a.job.steps < b.job.steps:
        yield f"stop before step {a.job.steps}: the first plan's final save holds weights only"
    if new.enable and old.load_step != new.load_step and new.load_step >= 0:
        yield f"`job.checkpoint.load_step`: training goes back to step {new.load_step}"
    if new.enable and new.exclude_from_loading != old.exclude_from_loading and new.exclude_from_loading:
        parts = _short(new.exclude_from_loading, 4)
        yield f"`job.checkpoint.exclude_from_loading`: {parts} start anew, so numbers differ"
    for address, before, after in (
        ("data.path", a.data.path, b.data.path),
        ("data.tokenizer", a.data.tokenizer, b.data.tokenizer),
    ):
        if before != after:
            yield f"`{address}` must hold the same content: a plan compares places, not what lies there"
    first, second = a.job.environment, b.job.environment
    changed = [name for name in sorted({**first, **second}) if first.get(name) != second.get(name)]
    # Allocator settings move memory, never numbers.
    suspects = [f"`{name}`" for name in changed if not name.endswith("ALLOC_CONF")]
    if suspects:
        yield f"{_short(suspects)} must not switch numerics: the planner does not judge environment variables"


def _estimate(a: Plan, b: Plan) -> tuple[Delta, ...]:
    old, new = a.estimate, b.estimate
    names = ("step_time_ms", "tokens_per_second_per_gpu", "mfu", "peak_memory_gib")
    return tuple(Delta(n, getattr(old, n) if old else None, getattr(new, n) if new else None) for n in names)
