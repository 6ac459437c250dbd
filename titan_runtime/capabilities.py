"""What this runtime does not do yet, as a table: a plan that asks for it is refused before any collective.

A plan holds decisions that a later version executes. Running it without one of them would be another training run under
the same name, so there is no "ignored with a warning".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_planner.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Missing:
    """Something a plan may ask for: its address, whether a plan asks for it, and what to do instead."""

    address: str
    asks: Callable[[Plan], bool]
    what: str
    instead: str


MISSING: tuple[Missing, ...] = (
    Missing(
        "expert_parallel.comm_backend",
        lambda p: p.mesh.ep > 1 and p.expert_parallel.comm_backend != "standard",
        "token dispatch by DeepEP or HybridEP",
        "use `standard`",
    ),
    Missing(
        "activation_checkpoint.policies",
        lambda p: len(memory_budgets(p)) > 1,
        "different memory budgets in one plan",
        "give all layers with a memory budget the same one",
    ),
    Missing(
        "layers.checkpoint",
        lambda p: "model" in p.compile.components and p.compile.enable and bool(memory_budgets(p)) and _keeps_all(p),
        "blocks with a memory budget beside blocks that keep everything (the compiler has one budget for all)",
        "give all blocks the same memory budget, or none of them one",
    ),
    Missing(
        "data.source",
        lambda p: p.data.source == "huggingface",
        "streaming from Hugging Face",
        "download the text and use the source text, jsonl or parquet",
    ),
    Missing(
        "job.checkpoint.async_mode",
        lambda p: p.job.checkpoint.enable and p.job.checkpoint.async_mode != "disabled",
        "asynchronous checkpoints",
        "use `async_mode: disabled`",
    ),
    Missing(
        "job.checkpoint.last_save_in_hf",
        lambda p: p.job.checkpoint.enable and p.job.checkpoint.last_save_in_hf,
        "a final checkpoint in Hugging Face's format",
        "turn last_save_in_hf off",
    ),
)


def unsupported(plan: Plan) -> list[str]:
    """One sentence for each thing that `plan` asks for and this version does not do; empty when it can be run."""
    return [
        f"`{row.address}`: this version of the runtime does not do {row.what} yet ({row.instead})"
        for row in MISSING
        if row.asks(plan)
    ]


def memory_budgets(plan: Plan) -> set[float]:
    """The different activation budgets that layers of `plan` ask for."""
    used = {layer.checkpoint for layer in plan.layers}
    return {
        p.memory_budget for p in plan.activation_checkpoint.policies if p.name in used and p.memory_budget is not None
    }


def _keeps_all(plan: Plan) -> bool:
    """Whether a block (they are what is compiled) keeps all its activations."""
    modes = {policy.name: policy.mode for policy in plan.activation_checkpoint.policies}
    return any(modes.get(layer.checkpoint) == "none" for layer in plan.layers if layer.fqn.startswith("layers."))
