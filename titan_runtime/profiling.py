"""torch.profiler traces of a few steps now and then, for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
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
