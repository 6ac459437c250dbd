"""Weights & Biases: the numbers of the log line, from the first rank, into a run named after the plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from titan_planner.ir.codec import digest
from titan_planner.ir.plan import Plan
from titan_runtime.metrics.meter import Measurement


class WandbWriter:
    """Writes for the first rank, or not at all when the plan wants none of it.

    Where and how (project, account, offline) is said by wandb's own environment variables.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        """Begin a run. The preflight check has found the package."""
        self._run: Any = None
        if plan.job.metrics.enable_wandb and rank == 0:
            import wandb  # no dependency of Titan

            self._run = wandb.init(
                name=plan.name or None, dir=plan.job.dump_folder, config={"digest": digest(plan), "plan": plan.name}
            )

    def write(self, step: int, measured: Measurement, **numbers: float) -> None:
        """Add the points of one log line."""
        if self._run is not None:
            told = {f"measured/{name}": value for name, value in asdict(measured).items() if value is not None}
            self._run.log({f"training/{name}": value for name, value in numbers.items()} | told, step=step)

    def validation(self, step: int, loss: float) -> None:
        """Add the point of one validation."""
        if self._run is not None:
            self._run.log({"validation/loss": loss}, step=step)

    def close(self) -> None:
        """No more points."""
        if self._run is not None:
            self._run.finish()
