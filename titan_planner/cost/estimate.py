"""Put the counts together into the plan's estimate."""

from __future__ import annotations

from titan_planner.cost.flops import flops_per_token
from titan_planner.cost.memory import stage_memory
from titan_planner.ir.inventory import num_params
from titan_planner.ir.plan import Estimate, Plan


def estimate(plan: Plan) -> Estimate:
    """Parameters, FLOPs and memory of `plan`. Times stay null: no cost model prices them yet."""
    memory = stage_memory(plan)
    available = round(plan.cluster.gpu.memory_gib * (1 - plan.request.limits.memory_headroom), 3)
    return Estimate(
        num_params=num_params(plan.model),
        flops_per_token=flops_per_token(plan.model, plan.batch.seq_len),
        memory=memory,
        memory_available_gib=available,
        fits=all(stage.total_gib <= available for stage in memory),
        step_time_ms=None,
        tokens_per_second_per_gpu=None,
        mfu=None,
    )
