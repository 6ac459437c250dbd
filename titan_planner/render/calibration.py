"""What a calibration moved, and how well it predicts the runs that it was fitted to."""

from __future__ import annotations

from collections.abc import Sequence

from titan_planner.calibrate import BOUNDS, Fit
from titan_planner.render.tables import table
from titan_planner.runs import Run


def calibration_text(runs: Sequence[Run], found: Fit, target: str) -> str:
    """One line a parameter, one a run, and what to do with the file."""
    start = runs[0].plan.cluster.gpu.efficiency
    rows = [("parameter", "before", "now")]
    rows += [
        (name, f"{getattr(start, name):.3g}", f"{getattr(found.efficiency, name):.3g}")
        for name in BOUNDS
        if getattr(start, name) != getattr(found.efficiency, name)
    ]
    lines = table(rows)
    errors = [("run", "measured", "error before", "error now")]
    errors += [
        (str(run.folder), f"{1e3 * run.step_seconds:,.1f} ms", f"{before:+.1%}", f"{after:+.1%}")
        for run, before, after in zip(runs, found.before, found.after, strict=True)
    ]
    lines += ["", *table(errors)]
    lines += ["", *(f"warning: {warning}" for warning in found.warnings)] if found.warnings else []
    lines += ["", f"wrote {target}; a spec uses it by `extends: {target}`"]
    return "\n".join(lines)
