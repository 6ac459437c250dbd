"""Optimizer groups and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import plans
from titan_planner.ir.inventory import muon_parameters, parameters
from titan_planner.ir.job import Optimizer, ParamGroup
from titan_planner.sharding import expert_rows, tensor_parallel_rows
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


# ------------------------------------------------------------------ moments of another dtype


def with_gradients(module: torch.nn.Module, step: int) -> None:
    for number, parameter in enumerate(module.parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 10.0 ** (
            number % 5 - 4
        )


def filled(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    module = build(plans.tiny_model(), device="cpu", dtype=dtype)
    initialise(module, plans.tiny_model(), seed=0)
    return module


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_moments_are_rounded_when_stored_and_nowhere_else(
    dtype: torch.dtype, name: str, implementation: str
) -> None:
    # bfloat16 parameters here have float32 moments, and the other way round.
    kept = "bfloat16" if dtype is torch.float32 else "float32"
    plan = replace(groups(("norm", 0.5, 0.0)), name=name, implementation=implementation, state_dtype=kept, beta2=0.99)
    module = filled(dtype)
    optimizer = build_optimizer(module, plan)
    by_hand = {fqn: [p.detach().clone().double(), 0.0, 0.0] for fqn, p in module.named_parameters()}
    for step in range(1, 4):
        with_gradients(module, step)
        set_lr(optimizer, 0.01)
        optimizer.step()
        for fqn, parameter in module.named_parameters():
            weight, m, v = by_hand[fqn]
            gradient, scale, decay = parameter.grad.double(), *((0.5, 0.0) if "norm" in fqn else (1.0, 0.1))
            if name == "AdamW":
                weight = weight * (1 - 0.01 * scale * decay)
            else:
                gradient = gradient + decay * weight
            m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
            root = (v / (1 - 0.99**step)).sqrt() + 1e-8
            weight = weight - 0.01 * scale / (1 - 0.9**step) * m / root
            stored = torch.bfloat16 if kept == "bfloat16" else torch.float32
            by_hand[fqn] = [weight.to(dtype).double(), m.float().to(stored).double(), v.float().to(stored).double()]
    for fqn, parameter in module.named_parameters():
        weight, m, _ = by_hand[fqn]
        state = optimizer.state[parameter]
        assert parameter.dtype is dtype
        assert (
            state["exp_avg"].dtype
            is state["exp_avg_sq"].dtype
            is (torch.bfloat16 if kept == "bfloat16" else torch.float32)
        )
        # Now and then a sum in float32 rounds to the neighbour in bfloat16.
        loose = {"rtol": 2e-3, "atol": 2e-4} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 2e-3}
        torch.testing.assert_close(parameter.detach().double(), weight, **loose, msg=fqn)
        torch.testing.assert_close(state["exp_avg"].double(), m, rtol=1e-2, atol=1e-6, msg=fqn)


def test_computing_wide_in_float32_is_torchs_adamw() -> None:
    from titan_runtime.update_rules import WideAdam

    ours, theirs = filled(), filled()
    wide = WideAdam(ours.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, state_dtype=torch.float32, decoupled=True)
    wide.param_groups[0]["weight_decay"] = 0.1
    exact = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        for module, optimizer in ((ours, wide), (theirs, exact)):
            with_gradients(module, step)
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_buckets_change_nothing_and_hold_what_they_may() -> None:
    from titan_runtime.update_rules import WideAdam, _buckets

    results = []
    for elements in (0, 3000, 1 << 25):
        module = filled()
        optimizer = WideAdam(
            module.parameters(),
            lr=0.01,
            betas=(0.9, 0.95),
            eps=1e-8,
            state_dtype=torch.bfloat16,
            decoupled=True,
            bucket_elements=elements,
        )
        with_gradients(module, 1)
        sizes = [sum(p.numel() for p in bucket) for bucket in _buckets(optimizer.param_groups[0])]
        assert all(size <= max(elements, 2048 * 32) for size in sizes)
        optimizer.step()
        results.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# ------------------------------------------------------------------ Muon

MATRICES = muon_parameters(plans.tiny_model())


def muon(**changes: object) -> Optimizer:
    return replace(groups(("norm", 0.5, 0.0)), name="Muon", beta1=0.95, **changes)


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    assert {fqn.split(".", 2)[2] for fqn in MATRICES} == {
        *(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")),
        *(f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")),
    }
    module = filled()
    optimizer = build_optimizer(module, muon(), MATRICES)
    state = optimizer_state(module, optimizer)
    assert {name.rsplit(".", 1)[0] for name in state if name.endswith("momentum_buffer")} == MATRICES
    assert {name.rsplit(".", 1)[0] for name in state if name.endswith("exp_avg")} == set(FQNS) - MATRICES
    with_gradients(module, 1)
    set_lr(optimizer, 0.0)
    before = {name: id(tensor) for name, tensor in state.items()}
    optimizer.step()
    assert {name: id(tensor) for name, tensor in optimizer_state(module, optimizer).items()} == before
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("held", [set(FQNS) - MATRICES, MATRICES], ids=["no-matrix", "matrices-alone"])
def test_muon_on_a_rank_that_holds_one_kind_of_parameters(held: set[str]) -> None:
    module = filled()
    stage = torch.nn.Module()
    stage.named_parameters = lambda: ((fqn, p) for fqn, p in module.named_parameters() if fqn in held)  # type: ignore[method-assign]
    optimizer = build_optimizer(stage, replace(muon(), param_groups=()), MATRICES, whole=FQNS)
    with_gradients(module, 1)
    before = {fqn: p.detach().clone() for fqn, p in module.named_parameters()}
    set_lr(optimizer, 0.1)
    optimizer.step()
    changed = {fqn for fqn, p in module.named_parameters() if not torch.equal(p, before[fqn])}
    assert changed == held


def test_muon_is_torchs_on_one_rank_bit_for_bit_and_on_shards_too() -> None:
    from tests.harness import Rank, run_ranks

    def stepped(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        from torch.distributed.tensor import DTensor, distribute_tensor

        for step in range(3):
            for number, parameter in enumerate(module.parameters()):
                generator = torch.Generator().manual_seed(100 * step + number)
                gradient = torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                parameter.grad = gradient
            set_lr(optimizer, 0.01)
            optimizer.step()
        return {
            fqn: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for fqn, p in module.named_parameters()
        }

    reference = filled()
    torchs = torch.optim.Muon(
        [{"params": [p for fqn, p in reference.named_parameters() if fqn in MATRICES], "lr_scale": 1.0}],
        lr=0.01,
        momentum=0.95,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    expected = stepped(reference, torchs)
    module = filled()
    found = stepped(module, build_optimizer(module, muon(implementation="for-loop"), MATRICES))
    for fqn in MATRICES:
        assert torch.equal(found[fqn], expected[fqn]), fqn
    assert not torch.equal(found["output.weight"], expected["output.weight"])

    def sharded(rank: Rank) -> bool:
        from titan_runtime.apply import build_model
        from titan_runtime.mesh import build_mesh

        plan = plans.tiny_plan(plans.mesh(3, 1), total=3, seeds=replace(plans.tiny_plan().seeds, seed=0))
        shards = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
        ours = stepped(shards, build_optimizer(shards, muon(implementation="for-loop"), MATRICES))
        return all(torch.equal(ours[fqn], expected[fqn]) for fqn in MATRICES)

    assert run_ranks(sharded, 3) == [True] * 3


FEW = {"num_experts": 2, "top_k": 1, "route_norm": False, "score_function": "softmax", "score_before_experts": True}


@pytest.mark.parametrize(
    ("layer", "degrees"),
    [
        ({}, {"dp_shard": 4, "ep": 2}),
        ({}, {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}),
        ({**FEW, "num_shared_experts": 0}, {"dp_shard": 4, "ep": 2}),
    ],
    ids=["whole experts", "etp", "cut inside"],
)
def test_muon_takes_every_expert_by_itself_however_they_are_spread(
    layer: dict[str, object], degrees: dict[str, int]
) -> None:
    from tests.harness import Rank, run_ranks

    model = plans.tiny_moe_model(**layer)
    grid = plans.mesh(**degrees)
    plan = plans.tiny_plan(grid, model=model, total=4)
    if grid.tp > 1:
        rows = tensor_parallel_rows(model, sequence_parallel=False, loss_parallel=False)
        plan = replace(plan, sharding=(*rows, *expert_rows(model, grid)))
    experts = {p.fqn: p.shape for p in parameters(model) if p.is_expert}
    assert experts
    assert set(experts) <= muon_parameters(model)
    assert not any("router" in fqn for fqn in muon_parameters(model))

    def gradient(fqn: str, step: int) -> torch.Tensor:
        return torch.randn(experts[fqn], generator=torch.Generator().manual_seed(step + sum(map(ord, fqn))))

    def spread(rank: Rank) -> dict[str, torch.Tensor]:
        from torch.distributed.tensor import distribute_tensor

        from titan_runtime.apply import build_model
        from titan_runtime.mesh import build_mesh

        module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
        optimizer = build_optimizer(module, muon(implementation="for-loop"), muon_parameters(model))
        named = {fqn: p for fqn, p in module.named_parameters() if fqn in experts}
        for step in range(2):
            for fqn, p in named.items():
                p.grad = distribute_tensor(gradient(fqn, step), p.device_mesh, p.placements)
            set_lr(optimizer, 0.01)
            optimizer.step()
        return {fqn: p.full_tensor().detach() for fqn, p in named.items()}

    found = run_ranks(spread, grid.world_size)[0]
    whole = build(model, seq_len=32).to_empty(device="cpu")
    initialise(whole, model, plan.seeds.seed)
    for fqn in experts:
        matrices = [torch.nn.Parameter(matrix.clone()) for matrix in whole.get_parameter(fqn).detach()]
        torchs = torch.optim.Muon(matrices, lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for step in range(2):
            for matrix, part in zip(matrices, gradient(fqn, step), strict=True):
                matrix.grad = part.clone()
            torchs.step()
        assert torch.equal(found[fqn], torch.stack([m.detach() for m in matrices])), fqn


def test_muons_momentum_may_be_bfloat16() -> None:
    module = filled()
    optimizer = build_optimizer(module, muon(state_dtype="bfloat16", implementation="foreach"), MATRICES)
    with_gradients(module, 1)
    optimizer.step()
    state = optimizer_state(module, optimizer)
    assert {t.dtype for name, t in state.items() if not name.endswith("step")} == {torch.bfloat16}
