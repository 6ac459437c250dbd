"""A plan diff for people and scripts: text, Markdown for a pull request, and JSON. Loudest consequence first."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_planner.ir.diff import LOUDEST_FIRST, MEANING, Change, Consequence, Delta, PlanDiff, Verdict, layer_key
from titan_planner.render.tables import PLAIN, Style, cut, table
from titan_planner.render.values import LABELS, layout, numbers, quantity, short_digest, value

_ROWS_PER_LIST = 8
_VALUE_WIDTH = 44


@dataclass(frozen=True, slots=True)
class _Row:
    address: str
    values: str
    note: str


def text(d: PlanDiff, *, style: Style = PLAIN, width: int | None = 120, full: bool = False) -> str:
    """The diff as aligned text. Long lists show their first entries unless `full`."""
    lines: list[str] = []
    if d.same:
        lines.append("No changes.")
        if d.changes:
            lines.append(f"Only explanations differ: {_explanations(d)}.")
    else:
        lines.append(style.bold(f"{_side(d, before=True)} -> {_side(d, before=False)}"))
        for consequence in LOUDEST_FIRST:
            rows = _rows(d.of(consequence), full, _values)
            if consequence == "none":
                if d.of("none"):
                    lines += ["", f"none: {MEANING['none']}", f"  {_explanations(d)}"]
            elif rows:
                lines += ["", _heading(consequence, style)]
                lines += table([(row.address, row.values, style.dim(row.note)) for row in rows], width=width)
    if not d.same or _moved(d.estimate):
        deltas = table([_delta_cells(delta) for delta in d.estimate if _known(delta)], right=(1, 3, 4))
        if deltas:
            lines += ["", "estimate", *deltas]
        lines += [f"  {style.red(note)}" for note in _fits(d)]
    if not d.same:
        lines += ["", f"verdict: {_coloured(d.verdict, style)}"]
        for words in (d.verdict.reason, *(f"but {condition}" for condition in d.verdict.conditions)):
            lines += textwrap.wrap(words, width or 120, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def markdown(d: PlanDiff, *, full: bool = False) -> str:
    """The diff as GitHub-flavoured Markdown, for a comment on a pull request."""
    if d.same:
        return "**No changes.**" + (f" Only explanations differ: {_explanations(d)}." if d.changes else "")
    lines = [f"### Plan {_code(_side(d, before=True))} → {_code(_side(d, before=False))}", ""]
    lines += [f"**A running job {_sentence(d.verdict)}**: {d.verdict.reason}."]
    lines += [f"- but {condition}" for condition in d.verdict.conditions]
    for consequence in LOUDEST_FIRST[:-1]:
        rows = _rows(d.of(consequence), full, _markdown_values)
        if rows:
            lines += [
                "",
                f"#### {consequence}: {MEANING[consequence]}",
                "",
                "| address | change | why |",
                "|---|---|---|",
            ]
            lines += [f"| {_code(row.address)} | {row.values} | {_plain_cell(row.note)} |" for row in rows]
    if any(_known(delta) for delta in d.estimate):
        lines += ["", "#### estimate", "", "| | before | after | change |", "|---|--:|--:|--:|"]
        for delta in d.estimate:
            if _known(delta):
                label, before, _, after, change = _delta_cells(delta)
                lines.append(f"| {label} | {before} | {after} | {change} |")
        lines += [f"\n**{note}**" for note in _fits(d)]
    if d.of("none"):
        lines += ["", f"<sub>Explanations that differ: {_explanations(d)}</sub>"]
    return "\n".join(lines)


def json_value(d: PlanDiff) -> dict[str, Any]:
    """The whole diff as plain data; nothing is abbreviated."""
    return {
        "same": d.same,
        "before": {"name": d.before.name, "digest": d.before.digest, "fits": d.before.fits},
        "after": {"name": d.after.name, "digest": d.after.digest, "fits": d.after.fits},
        "verdict": {
            "resume": d.verdict.resume,
            "reason": d.verdict.reason,
            "conditions": list(d.verdict.conditions),
        },
        "changes": [
            {
                "address": change.address,
                "kind": change.kind,
                "before": change.before,
                "after": change.after,
                "consequence": change.consequence,
                "note": change.note,
                "count": change.count,
            }
            for change in d.changes
        ],
        "estimate": {
            delta.name: {"before": delta.before, "after": delta.after, "delta": delta.delta, "percent": delta.percent}
            for delta in d.estimate
        },
    }


# ------------------------------------------------------------------ rows


def _rows(changes: Sequence[Change], full: bool, words: Callable[[Change], str]) -> list[_Row]:
    """One row a change; layers that are no run but change alike share one; long lists are cut unless `full`.

    A note that repeats is said once.
    """
    merged: dict[object, list[Change]] = {}
    for index, change in enumerate(changes):
        merged.setdefault(layer_key(change) or index, []).append(change)
    by_list: dict[object, list[list[Change]]] = {}
    for index, group in enumerate(merged.values()):
        by_list.setdefault(_list_of(group[0]) or index, []).append(group)
    rows: list[_Row] = []
    for owner, groups in by_list.items():
        for group in groups if full or len(groups) <= _ROWS_PER_LIST + 1 else groups[:_ROWS_PER_LIST]:
            rows.append(_Row(_address(group), words(group[0]), group[0].note))
        if not full and len(groups) > _ROWS_PER_LIST + 1:
            rows.append(_Row(str(owner), f"... and {len(groups) - _ROWS_PER_LIST} more like these", ""))
    notes = ["", *(row.note for row in rows)]
    return [replace(row, note="") if row.note == before else row for row, before in zip(rows, notes, strict=False)]


def _list_of(change: Change) -> str | None:
    """The list of the plan that an entry, or a field of an entry, belongs to."""
    owner, star, _ = change.pattern.partition(".*")
    return owner if star else None


def _address(group: Sequence[Change]) -> str:
    first = group[0].address
    if len(group) == 1:
        return first + (f" ({group[0].count} layers)" if group[0].count > 1 else "")
    parts = [change.address.split(".") for change in group]
    layers = [i for part in parts for i in _range(part[1])]
    tail = "".join(f".{name}" for name in parts[0][2:])
    return f"layers.{numbers(layers)}{tail} ({len(layers)} layers)"


def _range(segment: str) -> range:
    first, _, last = segment.partition("-")
    return range(int(first), int(last or first) + 1)


def _list_change(change: Change) -> tuple[list[Any], list[Any]] | None:
    """What left and what joined a list; None where that does not tell the change."""
    before, after = change.before, change.after
    if not (isinstance(before, list) and isinstance(after, list)):
        return None
    gone, new = [x for x in before if x not in after], [x for x in after if x not in before]
    return (gone, new) if gone or new else None


def _entry(change: Change, item: Any) -> str:
    return layout(item) if change.pattern == "sharding.*" else value(item)


def _values(change: Change) -> str:
    if change.kind == "added":
        return f"+ {cut(_entry(change, change.after), _VALUE_WIDTH)}"
    if change.kind == "removed":
        return f"- {cut(_entry(change, change.before), _VALUE_WIDTH)}"
    lists = _list_change(change)
    if lists and (change.before and change.after):
        return cut(
            " ".join([*(f"-{value(x)}" for x in lists[0]), *(f"+{value(x)}" for x in lists[1])]), 2 * _VALUE_WIDTH
        )
    return f"{cut(value(change.before), _VALUE_WIDTH)} -> {cut(value(change.after), _VALUE_WIDTH)}"


def _markdown_values(change: Change) -> str:
    if change.kind == "added":
        return f"added {_code(_entry(change, change.after))}"
    if change.kind == "removed":
        return f"removed {_code(_entry(change, change.before))}"
    lists = _list_change(change)
    if lists and (change.before and change.after):
        parts = [*(f"removed {_code(value(x))}" for x in lists[0]), *(f"added {_code(value(x))}" for x in lists[1])]
        return ", ".join(parts)
    return f"{_code(value(change.before))} → {_code(value(change.after))}"


def _explanations(d: PlanDiff) -> str:
    """The changes without consequence in one line: addresses, and counts of what comes in crowds."""
    sections: dict[str, int] = {}
    for change in d.of("none"):
        section = change.address.partition(".")[0]
        crowd = section in ("remarks", "estimate", "request", "cluster")
        sections[section if crowd else change.address] = sections.get(section, 0) + 1 if crowd else 0
    return (
        ", ".join(f"{name} ({many})" if many else name for name, many in sections.items()) or "the wording of the plan"
    )


# ------------------------------------------------------------------ pieces


def _side(d: PlanDiff, before: bool) -> str:
    side = d.before if before else d.after
    return f"{side.name or 'plan'} {short_digest(side.digest)}"


def _heading(consequence: Consequence, style: Style) -> str:
    colour = {"model": style.red, "numerics": style.red, "reshard": style.yellow}.get(consequence, style.bold)
    return f"{colour(consequence)}: {MEANING[consequence]}"


def _coloured(verdict: Verdict, style: Style) -> str:
    colour = style.green if verdict.resume == "continues exactly" else style.yellow
    return (style.red if verdict.resume == "incompatible" else colour)(verdict.resume)


def _sentence(verdict: Verdict) -> str:
    match verdict.resume:
        case "incompatible":
            return "cannot resume"
        case "different numerics (needs --accept-changes)":
            return "resumes with different numerics (needs `--accept-changes`)"
        case _:
            return verdict.resume


def _known(delta: Delta) -> bool:
    return delta.before is not None or delta.after is not None


def _moved(deltas: Sequence[Delta]) -> bool:
    return any(delta.before != delta.after for delta in deltas)


def _delta_cells(delta: Delta) -> tuple[str, str, str, str, str]:
    change = "" if delta.percent is None else ("same" if delta.delta == 0 else f"{delta.percent:+.1f} %")
    return (
        LABELS[delta.name],
        quantity(delta.name, delta.before),
        "->",
        quantity(delta.name, delta.after),
        change,
    )


def _fits(d: PlanDiff) -> Iterator[str]:
    if d.after.fits is False:
        was = ", and neither did the first" if d.before.fits is False else ""
        yield f"the second plan does not fit in memory by its own estimate{was}"
    elif d.before.fits is False and d.after.fits:
        yield "the first plan did not fit in memory; the second does"


def _code(words: str) -> str:
    words = words.replace("|", "\\|").replace("\n", " ")
    return f"`` {words} ``" if "`" in words else f"`{words}`"


def _plain_cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ").replace("*", "\\*")
