"""How values and numbers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from titan_planner.ir.codec import digest
from titan_planner.ir.fqn import runs
from titan_planner.ir.parallel import AXES, Mesh
from titan_planner.ir.plan import Plan

DIGEST_DIGITS = 12


def short_digest(plan_digest: str) -> str:
    """Enough of a digest to tell plans apart."""
    return plan_digest[:DIGEST_DIGITS]


def digest_of(plan: Plan) -> str:
    """The short digest of `plan`."""
    return short_digest(digest(plan))


def value(item: Any) -> str:
    """A JSON value as short text: `null`, `true`, `0.0003`, `[a, b]`, `stage 3, checkpoint full`."""
    match item:
        case None:
            return "null"
        case bool():
            return "true" if item else "false"
        case str():
            return item if item else '""'
        case Mapping():
            parts = [f"{name} {value(part)}" for name, part in item.items() if part not in (None, [])]
            return ", ".join(parts) or "{}"
        case list() | tuple():
            return f"[{', '.join(value(part) for part in item)}]"
        case float():
            return repr(item) if abs(item) < 1e7 or item != int(item) else f"{item:g}"
        case _:
            return str(item)


def layout(row: Mapping[str, Any]) -> str:
    """A sharding entry in short: `weight S(1), input S(2), output P -> S(1)`."""
    parts = [f"weight {row['weight']}"] if row["weight"] else []
    for side in ("input", "output"):
        arrives, needed = row[side], row[f"{side}_needed"]
        if arrives is not None:
            parts.append(f"{side} {arrives}" + (f" -> {needed}" if needed not in (None, arrives) else ""))
    return ", ".join(parts)


def count(number: float) -> str:
    """A large count with a unit: 8.03B, 405.9B, 2.1M, 512."""
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        if number >= factor:
            scaled = number / (1e3 if unit == "K" else factor)
            return f"{scaled:.2f}{unit}" if scaled < 100 else f"{scaled:.1f}{unit}"
    return f"{number:g}"


def quantity(name: str, number: float | None) -> str:
    """A number of the estimate in the unit that its name says."""
    if number is None:
        return "unknown"
    if name.endswith("_ms"):
        return f"{number:,.1f} ms" if number < 10_000 else f"{number / 1000:,.2f} s"
    if name.endswith("_gib"):
        return f"{number:.2f} GiB"
    if name == "mfu":
        return f"{100 * number:.1f} %"
    return f"{number:,.0f}"


LABELS = {"step_time_ms": "step time", "tokens_per_second_per_gpu": "tokens/s/GPU", "mfu": "MFU",
          "peak_memory_gib": "peak memory"}  # fmt: skip
"""Field of the estimate -> what people call it."""


def mesh(degrees: Mesh) -> str:
    """`pp8 x dp_shard8 x tp8 = 512`; axes of degree 1 are left out."""
    axes = [f"{axis}{degrees.degree(axis)}" for axis in AXES if degrees.degree(axis) > 1]
    experts = "".join(f", {axis}{degrees.degree(axis)}" for axis in ("ep", "etp") if degrees.degree(axis) > 1)
    return f"{' x '.join(axes) or 'one rank'} = {degrees.world_size}{experts}"


def numbers(found: Iterable[int], limit: int = 4) -> str:
    """Ascending numbers in few words: `0-31`, `0,2..124`, `0-2, 5, 9 ...`."""
    given = list(found)
    ranges = runs(given)
    stride = given[1] - given[0] if len(given) > 2 else 0
    if stride > 1 and all(b - a == stride for a, b in pairwise(given)):
        return f"{given[0]},{given[1]}..{given[-1]}"
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(parts) if len(parts) <= limit else ", ".join(parts[: limit - 1]) + f" .. {parts[-1]}"


def shape(dims: Iterable[int]) -> str:
    """`[128256, 16384]`."""
    return f"[{', '.join(str(dim) for dim in dims)}]"
