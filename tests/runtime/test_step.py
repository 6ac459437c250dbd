"""One optimizer step: what stops it, and the norm it reports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests import plans
from tests.harness import Rank, run_ranks
from titan_planner.ir.plan import Plan
from titan_runtime.clip import clip_, global_norm
from titan_runtime.errors import RunError
from titan_runtime.loss import count_valid, cross_entropy_sum, loss_function, with_z_loss


def poisoned(rank: Rank, plan: Plan, where: str) -> tuple[str, bool]:
    """What a step says when one rank's loss is not finite, and whether its weights and moments stayed as they were."""
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh
    from titan_runtime.optimizer import build_optimizer
    from titan_runtime.step import train_step

    device = torch.device("cpu")
    module = build_model(plan, build_mesh(plan.mesh, "cpu"), device)
    optimizer = build_optimizer(module, plan.optimizer)
    tokens = torch.arange(32).view(1, 32)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        total = cross_entropy_sum(logits, labels)
        if where == "loss" and rank.index == 1:
            return total * math.inf
        if where == "gradient" and rank.index == 1:
            total.register_hook(lambda gradient: gradient * math.nan)
        return total

    def step(number: int, used: object) -> None:
        train_step(plan, module, optimizer, used, [(tokens, tokens)], number, number - 1, device)

    step(1, cross_entropy_sum)
    before = [p.detach().to_local().clone() for p in module.parameters()]
    moments = [s["exp_avg"].to_local().clone() for s in optimizer.state.values()]
    with pytest.raises(RunError) as caught:
        step(2, loss)
    assert caught.value.agreed
    same = all(torch.equal(a, p.detach().to_local()) for a, p in zip(before, module.parameters(), strict=True))
    same &= all(torch.equal(a, s["exp_avg"].to_local()) for a, s in zip(moments, optimizer.state.values(), strict=True))
    return str(caught.value), same


@pytest.mark.parametrize(("where", "words"), [("loss", "the loss is inf"), ("gradient", "and the gradient norm nan")])
def test_a_number_that_is_not_finite_on_one_rank_stops_all_before_the_update(where: str, words: str) -> None:
    results = run_ranks(poisoned, 2, plans.tiny_plan(plans.mesh(2), total=2), where)
    for sentence, same in results:
        assert sentence.startswith("step 2: ")
        assert words in sentence
        assert "the weights are those of step 1" in sentence
        assert same
    assert results[0] == results[1]


def test_valid_labels_are_counted_over_all_ranks_and_microbatches() -> None:
    def count(rank: Rank) -> int:
        labels = torch.full((2, 4), -100)
        labels[0, : rank.index + 1] = 5
        return int(count_valid([labels, labels], torch.device("cpu")))

    assert run_ranks(count, 3) == [12, 12, 12]


def test_the_norm_counts_replicated_and_sharded_elements_once() -> None:
    def norms(rank: Rank) -> tuple[float, float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        whole = [torch.arange(14.0).view(7, 2), torch.tensor([3.0, 4.0]), torch.full((1, 2), 1e3)]
        placements = [(Replicate(), Shard(0)), (Replicate(), Replicate()), (Replicate(), Shard(0))]
        spread = [distribute_tensor(t, mesh, p) for t, p in zip(whole, placements, strict=True)]
        norm = global_norm(spread)
        clip_(spread, norm, 1.0)
        return float(norm), float(global_norm(spread))

    expected = math.sqrt(sum(n * n for n in range(14)) + 25 + 2e6)
    for before, after in run_ranks(norms, 4):
        assert before == pytest.approx(expected, rel=1e-7)
        assert after == pytest.approx(1.0, rel=1e-5)


def test_clipping_leaves_small_gradients_and_a_limit_of_zero_alone() -> None:
    gradient = torch.tensor([3.0, 4.0])
    for limit in (0.0, 5.1, 100.0):
        clip_([gradient], global_norm([gradient]), limit)
        assert gradient.tolist() == [3.0, 4.0]
    clip_([gradient], global_norm([gradient]), 1.0)
    assert gradient.tolist() == pytest.approx([0.6, 0.8])


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32() -> None:
    gradients = [torch.full((1 << 16,), 1e-2, dtype=torch.bfloat16) for _ in range(8)]
    exact = math.sqrt(8 * (1 << 16)) * float(gradients[0][0])
    assert float(global_norm(gradients)) == pytest.approx(exact, rel=1e-5)


def test_the_loss_of_bfloat16_logits_is_computed_in_float32() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    labels = torch.tensor([[1, -100, 3], [4, 5, -100]])
    expected = sum(-logits[i, j].double().log_softmax(0)[k] for i, j, k in [(0, 0, 1), (0, 2, 3), (1, 0, 4), (1, 1, 5)])
    found = cross_entropy_sum(logits, labels)
    assert found.dtype is torch.float32
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_a_partial_gradient_is_a_bug_that_says_so() -> None:
    def norm(rank: Rank) -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        gradient = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
        with pytest.raises(ValueError, match="is not reduced yet"):
            global_norm([gradient])
        return "said"

    assert run_ranks(norm, 2) == ["said", "said"]


def test_a_zero_rate_scale_freezes_a_group() -> None:
    from titan_planner.ir.job import ParamGroup
    from titan_runtime.modules import build
    from titan_runtime.optimizer import build_optimizer, set_lr

    values = replace(
        plans.tiny_plan().optimizer, param_groups=(ParamGroup(pattern="norm", lr_scale=0.0, weight_decay=None),)
    )
    module = build(plans.tiny_model(), device="cpu")
    before = {fqn: parameter.detach().clone() for fqn, parameter in module.named_parameters()}
    optimizer = build_optimizer(module, values)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_lr(optimizer, 0.01)
    optimizer.step()
    for fqn, parameter in module.named_parameters():
        assert torch.equal(parameter, before[fqn]) == ("norm" in fqn), fqn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_z_loss_bends_the_gradient_and_not_the_value(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 3, 50, generator=generator)).to(dtype).requires_grad_()
    labels = torch.tensor([[1, -100, 3], [4, 5, -100]])
    loss = with_z_loss(0.3)
    found = loss(logits, labels)
    assert torch.equal(found, cross_entropy_sum(logits, labels))
    (gradient,) = torch.autograd.grad(found, logits)
    exact = logits.detach().double().requires_grad_()
    valid = labels != -100
    total = sum(
        -exact[i, j].log_softmax(0)[labels[i, j]] + 0.3 * exact[i, j].logsumexp(0) ** 2 for i, j in valid.nonzero()
    )
    total.backward()
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5)
    assert gradient[~valid].count_nonzero() == 0


def test_without_a_weight_there_is_no_z_loss() -> None:
    assert loss_function(plans.tiny_plan(), None) is cross_entropy_sum
