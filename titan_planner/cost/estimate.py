"""Put the counts and the times together into the plan's estimate."""

from __future__ import annotations

from titan_planner.cost.flops import flops_per_token, flops_per_token_causal
from titan_planner.cost.local import imbalance_of
from titan_planner.cost.memory import available_bytes, rank_memory, reported
from titan_planner.cost.program import TITAN, Program
from titan_planner.cost.step import believed, step_seconds, step_time
from titan_planner.ir.inventory import num_params
from titan_planner.ir.plan import Estimate, Plan, StepTime


def estimate(plan: Plan, program: Program = TITAN) -> Estimate:
    """Parameters, FLOPs, memory and time of `plan` when `program` runs it."""
    ranks = rank_memory(plan, program, imbalance_of(plan))
    available = round(plan.cluster.gpu.memory_gib * (1 - plan.request.limits.memory_headroom), 3)
    found = step_seconds(plan, program)
    parts = step_time(found)
    speed = plan.batch.tokens_per_step / found.total / plan.mesh.world_size
    per_token = flops_per_token(plan.model, plan.batch.seq_len)
    rate = per_token * speed / 1e12
    hours = training_gpu_hours(plan, speed)
    price = plan.cluster.price_per_gpu_hour
    return Estimate(
        num_params=num_params(plan.model),
        flops_per_token=per_token,
        flops_per_token_causal=flops_per_token_causal(plan.model, plan.batch.seq_len),
        memory=reported(plan, ranks),
        memory_available_gib=available,
        # Judged before rounding, by the bytes that the passes count with.
        fits=max(rank.nbytes(plan.cluster.gpu.device) for rank in ranks) <= available_bytes(plan),
        step_time_ms=believed(1e3 * found.total),
        step_time=parts,
        bottleneck=bottleneck(parts),
        tokens_per_second_per_gpu=believed(speed),
        tflops_per_gpu=believed(rate),
        mfu=believed(rate / plan.cluster.gpu.bf16_tflops),
        training_days=None if hours is None else believed(hours / plan.mesh.world_size / 24),
        training_gpu_hours=None if hours is None else believed(hours),
        training_cost=None if hours is None or price is None else believed(hours * price),
    )


def training_gpu_hours(plan: Plan, tokens_per_second_per_gpu: float) -> float | None:
    """GPU-hours for the job's token budget at this speed, None without a budget; restarts and evaluation not included."""
    budget = plan.job.token_budget
    return None if budget is None else budget / tokens_per_second_per_gpu / 3600


USEFUL = ("matmul_ms", "attention_ms")
"""Parts of the step that no plan can do without."""


def bottleneck(parts: StepTime) -> str:
    """The largest part of the step that is not useful work by itself; the first in the order of fields among equals."""
    names = [name for name in StepTime.__dataclass_fields__ if name not in USEFUL]
    return max(names, key=lambda name: getattr(parts, name))
