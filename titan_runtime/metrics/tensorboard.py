"""TensorBoard scalars: a curve for every number of the log line, and the plan's predictions as curves of their own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from titan_planner.ir.plan import Plan
from titan_runtime.errors import RunError, reason, warn
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
        _quiet_writer_thread()
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
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_seen": tokens_seen, **(more or {})}
        points: dict[str, float | None] = {f"training/{name}": value for name, value in values.items()}
        points |= {f"measured/{name}": value for name, value in asdict(measured).items()}
        points |= {f"plan/{name}": value for name, value in predicted.items()}
        self._add(step, points)

    def validation(self, step: int, loss: float) -> None:
        """Add the point of one validation."""
        self._add(step, {"validation/loss": loss})

    def close(self) -> None:
        """No more points."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._stop(error)

    def _add(self, step: int, points: Mapping[str, float | None]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in points.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        """A log must not end a run: say once that it is incomplete, and go on without it."""
        self._writer = None
        warn(f"{self.folder}: {reason(error)}; it has no more scalars, training goes on")


def _quiet_writer_thread() -> None:
    """The writer's thread hands its error on to us and then prints it as a traceback, which nobody needs twice."""
    before = threading.excepthook
    if getattr(before, "of_titan", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (type(args.thread).__name__ == "_AsyncWriterThread" and issubclass(args.exc_type, OSError)):
            before(args)

    hook.of_titan = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def scalar_folder(plan: Plan, rank: int) -> Path:
    """Where a rank's event files go."""
    root = Path(plan.job.dump_folder) / plan.job.metrics.save_tb_folder
    return root / f"rank_{rank}" if plan.job.metrics.save_for_all_ranks else root
