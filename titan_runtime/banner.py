"""What a run says of itself before its first step and after its last."""

from __future__ import annotations

from pathlib import Path

from titan_planner.ir.codec import digest
from titan_planner.ir.inventory import num_params
from titan_planner.ir.parallel import AXES
from titan_planner.ir.plan import Plan
from titan_runtime import version
from titan_runtime.metrics import Console

METRICS_FILE = "metrics.jsonl"
SPEED_FILE = "speed.jsonl"


def announce(console: Console, plan: Plan) -> None:
    """Which plan runs, how it is split, how large it is, and where its output goes."""
    import torch

    mesh, batch, job = plan.mesh, plan.batch, plan.job
    degrees = " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES if mesh.degree(axis) > 1) or "1 rank"
    degrees += "".join(f", {axis} {mesh.degree(axis)}" for axis in ("ep", "etp") if mesh.degree(axis) > 1)
    model = " ".join(part for part in (plan.model.family, plan.model.flavor) if part)
    console.say(
        f"Titan {version()}, torch {torch.__version__}; plan {plan.name or '(unnamed)'}, digest {digest(plan)[:12]}"
    )
    console.say(
        f"{model}: {num_params(plan.model):,} parameters on {mesh.world_size} x {plan.cluster.gpu.name} ({degrees})"
    )
    console.say(
        f"{batch.tokens_per_step:,} tokens a step: {batch.global_batch_size} sequences of {batch.seq_len}, "
        f"{batch.local_batch_size} at a time on each rank, {batch.accumulation_steps} times"
    )
    saves = f", checkpoints every {job.checkpoint.interval} steps" if job.checkpoint.enable else ", no checkpoints"
    console.say(f"{job.steps} steps; output in {job.dump_folder}{saves}")


def warn_about_schedule(console: Console, plan: Plan, schedule_start: int) -> None:
    """Say so when steps lie beyond the learning-rate curve, where it may be zero."""
    end = schedule_start + plan.lr_schedule.total_steps
    if plan.job.steps > end:
        console.say(
            f"note: the learning-rate curve ends at step {end}; later steps train with "
            f"{plan.optimizer.lr * plan.lr_schedule.min_lr_factor:g}"
        )


def say_stopped(console: Console, plan: Plan, step: int, signal: int) -> None:
    """A signal ended the run after `step`."""
    saved = (
        "saved; the same command goes on from here"
        if plan.job.checkpoint.enable
        else "checkpoints are off: nothing saved"
    )
    console.say(f"stopped by signal {signal} after step {step} of {plan.job.steps}; {saved}")


def say_done(console: Console, plan: Plan, step: int, loss: float) -> None:
    """The run reached its last step."""
    root = Path(plan.job.dump_folder)
    console.say(f"done: step {step}, loss {loss:.4f}")
    console.say(f"every step's numbers: {root / METRICS_FILE}")
    if plan.job.metrics.enable_tensorboard:
        console.say(f"curves: tensorboard --logdir {root / plan.job.metrics.save_tb_folder}")
    if plan.job.checkpoint.enable:
        console.say(f"checkpoints: {root / plan.job.checkpoint.folder}")
