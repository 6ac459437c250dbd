"""May a run go on under another plan? The verdict is `titan-plan diff`'s: the same code gives it in both places."""

from __future__ import annotations

from pathlib import Path

from titan_planner.ir.diff import PlanDiff, diff
from titan_planner.ir.errors import PlanError
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import load_plan
from titan_runtime.errors import RunError

PLAN_FILE = "plan.json"


def require_compatible(folder: Path, now: Plan, accept_changes: bool) -> list[str]:
    """The accepted differences between the plan stored in a checkpoint's folder and `now`.

    Raises RunError when the model itself changed, and when something else that is trained did and `accept_changes` does
    not allow it.
    """
    try:
        before = load_plan(folder / PLAN_FILE)
    except PlanError as error:
        if accept_changes:
            return [f"unknown, because the stored plan cannot be read ({error.complaints[0].message})"]
        raise RunError(
            f"the plan stored in {folder} cannot be read: {error.complaints[0].message}",
            hint="--load-step N to resume from an older step, or --accept-changes to resume without the comparison",
        ) from None
    found = diff(before, now)
    if found.of("model"):
        raise RunError(
            f"the checkpoint {folder} is of another model: {_listed(differing(found, 'model'))}",
            hint="use the plan it was made with, or another --dump-folder to begin anew",
        )
    changes = differing(found, "numerics")
    if changes and not accept_changes:
        raise RunError(
            f"the checkpoint {folder} was made under a plan that differs in {_listed(changes)}, "
            "which changes what is trained",
            hint="use the plan it was made with, another --dump-folder to begin anew, or --accept-changes to go on",
        )
    return changes


def differing(found: PlanDiff, consequence: str) -> list[str]:
    """Addresses of the changes of one consequence, each once."""
    return list(dict.fromkeys(change.address for change in found.changes if change.consequence == consequence))


def _listed(addresses: list[str], limit: int = 6) -> str:
    more = f" and {len(addresses) - limit} more" if len(addresses) > limit else ""
    return ", ".join(f"`{address}`" for address in addresses[:limit]) + more
