"""Why a plan is as it is: the decision record, or all that the plan says about one address."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import islice
from typing import Any

from titan_planner.ir.codec import encode
from titan_planner.ir.diff import Consequence, consequence_of, entry, keyed
from titan_planner.ir.errors import Complaint, PlanError
from titan_planner.ir.fqn import fold, matches
from titan_planner.ir.model import Block, Model
from titan_planner.ir.parallel import AXES
from titan_planner.ir.plan import Plan, Remark
from titan_planner.ir.record import field_descriptors, field_types
from titan_planner.render import values
from titan_planner.render.asked import SPEC_ADDRESSES, Asked, asked
from titan_planner.render.derivation import derivation
from titan_planner.render.modules import Modules, policy_words, reshard_words
from titan_planner.render.show import (
    MEMORY_PARTS,
    checkpointing_words,
    float8_words,
    stage_rows,
    weight_json,
    weight_row,
)
from titan_planner.render.tables import PLAIN, Style, cut, pairs, table

_VALUE_WIDTH = 32
_DOC_ROOM = 40
_TOLD_AS_FACTS = ("pipeline.stages.", "estimate.memory.")


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
    see_also: tuple[str, ...] = ()


def explain(plan: Plan, address: str | None = None, *, style: Style = PLAIN, width: int = 100) -> str:
    """The whole decision record, or what the plan says about `address`. An unknown address raises `PlanError`."""
    if address is None:
        return "\n".join(_record(plan.remarks, style, width)) or "The plan has no remarks."
    found = explanation(plan, address)
    lines: list[str] = []
    if len(found.leaves) == 1 and found.leaves[0].address == found.address:
        lines += _leaf(found.leaves[0], style, width)
    elif found.leaves or not found.topics:
        lines.append(style.bold(found.address))
        lines += textwrap.wrap(found.doc, width, initial_indent="  ", subsequent_indent="  ")
        told = [leaf for leaf in found.leaves if not leaf.address.startswith(_TOLD_AS_FACTS)]
        lines += [""] * bool(told) + _leaf_rows(told, found.address, style, width)
        lines += [""] * bool(found.facts)
    lines += pairs(found.facts, width=width)
    for topic in found.topics:
        lines += [style.bold(topic.title), *pairs(topic.facts, width=width), *table(topic.rows, indent=4, width=width)]
    if found.remarks:
        lines += ["", style.bold("remarks"), *_remarks(found.remarks, style, width, by=True)]
    else:
        lines += ["", style.dim("no pass remarked on it")]
    if found.see_also:
        lines += ["", f"see also: {', '.join(found.see_also)}"]
    return "\n".join(lines)


def _leaf_rows(leaves: Sequence[Leaf], section: str, style: Style, width: int) -> list[str]:
    """Name within the section, value, how it was asked for, and meaning where there is room for it."""
    shown = []
    for leaf in leaves:
        placed = leaf.address.startswith("sharding.") and isinstance(leaf.value, dict)
        words = values.layout(leaf.value) if placed else values.value(leaf.value)
        shown.append(
            (leaf.address.removeprefix(f"{section}."), words if not leaf.doc else cut(words, _VALUE_WIDTH), leaf)
        )
    aligned = [(name, words) for name, words, leaf in shown if leaf.doc]
    taken = max((len(name) for name, _ in aligned), default=0) + max((len(words) for _, words in aligned), default=0)
    roomy = width - taken >= _DOC_ROOM
    rows: list[tuple[str, ...]] = []
    for name, words, leaf in shown:
        if not leaf.doc:
            rows.append((name, style.cyan(words)))
            continue
        how = style.dim(leaf.asked.how if leaf.asked else "")
        rows.append((name, style.cyan(words), how, *([style.dim(leaf.doc)] * roomy)))
    return table(rows, width=width)


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
        "see_also": list(found.see_also),
    }


def explanation(plan: Plan, address: str) -> Explanation:
    """Everything at `address`: a value or section of the plan, a module or selector, or what only remarks speak of."""
    entry_of = re.match(r"layers\[(\d+)\]", address.strip())
    if entry_of and int(entry_of[1]) < len(plan.layers):
        # A position, as complaints about a plan's file count: the embedding is entry 0.
        address = plan.layers[int(entry_of[1])].fqn + address.strip()[entry_of.end() :]
    wanted = _normal(address)
    modules = Modules(plan)
    if not wanted:
        raise PlanError(Complaint("the address is empty", address, hint=_ADDRESS_HINT))
    field = re.fullmatch(r"(.+)\.(stage|checkpoint|fqn)", wanted)
    stem = wanted.removesuffix(".weight")
    named = [name for name in {**modules.names, **modules.targets} if matches(stem, name)]
    if stem == "layers":
        named = [name for name in modules.layers if name.startswith("layers.")]
    if named:
        remarks = _about(plan, stem)
        return Explanation(
            stem, "", (), tuple(_topics(modules, named)), (), remarks, _see_also(modules, named, remarks)
        )
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
    """`lm_head` as `output`, `fsdp.units[3]` as `fsdp.units.3`, and TorchTitan's newer names as ours."""
    address = re.sub(r"\[(\d+)\]", r".\1", address.strip())
    address = re.sub(r"^lm_head(?=\.|$)", "output", address)
    return re.sub(r"\.attention\.qkv_linear\.(w[qkv])(?=\.|$)", r".attention.\1", address)


def _find(plan: Plan, address: str) -> tuple[Any, str, str] | None:
    """The value at `address` with its address in the Plan type and its doc.

    `model.layers` is the number of blocks and `model.layers.3-5` the block that stands there, as a diff calls them.
    """
    value: Any = plan
    pattern, doc, rest = "", "", address
    while rest:
        if isinstance(value, Model) and rest.partition(".")[0] == "layers":
            if rest == "layers":
                return value.num_layers, "model.blocks.*.repeat", "Number of transformer blocks."
            number, _, rest = rest.removeprefix("layers.").partition(".")
            first = number.partition("-")[0]
            if not first.isdecimal() or int(first) >= value.num_layers:
                return None
            value = next(islice(value.layers(), int(first), None))
            pattern, doc = "model.blocks.*.block", _first_line(Block)
            continue
        if is_dataclass(value):
            name, _, rest = rest.partition(".")
            if name not in field_types(type(value)):
                return None
            label = field_descriptors(type(value)).get(name)
            value = getattr(value, name)
            doc = label.doc if label else _first_line(type(value))
            pattern = f"{pattern}.{name}" if pattern else name
            continue
        if isinstance(value, Mapping):
            entries: Mapping[str, Any] = value
        elif isinstance(value, tuple) and any(is_dataclass(item) for item in value):
            # `layers.3` is the block of that number, which is not the third entry of the list.
            positions = {} if pattern == "layers" else {str(i): item for i, item in enumerate(value)}
            entries = {**positions, **keyed(value, pattern)}
        else:
            return None
        key = max((k for k in entries if rest == k or rest.startswith(f"{k}.")), key=len, default=None)
        if key is None:
            return None
        value, rest, pattern = entries[key], rest[len(key) + 1 :], f"{pattern}.*"
        if is_dataclass(value):
            doc = _first_line(type(value))
    return value, pattern, doc


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


def _spec_address(address: str) -> str | None:
    """Where the plan decides what the spec calls `address`."""
    address = address.removeprefix("request.")
    if address in SPEC_ADDRESSES:
        return SPEC_ADDRESSES[address]
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


_ADDRESS_HINT = "an address is a module (`layers.0.attention.wk`), a section (`mesh`) or a value (`optimizer.lr`)"


def _unknown(plan: Plan, modules: Modules, given: str, wanted: str) -> Complaint:
    layer = re.match(r"layers\.(\d+)(?:\.|$)", wanted)
    last = plan.model.num_layers - 1
    if layer and int(layer[1]) > last:
        message = f"`{given}` is not in the plan: the model has the layers 0 to {last}"
        rest = wanted[layer.end(1) :]
        return Complaint(message, given, hint=f"ask for `layers.{last}{rest}`")
    # Layers are alike in their names, so those of the layer asked about are enough.
    number = layer[1] if layer else "0"
    pool = [name for name in modules.names if not name.startswith("layers.") or name.split(".")[1] == number]
    pool += [*_addresses(plan, "", "")]
    parent, _, tail = wanted.rpartition(".")
    same_tail = [address for address in pool if address.endswith(f".{tail}")]
    close = difflib.get_close_matches(wanted, pool, 3, 0.8)
    suggestions = list(dict.fromkeys([*same_tail, *close]))[:3]
    owner = _find(plan, parent) if parent else None
    if suggestions:
        hint = f"did you mean {' or '.join(f'`{name}`' for name in suggestions)}?"
    elif owner is not None and is_dataclass(owner[0]):
        hint = f"`{parent}` has {', '.join(field_types(type(owner[0])))}"
    else:
        hint = _ADDRESS_HINT
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
    """The modules in `named`, those that differ in nothing but their stage together."""
    alike: dict[object, tuple[list[str], Topic]] = {}
    for name in named:
        topic = _topic(modules, name)
        alike.setdefault((topic.facts, topic.rows), ([], topic))[0].append(name)
    for names, topic in alike.values():
        rows, columns = modules.linears.get(names[0], (0, 0))
        kind = f"  linear {columns} -> {rows}" if rows else ""
        stage = _stage_facts(modules, names)
        each = " each" * (len(names) > 1)
        facts = [(label, words + each * (label == "parameters")) for label, words in topic.facts]
        yield Topic(f"{', '.join(fold(names))}{kind}", (*stage, *facts), topic.weights, topic.rows)


def _stage_facts(modules: Modules, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The pipeline stages that hold the modules `names`, and their ranks."""
    plan = modules.plan
    if plan.mesh.pp == 1:
        return ()
    stages = sorted({layer.stage for name in names if (layer := modules.layer(name)) is not None})
    ranks = sorted({plan.pipeline.stages[stage].pp_rank for stage in stages})
    many = "s" * (len(ranks) > 1)
    where = f"{values.numbers(stages)}, on pipeline rank{many} {values.numbers(ranks)}"
    return (("stages" if len(stages) > 1 else "stage", where),)


def _see_also(modules: Modules, named: Sequence[str], shown: Sequence[Remark]) -> tuple[str, ...]:
    """Sections that decide about the modules `named`, where a pass has remarked on them."""
    sections = {
        "activation_checkpoint": any(name.startswith("layers.") for name in named),
        "float8": any(name in modules.linears for name in named),
        "pipeline": modules.plan.mesh.pp > 1,
        "mesh.tp": any(name in modules.sharding for name in named),
        "fsdp": True,
    }
    others = [remark for remark in modules.plan.remarks if remark not in shown]
    return tuple(
        section
        for section, concerned in sections.items()
        if concerned and any(related(section, remark.address) for remark in others)
    )


def _topic(modules: Modules, fqn: str) -> Topic:
    plan = modules.plan
    owned = modules.weights(fqn)
    found = [modules.weight(parameter, parameter.fqn[len(fqn) + 1 :]) for parameter in owned]
    rows = [weight_row(plan, weight) for weight in found]
    facts: list[tuple[str, str]] = []
    if owned:
        facts.append(("parameters", values.count(sum(parameter.numel for parameter in owned))))
    elif fqn == "output":
        facts.append(("parameters", "none of its own: tied to tok_embeddings"))
    if len(owned) == 1 and owned[0].target == fqn:
        _, shape, arrow, local, placements, _ = rows.pop()
        facts.append(("weight", f"{shape} {arrow} {local} on a rank  {placements}".rstrip()))
    facts += [*_shared_facts(modules, fqn), *_block_facts(modules, fqn)]
    return Topic(fqn, tuple(facts), tuple(weight_json(weight) for weight in found), tuple(rows))


def _shared_facts(modules: Modules, fqn: str) -> Iterator[tuple[str, str]]:
    """How ranks share a module: its layouts on the axes, and its FSDP unit."""
    plan = modules.plan
    unit = modules.unit(fqn)
    for row in modules.sharding.get(fqn, ()):
        yield row.axis, values.layout(encode(row))
    if plan.fsdp.strategy == "ddp":
        yield "ddp", f"replicated on {plan.mesh.dp} ranks"
    elif plan.mesh.fsdp > 1:
        freed = f"unit {'+'.join(unit.modules)}, {reshard_words(unit.reshard_after_forward)}" if unit else "root unit"
        owned = modules.weights(fqn)
        over = {plan.mesh.efsdp if parameter.is_expert else plan.mesh.fsdp for parameter in owned} or {plan.mesh.fsdp}
        yield "fsdp", f"{freed}, sharded over {' or '.join(str(ranks) for ranks in sorted(over))} ranks"


def _block_facts(modules: Modules, fqn: str) -> Iterator[tuple[str, str]]:
    """How a rank computes a module: what it recomputes, and whether in Float8."""
    policy, status = modules.policy(fqn), modules.float8(fqn)
    if policy is not None and fqn.startswith("layers."):
        how = _asked_words(asked(modules.plan, "layers.*.checkpoint"))
        yield "checkpoint", f"{policy.name}: {policy_words(policy)}" + (f"; asked: {how}" if how else "")
    if status is not None:
        yield "float8", _float8_fact(modules.plan, status.converted, status.reason)


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
            yield from ((f"ranks of {axis}", _axis_ranks(plan, axis)) for axis in AXES
                        if name in ("", axis) and plan.mesh.degree(axis) > 1)  # fmt: skip
            if name in ("", "tp") and plan.sharding:
                cut = [row.module for row in plan.sharding if row.weight not in (None, "R")]
                yield "tp shards", ", ".join(cut)
        case "batch":
            yield from _batch_facts(plan)
        case "pipeline":
            yield from ((f"stage {row[0]}", f"rank {row[1]}: {row[2]}") for row in stage_rows(plan)[1:]
                        if name in ("", "stages", f"stages.{row[0]}"))  # fmt: skip
        case "activation_checkpoint":
            yield "layers", checkpointing_words(plan)
            yield from ((policy.name, policy_words(policy)) for policy in plan.activation_checkpoint.policies)
        case "float8":
            yield "linears", float8_words(plan, modules)
        case "estimate" if plan.estimate is not None:
            peak, available = plan.estimate.peak_memory_gib, plan.estimate.memory_available_gib
            fits = "fits" if plan.estimate.fits else "does NOT fit"
            if name in ("", "fits") or name.startswith("memory"):
                yield "peak memory", f"{peak:.2f} of {available:.2f} GiB: {fits}"
            yield from derivation(plan, name)
            for memory in plan.estimate.memory if name == "" else ():
                parts = [(word, getattr(memory, part)) for part, word in MEMORY_PARTS.items()]
                words = ", ".join(f"{word} {size:.2f}" for word, size in parts if size)
                yield f"stage {memory.stage}", words


def _batch_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    batch, micro = plan.batch, plan.pipeline.microbatches
    steps = f"{batch.accumulation_steps} accumulation steps"
    product = f"{batch.local_batch_size} local x {plan.mesh.dp} data-parallel ranks x {steps}"
    yield "global", f"{product} = {batch.global_batch_size} sequences"
    yield "tokens", f"{batch.tokens_per_step:,} a step"
    if plan.mesh.pp > 1:
        yield "pipeline", f"{micro} microbatches of {batch.microbatch_size} = {batch.local_batch_size} local"


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
        rows.append(("changing it", _EFFECT[leaf.consequence]))
    return [*lines, *pairs(rows, width=width)]


_EFFECT: Mapping[Consequence, str] = {
    "model": "makes checkpoints incompatible",
    "numerics": "changes numerics",
    "reshard": "reshards checkpoints",
    "speed": "changes speed or memory only",
    "job": "changes what the run does, not what it trains",
    "none": "changes nothing that runs",
}


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
