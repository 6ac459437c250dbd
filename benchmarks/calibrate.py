"""Fit the hardware catalogue's efficiencies on published step times, and say how well they do on what they were not fitted on.

    python benchmarks/calibrate.py --rows DIR [--write] [--cross] [--json OUT]

Per GPU, a handful of numbers (titan_planner/calibrate.py: bounds, priors, robust least squares) on dense rows of quality A, and B
where a GPU has few; at most `CAP` rows of a source, spread evenly over them, so that a long table does not outvote the others.
`--write` puts the result into titan_planner/hardware/fitted.py. `--cross` fits once more for every source without its rows and
predicts them: the error that a reader's own cluster, which is in no table, should expect.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.published.cases import Case, load_cases  # noqa: E402
from titan_planner.calibrate import Fit, Measured, fit, predicted  # noqa: E402
from titan_planner.hardware.efficiencies import PRIORS  # noqa: E402
from titan_planner.ir.cluster import Efficiency  # noqa: E402

CAP = 40
"""Rows of one source and program that a fit takes."""

ENOUGH = 20
"""With fewer rows of quality A, a GPU's rows of quality B count too."""

TOGETHER = {"a100-sxm-40gb": "a100-sxm-80gb", "gb300-288gb": "gb200-186gb"}
"""GPUs whose rows are fitted with another's: the same chip with other memory or a newer revision of it."""


def fitted_gpu(case: Case) -> str:
    """The catalogue GPU whose numbers `case` helps to fit."""
    assert case.plan is not None
    name = case.plan.cluster.gpu.name
    return TOGETHER.get(name, name)


def runs_of(cases: Sequence[Case], gpu: str, without: str | None = None) -> list[Measured]:
    """What `gpu` is fitted on, without the rows of one source."""
    mine = [case for case in cases if fitted_gpu(case) == gpu and not is_moe(case) and case.row.source != without]
    best = [case for case in mine if case.row.quality == "A"]
    if len(best) < ENOUGH:
        best = [case for case in mine if case.row.quality in ("A", "B")]
    by: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in best:
        assert case.program is not None
        by[case.row.source, case.program.name].append(case)
    chosen = []
    for _, rows in sorted(by.items()):
        step = max(1.0, len(rows) / CAP)
        chosen += [rows[int(index * step)] for index in range(min(CAP, len(rows)))]
    return [measured(case) for case in chosen]


def measured(case: Case) -> Measured:
    """`case` as the fit wants it."""
    assert case.plan is not None
    assert case.program is not None
    assert case.measured.step_time_s is not None
    return Measured(case.row.id, case.plan, case.measured.step_time_s, case.program)


def is_moe(case: Case) -> bool:
    """Whether its model routes tokens."""
    return bool(case.row.value("model.moe"))


def fit_gpu(runs: Sequence[Measured], gpu: str, sources: int) -> Fit:
    """The numbers of `gpu`, from the prior of its architecture."""
    return fit(runs, PRIORS[gpu], source=f"{len(runs)} published rows of {sources} sources (benchmarks/calibrate.py)")


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print, and write what is asked for."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", required=True, type=Path, metavar="DIR", help="folder of published rows")
    parser.add_argument("--write", action="store_true", help="write titan_planner/hardware/fitted.py")
    parser.add_argument("--cross", action="store_true", help="predict every source from fits without it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the fits and errors")
    parser.add_argument("--gpu", action="append", help="only these GPUs")
    parser.add_argument(
        "--source",
        help="only this source's rows: one set of numbers for one cluster, as `titan-plan calibrate` fits it",
    )
    arguments = parser.parse_args(argv)
    cases = [
        case
        for case in load_cases(arguments.rows)
        if case.plan is not None and case.measured.step_time_s is not None and not case.time_unlike
        if arguments.source is None or case.row.source == arguments.source
    ]
    found: dict[str, Fit] = {}
    report: dict[str, object] = {}
    for gpu in arguments.gpu or PRIORS:
        runs = runs_of(cases, gpu)
        if not runs:
            continue
        names = {run.name for run in runs}
        sources = {case.row.source for case in cases if case.row.id in names}
        result = fit_gpu(runs, gpu, len(sources))
        found[gpu] = result
        print(f"{gpu}: {len(runs)} rows of {len(sources)} sources, median error "
              f"{_median(result.before):.1%} before, {_median(result.after):.1%} after")  # fmt: skip
        print("  " + ", ".join(f"{f.name} {getattr(result.efficiency, f.name):.3g}" for f in fields(Efficiency)
                               if f.name != "source"))  # fmt: skip
        if arguments.source is not None:
            print(f"  {arguments.source} alone: mean {statistics.mean(map(abs, result.after)):.2%}, "
                  f"worst {max(map(abs, result.after)):.2%}")  # fmt: skip
        entry: dict[str, object] = {
            "rows": {run.name: error for run, error in zip(runs, result.after, strict=True)},
            "efficiency": {f.name: getattr(result.efficiency, f.name) for f in fields(Efficiency)},
            "median_abs_error": _median(result.after),
        }
        if arguments.cross:
            entry["left_out"] = _cross(cases, gpu, sorted(sources))
        report[gpu] = entry
    if arguments.write:
        _write_fitted(found)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _cross(cases: Sequence[Case], gpu: str, sources: Sequence[str]) -> dict[str, dict[str, float]]:
    """Every source's errors when it was not fitted on, and when it was."""
    table = {}
    for source in sources:
        rest = runs_of(cases, gpu, without=source)
        mine = [
            measured(c) for c in cases if fitted_gpu(c) == gpu and c.row.source == source and c.row.quality == "A"
            and not is_moe(c)
        ]  # fmt: skip
        if not mine:
            continue
        # Without any other row of this GPU it is the prior that predicts.
        values = fit_gpu(rest, gpu, 0).efficiency if rest else PRIORS[gpu]
        errors = [predicted(run, values) / run.step_seconds - 1 for run in mine]
        table[source] = {"rows": len(mine), "median_abs": _median(errors), "mean": statistics.mean(errors)}
        print(
            f"  without {source}: {len(mine)} rows, median {_median(errors):.1%}, mean {statistics.mean(errors):+.1%}"
        )
    return table


def _median(errors: Sequence[float]) -> float:
    return statistics.median(abs(error) for error in errors)


def _write_fitted(found: dict[str, Fit]) -> None:
    """The fitted table as a module; GPUs that were not fitted now keep their rows."""
    from titan_planner.hardware.fitted import FITTED

    rows = {**FITTED, **{gpu: result.efficiency for gpu, result in found.items()}}
    lines = [
        '"""Efficiencies fitted on published measurements. Written by `benchmarks/calibrate.py --write`; not to be edited."""',
        "",
        "from __future__ import annotations",
        "",
        "from titan_planner.ir.cluster import Efficiency",
        "",
        "FITTED: dict[str, Efficiency] = {",
    ]
    for gpu in sorted(rows):
        lines.append(f'    "{gpu}": Efficiency(')
        for f in fields(Efficiency):
            value = getattr(rows[gpu], f.name)
            lines.append(f"        {f.name}={value!r},".replace("'", '"') if isinstance(value, str)
                         else f"        {f.name}={round(value, 4)!r},")  # fmt: skip
        lines.append("    ),")
    lines += ["}", ""]
    path = ROOT / "titan_planner" / "hardware" / "fitted.py"
    path.write_text("\n".join(lines), encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
