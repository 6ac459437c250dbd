"""Mixtures of experts: routing, products, counting and balancing, against references written out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import plans
from tests.harness import Rank, run_ranks
from tests.runtime.test_checkpoint import copy_until, train_ranks
from tests.runtime.test_parity import checkpointed
from titan_planner.ir.model import Moe
from titan_planner.ir.plan import Plan
from titan_runtime.apply.checkpointing import apply_checkpointing
from titan_runtime.experts import ExpertCounts, bias_step
from titan_runtime.init import initialise
from titan_runtime.loss import cross_entropy_sum
from titan_runtime.modules import build, moe
from titan_runtime.modules.moe import MixtureOfExperts

DIM, TOKENS = 16, 40


def mixture(seed: int = 0, dim: int = DIM, **changes: Any) -> MixtureOfExperts:
    """A mixture whose router tells experts clearly apart, with a bias that changes choices."""
    layer = MixtureOfExperts(dim, plans.moe(**changes))
    generator = torch.Generator().manual_seed(seed)
    layer.reset()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        if layer.expert_bias is not None:
            layer.expert_bias.copy_(torch.randn(layer.expert_bias.shape, generator=generator) * 0.3)
    return layer


def inputs(dim: int = DIM, seed: int = 1) -> Tensor:
    return torch.randn(2, TOKENS // 2, dim, generator=torch.Generator().manual_seed(seed))


def naive(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, list[list[int]]]:
    """One token and one expert at a time, in float64 and differentiable; and the choices."""
    settings: Moe = layer.moe
    weights = {name: parameter.double() for name, parameter in layer.named_parameters()}
    rows, choices = [], []

    def swiglu(h: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        up = w1 @ h
        return w2 @ (up * torch.sigmoid(up) * (w3 @ h))

    for token in x.double().flatten(0, 1):
        logits = weights["router.gate.weight"] @ token
        scores = torch.sigmoid(logits) if settings.score_function == "sigmoid" else logits.exp() / logits.exp().sum()
        judged = scores.detach().tolist()
        if layer.expert_bias is not None:
            judged = [score + float(bias) for score, bias in zip(judged, layer.expert_bias, strict=True)]
        allowed = set(range(settings.num_experts))
        if settings.num_groups:
            size = settings.num_experts // settings.num_groups
            groups = [range(g * size, (g + 1) * size) for g in range(settings.num_groups)]
            groups.sort(key=lambda group: -sum(sorted((judged[e] for e in group), reverse=True)[:2]))
            allowed = {e for group in groups[: settings.num_limited_groups] for e in group}
        chosen = sorted(allowed, key=lambda e: -judged[e])[: settings.top_k]
        total = sum(scores[e] for e in chosen) if settings.route_norm else 1.0
        out = torch.zeros_like(token)
        for e in chosen:
            expert = tuple(weights[f"experts.{w}"][e] for w in ("w1", "w2", "w3"))
            score = scores[e] / total * settings.route_scale
            if settings.score_before_experts:
                out = out + swiglu(score * token, *expert)
            else:
                out = out + score * swiglu(token, *expert)
        if settings.num_shared_experts:
            out = out + swiglu(token, *(weights[f"shared_experts.{w}.weight"] for w in ("w1", "w2", "w3")))
        rows.append(out)
        choices.append(chosen)
    return torch.stack(rows).view(x.shape), choices


OPTIONS = [
    pytest.param({}, id="deepseek"),
    pytest.param({"score_function": "softmax", "route_norm": False, "load_balance_coeff": None}, id="qwen"),
    pytest.param({"top_k": 1, "score_before_experts": True, "route_norm": False}, id="llama4"),
    pytest.param({"num_groups": 4, "num_limited_groups": 2, "top_k": 3, "num_shared_experts": 2}, id="groups"),
    pytest.param({"num_shared_experts": 0, "hidden_dim": 7}, id="no-grouped-product"),
]


@pytest.mark.parametrize("changes", OPTIONS)
def test_outputs_and_gradients_are_those_of_one_token_at_a_time(changes: dict[str, Any]) -> None:
    layer, x = mixture(**changes), inputs()
    direction = inputs(seed=2)
    ours = x.clone().requires_grad_()
    out = layer(ours)
    (out * direction).sum().backward()
    got = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    theirs = x.double().clone().requires_grad_()
    expected, choices = naive(layer, theirs)
    (expected * direction).sum().backward()

    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    flat = [expert for chosen in choices for expert in chosen]
    assert layer.tokens_per_expert.tolist() == [flat.count(e) for e in range(8)]


def test_the_bias_changes_choices_and_not_scores() -> None:
    layer = mixture()
    tokens = inputs().flatten(0, 1)
    plain_scores, plain = layer.router(tokens)
    scores, chosen = layer.router(tokens, layer.expert_bias)
    same = (plain == chosen).all(dim=1)
    assert 5 < same.sum() < TOKENS - 5
    assert torch.equal(plain_scores[same], scores[same])
    everywhere = torch.full((8,), 3.0)  # the same for all: no choice changes
    assert torch.equal(layer.router(tokens, everywhere)[1].sort().values, plain.sort().values)


def test_groups_limit_the_choice() -> None:
    limited = mixture(num_groups=4, num_limited_groups=1, load_balance_coeff=None)
    chosen = limited.router(inputs().flatten(0, 1))[1]
    assert bool((chosen[:, 0] // 2 == chosen[:, 1] // 2).all())
    free = mixture(load_balance_coeff=None).router(inputs().flatten(0, 1))[1]
    assert not bool((free[:, 0] // 2 == free[:, 1] // 2).all())


def test_a_bfloat16_router_scores_in_float32() -> None:
    layer = mixture().bfloat16()
    tokens = inputs().flatten(0, 1).bfloat16()
    scores, chosen = layer.router(tokens)
    wide = torch.sigmoid(tokens.float() @ layer.router.gate.weight.float().T)
    assert scores.dtype is torch.float32
    assert torch.equal(chosen.sort().values, wide.topk(2).indices.sort().values)
    assert layer(inputs().bfloat16()).dtype is torch.bfloat16


def test_the_grouped_product_and_the_loop_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = mixture()
    counts = torch.tensor([7, 0, 3, 0, 0, 20, 1, 9])
    results = []
    for grouped in (True, False):
        monkeypatch.setattr(moe, "grouped_product_works", lambda *tensors, answer=grouped: answer)
        x = inputs().flatten(0, 1).requires_grad_()
        layer.zero_grad()
        out = layer.experts(x, counts)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad.clone() for p in layer.experts.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    # FSDP reduces only gradients that exist, so an expert nobody chose has one, of zeros.
    assert all(bool((gradient[1] == 0).all()) for gradient in results[1][2:])


@pytest.mark.parametrize("grouped", [True, False])
def test_no_rows_at_all_still_give_gradients(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "grouped_product_works", lambda *tensors: grouped)
    experts = mixture().experts
    out = experts(torch.zeros(0, DIM, requires_grad=True), torch.zeros(8, dtype=torch.int64))
    out.sum().backward()
    assert out.shape == (0, DIM)
    assert all(bool((p.grad == 0).all()) for p in experts.parameters())


def test_the_grouped_product_is_taken_where_rows_are_whole_vectors() -> None:
    def works(dim: int, hidden: int, dtype: torch.dtype = torch.float32) -> bool:
        w1, w2 = torch.empty(2, hidden, dim, dtype=dtype), torch.empty(2, dim, hidden, dtype=dtype)
        return moe.grouped_product_works(torch.empty(3, dim, dtype=dtype), w1, w2)

    assert works(16, 24)
    assert not works(16, 7)
    assert not works(6, 8)
    assert not works(8, 4, torch.bfloat16)


# ------------------------------------------------------------------ counting


def moe_plan(**sections: Any) -> Plan:
    return plans.tiny_plan(**{"model": plans.tiny_moe_model(), **sections})


def counted(plan: Plan, microbatches: int) -> dict[str, list[int]]:
    module = build(plan.model, seq_len=32).to_empty(device="cpu")
    initialise(module, plan.model, seed=0)
    apply_checkpointing(module, plan)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, plans.VOCAB, (2, 32), generator=generator) for _ in range(2)]
    for number in range(microbatches):
        cross_entropy_sum(module(batches[number]), batches[number]).backward()
    with torch.no_grad():
        module(batches[1])
    module.eval()
    module(batches[1])
    return {
        fqn: part.tokens_per_expert.tolist()
        for fqn, part in module.named_modules()
        if isinstance(part, MixtureOfExperts)
    }


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_every_choice_of_training_is_counted_once(mode: str) -> None:
    plain = [counted(moe_plan(), microbatches) for microbatches in (1, 2)]
    for counts, microbatches in zip(plain, (1, 2), strict=True):
        assert [sum(count) for count in counts.values()] == [microbatches * 2 * 32 * 2] * 2
    assert plain[0] != plain[1]
    if mode != "none":
        assert counted(everywhere(moe_plan(), mode), 2) == plain[1]


def everywhere(plan: Plan, mode: str) -> Plan:
    """`plan` with all its blocks under a checkpointing policy."""
    plan = checkpointed(plan, mode)
    layers = [replace(x, checkpoint="some" if x.fqn.startswith("layers.") else "none") for x in plan.layers]
    return replace(plan, layers=tuple(layers))


def test_a_capacity_cuts_off_the_last_tokens_and_says_how_many() -> None:
    layer, x = mixture(num_shared_experts=0), inputs()
    whole = layer(x).flatten(0, 1)
    loads = layer.tokens_per_expert.tolist()
    layer.reset()
    layer.expert_bias.copy_(mixture(num_shared_experts=0).expert_bias)
    layer.capacity_factor = 1.1
    cut = layer(x).flatten(0, 1)
    capacity = math.ceil(1.1 * TOKENS * 2 / 8)
    assert max(loads) > capacity
    assert layer.dropped.item() == sum(max(0, load - capacity) for load in loads)
    assert layer.tokens_per_expert.tolist() == loads  # the balance needs what was wanted

    seen, touched = [0] * 8, []
    for chosen in layer.router(x.flatten(0, 1), layer.expert_bias)[1].tolist():
        for expert in chosen:
            seen[expert] += 1
        touched.append(any(seen[expert] > capacity for expert in chosen))
    same = (whole - cut).abs().amax(dim=1) < 1e-6
    assert same.tolist() == [not lost for lost in touched]

    layer.capacity_factor = 8.0
    layer.dropped.zero_()
    assert torch.equal(layer(x).flatten(0, 1), whole)
    assert layer.dropped.item() == 0


def test_forced_balance_loads_all_experts_equally() -> None:
    layer = mixture()
    layer.force_load_balance = True
    layer(inputs()).sum().backward()
    assert layer.tokens_per_expert.tolist() == [TOKENS * 2 // 8] * 8
    assert layer.router.gate.weight.grad.abs().sum() > 0


# ------------------------------------------------------------------ balancing


def test_the_bias_steps_towards_even_loads_without_a_drift() -> None:
    step = bias_step(torch.tensor([10, 2, 4, 4, 4, 0, 4, 4]), 0.01)  # the mean is 4
    signs = torch.tensor([-1.0, 1, 0, 0, 0, 1, 0, 0])
    torch.testing.assert_close(step, 0.01 * (signs - signs.mean()))
    assert abs(step.sum().item()) < 1e-8
    assert torch.equal(bias_step(torch.full((8,), 5), 0.01), torch.zeros(8))


def test_the_bias_evens_out_the_loads() -> None:
    layer = mixture(load_balance_coeff=0.02)
    layer.expert_bias.zero_()
    x = torch.randn(4, 64, DIM, generator=torch.Generator().manual_seed(5)) + 0.7  # one direction stands out

    def imbalance() -> float:
        layer(x)
        return float(layer.tokens_per_expert.max() / layer.tokens_per_expert.float().mean())

    before = imbalance()
    for _ in range(40):
        layer.expert_bias += bias_step(layer.tokens_per_expert, 0.02)
        layer.tokens_per_expert.zero_()
        after = imbalance()
    assert before > 1.8
    assert after < 1.3


def test_counts_of_all_ranks_move_the_bias_and_are_emptied() -> None:
    def loads(rank: Rank) -> tuple[dict[str, float], int, list[float], int]:
        module = torch.nn.Module()
        module.layers = torch.nn.ModuleDict({"1": torch.nn.ModuleDict({"moe": mixture(load_balance_coeff=0.01)})})
        part = module.layers["1"]["moe"]
        part.expert_bias.zero_()
        part.tokens_per_expert.copy_(torch.tensor([[8, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 8, 16]][rank.index]))
        part.dropped.fill_(rank.index + 1)
        counts = ExpertCounts(moe_plan(), module)
        counts.update_bias()
        load = counts.report(counts.numbers(torch.device("cpu")).tolist())
        assert load is not None
        return load.imbalance, load.dropped, part.expert_bias.tolist(), int(part.tokens_per_expert.sum())

    first, second = run_ranks(loads, 2)
    assert first == second
    imbalance, dropped, bias, left = first
    assert imbalance == {"1": 4.0, "2": 0.0}  # 16 of 32 choices, where a mean expert has 4
    assert (dropped, left) == (3, 0)
    signs = torch.tensor([-1.0, 1, 1, 1, 1, 1, -1, -1])
    torch.testing.assert_close(torch.tensor(bias), 0.01 * (signs - signs.mean()))


# ------------------------------------------------------------------ whole runs


def saving(folder: Path, steps: int, ep: int, **changes: Any) -> Plan:
    grid = plans.mesh(ep, ep=ep)
    job = plans.job(str(folder), steps, enable=True, interval=2)
    return moe_plan(grid=grid, local=8 // ep, job=job, **changes)


def test_a_run_moves_between_expert_ranks_and_one_process(tmp_path: Path) -> None:
    straight = train_ranks(saving(tmp_path / "straight", 6, ep=2))
    keys = {"expert_imbalance/1", "expert_imbalance/2", "dropped_tokens"}
    assert all(keys < line.keys() and line["dropped_tokens"] == 0 for line in straight)
    assert all(1.0 <= line["expert_imbalance/1"] < 8.0 for line in straight)

    moved = tmp_path / "moved"
    moved.mkdir()
    copy_until(tmp_path / "straight", moved, step=2)
    train_ranks(saving(moved, 4, ep=1))
    back = train_ranks(saving(moved, 6, ep=2))
    for ours, theirs in zip(back, straight, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    again = tmp_path / "again"
    again.mkdir()
    copy_until(tmp_path / "straight", again, step=4)
    assert train_ranks(saving(again, 6, ep=2)) == straight

    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(tmp_path / "straight" / "checkpoint" / "step-2").read_metadata().state_dict_metadata
    bias = metadata["layers.1.moe.expert_bias"]
    assert bias.properties.dtype is torch.float32
    assert tuple(metadata["layers.1.moe.experts.w1"].size) == (8, 24, 32)
    assert not any("tokens_per_expert" in name for name in metadata)


def test_dropped_tokens_are_reported(tmp_path: Path) -> None:
    plan = saving(tmp_path, 2, ep=2)
    options = replace(plan.expert_parallel, capacity_factor=1.0)
    # Deterministic too, which some operators refuse.
    plan = replace(plan, expert_parallel=options, seeds=replace(plan.seeds, deterministic=True))
    output: list[str] = []
    lines = train_ranks(plan, output)
    assert f"in step 1 expert capacity cut off {lines[0]['dropped_tokens']:,} choices" in output[0]
    assert all(line["dropped_tokens"] > 0 for line in lines)
    assert json.dumps(lines[0]["dropped_tokens"]).isdecimal()
