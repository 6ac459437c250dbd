"""When to save, what to load, and in which order: the run's side of checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titan_planner.ir.codec import digest, dumps
from titan_planner.ir.plan import Plan
from titan_runtime import version
from titan_runtime.agreement import on_first_rank, together
from titan_runtime.apply.fsdp import DTYPES
from titan_runtime.apply.pipeline import Pipeline
from titan_runtime.checkpoint.compatibility import PLAN_FILE, require_compatible
from titan_runtime.checkpoint.folder import CheckpointFolder, Entry, write_file
from titan_runtime.checkpoint.record import FILE as RECORD_FILE
from titan_runtime.checkpoint.record import Progress, Record, read_record
from titan_runtime.checkpoint.storage import read_metadata, read_tensors, write_tensors
from titan_runtime.checkpoint.tensors import (
    cast,
    model_tensors,
    optimizer_tensors,
    restore_rng,
    rng_tensors,
    saved_buffers,
)
from titan_runtime.data import DataError, DataLoader
from titan_runtime.errors import RunError

EXPORT_DTYPES = {**DTYPES, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Start:
    """Which checkpoint a run begins from. `own` is False for one of another run (`initial_load_path`)."""

    path: Path
    own: bool
    model_only: bool
    notes: tuple[str, ...] = ()


class Checkpointer:
    """Saves and restores one run. Every method is collective unless it says otherwise."""

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader,
        rank: int,
        device: torch.device,
        written_plan: Plan | None = None,
        accept_changes: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """`written_plan` is what gets stored: the plan as its file has it, before the command line changed paths."""
        self.job = plan.job.checkpoint
        self.folder = CheckpointFolder(Path(plan.job.dump_folder) / self.job.folder)
        self._plan = plan
        self._written_plan = written_plan or plan
        self._module, self._optimizer, self._loader = module, optimizer, loader
        self._rank, self._device = rank, device
        self._accept_changes = accept_changes
        self._say = say
        self._excluded: list[str] = []
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._loaded_step: int | None = None  # of the own checkpoint that this run began from
        self._restarted = False  # steps are counted anew from a checkpoint of this folder, which is not yet replaced

    # ---------------------------------------------------------------- saving

    def minutes_due(self) -> bool:
        """Whether the minutes between saves are over by this rank's clock. Not collective: ranks must agree on it."""
        minutes = self.job.interval_minutes
        return bool(self.job.enable and minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes)

    def due(self, step: int) -> bool:
        """Whether `step`, just done, is one to save after. Not collective, equal on all ranks."""
        first = self.job.enable_first_step_checkpoint and step == 1
        return self.job.enable and (step % self.job.interval == 0 or first)

    def save(self, progress: Progress, *, last: bool = False) -> Path | None:
        """Save after `progress.step`; None when checkpoints are off or this step is saved already.

        `last` says that the run has reached its end, where the plan may want weights only. Raises RunError on all ranks
        when it cannot be written; older checkpoints are then as they were.
        """
        step = progress.step
        if not self.job.enable or step == self._saved_step:
            return None
        model_only = last and self.job.last_save_model_only
        tensors = model_tensors(self._module)
        if model_only:
            # The experts' bias stays float32: its steps are too small for a smaller type.
            tensors = cast(tensors, EXPORT_DTYPES[self.job.export_dtype]) | saved_buffers(self._module)
        else:
            tensors |= optimizer_tensors(self._module, self._optimizer)
            tensors |= rng_tensors(self._rank, self._device)
        on_first_rank(lambda: self._begin(progress, "model" if model_only else "full"), "write the checkpoint")
        try:
            write_tensors(tensors, self.folder.partial(step))
        except RunError:
            if self._rank == 0:
                self.folder.abandon(step)
            raise
        for note in on_first_rank(lambda: self._finish(step), "publish the checkpoint"):
            self._say(note)
        self._restarted = False
        self._saved_step, self._saved_at = step, time.monotonic()
        return self.folder.path(step)

    def _begin(self, progress: Progress, contents: str) -> None:
        folder = self.folder.begin(progress.step)
        write_file(folder / PLAN_FILE, dumps(self._written_plan))
        record = Record(
            contents=contents,
            progress=progress,
            data=self._loader.state_dict(),
            digest=digest(self._plan),
            plan_name=self._plan.name,
            titan=version(),
            torch=torch.__version__,
            excluded=self._excluded,
        )
        record.write(folder)

    def _finish(self, step: int) -> list[str]:
        notes: list[str] = []
        if self._restarted:
            # From here on this run has a checkpoint of its own; until now the one it began from was the place to go
            # back to. First the one whose name is needed, and the rest once the new one is there.
            notes += _aside(self.folder.set_aside(step - 1, step))
        self.folder.publish(step)
        if self._restarted:
            notes += _aside(self.folder.set_aside(step)) + _aside(self.folder.set_aside(-1, step - 1))
        self.folder.keep(self.job.keep_latest_k, step)
        return notes

    def leave_other_branch(self) -> None:
        """Before the first step: put the checkpoints aside that lie after the chosen one, so that there is one history.

        With a `load_step` they are of a branch that this run leaves. Without one they are no branch: saves that were
        cut short, or weights alone.
        """
        if self._loaded_step is None or (self.job.load_step < 0 and not self._restarted):
            return
        loaded = self._loaded_step
        for note in on_first_rank(lambda: _aside(self.folder.set_aside(loaded)), "put later checkpoints aside"):
            self._say(note)

    # --------------------------------------------------------------- loading

    def load(self) -> Progress:
        """Restore the newest complete checkpoint or the one the plan names, or begin anew. Returns where the run is."""
        if not self.job.enable:
            return Progress()
        start = on_first_rank(self._choose, "look for checkpoints")
        for note in start.notes if start else ():
            self._say(note)
        if start is None:
            return Progress()
        return self._load_model(start) if start.model_only else self._load_all(start)

    def _choose(self) -> Start | None:
        """Which checkpoint to begin from, judged by one rank so that all agree."""
        own = self._newest(self.folder, self.job.load_step)
        if own is not None:
            path, notes = own
            changes = require_compatible(path, self._plan, self._accept_changes)
            if changes:
                notes += (f"resuming although the plan now differs in {', '.join(changes)} (--accept-changes)",)
            return Start(path, own=True, model_only=False, notes=notes)
        if self.job.initial_load_path is None:
            return None
        given = Path(self.job.initial_load_path)
        if (given / ".metadata").is_file():
            return Start(given, own=False, model_only=self.job.initial_load_model_only)
        newest = self._newest(CheckpointFolder(given), -1, weights_only_too=self.job.initial_load_model_only)
        if newest is None:
            raise RunError(
                f"job.checkpoint.initial_load_path: {given} holds no complete checkpoint",
                hint="name a folder `step-N` with a `.metadata` file in it, or the folder above it",
            )
        return Start(newest[0], own=False, model_only=self.job.initial_load_model_only, notes=newest[1])

    def _newest(
        self, folder: CheckpointFolder, wanted: int, weights_only_too: bool = False
    ) -> tuple[Path, tuple[str, ...]] | None:
        """The checkpoint of step `wanted` (-1: the newest usable one), and what was passed over on the way to it."""
        entries = folder.entries()
        if wanted >= 0:
            entries = [entry for entry in entries if entry.step == wanted]
            if not entries:
                there = ", ".join(str(entry.step) for entry in reversed(folder.entries())) or "none"
                raise RunError(
                    f"there is no checkpoint of step {wanted} in {folder.root}", hint=f"steps there: {there}"
                )
        notes: list[str] = []
        damaged: RunError | None = None
        for entry in entries:
            if not entry.complete:
                notes.append(f"skipping {entry.path}: its save was cut short (it has no .metadata)")
                continue
            if weights_only_too:
                return entry.path, tuple(notes)
            try:
                record = _own_record(entry)
            except RunError as error:
                damaged = damaged or error
                notes.append(f"skipping {entry.path}: it is damaged: {error.message}")
                continue
            if record.contents == "full":
                return entry.path, tuple(notes)
            notes.append(f"skipping {entry.path}: it holds weights only and cannot be resumed")
        if damaged is not None:
            # Never begin anew over checkpoints that somebody may still be able to mend.
            hint = "choose another step" if wanted >= 0 else "mend or move it away, or use another --dump-folder"
            raise RunError(damaged.message, hint=hint)
        if wanted >= 0:
            raise RunError(notes[0], hint="choose another step")
        if notes:
            self._say("\n".join(notes))
        return None

    def _load_model(self, start: Start) -> Progress:
        read_tensors(model_tensors(self._module), start.path)
        self._weights_changed()
        self._say(f"starting from the weights in {start.path}")
        return Progress()

    def _load_all(self, start: Start) -> Progress:
        record = together(lambda: read_record(start.path), "read the checkpoint")
        excluded = [part for part in self.job.exclude_from_loading if part not in record.excluded]
        self._excluded = sorted({*record.excluded, *excluded})
        tensors = model_tensors(self._module)
        if "optimizer" not in excluded:
            tensors |= optimizer_tensors(self._module, self._optimizer)
        stored = together(lambda: read_metadata(start.path), "read the checkpoint").state_dict_metadata
        # A rank that the saved run did not have keeps the generator it was started with.
        rng = {name: state for name, state in rng_tensors(self._rank, self._device).items() if name in stored}
        read_tensors(tensors | rng, start.path)
        self._weights_changed()
        restore_rng(rng, self._rank, self._device)
        if "data" not in excluded:
            self._load_data(record)
        progress = _without(record.progress, excluded)
        if start.own:
            self._loaded_step = record.progress.step
            self._restarted = progress.step != record.progress.step
            self._saved_step = progress.step
        left_out = f", without {', '.join(excluded)}" if excluded else ""
        self._say(f"resuming from {start.path} (step {record.progress.step}){left_out}")
        return progress

    def _weights_changed(self) -> None:
        if isinstance(self._module, Pipeline):
            self._module.after_change()

    def _load_data(self, record: Record) -> None:
        """Go on in the data where the saved run was; over other data, and only when that is accepted, begin anew."""
        beginning = self._loader.state_dict()
        try:
            together(
                lambda: self._loader.load_state_dict(record.data, other_batch_size=self._accept_changes),
                "restore the data position",
            )
            return
        except RunError:
            # All ranks are here when one is: a position that no rank can use is no reason to stop if that is accepted.
            if not self._accept_changes or not self._of_other_data(record):
                raise
        together(lambda: self._loader.load_state_dict(beginning), "restore the data position")
        self._say(
            "the data begin anew: the saved position belongs to other data or another way to cut them into samples"
        )

    def _of_other_data(self, record: Record) -> bool:
        """Whether that is the only thing wrong with the saved position, on all ranks."""
        try:
            self._loader.load_state_dict(record.data, other_batch_size=True)
        except DataError as error:
            usable = error.rule == "same-data"
        else:
            usable = True
        verdicts: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(verdicts, usable)
        return all(verdicts)


def _own_record(entry: Entry) -> Record:
    record = read_record(entry.path)
    if record.progress.step != entry.step:
        raise RunError(f"{entry.path / RECORD_FILE}: it is of step {record.progress.step}, not of step {entry.step}")
    return record


def _aside(moved: list[tuple[int, Path]]) -> list[str]:
    if not moved:
        return []
    steps = ", ".join(str(step) for step, _ in moved)
    names = ", ".join(path.name for _, path in moved)
    return [f"put aside the checkpoints of an abandoned branch (steps {steps}) as {names} in {moved[0][1].parent}"]


def _without(saved: Progress, excluded: list[str]) -> Progress:
    """Where a run stands that loads `saved` but leaves parts out."""
    progress = replace(saved)
    if "lr_schedule" in excluded:
        progress.schedule_start = progress.step
    if "train_state" in excluded:
        # Steps are counted anew; the curve goes on where it was, which lies before this run's step 0.
        progress = Progress(step=0, tokens_seen=0, schedule_start=progress.schedule_start - progress.step)
    return progress
