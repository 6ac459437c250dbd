"""Why a plan is as it is: the decision record, or all that the plan says about one address. Nothing is computed anew."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from titan_planner.diff import Consequence, consequence_of, entry, keyed
from titan_planner.ir.codec import encode
from titan_planner.ir.errors import Complaint, PlanError
from titan_planner.ir.fqn import fold, matches
from titan_planner.ir.parallel import AXES
from titan_planner.ir.plan import Plan, Remark
from titan_planner.ir.record import field_descriptors, field_types
from titan_planner.render import values
from titan_planner.render.asked import SPEC_ADDRESSES, Asked, asked
from titan_planner.render.modules import Modules, policy_words, reshard_words
from titan_planner.render.show import checkpointing_words, float8_words, stage_rows, weight_json, weight_row
from titan_planner.render.tables import PLAIN, Style, table

_KINDS = ("applied", "missed", "analysis")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of the plan: where it stands, what it means, what was asked, and what changing it would do."""

    address: str
    value: Any
    doc: str
    asked: Asked | None
    consequence: Consequence | None


@dataclass(frozen=True, slots=True)
class Topic:
    """Modules that are decided alike, with one labelled line for each decision."""

    title: str
    facts: tuple[tuple[str, str], ...]
    weights: tuple[dict[str, Any], ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that a plan says about `address`."""

    address: str
    doc: str
    leaves: tuple[Leaf, ...]
    topics: tuple[Topic, ...]
    facts: tuple[tuple[str, str], ...]
    remarks: tuple[Remark, ...]


def explain(plan: Plan, address: str | None = None, *, style: Style = PLAIN, width: int = 100) -> str:
    """The whole decision record, or what the plan says about `address`. An unknown address raises `PlanError`."""
    if address is None:
        return "\n".join(_record(plan.remarks, style, width)) or "The plan has no remarks."
    found = explanation(plan, address)
    lines: list[str] = []
    if len(found.leaves) == 1 and found.leaves[0].address == found.address:
        lines += _leaf(found.leaves[0], style, width)
    else:
        title = style.bold(found.address)
        lines += [] if found.topics and not found.leaves else [f"{title}  {found.doc}".rstrip()]
        rows = [
            (
                leaf.address,
                style.cyan(values.value(leaf.value)),
                style.dim(_asked_words(leaf.asked)),
                style.dim(leaf.doc),
            )
            for leaf in found.leaves
        ]
        lines += table(rows, width=width)
    lines += table(found.facts, width=width)
    for topic in found.topics:
        lines += [style.bold(topic.title), *table(topic.facts, width=width), *table(topic.rows, indent=4, width=width)]
    if found.remarks:
        lines += ["", style.bold("remarks"), *_remarks(found.remarks, style, width, by=True)]
    else:
        lines += ["", style.dim("no pass remarked on it")]
    return "\n".join(lines)


def explain_json(plan: Plan, address: str | None = None) -> dict[str, Any]:
    """What `explain` says, as plain data."""
    if address is None:
        return {"address": None, "remarks": [encode(remark) for remark in plan.remarks]}
    found = explanation(plan, address)
    return {
        "address": found.address,
        "doc": found.doc,
        "values": [
            {
                "address": leaf.address,
                "value": leaf.value,
                "doc": leaf.doc,
                "asked": None
                if leaf.asked is None
                else {"address": leaf.asked.address, "value": leaf.asked.value, "how": leaf.asked.how},
                "consequence": leaf.consequence,
            }
            for leaf in found.leaves
        ],
        "facts": dict(found.facts),
        "modules": [
            {"modules": topic.title, "facts": dict(topic.facts), "parameters": list(topic.weights)}
            for topic in found.topics
        ],
        "remarks": [encode(remark) for remark in found.remarks],
    }


def explanation(plan: Plan, address: str) -> Explanation:
    """Everything at `address`: a value or section of the plan, a module or selector, or what only remarks speak of."""
    wanted = _normal(address)
    modules = Modules(plan)
    field = re.fullmatch(r"(.+)\.(stage|checkpoint|fqn)", wanted)
    stem = wanted.removesuffix(".weight") if wanted != "sharding.weight" else wanted
    named = [name for name in modules.names if matches(stem, name)]
    if stem == "layers":
        named = [name for name in modules.layers if name.startswith("layers.")]
    if named:
        return Explanation(stem, "", (), tuple(_topics(modules, named)), (), _about(plan, stem))
    if field and (tops := [name for name in modules.layers if matches(field[1], name) or field[1] == "layers"]):
        return Explanation(
            wanted, "", tuple(_layer_leaves(plan, modules, tops, field[2])), (), (), _about(plan, wanted)
        )
    place = _find(plan, wanted)
    if place is None and _spec_address(wanted) is not None:
        wanted = _spec_address(wanted) or wanted
        place = _find(plan, wanted)
    remarks = _about(plan, wanted)
    if place is None:
        if not any(_covers(wanted, remark.address) for remark in remarks):
            raise PlanError(_unknown(plan, modules, address, wanted))
        return Explanation(wanted, "", (), (), (), remarks)
    value, pattern, doc = place
    leaves = tuple(_leaves(plan, value, wanted, pattern, doc))
    return Explanation(wanted, doc, leaves, (), tuple(_facts(plan, modules, wanted)), remarks)


# ------------------------------------------------------------------ addresses


def _normal(address: str) -> str:
    """`lm_head` as `output`, `layers[3].stage` as `layers.3.stage`, and TorchTitan's newer names as ours."""
    address = re.sub(r"\[(\d+)\]", r".\1", address.strip())
    address = re.sub(r"^lm_head(?=\.|$)", "output", address)
    return re.sub(r"\.attention\.qkv_linear\.(w[qkv])(?=\.|$)", r".attention.\1", address)


def _find(plan: Plan, address: str) -> tuple[Any, str, str] | None:
    """The value at `address` with its address in the Plan type and its doc."""
    value: Any = plan
    pattern, doc, rest = "", "", address
    while rest:
        if is_dataclass(value):
            name, _, rest = rest.partition(".")
            if name not in field_types(type(value)):
                return None
            label = field_descriptors(type(value)).get(name)
            value = getattr(value, name)
            doc = (
                label.doc
                if label
                else (type(value).__doc__ or "").strip().splitlines()[0]
                if is_dataclass(value)
                else ""
            )
            pattern = f"{pattern}.{name}" if pattern else name
            continue
        if isinstance(value, Mapping):
            entries: Mapping[str, Any] = value
        elif isinstance(value, tuple) and any(is_dataclass(item) for item in value):
            entries = {**{str(i): item for i, item in enumerate(value)}, **keyed(value, pattern)}
        else:
            return None
        key = max((k for k in entries if rest == k or rest.startswith(f"{k}.")), key=len, default=None)
        if key is None:
            return None
        value, rest, pattern = entries[key], rest[len(key) + 1 :], f"{pattern}.*"
        if is_dataclass(value):
            doc = (type(value).__doc__ or "").strip().splitlines()[0]
    return value, pattern, doc


def _spec_address(address: str) -> str | None:
    """Where the plan decides what the spec calls `address`."""
    address = address.removeprefix("request.")
    if address in SPEC_ADDRESSES:
        found = SPEC_ADDRESSES[address]
        return found.removesuffix(".*.checkpoint") if "*" in found else found
    head, dot, tail = address.partition(".")
    return f"{SPEC_ADDRESSES[head]}.{tail}" if dot and head in SPEC_ADDRESSES else None


def _leaves(plan: Plan, value: Any, address: str, pattern: str, doc: str) -> Iterator[Leaf]:
    if is_dataclass(value):
        labels = field_descriptors(type(value))
        for name in field_types(type(value)):
            part = getattr(value, name)
            label = labels.get(name)
            yield from _leaves(plan, part, f"{address}.{name}", f"{pattern}.{name}", label.doc if label else "")
    elif isinstance(value, tuple) and any(is_dataclass(item) for item in value):
        for key, item in keyed(value, pattern).items():
            yield Leaf(f"{address}.{key}", entry(item, pattern), "", None, None)
    elif isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield Leaf(f"{address}.{key}", value[key], "", None, _consequence(f"{pattern}.*"))
    else:
        yield Leaf(address, encode(value), doc, asked(plan, pattern), _consequence(pattern))


def _consequence(pattern: str) -> Consequence | None:
    try:
        return consequence_of(pattern)[1]
    except KeyError:
        return None


def _segment_meets(a: str, b: str) -> bool:
    if a == b or "*" in (a, b):
        return True
    spans = [re.fullmatch(r"(\d+)(?:-(\d+))?", segment) for segment in (a, b)]
    if spans[0] is None or spans[1] is None:
        return False
    (low, high), (first, last) = ((int(m[1]), int(m[2] or m[1])) for m in spans if m)
    return low <= last and first <= high


def related(a: str, b: str) -> bool:
    """Whether one address is the other, lies above or below it, or is a selector that meets it."""
    if not a or not b:
        return True
    return all(_segment_meets(x, y) for x, y in zip(_normal(a).split("."), _normal(b).split("."), strict=False))


def _covers(wanted: str, address: str) -> bool:
    """Whether `address` is `wanted` or lies below it."""
    return bool(address) and len(_normal(address).split(".")) >= len(wanted.split(".")) and related(wanted, address)


def _about(plan: Plan, address: str) -> tuple[Remark, ...]:
    return tuple(remark for remark in plan.remarks if related(address, remark.address))


def _unknown(plan: Plan, modules: Modules, given: str, wanted: str) -> Complaint:
    layer = re.match(r"layers\.(\d+)(?:\.|$)", wanted)
    last = plan.model.num_layers - 1
    if layer and int(layer[1]) > last:
        return Complaint(
            f"`{given}` is not in the plan: the model has the layers 0 to {last}",
            given,
            hint=f"ask for `layers.{last}{wanted[layer.end(1) :]}`",
        )
    # Layers are alike in their names, so those of the layer asked about are enough.
    number = layer[1] if layer else "0"
    pool = [name for name in modules.names if not name.startswith("layers.") or name.split(".")[1] == number]
    pool += [*_addresses(plan, "", "")]
    tail = wanted.rpartition(".")[2]
    same_tail = [address for address in pool if address.endswith(f".{tail}")]
    close = difflib.get_close_matches(wanted, pool, 3, 0.7)
    suggestions = list(dict.fromkeys([*same_tail, *close]))[:3]
    hint = (
        f"did you mean {' or '.join(f'`{name}`' for name in suggestions)}?"
        if suggestions
        else "an address is a module (`layers.0.attention.wk`), a section (`mesh`) or a value (`optimizer.lr`)"
    )
    return Complaint(f"`{given}` is neither a module nor a value of the plan", given, hint=hint)


def _addresses(value: Any, address: str, pattern: str) -> Iterator[str]:
    """Sections and values of the plan; entries of lists only where there are few."""
    if address:
        yield address
    if is_dataclass(value):
        for name in field_types(type(value)):
            at = f"{address}.{name}" if address else name
            if at not in ("layers", "remarks"):
                yield from _addresses(getattr(value, name), at, f"{pattern}.{name}" if pattern else name)
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for key in keyed(value, pattern):
            yield f"{address}.{key}"


# ------------------------------------------------------------------ modules


def _topics(modules: Modules, named: Sequence[str]) -> Iterator[Topic]:
    """The modules in `named`, those with equal facts together."""
    alike: dict[object, tuple[list[str], Topic]] = {}
    for name in named:
        topic = _topic(modules, name)
        key = (topic.facts, topic.rows)
        alike.setdefault(key, ([], topic))[0].append(name)
    for names, topic in alike.values():
        kind = ""
        if names[0] in modules.linears:
            rows, columns = modules.linears[names[0]]
            kind = f"  linear {columns} -> {rows}"
        yield Topic(f"{', '.join(fold(names))}{kind}", topic.facts, topic.weights, topic.rows)


def _topic(modules: Modules, fqn: str) -> Topic:
    plan = modules.plan
    facts: list[tuple[str, str]] = []
    layer, unit, policy = modules.layer(fqn), modules.unit(fqn), modules.policy(fqn)
    owned = modules.weights(fqn)
    if owned:
        facts.append(("parameters", values.count(sum(parameter.numel for parameter in owned))))
    elif fqn == "output":
        facts.append(("parameters", "none of its own: tied to tok_embeddings"))
    if layer is not None and plan.mesh.pp > 1:
        rank = plan.pipeline.stages[layer.stage].pp_rank
        facts.append(("stage", f"{layer.stage}, on pipeline rank {rank}"))
    for row in modules.sharding.get(fqn, ()):
        parts = [f"weight {entry.weight}"] if entry.weight else []
        for side, arrives, needed in (
            ("input", entry.input, entry.input_needed),
            ("output", entry.output, entry.output_needed),
        ):
            if arrives is not None:
                parts.append(f"{side} {arrives}" + (f" -> {needed}" if needed not in (None, arrives) else ""))
        facts.append((entry.axis, ", ".join(parts)))
    if plan.fsdp.strategy == "fsdp" and plan.mesh.fsdp > 1:
        if unit is None:
            facts.append(("fsdp", f"root unit, sharded over {plan.mesh.fsdp} ranks"))
        else:
            facts.append(("fsdp", f"unit {'+'.join(unit.modules)} over {plan.mesh.fsdp} ranks, "
                          f"{reshard_words(unit.reshard_after_forward)}"))  # fmt: skip
    if policy is not None and fqn.startswith("layers."):
        facts.append(("checkpoint", f"{policy.name}: {policy_words(policy)}"))
        how = asked(plan, "layers.*.checkpoint")
        if how is not None:
            facts.append(("", _asked_words(how)))
    status = modules.float8(fqn)
    if status is not None:
        facts.append(("float8", _float8_fact(plan, status.converted, status.reason)))
    found = [modules.weight(parameter, parameter.fqn[len(fqn) + 1 :] or "weight") for parameter in owned]
    rows = [weight_row(plan, weight) for weight in found]
    if len(owned) == 1 and owned[0].module == fqn:
        facts.insert(1, ("weight", " ".join(rows[0][1:4]) + " on a rank" + (f"  {rows[0][4]}" if rows[0][4] else "")))
        rows = []
    return Topic(fqn, tuple(facts), tuple(weight_json(weight) for weight in found), tuple(rows))


def _float8_fact(plan: Plan, converted: bool, reason: str | None) -> str:
    if plan.float8.recipe is None:
        return "off: the plan has no Float8 recipe" + (f"; {reason}" if reason else "")
    if converted:
        return plan.float8.recipe
    return f"high precision: {reason}" if reason else "high precision: no selector of `float8.converted` matches it"


def _layer_leaves(plan: Plan, modules: Modules, tops: Sequence[str], field: str) -> Iterator[Leaf]:
    label = field_descriptors(type(plan.layers[0]))[field]
    by_value: dict[Any, list[str]] = {}
    for name in tops:
        by_value.setdefault(getattr(modules.layers[name], field), []).append(name)
    for value, names in by_value.items():
        for address in fold(names):
            yield Leaf(
                f"{address}.{field}",
                value,
                label.doc,
                asked(plan, f"layers.*.{field}"),
                _consequence(f"layers.*.{field}"),
            )


# ------------------------------------------------------------------ what else concerns a section


def _facts(plan: Plan, modules: Modules, address: str) -> Iterator[tuple[str, str]]:
    section, _, name = address.partition(".")
    match section:
        case "mesh":
            for axis in AXES:
                if name in ("", axis) and plan.mesh.degree(axis) > 1:
                    yield f"ranks of {axis}", _axis_ranks(plan, axis)
            if name in ("", "tp") and plan.sharding:
                yield (
                    "tp shards",
                    ", ".join(entry.module for entry in plan.sharding if entry.weight and entry.weight != "R"),
                )
        case "batch":
            batch = plan.batch
            yield (
                "global",
                (
                    f"{batch.local_batch_size} local x {plan.mesh.dp} data-parallel ranks x {batch.accumulation_steps} "
                    f"accumulation steps = {batch.global_batch_size} sequences, {values.count(batch.tokens_per_step)} tokens"
                ),
            )
            if plan.mesh.pp > 1:
                yield (
                    "pipeline",
                    f"{plan.pipeline.microbatches} microbatches of {batch.microbatch_size} = {batch.local_batch_size} local",
                )
        case "pipeline":
            yield from ((f"stage {row[0]}", f"rank {row[1]}: {row[2]}") for row in stage_rows(plan)[1:]
                        if name in ("", "stages", f"stages.{row[0]}"))  # fmt: skip
        case "activation_checkpoint":
            yield "layers", checkpointing_words(plan)
            for policy in plan.activation_checkpoint.policies:
                yield policy.name, policy_words(policy)
        case "float8":
            yield "linears", float8_words(plan, modules)
        case "estimate" if plan.estimate is not None:
            peak = values.quantity("_gib", plan.estimate.peak_memory_gib)
            fits = "fits" if plan.estimate.fits else "does NOT fit"
            yield "peak memory", f"{peak} of {values.quantity('_gib', plan.estimate.memory_available_gib)}: {fits}"
            for memory in plan.estimate.memory:
                yield f"stage {memory.stage}", f"{memory.total_gib:.2f} GiB"


def _axis_ranks(plan: Plan, axis: str) -> str:
    """Where the ranks of one group of `axis` are: how far apart, and on how many nodes."""
    degree, stride = plan.mesh.degree(axis), 1
    for inner in AXES[AXES.index(axis) + 1 :]:
        stride *= plan.mesh.degree(inner)
    per_node = plan.cluster.gpus_per_node
    nodes = len({rank // per_node for rank in range(0, degree * stride, stride)})
    where = (
        f"inside one node ({plan.cluster.intra_node.name})"
        if nodes == 1
        else f"over {nodes} nodes ({plan.cluster.inter_node.name})"
    )
    return f"{degree} ranks, {stride} apart, {where}"


# ------------------------------------------------------------------ text


def _leaf(leaf: Leaf, style: Style, width: int) -> list[str]:
    lines = [f"{style.bold(leaf.address)} = {style.cyan(values.value(leaf.value))}"]
    rows = [("meaning", leaf.doc)] if leaf.doc else []
    if leaf.asked is not None:
        rows.append(("asked", _asked_words(leaf.asked)))
    if leaf.consequence is not None:
        rows.append(("changing it", _consequence_words(leaf)))
    return [*lines, *table(rows, width=width)]


def _consequence_words(leaf: Leaf) -> str:
    words = {"model": "makes checkpoints incompatible", "numerics": "changes numerics", "reshard": "reshards checkpoints",
             "speed": "changes speed or memory only", "job": "changes what the run does, not what it trains",
             "none": "changes nothing that runs"}  # fmt: skip
    assert leaf.consequence is not None
    return words[leaf.consequence]


def _asked_words(found: Asked | None) -> str:
    match found:
        case None:
            return ""
        case Asked(how="auto"):
            return f"auto ({found.address})"
        case Asked(how="default"):
            return f"default {values.value(found.value)} ({found.address})"
        case Asked(value=-1):
            return f"pinned to -1, the rest ({found.address})"
        case _:
            return f"pinned to {values.value(found.value)} ({found.address})"


def _record(remarks: Sequence[Remark], style: Style, width: int) -> Iterator[str]:
    """All remarks, pass by pass in the order in which the passes ran."""
    by_pass: dict[str, list[Remark]] = {}
    for remark in remarks:
        by_pass.setdefault(remark.by, []).append(remark)
    for index, (name, found) in enumerate(by_pass.items()):
        if index:
            yield ""
        yield style.bold(name)
        yield from _remarks(found, style, width, by=False)


def _remarks(remarks: Iterable[Remark], style: Style, width: int, *, by: bool) -> Iterator[str]:
    """Remarks in order, those that say the same of several layers as one; messages wrap under themselves."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for remark in remarks:
        grouped.setdefault((remark.kind, remark.by, remark.message), []).append(remark.address)
    colours = {"applied": style.green, "missed": style.yellow, "analysis": style.dim}
    for (kind, name, message), addresses in grouped.items():
        where = ", ".join(fold(address or "the plan" for address in addresses))
        head = f"  {colours[kind](f'{kind:<8}')}  {style.bold(where)}" + (f"  {style.dim(name)}" if by else "")
        yield head
        yield from textwrap.wrap(message, width, initial_indent=" " * 12, subsequent_indent=" " * 12)
