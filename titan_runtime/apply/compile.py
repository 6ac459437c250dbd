"""torch.compile, block by block: equal blocks share one compilation, and start-up does not grow with depth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_planner.ir.plan import Plan
from titan_runtime.errors import RunError
from titan_runtime.modules.moe import MixtureOfExperts


def apply_compile(module: nn.Module, plan: Plan) -> None:
    """Compile every block of `module` in place, when the plan compiles the model. FQNs stay as they are."""
    if not (plan.compile.enable and "model" in plan.compile.components):
        return
    _require_backend(plan.compile.backend)
    budget = memory_budget(plan)
    if budget is not None:
        torch._functorch.config.activation_memory_budget = budget
    for block in module.get_submodule("layers").children():
        for part in _compilable(block):
            part.compile(backend=plan.compile.backend, fullgraph=True)


def _compilable(block: nn.Module) -> list[nn.Module]:
    """The block, or where it has a mixture of experts the parts around the routing, whose shapes depend on the data."""
    inner = [part for part in block.children() if isinstance(part, MixtureOfExperts)]
    if not inner:
        return [block]
    shared = [part.shared_experts for part in inner if part.shared_experts is not None]
    return [part for part in block.children() if part not in inner] + shared


def compiled_loss(loss: Callable[[Tensor, Tensor], Tensor], plan: Plan) -> Callable[[Tensor, Tensor], Tensor]:
    """`loss`, compiled when the plan says so: fused, it never writes the float32 logits to memory."""
    if not (plan.compile.enable and "loss" in plan.compile.components):
        return loss
    _require_backend(plan.compile.backend)
    return torch.compile(loss, backend=plan.compile.backend)


def _require_backend(name: str) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        raise RunError(
            f"compile.backend: torch {torch.__version__} has no compiler backend `{name}`",
            hint=f"use one of {', '.join(known)}",
        )


def memory_budget(plan: Plan) -> float | None:
    """The compiler's activation budget, None when no layer asks for one. Different ones have been refused before."""
    used = {layer.checkpoint for layer in plan.layers}
    for policy in plan.activation_checkpoint.policies:
        if policy.name in used and policy.memory_budget is not None:
            return policy.memory_budget
    return None
