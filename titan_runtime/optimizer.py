"""Adam, AdamW and Muon as the plan asks, with groups of parameters that have values of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import assert_never

import torch
from torch import Tensor, nn

from titan_planner.ir.job import Optimizer
from titan_runtime.apply.fsdp import DTYPES
from titan_runtime.errors import RunError
from titan_runtime.update_rules import WIDE_ELEMENTS, ShardedMuon, Together, WideAdam, fill_state


def group_parameters(fqns: Iterable[str], optimizer: Optimizer) -> dict[int, list[str]]:
    """Index of the group -> FQNs it claims; -1 is the rest. The first pattern found in an FQN claims it.

    Raises RunError for a pattern that is no regular expression, or that claims nothing, for then it is misspelled or
    hidden behind an earlier one.
    """
    patterns = []
    for index, group in enumerate(optimizer.param_groups):
        try:
            patterns.append(re.compile(group.pattern))
        except re.error as error:
            raise RunError(
                f"optimizer.param_groups[{index}]: `{group.pattern}` is not a regular expression ({error})",
                hint="escape special characters with a backslash",
            ) from None
    names = list(fqns)
    claimed: dict[int, list[str]] = {index: [] for index in (*range(len(patterns)), -1)}
    for fqn in names:
        first = next((index for index, pattern in enumerate(patterns) if pattern.search(fqn)), -1)
        claimed[first].append(fqn)
    for index, pattern in enumerate(patterns):
        if not claimed[index]:
            hidden = [fqn for fqn in names if pattern.search(fqn)]
            why = (
                f"an earlier pattern claims all {len(hidden)} parameters it matches, e.g. `{hidden[0]}`"
                if hidden
                else "it matches no parameter"
            )
            hint = "put it before the wider pattern" if hidden else f"parameters are named like `{names[-1]}`"
            raise RunError(f"optimizer.param_groups[{index}]: `{pattern.pattern}` is idle: {why}", hint=hint)
    return claimed


def build_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    muon: frozenset[str] = frozenset(),
    whole: Iterable[str] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over all parameters of `module`. Each group carries `lr_scale`, which `set_lr` multiplies in.

    `muon` are the parameters that Muon takes where the plan names it; AdamW takes all others. `whole` are the FQNs of the
    whole model where `module` is a pipeline stage: a pattern may be for other stages only.
    """
    named = dict(module.named_parameters())
    groups = []
    for index, claimed in group_parameters(named if whole is None else whole, optimizer).items():
        fqns = [fqn for fqn in claimed if fqn in named]
        if not fqns:
            continue
        own = optimizer.param_groups[index] if index >= 0 else None
        decay = optimizer.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        for matrices in (False, True):
            members = [fqn for fqn in fqns if (optimizer.name == "Muon" and fqn in muon) is matrices]
            if members:
                groups.append(
                    {
                        "params": [named[fqn] for fqn in members],
                        "lr_scale": 1.0 if own is None else own.lr_scale,
                        "weight_decay": decay,
                        "muon": matrices,
                    }
                )
    dtype = DTYPES[optimizer.state_dtype]
    if any(parameter.dtype is not dtype for parameter in named.values()):
        # torch keeps moments in the parameters' dtype.
        adam: Callable[..., torch.optim.Optimizer] = partial(
            WideAdam,
            state_dtype=dtype,
            decoupled=optimizer.name != "Adam",
            bucket_elements=WIDE_ELEMENTS if optimizer.implementation == "foreach" else 0,
        )
    else:
        adam = partial(
            torch.optim.Adam if optimizer.name == "Adam" else torch.optim.AdamW,
            fused=optimizer.implementation == "fused",
            foreach=optimizer.implementation == "foreach",
        )
    adam = partial(adam, lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
    match optimizer.name:
        case "AdamW" | "Adam":
            return adam(groups)
        case "Muon":
            matrices_ = [group for group in groups if group["muon"]]
            others = [group for group in groups if not group["muon"]]
            # A pipeline rank may hold no matrix (an embedding alone), or nothing else.
            parts: list[torch.optim.Optimizer] = []
            if matrices_:
                parts.append(ShardedMuon(matrices_, lr=optimizer.lr, momentum=optimizer.beta1, state_dtype=dtype))
            if others:
                parts.append(adam(others))
            return Together(*parts)
        case _:
            assert_never(optimizer.name)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next step use `lr`, times each group's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live state tensors as `<fqn>.<moment>` -> tensor, made now where the first step has not made them yet.

    Hyperparameters are not in it: they come from the plan, and the learning rate from the step.
    """
    found: dict[str, Tensor] = {}
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for fqn, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            fill_state(state, parameter, group_of[id(parameter)])
        for name, value in state.items():
            found[f"{fqn}.{name}"] = value
    return found
