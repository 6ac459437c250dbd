"""torch.profiler traces of a few steps now and then, for chrome://tracing or Perfetto, and CUDA memory snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titan_planner.ir.plan import Plan


@contextmanager
def profiler(plan: Plan, rank: int, device: torch.device, first_step: int) -> Iterator[profile | None]:
    """A profiler whose `step()` is called after every step, or None when the plan wants no traces.

    Every `profile_freq` steps the last `profiler_active` are written to
    `dump_folder/save_traces_folder/step-N/rank-R.json`, N being the last step in the trace.
    """
    wanted = plan.job.profiling
    if not wanted.enable_profiling:
        yield None
        return
    root = Path(plan.job.dump_folder) / wanted.save_traces_folder

    def write(finished: profile) -> None:
        folder = root / f"step-{first_step + finished.step_num}"
        folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(folder / f"rank-{rank}.json"))

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(
            wait=wanted.profile_freq - wanted.profiler_active - wanted.profiler_warmup,
            warmup=wanted.profiler_warmup,
            active=wanted.profiler_active,
        ),
        on_trace_ready=write,
        record_shapes=True,
    ) as running:
        yield running


_SNAPSHOT_ENTRIES = 100_000
"""Allocations that a snapshot remembers, the newest ones."""


@contextmanager
def memory_snapshots(plan: Plan, rank: int) -> Iterator[Callable[[int], None]]:
    """A function to be called after every step, which writes what CUDA's allocator did every `profile_freq` steps.

    Written to `dump_folder/save_traces_folder/step-N/rank-R.memory.pickle`, for https://pytorch.org/memory_viz, and once
    more when the run ends for lack of memory, into `out-of-memory`.
    """
    wanted = plan.job.profiling
    if not wanted.enable_memory_snapshot:
        yield lambda step: None
        return
    root = Path(plan.job.dump_folder) / wanted.save_traces_folder

    def write(name: str) -> None:
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"rank-{rank}.memory.pickle"))

    def after(step: int) -> None:
        if step % wanted.profile_freq == 0:
            write(f"step-{step}")

    torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
    try:
        yield after
    except torch.OutOfMemoryError:
        write("out-of-memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
