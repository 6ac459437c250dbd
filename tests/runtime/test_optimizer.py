"""Optimizer groups and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import plans
from titan_planner.ir.inventory import parameters
from titan_planner.ir.job import Optimizer, ParamGroup
from titan_runtime.errors import RunError
from titan_runtime.init import initialise
from titan_runtime.modules import build
from titan_runtime.optimizer import build_optimizer, group_parameters, optimizer_state, set_lr

FQNS = [parameter.fqn for parameter in parameters(plans.tiny_model())]


def groups(*entries: tuple[str, float, float | None]) -> Optimizer:
    found = tuple(ParamGroup(pattern=p, lr_scale=scale, weight_decay=decay) for p, scale, decay in entries)
    return replace(plans.tiny_plan().optimizer, param_groups=found)


def test_the_first_pattern_that_is_found_claims_a_parameter() -> None:
    claimed = group_parameters(FQNS, groups(("norm", 1.0, 0.0), (r"^layers\.0\.", 2.0, None)))
    assert claimed[0] == [fqn for fqn in FQNS if "norm" in fqn]
    assert claimed[1] == [fqn for fqn in FQNS if fqn.startswith("layers.0.") and "norm" not in fqn]
    assert sorted(claimed[0] + claimed[1] + claimed[-1]) == sorted(FQNS)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(RunError, match=r"param_groups\[1\]: `bias` is idle: it matches no parameter"):
        group_parameters(FQNS, groups(("norm", 1.0, 0.0), ("bias", 1.0, 0.0)))


def test_a_pattern_behind_a_wider_one_is_an_error_that_says_so() -> None:
    with pytest.raises(RunError, match=r"param_groups\[1\].*an earlier pattern claims all 2 parameters") as caught:
        group_parameters(FQNS, groups(("norm", 1.0, 0.0), ("ffn_norm", 2.0, 0.0)))
    assert caught.value.hint == "put it before the wider pattern"


def test_a_broken_pattern_is_an_error() -> None:
    with pytest.raises(RunError, match=r"`norm\(` is not a regular expression"):
        group_parameters(FQNS, groups(("norm(", 1.0, 0.0)))


def test_groups_carry_their_own_rate_and_decay() -> None:
    module = build(plans.tiny_model(), device="cpu")
    optimizer = build_optimizer(module, groups(("norm", 0.5, 0.0)))
    set_lr(optimizer, 0.01)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.005, 0.0), (0.01, 0.1)]


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_implementations_make_the_same_step(name: str, implementation: str) -> None:
    plan = replace(plans.tiny_plan().optimizer, name=name, implementation=implementation)
    module, reference = (build(plans.tiny_model(), device="cpu") for _ in range(2))
    for made in (module, reference):
        initialise(made, plans.tiny_model(), seed=0)
    ours = build_optimizer(module, plan)
    flags = {"fused": "fused", "foreach": "foreach"}.get(implementation)
    assert all(bool(group[flags]) for group in ours.param_groups) if flags else True
    kind = getattr(torch.optim, name)
    theirs = kind(reference.parameters(), lr=plan.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(3):
        for made, optimizer in ((module, ours), (reference, theirs)):
            for number, parameter in enumerate(made.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (number + 1) - 0.05 * step)
            optimizer.step()
    for ours_, theirs_ in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-5, atol=1e-7)


def test_state_made_before_the_first_step_is_what_the_step_would_make() -> None:
    module = build(plans.tiny_model(), device="cpu")
    early, late = (build_optimizer(module, plans.tiny_plan().optimizer) for _ in range(2))
    made = optimizer_state(module, early)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_lr(late, 0.0)
    late.step()
    stepped = optimizer_state(module, late)
    assert made.keys() == stepped.keys()
    for name, value in made.items():
        assert value.dtype == stepped[name].dtype, name
        assert value.shape == stepped[name].shape, name
    assert {tuple(name.rsplit(".", 1)[1] for name in made if name.startswith("norm.weight"))} == {
        ("step", "exp_avg", "exp_avg_sq")
    }
