"""Predictions beside measurements: one record a row, error tables, rankings, and plots."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

from benchmarks.published.cases import Case, Efficiencies, configuration, with_efficiencies
from titan_planner.cost.estimate import estimate
from titan_planner.ir.plan import Estimate, Plan

Record = dict[str, Any]
Quantity = Literal["step_time", "peak_mem"]

QUANTITIES: tuple[Quantity, ...] = ("step_time", "peak_mem")
TITLES: dict[Quantity, str] = {"step_time": "step time", "peak_mem": "peak memory"}
TABLES = ("source", "quality", "model class", "GPU", "parallelism", "precision", "recomputation", "program")
RANKING_SIZE = 4
"""A ranking of fewer configurations says nothing."""


# ------------------------------------------------------------------ records


def record_of(case: Case, efficiencies: Efficiencies | None = None) -> Record:
    """The case with what is predicted for it, as JSON values. Errors are predicted / measured - 1."""
    measured, row = case.measured, case.row
    found: Record = {
        "id": row.id,
        "file": row.file,
        "number": row.number,
        "tags": dict(case.tags()),
        "status": row.text("status") or None,
        "predicted": None,
        "measured": {
            "step_time_s": measured.step_time_s,
            "peak_mem_gib": measured.peak_mem_gib,
            "peak_mem_printed_gb": measured.peak_mem_printed_gb,
            "step_time_from": measured.step_time_from,
            "memory_kind": measured.memory_kind,
            "out_of_memory": measured.out_of_memory,
        },
        "error": dict.fromkeys(QUANTITIES),
        "not_compared": {},
        "peer": None,
        "skipped": str(case.skipped) if case.skipped else None,
        "skipped_kind": case.skipped.kind if case.skipped else None,
        "executable": None,
        "assumptions": list(case.assumptions),
        "group": None,
    }
    if case.peer is not None:
        found["peer"] = {
            "system": case.peer.system,
            "step_time_s": case.peer.step_time_s,
            "peak_mem_gib": case.peer.peak_mem_gib,
            "error": {
                # As it states them, where it gives no value to compare.
                "step_time": _first(_error(case.peer.step_time_s, measured.step_time_s), case.peer.error_time),
                "peak_mem": _first(_error(case.peer.peak_mem_gib, measured.peak_mem_gib), case.peer.error_mem),
            },
        }
    if efficiencies:
        case = with_efficiencies(case, efficiencies)
    plan, program = case.plan, case.program
    if plan is None or program is None:
        return found
    try:
        priced = estimate(plan, program)
    except Exception as error:  # one row must not end the run; these are counted first in the report
        found["skipped_kind"] = "ERROR in the cost model"
        found["skipped"] = f"ERROR in the cost model: {type(error).__name__}: {error}"
        return found
    seconds = None if priced.step_time_ms is None else priced.step_time_ms / 1000
    memory = comparable_gib(priced, plan, measured.memory_kind, measured.pp_rank)
    found["executable"] = program.executable
    found["predicted"] = {
        "step_time_s": seconds,
        "peak_mem_gib": round(memory, 4),
        "needed_gib": round(priced.peak_memory_gib, 4),
        "fits": priced.fits,
        "tokens_per_s_per_gpu": seconds and plan.batch.tokens_per_step / seconds / plan.cluster.num_gpus,
    }
    found["not_compared"] = {
        name: why for name, why in (("step_time", case.time_unlike), ("peak_mem", case.memory_unlike)) if why
    }
    found["error"] = {
        "step_time": _error(seconds, measured.step_time_s) if case.has_time else None,
        "peak_mem": _error(memory, measured.peak_mem_gib) if case.has_memory else None,
    }
    if measured.peak_mem_printed_gb is not None and case.memory_unlike is None:
        found["error"]["peak_mem_printed"] = _error(memory, measured.peak_mem_printed_gb)
    found["group"] = hashlib.sha256(repr(configuration(case)).encode()).hexdigest()[:16]
    return found


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else round(predicted / measured - 1, 6)


def _first(found: float | None, otherwise: float | None) -> float | None:
    return otherwise if found is None else found


def comparable_gib(priced: Estimate, plan: Plan, kind: str, pp_rank: int | None) -> float:
    """The predicted memory of what was measured: of the fullest rank, or of pipeline rank `pp_rank`.

    What the driver and libraries hold is outside of what torch allocates and reserves, so it counts for `unknown` only
    where the estimate does not tell the parts apart.
    """
    name = "allocated_gib" if kind == "allocated" else "reserved_gib"
    ranks = {plan.pipeline.stages[stage.stage].pp_rank: stage for stage in priced.memory}
    chosen = [ranks[pp_rank]] if pp_rank in ranks else list(ranks.values())
    return max(float(getattr(stage, name, stage.total_gib)) for stage in chosen)


# ------------------------------------------------------------------ summary


def errors(records: Iterable[Record], quantity: Quantity) -> list[tuple[float, Record]]:
    """(signed relative error, record) of those that have one."""
    return [(r["error"][quantity], r) for r in records if r["error"][quantity] is not None]


def statistics_of(found: Sequence[tuple[float, Record]]) -> dict[str, Any]:
    """Number, median and 90th percentile of the absolute error, mean of the signed one, and the share within 8 %."""
    if not found:
        return {"rows": 0}
    sizes = sorted(abs(error) for error, _ in found)
    return {
        "rows": len(found),
        "median_abs": statistics.median(sizes),
        "mean": statistics.fmean(error for error, _ in found),
        "p90_abs": sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)],
        "worst_abs": sizes[-1],
    }


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """All numbers of the report, as JSON values."""
    skipped = [r for r in records if r["skipped"]]
    out_of_memory = [r for r in records if r["measured"]["out_of_memory"] and r["predicted"]]
    return {
        "rows": len(records),
        "expressed": sum(1 for r in records if r["predicted"]),
        "executable": sum(1 for r in records if r["executable"]),
        "skipped": dict(Counter(r["skipped_kind"] for r in skipped).most_common()),
        "targets": {name: statistics_of(errors(chosen, quantity)) for name, quantity, chosen in _targets(records)},
        "overall": {quantity: statistics_of(errors(records, quantity)) for quantity in QUANTITIES},
        "printed_memory": statistics_of(
            [(r["error"]["peak_mem_printed"], r) for r in records if r["error"].get("peak_mem_printed") is not None]
        ),
        "tables": {quantity: {table: _by(records, quantity, table) for table in TABLES} for quantity in QUANTITIES},
        "not_compared": {
            quantity: dict(
                Counter(r["not_compared"][quantity] for r in records if quantity in r["not_compared"]).most_common()
            )
            for quantity in QUANTITIES
        },
        "out_of_memory": {
            "rows": len(out_of_memory),
            "said_to_fit": [r["id"] for r in out_of_memory if r["predicted"]["fits"]],
        },
        "measured_but_said_not_to_fit": [
            r["id"]
            for r in records
            if r["predicted"] and not r["predicted"]["fits"] and r["status"] in (None, "ok") and not r["not_compared"]
        ],
        "ranking": ranking(records),
        "peers": peers(records),
    }


def _targets(records: Sequence[Record]) -> list[tuple[str, Quantity, list[Record]]]:
    best = [r for r in records if r["tags"]["quality"] == "A"]
    return [
        ("step time, dense, quality A", "step_time", [r for r in best if r["tags"]["model class"] == "dense"]),
        ("step time, MoE, quality A", "step_time", [r for r in best if r["tags"]["model class"] == "moe"]),
        ("step time, quality A and B", "step_time", [r for r in records if r["tags"]["quality"] in ("A", "B")]),
        ("peak memory, quality A", "peak_mem", best),
        ("peak memory, quality A and B", "peak_mem", [r for r in records if r["tags"]["quality"] in ("A", "B")]),
    ]


def _by(records: Sequence[Record], quantity: Quantity, table: str) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[tuple[float, Record]]] = defaultdict(list)
    for error, record in errors(records, quantity):
        groups[record["tags"][table]].append((error, record))
    return {name: statistics_of(groups[name]) for name in sorted(groups, key=lambda name: (-len(groups[name]), name))}


def ranking(records: Sequence[Record]) -> dict[str, Any]:
    """Spearman's correlation of predicted and measured throughput in groups of rows that differ in configuration only."""
    groups: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    names: dict[str, Record] = {}
    for error, record in errors(records, "step_time"):
        predicted = record["predicted"]["tokens_per_s_per_gpu"]
        # Equal predictions are equal configurations (repeats, other software): their measurements are averaged.
        groups[record["group"]][predicted].append(predicted * (1 + error))
        names[record["group"]] = record
    found = []
    for group, rates in groups.items():
        if len(rates) < RANKING_SIZE:
            continue
        predicted, measured = list(rates), [statistics.fmean(values) for values in rates.values()]
        example = names[group]
        found.append(
            {
                "example": example["id"],
                "source": example["tags"]["source"],
                "configurations": len(rates),
                "spearman": round(spearman(predicted, measured), 4),
                # Of configurations that were measured to differ by less than noise no order can be right.
                "spread": round(max(measured) / min(measured) - 1, 4),
            }
        )
    found.sort(key=lambda entry: (-entry["configurations"], entry["example"]))
    values = [entry["spearman"] for entry in found]
    return {
        "groups": len(found),
        "median": statistics.median(values) if values else None,
        "at_least_0.9": sum(value >= 0.9 for value in values),
        "each": found,
    }


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation of two equally long sequences, ties sharing their mean rank; 0 when one has no order."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2
    product = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return product / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            ranks[order[position]] = (start + end) / 2
        start = end + 1
    return ranks


def peers(records: Sequence[Record]) -> dict[str, Any]:
    """Another planner's errors and ours on the rows that both have."""
    found: dict[str, Any] = {}
    for system in sorted({r["peer"]["system"] for r in records if r["peer"]}):
        theirs = [r for r in records if r["peer"] and r["peer"]["system"] == system]
        entry: dict[str, Any] = {}
        for quantity in QUANTITIES:
            both = [r for r in theirs if r["peer"]["error"][quantity] is not None and r["error"][quantity] is not None]
            entry[quantity] = {
                "theirs": statistics_of([(r["peer"]["error"][quantity], r) for r in both]),
                "ours": statistics_of([(r["error"][quantity], r) for r in both]),
            }
        entry["each"] = [
            {"id": r["id"], "ours": {q: r["error"][q] for q in QUANTITIES}, "theirs": r["peer"]["error"]}
            for r in theirs
            if any(r["error"][q] is not None for q in QUANTITIES)
        ]
        found[system] = entry
    return found


def leave_one_source_out(
    cases: Sequence[Case], fit: Callable[[Sequence[Case]], Efficiencies]
) -> dict[str, list[Record]]:
    """Source -> records of its rows, predicted with efficiencies that `fit` found on the rows of all other sources."""
    found: dict[str, list[Record]] = {}
    for source in sorted({case.source for case in cases if case.has_time}):
        others = [case for case in cases if case.source != source and case.fitting]
        efficiencies = fit(others)
        found[source] = [record_of(case, efficiencies) for case in cases if case.source == source]
    return found


# ------------------------------------------------------------------ text


def text_report(summary: Mapping[str, Any], records: Sequence[Record], worst: int = 12) -> str:
    """The report as text, in Markdown tables."""
    lines = [
        f"{summary['rows']} rows: {summary['expressed']} expressed as plans ({summary['executable']} of them this runtime "
        f"could execute), {sum(summary['skipped'].values())} skipped",
        "",
        "## Skipped rows",
        "",
        *_table(("rows", "reason"), [(count, kind) for kind, count in summary["skipped"].items()]),
        "",
        "## Numbers not compared",
        "",
        *_table(
            ("rows", "of", "reason"),
            [
                (count, TITLES[quantity], why)
                for quantity in QUANTITIES
                for why, count in summary["not_compared"][quantity].items()
            ],
        ),
        "",
        "## Errors: predicted / measured - 1",
        "",
        *_error_table(
            "rows of", {**summary["targets"], "peak memory printed as GB, of unknown unit": summary["printed_memory"]}
        ),
    ]
    for quantity in QUANTITIES:
        for table, groups in summary["tables"][quantity].items():
            lines += ["", f"### {TITLES[quantity]} by {table}", "", *_error_table(table, groups)]
    lines += ["", *_memory_lines(summary), "", *_ranking_lines(summary["ranking"]), *_peer_lines(summary["peers"])]
    for quantity in QUANTITIES:
        found = sorted(errors(records, quantity), key=lambda entry: -abs(entry[0]))[:worst]
        rows = [(f"{error:+.1%}", r["tags"]["quality"], r["id"], r["tags"]["program"]) for error, r in found]
        lines += ["", f"### Worst rows: {TITLES[quantity]}", "", *_table(("error", "quality", "row", "program"), rows)]
    return "\n".join(lines) + "\n"


def _memory_lines(summary: Mapping[str, Any]) -> list[str]:
    found = summary["out_of_memory"]
    bad = found["said_to_fit"]
    refused = summary["measured_but_said_not_to_fit"]
    return [
        "## Fits or not",
        "",
        f"{found['rows']} rows ran out of memory; {len(bad)} of them are said to fit"
        + (f": {', '.join(bad)}" if bad else ""),
        f"{len(refused)} rows that ran are said not to fit" + (f", e.g. {', '.join(refused[:8])}" if refused else ""),
    ]


def _ranking_lines(found: Mapping[str, Any]) -> list[str]:
    if not found["groups"]:
        return ["## Ranking", "", "no group of rows that differ in configuration only has predicted times"]
    rows = [
        (
            f"{entry['spearman']:.2f}",
            entry["configurations"],
            f"{entry['spread']:.0%}",
            entry["source"],
            entry["example"],
        )
        for entry in found["each"]
    ]
    return [
        "## Ranking: rows that differ in configuration only",
        "",
        f"{found['groups']} groups, median Spearman {found['median']:.2f}, {found['at_least_0.9']} of them at least 0.9",
        "",
        *_table(("Spearman", "configurations", "spread of throughput", "source", "with"), rows),
    ]


def _peer_lines(found: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for system, entry in found.items():
        stats = {
            f"{TITLES[quantity]}, {who}": entry[quantity][whose]
            for quantity in QUANTITIES
            for who, whose in ((system, "theirs"), ("this planner", "ours"))
        }
        lines += ["", f"## Beside {system}: the same rows", "", *_error_table("", stats), ""]
        rows = [
            (
                each["id"],
                *(_percent(each[whose][quantity]) for quantity in QUANTITIES for whose in ("ours", "theirs")),
            )
            for each in entry["each"]
        ]
        head = ("row", *(f"{TITLES[quantity]}, {who}" for quantity in QUANTITIES for who in ("ours", "theirs")))
        lines += _table(head, rows)
    return lines


def _error_table(name: str, groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            group,
            stats["rows"],
            *(_percent(stats.get(key), signed=key == "mean") for key in ("median_abs", "mean", "p90_abs", "worst_abs")),
        )
        for group, stats in groups.items()
    ]
    return _table((name, "rows", "median abs", "mean", "p90 abs", "worst"), rows)


def _percent(value: float | None, signed: bool = True) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


# ------------------------------------------------------------------ plots

_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#8c564b",
    "#e377c2",
    "#17becf",
    "#7f7f7f",
    "#bcbd22",
)
_SIZE, _LEFT, _TOP, _LEGEND = 520, 70, 40, 230


def plot(records: Sequence[Record], quantity: Quantity, group: str = "source") -> str | None:
    """Predicted over measured on logarithmic axes as an SVG, a colour for each group; None without points."""
    unit, key = ("s", "step_time_s") if quantity == "step_time" else ("GiB", "peak_mem_gib")
    points = [(r["measured"][key], r["predicted"][key], r) for _, r in errors(records, quantity)]
    points = [point for point in points if point[0] > 0 and point[1] > 0]
    if not points:
        return None
    values = [value for point in points for value in point[:2]]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * _SIZE

    def line(first: tuple[float, float], second: tuple[float, float], style: str) -> str:
        (x1, y1), (x2, y2) = first, second
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'

    groups = [name for name, _ in Counter(r["tags"][group] for *_, r in points).most_common()]
    title = f"{TITLES[quantity].capitalize()}: predicted over measured, {len(points)} published rows"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _SIZE + _LEGEND}" height="{_TOP + _SIZE + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
        f'<g transform="translate({_LEFT},{_TOP})">',
        f'<rect width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#444"/>',
        f'<clipPath id="frame"><rect width="{_SIZE}" height="{_SIZE}"/></clipPath>',
    ]
    for power in range(math.floor(low), math.ceil(high) + 1):
        for factor in (1, 2, 5):
            value = factor * 10.0**power
            if not low <= math.log10(value) <= high:
                continue
            place = at(value)
            parts += [
                line((place, 0), (place, _SIZE), 'stroke="#eee"'),
                line((0, _SIZE - place), (_SIZE, _SIZE - place), 'stroke="#eee"'),
                f'<text x="{place:.1f}" y="{_SIZE + 16}" text-anchor="middle">{value:g}</text>',
                f'<text x="-6" y="{_SIZE - place + 4:.1f}" text-anchor="end">{value:g}</text>',
            ]
    parts.append('<g clip-path="url(#frame)">')
    dashed = 'stroke="#999" stroke-dasharray="4"'
    for ratio, style in ((1.0, 'stroke="#000"'), (1.1, dashed), (1 / 1.1, dashed)):
        shift = math.log10(ratio) / (high - low) * _SIZE
        parts.append(line((0, _SIZE - shift), (_SIZE, -shift), style))
    for measured, predicted, record in points:
        colour = _COLOURS[groups.index(record["tags"][group]) % len(_COLOURS)]
        parts.append(
            f'<circle cx="{at(measured):.1f}" cy="{_SIZE - at(predicted):.1f}" r="2.6" fill="{colour}" fill-opacity="0.6">'
            f"<title>{escape(record['id'])}: {predicted / measured - 1:+.1%}</title></circle>"
        )
    parts.append("</g>")
    parts += [
        f'<text x="{_SIZE / 2}" y="{_SIZE + 40}" text-anchor="middle">measured, {unit}</text>',
        f'<text transform="translate(-48,{_SIZE / 2}) rotate(-90)" text-anchor="middle">predicted, {unit} (dashed: 10 %)</text>',
    ]
    for index, name in enumerate(groups):
        y = 12 + 18 * index
        parts += [
            f'<circle cx="{_SIZE + 18}" cy="{y - 4}" r="5" fill="{_COLOURS[index % len(_COLOURS)]}"/>',
            f'<text x="{_SIZE + 30}" y="{y}">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</g>", "</svg>", ""])
