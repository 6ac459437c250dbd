"""Cut the model into pipeline stages: even by layers, embedding and output weighted as layers, or as the user listed them."""

from __future__ import annotations

from titan_planner.ir.plan import Plan
from titan_planner.passes.context import Context


def partition_stages(plan: Plan, ctx: Context) -> Plan:
    """Say how stages were cut. Balancing by cost needs times, which no cost model gives yet: the even split stands."""
    if plan.mesh.pp == 1:
        return plan
    counts = [0] * len(plan.pipeline.stages)
    for layer in plan.layers:
        counts[layer.stage] += layer.fqn.startswith("layers.")
    how = (
        "as the spec lists them"
        if plan.request.parallelism.module_fqns_per_model_part is not None
        else "even by layers"
    )
    ctx.analysis("pipeline.stages", f"{how}: {min(counts)} to {max(counts)} layers a stage")
    return plan
