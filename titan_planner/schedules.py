"""Pipeline schedules: where stages lie and how many microbatches each pipeline rank holds at its fullest."""

from __future__ import annotations

from titan_planner.ir.parallel import MULTI_STAGE_SCHEDULES, V_SCHEDULES, Schedule, Stage


def place_stages(schedule: Schedule | None, pp: int, stages: int) -> tuple[Stage, ...]:
    """Stage -> pipeline rank: in a V for ZBV and DualPipeV, in a loop for all others."""
    if schedule in V_SCHEDULES:
        return tuple(Stage(index=s, pp_rank=min(s, 2 * pp - 1 - s)) for s in range(stages))
    return tuple(Stage(index=s, pp_rank=s % pp) for s in range(stages))


def default_stages_per_rank(schedule: Schedule | None) -> int:
    """Virtual stages a rank when the user names none."""
    return 2 if schedule in MULTI_STAGE_SCHEDULES else 1


def microbatches_in_flight(schedule: Schedule | None, pp: int, rank: int, microbatches: int, per_rank: int) -> float:
    """Most microbatches whose activations pipeline rank `rank` holds at once, in units of its whole layer share.

    Counted from torch 2.13's own `pipeline_order` (F minus B); closed forms: GPipe and LoopedBFS m; 1F1B min(m, p - r);
    Interleaved1F1B (p(v+1) - 2r - 1)/v; zero-bubble p (weight gradients are late); DualPipeV (2p+1)/2. None exceeds m.
    """
    match schedule:
        case None:
            return 1.0
        case "GPipe" | "LoopedBFS":
            held = float(microbatches)
        case "1F1B":
            held = float(pp - rank)
        case "Interleaved1F1B":
            held = (pp * (per_rank + 1) - 2 * rank - 1) / per_rank
        case "InterleavedZeroBubble" | "ZBVZeroBubble":
            held = float(pp)
        case "DualPipeV":
            held = (2 * pp + 1) / 2
    return min(held, float(microbatches))
