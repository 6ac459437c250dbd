"""Activation checkpointing: what a block keeps for backward, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy as Decision,
)
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titan_planner.ir.execution import ActivationCheckpoint, CheckpointPolicy
from titan_planner.ir.fqn import matches
from titan_planner.ir.plan import Plan
from titan_runtime.errors import RunError

MATMUL = torch.ops.aten.mm.default


def apply_checkpointing(module: nn.Module, plan: Plan) -> None:
    """Wrap the forward of every top-level module in place as its layer's policy says. FQNs stay as they are."""
    here = {name for name, _ in module.named_modules()}
    for layer in plan.layers:
        if layer.fqn not in here:  # another pipeline stage's
            continue
        policy = plan.activation_checkpoint.policy(layer.checkpoint)
        if policy is None:
            raise RunError(
                f"layers: `{layer.fqn}` has the checkpointing policy `{layer.checkpoint}`, which does not exist"
            )
        match policy.mode:
            case "none":
                continue
            case "memory_budget":
                # Not a wrapper but a limit that the compiler is given; see apply/compile.py.
                continue
            case "full" | "selective":
                part = module.get_submodule(layer.fqn)
                part.forward = _checkpointed(part, layer.fqn, policy, plan.activation_checkpoint)  # type: ignore[method-assign]
            case _:
                assert_never(policy.mode)


def _checkpointed(
    part: nn.Module, fqn: str, policy: CheckpointPolicy, options: ActivationCheckpoint
) -> Callable[..., Any]:
    """The module's forward under torch's checkpoint. Only the bound forward changes, so hooks stay outside: FSDP
    gathers
    the weights before the recomputation as before any other use of the block."""
    keywords: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": options.preserve_rng_state,
        "determinism_check": options.determinism_check,
        "early_stop": options.early_stop,
    }
    if policy.mode == "selective":
        keywords["context_fn"] = _selective_contexts(part, fqn, policy)
    inner, name = part.forward, policy.name

    # A function written out here, not a partial: the compiler steps into user code, and skips a bare torch function.
    def forward(*args: Any) -> Any:
        # The comparison makes the compiler guard on the policy. It does not guard on `context_fn`, and would run the code
        # compiled for the first policy in all other blocks of the same shape.
        assert name == policy.name
        return checkpoint(inner, *args, **keywords)

    return forward


def _selective_contexts(part: nn.Module, fqn: str, policy: CheckpointPolicy) -> Callable[[], Any]:
    saved = frozenset(resolve_op(policy.name, name) for name in policy.save_ops)
    recomputed_shapes = _shapes(part, fqn, policy.force_recompute_fqns)

    def contexts() -> Any:
        seen = {False: 0, True: 0}  # matmuls of the forward, and of its recomputation

        def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Decision:
            if op is MATMUL:
                if tuple(args[1].shape) in recomputed_shapes:
                    return Decision.PREFER_RECOMPUTE
                seen[ctx.is_recompute] += 1
                if policy.recompute_every_second_matmul and seen[ctx.is_recompute] % 2 == 0:
                    return Decision.PREFER_RECOMPUTE
            return Decision.MUST_SAVE if op in saved else Decision.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return contexts


def resolve_op(policy: str, name: str) -> Any:
    """The torch operator `aten.mm.default`; RunError when this torch has none of that name."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise RunError(
            f"activation_checkpoint: policy `{policy}` saves `{name}`, "
            f"which is no operator of torch {torch.__version__}",
            hint="name operators as namespace.name.overload, e.g. aten.mm.default",
        )
    return found


def _shapes(part: nn.Module, fqn: str, selectors: tuple[str, ...]) -> frozenset[tuple[int, int]]:
    """The shapes, as the second operand of the matmul, of the linears below `part` that `selectors` name."""
    shapes = set()
    for name, child in part.named_modules():
        if isinstance(child, nn.Linear) and any(matches(selector, f"{fqn}.{name}") for selector in selectors):
            # The weight's own shape: under tensor parallelism a rank multiplies with a part of it.
            shapes.add((child.weight.shape[1], child.weight.shape[0]))
    return frozenset(shapes)
