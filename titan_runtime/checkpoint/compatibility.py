"""May a run go on under another plan? Yes when the plans differ only in how the same work is split and computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_planner.ir.codec import decisions
from titan_planner.ir.errors import PlanError
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import load_plan
from titan_runtime.errors import RunError

FREE = (
    "mesh",
    "pipeline",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "sharding",
    "layers",
    "activation_checkpoint",
    "compile",
    "loss.chunks",
    "optimizer.implementation",
    "fsdp.strategy",
    "fsdp.units",
    "fsdp.defer_gradient_sync",
    "fsdp.prefetch_forward",
    "fsdp.prefetch_backward",
    "fsdp.cpu_offload",
    "batch.local_batch_size",
    "batch.microbatch_size",
    "batch.accumulation_steps",
)
"""Addresses that may differ: the mathematics is the same, only the order of roundings changes."""

PLAN_FILE = "plan.json"


def differing(before: Plan, now: Plan) -> list[str]:
    """Addresses of decisions outside of `FREE` that differ between two plans, in the plan's order."""
    found = list(_differing(decisions(before), decisions(now), ""))
    return [address for address in found if not any(_within(address, free) for free in FREE)]


def _differing(before: Any, now: Any, address: str) -> Iterator[str]:
    # Descend through records only: of a list that differs, the list is what changed.
    if isinstance(before, dict) and isinstance(now, dict) and set(before) == set(now):
        for key in before:
            yield from _differing(before[key], now[key], f"{address}.{key}" if address else key)
    elif before != now:
        yield address


def _within(address: str, section: str) -> bool:
    return address == section or address.startswith(f"{section}.")


def require_compatible(folder: Path, now: Plan, accept_changes: bool) -> list[str]:
    """The accepted differences between the plan stored in a checkpoint's folder and `now`.

    Raises RunError when there are any and `accept_changes` does not allow them.
    """
    try:
        before = load_plan(folder / PLAN_FILE)
    except PlanError as error:
        if accept_changes:
            return [f"unknown, because the stored plan cannot be read ({error.complaints[0].message})"]
        raise RunError(
            f"the plan stored in {folder} cannot be read: {error.complaints[0].message}",
            hint="--accept-changes resumes without the comparison",
        ) from None
    changes = differing(before, now)
    if changes and not accept_changes:
        listed = ", ".join(f"`{address}`" for address in changes[:6])
        more = f" and {len(changes) - 6} more" if len(changes) > 6 else ""
        raise RunError(
            f"the checkpoint {folder} was made under a plan that differs in {listed}{more}, "
            "which changes what is trained",
            hint="use the plan it was made with, another --dump-folder to begin anew, or --accept-changes to go on",
        )
    return changes
