"""torch.compile, block by block: equal blocks share one compilation, and start-up does not grow with depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan_planner.ir.plan import Plan
from titan_planner.ir.rules import splits_backward
from titan_runtime.apply.tensor import holds_parts, taken_weights
from titan_runtime.errors import RunError
from titan_runtime.modules.moe import MixtureOfExperts


def apply_compile(module: nn.Module, plan: Plan) -> None:
    """Compile every block of `module` in place, when the plan compiles the model. FQNs stay as they are."""
    if not (plan.compile.enable and "model" in plan.compile.components):
        return
    _configure(plan)
    for block in module.get_submodule("layers").children():
        for part in _compilable(block):
            if holds_parts(part):
                compiled = torch.compile(part.forward, backend=plan.compile.backend, fullgraph=True)
                part.forward = _around_weights(part, compiled)  # type: ignore[method-assign]
            else:
                part.compile(backend=plan.compile.backend, fullgraph=True)


def _around_weights(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, compiled, given the weights of `part` that are DTensors as the plain tensors that it computes with.

    The compiler would take a DTensor for a tensor and a mesh, and choose what to keep for backward among both; of a region
    that is recomputed, torch 2.13 tries to save the mesh as a tensor, and of a memory budget it asks for the mesh's size.
    """

    def around(*args: Any) -> Any:
        with taken_weights(part):
            return forward(*args)

    return around


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
    _configure(plan)
    return torch.compile(loss, backend=plan.compile.backend)


def _configure(plan: Plan) -> None:
    """Tell the compiler, which has one configuration a process, what the plan's code must allow."""
    require_backend(plan.compile.backend)
    budget = memory_budget(plan)
    torch._functorch.config.activation_memory_budget = 1.0 if budget is None else budget
    # Schedules that split backward go through a stage's graph twice, for inputs and for weights: what the first pass reads
    # must still be there for the second, while compiled code would reuse its memory.
    torch._functorch.config.donated_buffer = splits_backward(plan) is None


def require_backend(name: str) -> None:
    """RunError when this torch has no compiler backend called `name`."""
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
