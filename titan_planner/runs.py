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
    steps = [line["step_time_ms"] for line in lines if _positive(line.get("step_time_ms"))]
    if not steps:
        raise PlanError(
            Complaint(
                f"`{folder / SPEED_FILE}` has no measurement under the plan beside it (digest {named[:12]})",
                hint="run some more steps: the first one is never measured, and then every metrics.log_freq",
            )
        )
    peaks = [line["peak_memory_gib"] for line in lines if _positive(line.get("peak_memory_gib"))]
    return Run(folder, plan, len(steps), statistics.median(steps) / 1e3, max(peaks, default=None))


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text.decode("utf-8"))
        except ValueError:  # cut short by a kill
            continue
        if isinstance(line, dict):
            yield line
