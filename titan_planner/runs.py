"""What a finished run says of its speed: the plan it followed, and its measured step time."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_planner.ir.codec import digest
from titan_planner.ir.errors import Complaint, PlanError
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import load_plan

PLAN_FILE, SPEED_FILE = "plan.json", "speed.jsonl"

STEP_MS = (1e-3, 1e9)
"""Step times that a run can have had, in ms: from a microsecond to eleven days."""

PEAK_GIB = (1e-6, 1e6)
"""The same of its peak memory."""


@dataclass(frozen=True, slots=True)
class Run:
    """One folder of a run: medians over the measurements that were taken under its last plan."""

    folder: Path
    plan: Plan
    measurements: int
    step_seconds: float
    peak_memory_gib: float | None


def read_run(folder: Path) -> Run:
    """The run that wrote `folder`. Raises `PlanError` with what is missing."""
    for name, what in ((PLAN_FILE, "the plan it followed"), (SPEED_FILE, "measured speed")):
        if not (folder / name).is_file():
            raise PlanError(
                Complaint(
                    f"`{folder}` is no folder of a run: it has no {name}, which holds {what}",
                    hint="name the job.dump_folder of a run of some logged steps beyond its first",
                )
            )
    plan = load_plan(folder / PLAN_FILE)
    named = digest(plan)
    lines = [line for line in _lines(folder / SPEED_FILE) if line.get("plan") == named]
    given = [line["step_time_ms"] for line in lines if "step_time_ms" in line]
    steps = [float(value) for value in given if _plausible(value, STEP_MS)]
    if given and not steps:
        raise PlanError(
            Complaint(
                f"`{folder / SPEED_FILE}` has no step time that could be one: {_short(given[0])} is no number of "
                f"milliseconds between {STEP_MS[0]:g} and {STEP_MS[1]:g}",
                hint="was the file edited? the runtime writes measured times only",
            )
        )
    if not steps:
        raise PlanError(
            Complaint(
                f"`{folder / SPEED_FILE}` has no measurement under the plan beside it (digest {named[:12]})",
                hint="run some more steps: the first one is never measured, and then every metrics.log_freq",
            )
        )
    sizes = [line["peak_memory_gib"] for line in lines if "peak_memory_gib" in line]
    peaks = [float(size) for size in sizes if _plausible(size, PEAK_GIB)]
    return Run(folder, plan, len(steps), statistics.median(steps) / 1e3, max(peaks, default=None))


def _plausible(value: Any, within: tuple[float, float]) -> bool:
    """Whether `value` is a number that can have been measured. JSON's readers take Infinity and whole numbers of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and within[0] <= value <= within[1]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return f"`{text}`" if len(text) <= 40 else f"`{text[:30]}...`"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError):  # cut short by a kill, or never written by the runtime
            continue
        if isinstance(line, dict):
            yield line
