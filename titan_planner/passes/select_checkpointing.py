"""Choose what every block keeps for backward: as pinned, else the least recomputation that fits in memory."""

from __future__ import annotations

from dataclasses import replace

from titan_planner.cost.estimate import estimate
from titan_planner.ir.execution import KEEP_ALL, CheckpointPolicy
from titan_planner.ir.fqn import fold, pattern_matches
from titan_planner.ir.inventory import linear_modules
from titan_planner.ir.plan import Plan
from titan_planner.ir.request import ActivationCheckpointSpec
from titan_planner.ir.rules import splits_backward
from titan_planner.passes.context import Context

FULL = replace(KEEP_ALL, name="full", mode="full")

SAVE_OPS = (
    "aten.mm.default",
    "aten._grouped_mm.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_attention_math.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten.max.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
)
"""Ops that cost much to recompute: matmuls, grouped ones of experts, attention, Float8's amax, and collectives."""


def select_checkpointing(plan: Plan, ctx: Context) -> Plan:
    """Set every block's checkpointing policy: the pinned one, else the first of none, selective, full that fits."""
    asked = plan.request.activation_checkpoint
    if asked.mode != "auto":
        chosen = _pinned(plan, asked)
        ctx.applied("activation_checkpoint", f"{_describe(asked)}, as pinned")
        return chosen
    tried = []
    # Schedules that split backward cannot checkpoint selectively (rule pp-split-backward-selective).
    split = splits_backward(plan) is not None
    for policy in (KEEP_ALL, FULL) if split else (KEEP_ALL, _selective(plan, asked), FULL):
        candidate = _uniform(plan, policy)
        result = estimate(candidate)
        tried.append(f"{policy.name} needs {result.peak_memory_gib:.1f} GiB")
        if result.fits or policy is FULL:
            break
    fits = "fits in" if result.fits else "is the least, but does not fit in"
    message = f"{policy.name}: {'; '.join(tried)}; the last {fits} the {result.memory_available_gib:.1f} GiB available"
    (ctx.applied if result.fits else ctx.missed)("activation_checkpoint", message)
    return candidate


def _pinned(plan: Plan, asked: ActivationCheckpointSpec) -> Plan:
    match asked.mode:
        case "none":
            return _uniform(plan, KEEP_ALL)
        case "full":
            return _uniform(plan, FULL)
        case "memory_budget":
            return _uniform(
                plan, replace(KEEP_ALL, name="memory_budget", mode="memory_budget", memory_budget=asked.memory_budget)
            )
        case _:
            if asked.selective_ac_option == "op":
                return _uniform(plan, _selective(plan, asked))
            return _every_nth(plan, int(asked.selective_ac_option))


def _selective(plan: Plan, asked: ActivationCheckpointSpec) -> CheckpointPolicy:
    # The spec names parts of FQNs, as TorchTitan does; a plan holds selectors.
    patterns = asked.per_op_sac_force_recompute_mm_shapes_by_fqns
    recomputed = [fqn for fqn in linear_modules(plan.model) if any(pattern_matches(part, fqn) for part in patterns)]
    return CheckpointPolicy(
        name="selective_op",
        mode="selective",
        save_ops=SAVE_OPS,
        recompute_every_second_matmul=True,
        force_recompute_fqns=fold(recomputed),
        memory_budget=None,
    )


def _uniform(plan: Plan, policy: CheckpointPolicy) -> Plan:
    layers = tuple(
        replace(layer, checkpoint=policy.name) if layer.fqn.startswith("layers.") else layer for layer in plan.layers
    )
    policies = (KEEP_ALL,) if policy.name == "none" else (KEEP_ALL, policy)
    return replace(plan, layers=layers, activation_checkpoint=replace(plan.activation_checkpoint, policies=policies))


def _every_nth(plan: Plan, n: int) -> Plan:
    whole = _uniform(plan, FULL)
    layers = tuple(
        layer
        if not layer.fqn.startswith("layers.") or int(layer.fqn.split(".")[1]) % n == 0
        else replace(layer, checkpoint="none")
        for layer in whole.layers
    )
    return replace(whole, layers=layers)


def _describe(asked: ActivationCheckpointSpec) -> str:
    if asked.mode == "selective":
        return (
            "selective by op"
            if asked.selective_ac_option == "op"
            else f"full on every layer divisible by {asked.selective_ac_option}"
        )
    return asked.mode if asked.mode != "memory_budget" else f"memory budget {asked.memory_budget:g}"
