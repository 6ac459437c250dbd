"""Choose which linears run in Float8: what the recipe allows, less what the user filters and what is too small to gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from titan_planner.ir.execution import SkippedLinear
from titan_planner.ir.features import AUTO_FILTER
from titan_planner.ir.fqn import fold, pattern_matches
from titan_planner.ir.inventory import expert_modules, is_router, linear_modules, parameters
from titan_planner.ir.plan import Plan
from titan_planner.ir.rules import float8_all_gather_obstacle, float8_token_block, mxfp8_experts_obstacle
from titan_planner.passes.context import Context
from titan_planner.sharding import local_shape

# torchao 0.18's thresholds; N = out features, K = in features. Below them the casts cost more than the matmul gains.
_TOO_SMALL: dict[str, Callable[[int, int], bool]] = {
    "tensorwise": lambda n, k: k <= 4096 and n <= 1024,
    "rowwise": lambda n, k: n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048),
}


def filter_float8(plan: Plan, ctx: Context) -> Plan:
    """List the linears to convert and those to skip, with reasons. Shapes are judged as one tensor rank sees them."""
    asked = plan.request.float8
    recipe = asked.recipe
    if recipe == "none":
        return plan
    if recipe == "auto":
        if not plan.cluster.gpu.float8:
            ctx.missed("float8", f"{plan.cluster.gpu.name} has no Float8")
            return plan
        recipe = "tensorwise"
    auto = asked.recipe == "auto" or AUTO_FILTER in asked.filter_fqns
    patterns = [p for p in asked.filter_fqns if p != AUTO_FILTER]
    block = 32 if recipe == "mxfp8" else 16
    tokens = plan.batch.microbatch_size * plan.batch.seq_len // plan.mesh.cp
    rows = float8_token_block(recipe, asked.emulate)
    if tokens % rows:
        ctx.missed("float8", f"a rank's microbatch has {tokens} tokens, which is not a multiple of {rows}")
        return plan
    local = {p.module: local_shape(p, plan.mesh, plan.tensor_parallel.kv_replicas) for p in parameters(plan.model)}
    converted: list[str] = []
    skipped: dict[str, list[str]] = {}
    skipped_experts: dict[str, list[str]] = {}
    for fqn, (n, k) in linear_modules(plan.model).items():
        local_n, local_k = local.get(fqn, (n, k))[:2]
        reason = _reason(fqn, local_n, local_k, patterns, _TOO_SMALL.get(recipe) if auto else None, block)
        if reason is None and asked.enable_fsdp_float8_all_gather and plan.fsdp.strategy == "fsdp":
            reason = float8_all_gather_obstacle(plan, fqn, n)
        if reason is None and fqn == "output" and rows > 1 and tokens % (rows * plan.loss.chunks):
            reason = f"it sees {tokens} tokens in {plan.loss.chunks} chunks, which are no multiples of {rows}"
        if reason is None:
            converted.append(fqn)
        else:
            skipped.setdefault(reason, []).append(fqn)
    experts: list[str] = []
    for fqn in expert_modules(plan.model):
        obstacle: str | None = "experts are grouped products over stacked weights, not linears"
        if recipe == "mxfp8":
            named = any(pattern_matches(part, fqn) for part in asked.grouped_mm_fqns)
            obstacle = mxfp8_experts_obstacle(plan, fqn) if named else "grouped_mm_fqns does not name them"
        if obstacle is None:
            experts.append(fqn)
        else:
            skipped_experts.setdefault(obstacle, []).append(fqn)
    if not converted and not experts:
        ctx.missed("float8", "every linear is filtered or too small to gain: nothing is converted")
        return plan
    count = sum(len(fqns) for fqns in skipped.values())
    ctx.applied("float8", f"{recipe}: {len(converted)} linears converted, {count} kept in high precision")
    for reason, fqns in skipped.items():
        for selector in fold(fqns):
            ctx.missed(selector, f"no Float8: {reason}")
    for selector in fold(experts):
        ctx.applied(selector, f"{recipe}: grouped products")
    for reason, fqns in skipped_experts.items():
        for selector in fold(fqns):
            ctx.missed(selector, f"no Float8: {reason}")
    return replace(
        plan,
        float8=replace(
            plan.float8,
            recipe=recipe,
            converted=fold(converted),
            experts=fold(experts),
            skipped=tuple(
                SkippedLinear(module=selector, reason=reason)
                for reason, fqns in skipped.items()
                for selector in fold(fqns)
            ),
            enable_fsdp_float8_all_gather=asked.enable_fsdp_float8_all_gather,
            precompute_float8_dynamic_scale_for_fsdp=asked.precompute_float8_dynamic_scale_for_fsdp,
            emulate=asked.emulate,
        ),
    )


def _reason(
    fqn: str, n: int, k: int, patterns: list[str], too_small: Callable[[int, int], bool] | None, block: int
) -> str | None:
    for pattern in patterns:
        if pattern_matches(pattern, fqn):
            return f"filter_fqns has `{pattern}`"
    if is_router(fqn):
        return "routers compute in float32"
    if n % block or k % block:
        return f"its local shape {n} x {k} is not a multiple of {block}"
    if too_small is not None and too_small(n, k):
        return f"its local shape N {n} x K {k} is too small to gain"
    return None
