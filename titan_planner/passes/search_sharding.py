"""Choose the mesh: the least model parallelism whose plan, finished by the later passes, fits in memory."""

from __future__ import annotations

from collections.abc import Iterator

from titan_planner.cost.estimate import estimate
from titan_planner.ir.parallel import Mesh, Schedule
from titan_planner.ir.plan import Plan
from titan_planner.ir.rules import divisors
from titan_planner.ir.verify import verify
from titan_planner.layout import meshes, remesh
from titan_planner.passes.context import Context
from titan_planner.stages import InfeasibleStages


def search_sharding(plan: Plan, ctx: Context) -> Plan:
    """Choose the mesh with the least model parallelism that fits in memory, its schedule and its local batch.

    The rule is plain on purpose: predicted times are not compared yet, and communication grows with every degree of
    model parallelism.
    Candidates come in a fixed order (pp x cp x tp, then pp, cp, tp), so ties need no breaking.
    """
    best: tuple[float, Plan] | None = None
    tried = 0
    for mesh in meshes(plan.model, plan.cluster, plan.request):
        for candidate in _on(plan, mesh):
            tried += 1
            finished = estimate(ctx.finish(candidate))
            over = max(stage.total_gib for stage in finished.memory) - finished.memory_available_gib
            if over <= 0:
                _say(plan, candidate, ctx, tried)
                return _grow_local_batch(candidate, ctx)
            if best is None or over < best[0]:
                best = (over, candidate)
    if best is None:
        return plan
    over, candidate = best
    ctx.missed("mesh", f"none of {tried} legal layouts fits in memory; the closest is {over:.1f} GiB over")
    return candidate


def _on(plan: Plan, mesh: Mesh) -> Iterator[Plan]:
    """Valid plans on `mesh`, the fewest pipeline bubbles first: interleaved stages where they can be had."""
    schedules: tuple[Schedule | None, ...] = ("Interleaved1F1B", "1F1B", "GPipe") if mesh.pp > 1 else (None,)
    if plan.request.parallelism.pipeline_parallel_schedule != "auto":
        schedules = (None,)
    for schedule in schedules:
        try:
            candidate = remesh(plan, mesh, schedule=schedule)
        except InfeasibleStages:
            continue
        if not verify(candidate):
            yield candidate


def _say(before: Plan, chosen: Plan, ctx: Context, tried: int) -> None:
    pins = before.request.parallelism
    for axis, name in (
        ("tp", "tensor_parallel_degree"),
        ("pp", "pipeline_parallel_degree"),
        ("cp", "context_parallel_degree"),
    ):
        if getattr(pins, name) == "auto":
            degree = chosen.mesh.degree(axis)
            why = "a smaller degree does not fit or is not legal" if degree > 1 else "the plan fits without it"
            ctx.applied(f"mesh.{axis}", f"{axis} = {degree}: {why}")
    if chosen.mesh.pp > 1 and pins.pipeline_parallel_schedule == "auto":
        ctx.applied(
            "pipeline.schedule",
            f"{chosen.pipeline.schedule} over {len(chosen.pipeline.stages)} stages: the fewest bubbles of the schedules that fit "
            f"with {chosen.pipeline.microbatches} microbatches",
        )
    ctx.analysis("mesh", f"layout {tried} of the legal ones, in order of model parallelism, is the first that fits")


def _grow_local_batch(plan: Plan, ctx: Context) -> Plan:
    """Larger local batches in place of accumulation, while that fits and needs no more recomputation."""
    batch, mesh = plan.batch, plan.mesh
    if plan.request.local_batch_size != "auto" or mesh.pp > 1 or batch.accumulation_steps == 1:
        return plan
    recompute = _recomputation(ctx.finish(plan))
    chosen = plan
    for local in divisors(batch.global_batch_size // mesh.dp)[1:]:
        candidate = remesh(plan, mesh, local_batch_size=local)
        if verify(candidate):
            continue
        finished = ctx.finish(candidate)
        if not estimate(finished).fits or _recomputation(finished) != recompute:
            break
        chosen = candidate
    if chosen is not plan:
        size = chosen.batch.local_batch_size
        ctx.applied(
            "batch.local_batch_size", f"{size} sequences a rank is the most that fits without more recomputation"
        )
    return chosen


def _recomputation(plan: Plan) -> tuple[str, ...]:
    return tuple(layer.checkpoint for layer in plan.layers)
