"""The learning-rate curve: warmup, stable, decay. A function of the step; there is nothing to save or restore."""

from __future__ import annotations

import math
from typing import assert_never

from titan_planner.ir.job import LrSchedule


def lr_factor(schedule: LrSchedule, step: int) -> float:
    """The factor on the peak rate that optimizer step `step` (from 0) runs with.

    With W warmup, D decay and T total steps:

    - s < W: (s + 1) / (W + 1), so that step 0 already moves and step W is the first at the full rate;
    - W <= s < T - D: 1;
    - T - D <= s < T: m + (1 - m) f(p) with p = (s - (T - D)) / D in [0, 1), m = min_lr_factor, and f(p) = 1 - p
      (linear), 1 - sqrt(p) (sqrt) or (1 + cos(pi p)) / 2 (cosine);
    - s >= T: m.

    The decay would reach m at step T, which the curve no longer contains: the last step, T - 1, has p = (D - 1) / D and
    still moves even when m is 0. This is TorchTitan's "virtual last step".
    """
    decay_start = schedule.total_steps - schedule.decay_steps
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if step < decay_start:
        return 1.0
    if step >= schedule.total_steps:
        return schedule.min_lr_factor
    shape = _decay(schedule, (step - decay_start) / schedule.decay_steps)
    return schedule.min_lr_factor + (1.0 - schedule.min_lr_factor) * shape


def _decay(schedule: LrSchedule, progress: float) -> float:
    match schedule.decay_type:
        case "linear":
            return 1.0 - progress
        case "sqrt":
            return 1.0 - math.sqrt(progress)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(schedule.decay_type)
