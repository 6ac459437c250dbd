"""TensorBoard scalars: a curve for every number of the log line, and the plan's predictions as curves of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from titan_planner.ir.plan import Plan
from titan_runtime.errors import RunError
from titan_runtime.metrics.meter import Measurement


class ScalarWriter:
    """Writes for this rank, or not at all when the plan wants none of it."""

    def __init__(self, plan: Plan, rank: int, step: int) -> None:
        """Open the writer of a run that is at `step`: later points of an earlier attempt are taken back.

        Raises RunError when the tensorboard package is missing, OSError when the folder cannot be written.
        """
        metrics = plan.job.metrics
        self._writer = None
        if not metrics.enable_tensorboard or (rank != 0 and not metrics.save_for_all_ranks):
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError(
                "the plan asks for TensorBoard scalars, but the package tensorboard is not installed",
                hint="pip install 'titan-planner[runtime]', or start with --no-tensorboard",
            ) from None
        self.folder = scalar_folder(plan, rank)
        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def write(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens_seen: int,
        measured: Measurement,
        predicted: dict[str, float],
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Add the points of one log line, with `more` numbers of the training itself."""
        if self._writer is None:
            return
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_seen": tokens_seen, **(more or {})}
        for name, value in values.items():
            self._writer.add_scalar(f"training/{name}", value, step)
        for name, value in asdict(measured).items():
            if value is not None:
                self._writer.add_scalar(f"measured/{name}", value, step)
        for name, value in predicted.items():
            self._writer.add_scalar(f"plan/{name}", value, step)
        self._writer.flush()

    def validation(self, step: int, loss: float) -> None:
        """Add the point of one validation."""
        if self._writer is not None:
            self._writer.add_scalar("validation/loss", loss, step)
            self._writer.flush()

    def close(self) -> None:
        """No more points."""
        if self._writer is not None:
            self._writer.close()


def scalar_folder(plan: Plan, rank: int) -> Path:
    """Where a rank's event files go."""
    root = Path(plan.job.dump_folder) / plan.job.metrics.save_tb_folder
    return root / f"rank_{rank}" if plan.job.metrics.save_for_all_ranks else root
