"""A rule in words: what it says, why it holds, and where in a spec or a plan it looks."""

from __future__ import annotations

from typing import Any

from titan_planner.render.tables import PLAIN, Style, pairs
from titan_planner.rules import Known


def rule_text(rule: Known, width: int, style: Style = PLAIN) -> str:
    """For people: `id: statement`, and the rest below."""
    rows = [("why", rule.doc)]
    if rule.spec:
        rows.append(("in a spec", ", ".join(f"`{address}`" for address in rule.spec)))
    if rule.plan:
        rows.append(("in a plan", ", ".join(f"`{address}`" for address in rule.plan)))
    if rule.table:
        rows.append(("combinations", "; ".join(rule.table)))
    return "\n".join([f"{style.bold(rule.id)}: {rule.statement}", *pairs(rows, width=width)])


def rule_json(rule: Known) -> dict[str, Any]:
    """For scripts."""
    return {
        "rule": rule.id,
        "statement": rule.statement,
        "doc": rule.doc,
        "spec": list(rule.spec),
        "plan": list(rule.plan),
        "combinations": list(rule.table),
    }
