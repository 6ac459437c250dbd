"""Fit a GPU's efficiencies to measured step times: few numbers, physically bounded, pulled towards what was known before.

Maximum a posteriori by robust least squares: residuals are log(predicted / measured) over the noise of a measurement, and
log(parameter / prior) over how far parameters differ between clusters of the same GPU. One run moves the parameters that its
step depends on, a little each; many runs of different shapes tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_planner.cost.program import TITAN, Program
from titan_planner.cost.step import step_seconds
from titan_planner.ir.cluster import Cluster, Efficiency
from titan_planner.ir.errors import Complaint, PlanError
from titan_planner.ir.plan import Plan
from titan_planner.runs import Run

BOUNDS: dict[str, tuple[float, float]] = {
    "matmul": (0.2, 0.85),
    "matmul_float8": (0.15, 0.85),
    "attention": (0.08, 0.8),
    "attention_backward": (0.06, 0.7),
    "memory": (0.7, 0.95),
    "intra_node": (0.5, 0.95),
    "inter_node": (0.4, 0.98),
    "overlap_slowdown": (0.02, 0.3),
    "launch_us": (2.0, 20.0),
}
"""Parameter -> what is physically possible: nothing beats its peak, and nothing sane is below a fifth of it."""

TIED = {"attention_backward": ("attention", 0.8)}
"""Parameter -> (the one it follows, in this proportion): step times do not tell the two apart (FlashAttention-2's figures)."""

NOISE = 0.03
"""Standard deviation of log step time between equal runs on equal machines (published repeats: 0.4 to 6 %)."""

EXPLAINED = 0.10
"""A run is explained when its step time is predicted within this part: more is neither noise nor the model's usual error."""

SPREAD: dict[str, float] = {
    "matmul": 0.12,
    "matmul_float8": 0.15,
    "attention": 0.15,
    "attention_backward": 0.15,
    "memory": 0.05,
    "intra_node": 0.10,
    "inter_node": 0.10,
    "overlap_slowdown": 0.30,
    "launch_us": 0.30,
}
"""Standard deviation of log parameter between clusters of the same GPU: least for what is measured in isolation everywhere
(copies, nccl-tests), most for what depends on software."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: the plan, the program that ran it, and the step time that it had."""

    name: str
    plan: Plan
    step_seconds: float
    program: Program = TITAN
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted numbers, and every run's signed relative error before and after."""

    efficiency: Efficiency
    before: tuple[float, ...]
    after: tuple[float, ...]
    warnings: tuple[str, ...] = ()
    """Sentences on what the fit leaves unexplained."""


def fit(
    runs: Sequence[Measured],
    prior: Efficiency,
    *,
    free: Iterable[str] = tuple(BOUNDS),
    source: str = "fitted",
    tied: Mapping[str, tuple[str, float]] = TIED,
) -> Fit:
    """The efficiencies that predict `runs` best, starting from `prior`. Raises `PlanError` where SciPy is not installed."""
    # A 0 says that there is none of it here, which no factor changes.
    names = tuple(name for name in free if name not in tied and getattr(prior, name) > 0)
    if not runs:
        raise PlanError(Complaint("there is no measurement to fit to", "", hint="name a folder of a finished run"))
    optimize = _scipy_optimize()
    start = [math.log(getattr(prior, name)) for name in names]

    def residuals(logs: Sequence[float]) -> list[float]:
        candidate = _with(prior, names, logs, tied)
        misses = [run.weight * math.log(predicted(run, candidate) / run.step_seconds) / NOISE for run in runs]
        return misses + [(log - known) / SPREAD[name] for name, log, known in zip(names, logs, start, strict=True)]

    lower = [math.log(BOUNDS[name][0]) for name in names]
    upper = [math.log(BOUNDS[name][1]) for name in names]
    inside = [min(max(value, low + 1e-9), high - 1e-9) for value, low, high in zip(start, lower, upper, strict=True)]
    found = optimize.least_squares(
        residuals, inside, bounds=(lower, upper), loss="soft_l1", diff_step=1e-3, max_nfev=40
    )
    best = replace(_with(prior, names, [float(x) for x in found.x], tied), source=source)
    after = tuple(predicted(run, best) / run.step_seconds - 1 for run in runs)
    return Fit(
        efficiency=best,
        before=tuple(predicted(run, prior) / run.step_seconds - 1 for run in runs),
        after=after,
        warnings=tuple(_warnings(runs, after, names, prior, best)),
    )


def _warnings(
    runs: Sequence[Measured], errors: Sequence[float], names: Sequence[str], prior: Efficiency, found: Efficiency
) -> Iterator[str]:
    """What a fit leaves unexplained: runs that it still misses, and parameters that go as far as is possible."""
    limits = [
        (name, "least" if value == BOUNDS[name][0] else "most", value)
        for name in names
        if (value := getattr(found, name)) in BOUNDS[name]
    ]
    missed = False
    for run, error in zip(runs, errors, strict=True):
        if abs(error) > EXPLAINED:
            missed = True
            moved = [name for name, _, value in limits if getattr(prior, name) != value]
            cause = f" although {' and '.join(moved)} went to the limit" if moved else ""
            yield (
                f"{run.name} is still off by {error:+.0%}{cause}: something slows it or speeds it up that no efficiency is, "
                "or it did not run as its plan says"
            )
    for name, end, value in limits:
        if getattr(prior, name) != value:
            yield f"{name} is {value:g}, the {end} that is physically possible: the runs ask for more than it can explain"
        elif missed:  # else it explains the runs where it stood already
            yield f"{name} is {value:g}, the {end} that is physically possible, as it was before"


def calibrate_cluster(runs: Sequence[Run]) -> tuple[Cluster, Fit]:
    """The cluster that `runs` ran on with efficiencies fitted to them, starting from the first plan's own.

    Raises `PlanError` when they ran on different clusters (nodes may differ in number).
    """
    first = runs[0].plan.cluster
    for run in runs[1:]:
        other = replace(
            run.plan.cluster,
            nodes=first.nodes,
            gpu=replace(run.plan.cluster.gpu, efficiency=first.gpu.efficiency),
            price_per_gpu_hour=first.price_per_gpu_hour,
        )
        if other != first:
            raise PlanError(
                Complaint(
                    f"`{runs[0].folder}` ran on {first.gpu.name} and `{run.folder}` on another cluster",
                    hint="calibrate each cluster from its own runs",
                )
            )
    measured = [Measured(str(run.folder), run.plan, run.step_seconds) for run in runs]
    count = sum(run.measurements for run in runs)
    prior = first.gpu.efficiency
    # In the proportion that it has here, so that runs as predicted change nothing.
    tied = {name: (other, getattr(prior, name) / getattr(prior, other)) for name, (other, _) in TIED.items()}
    source = f"{len(runs)} runs of the cluster's own, {count} measurements"
    found = fit(measured, prior, source=source, tied=tied)
    return replace(first, gpu=replace(first.gpu, efficiency=found.efficiency)), found


def predicted(run: Measured, efficiency: Efficiency) -> float:
    """Step time in seconds that the cost model gives `run` on a GPU of this efficiency."""
    return step_seconds(with_efficiency(run.plan, efficiency), run.program).total


def with_efficiency(plan: Plan, efficiency: Efficiency) -> Plan:
    """`plan` on the same cluster with other efficiencies."""
    return replace(plan, cluster=replace(plan.cluster, gpu=replace(plan.cluster.gpu, efficiency=efficiency)))


def _with(
    prior: Efficiency, names: Sequence[str], logs: Sequence[float], tied: Mapping[str, tuple[str, float]]
) -> Efficiency:
    values: dict[str, Any] = {name: round(min(max(math.exp(log), BOUNDS[name][0]), BOUNDS[name][1]), 6)
              for name, log in zip(names, logs, strict=True)}  # fmt: skip
    for name, (other, proportion) in tied.items():
        if other in values:
            values[name] = round(min(1.0, proportion * values[other]), 6)
    return replace(prior, **values)


def _scipy_optimize() -> Any:
    try:
        from scipy import optimize
    except ImportError:
        raise PlanError(
            Complaint("fitting needs SciPy, which is not installed", "", hint="pip install 'titan-planner[calibrate]'")
        ) from None
    return optimize
