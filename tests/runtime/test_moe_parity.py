"""However a model with experts is split, it has the losses, gradient norms, weights and biases of one plain process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests import plans
from tests.harness import Rank, run_ranks
from tests.runtime import test_parity as parity
from tests.runtime.test_parity import checkpointed, parity_plan, train_plainly, train_rank
from titan_planner.ir.inventory import fsdp_dim, parameters
from titan_planner.ir.parallel import FsdpUnit, Mesh, Pipeline, Stage, TensorParallel
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import verify
from titan_planner.passes.select_checkpointing import SAVE_OPS
from titan_planner.sharding import expert_rows, tensor_parallel_rows
from titan_runtime.step import StepResult

TOLERANCE = 1e-5


@dataclass
class Curve(parity.Curve):
    """What a run did; `weights` hold the biases too, and `imbalances` are those of the layers, step by step."""

    imbalances: list[dict[str, float]]


def moe_plan(grid: Mesh | None = None, **sections: object) -> Plan:
    return parity_plan(grid, **{"model": plans.tiny_moe_model(), **sections})


def lean_on(module: torch.nn.Module, leaning: float) -> None:
    """Add to the bias of each layer's first two experts, so that tokens prefer them."""
    for name, buffer in module.named_buffers():
        if name.endswith("expert_bias"):
            buffer[:2] += leaning


def reference(plan: Plan, leaning: float = 0.0) -> Curve:
    """One process, with the bias' steps written out."""
    imbalances: list[dict[str, float]] = []

    def balance(module: torch.nn.Module) -> None:
        imbalance = {}
        for fqn, part in module.named_modules():
            if not fqn.endswith(".moe"):
                continue
            load = part.tokens_per_expert.clone()
            part.tokens_per_expert.zero_()
            assert load.sum() == plan.batch.global_batch_size * plan.batch.seq_len * part.moe.top_k
            mean = load.sum().item() / len(load)
            imbalance[fqn.split(".")[1]] = load.max().item() / mean
            if part.expert_bias is not None:
                signs = [(count < mean) - (count > mean) for count in load.tolist()]
                part.expert_bias += part.moe.load_balance_coeff * torch.tensor(
                    [sign - sum(signs) / len(signs) for sign in signs]
                )
        imbalances.append(imbalance)

    module, curve = train_plainly(plan, prepare=lambda module: lean_on(module, leaning), after_step=balance)
    weights = {fqn: tensor.detach() for fqn, tensor in module.state_dict().items()}
    return Curve(curve.losses, curve.norms, weights, imbalances)


def run(rank: Rank, plan: Plan, leaning: float = 0.0) -> Curve:
    """What the runtime does on this rank."""
    from titan_runtime.checkpoint.tensors import model_tensors

    imbalances: list[dict[str, float]] = []

    def note(result: StepResult) -> None:
        assert result.experts is not None
        assert result.experts.dropped == 0
        imbalances.append(result.experts.imbalance)

    module, curve = train_rank(rank, plan, prepare=lambda module: lean_on(module, leaning), after_step=note)
    weights = {
        fqn: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for fqn, tensor in model_tensors(module).items()
    }
    return Curve(curve.losses, curve.norms, weights, imbalances)


def check(plan: Plan, expected: Curve, leaning: float = 0.0) -> dict[str, float]:
    """Assert that the ranks of `plan` do what one process does; the largest differences seen."""
    assert verify(replace(plan, data=plans.tiny_plan().data)) == ()
    curves = run_ranks(run, plan.mesh.world_size, plan, leaning)
    for curve in curves:
        assert curve.losses == curves[0].losses
        assert curve.norms == curves[0].norms
        assert curve.imbalances == curves[0].imbalances
    got = replace(curves[0], weights={})
    for curve in curves:  # stages of a pipeline have different ones
        for fqn, weight in curve.weights.items():
            assert torch.equal(got.weights.setdefault(fqn, weight), weight), fqn
    assert got.weights.keys() == expected.weights.keys()
    worst = {
        "loss": max(abs(a / b - 1) for a, b in zip(got.losses, expected.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(got.norms, expected.norms, strict=True)),
        "weight": max((got.weights[fqn] - weight).abs().max().item() for fqn, weight in expected.weights.items()),
    }
    assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert got.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    for a, b in zip(got.imbalances, expected.imbalances, strict=True):
        assert a == pytest.approx(b)
    for fqn, weight in got.weights.items():
        torch.testing.assert_close(weight, expected.weights[fqn], rtol=TOLERANCE, atol=TOLERANCE, msg=fqn)
    return worst


@pytest.fixture(scope="module")
def expected() -> Curve:
    return reference(moe_plan())


def test_the_reference_learns_clips_and_moves_its_bias(expected: Curve) -> None:
    assert expected.losses[-1] < expected.losses[0] - 0.3
    assert min(expected.norms) > 0.3
    bias = expected.weights["layers.1.moe.expert_bias"]
    assert bias.abs().max() > 0.002
    assert abs(bias.sum().item()) < 1e-6
    assert all(value > 1.05 for value in expected.imbalances[0].values())


@pytest.mark.parametrize(
    ("grid", "local"),
    [
        pytest.param(plans.mesh(1), 2, id="one-rank-accumulating-4"),
        pytest.param(plans.mesh(2), 2, id="dp2"),
        pytest.param(plans.mesh(4), 2, id="dp4"),
        pytest.param(plans.mesh(2, ep=2), 2, id="ep2"),
        pytest.param(plans.mesh(4, ep=4), 1, id="ep4"),
        pytest.param(plans.mesh(4, ep=2), 2, id="ep2xdp2"),
        pytest.param(plans.mesh(2, 2, ep=2), 1, id="hsdp-2x2-ep2"),
        pytest.param(plans.mesh(2, cp=2, ep=4), 2, id="dp2xcp2-ep4"),
    ],
)
def test_splitting_changes_nothing(grid: Mesh, local: int, expected: Curve) -> None:
    print(check(moe_plan(grid, local=local), expected))


def test_experts_of_a_unit_of_their_own_learn_the_same(expected: Curve) -> None:
    plan = moe_plan(plans.mesh(4, ep=2), local=1)
    own = FsdpUnit(modules=("layers.*.moe.experts",), reshard_after_forward=True)
    fsdp = replace(plan.fsdp, units=(*plan.fsdp.units, own), defer_gradient_sync=True, prefetch_forward=1)
    print(check(replace(plan, fsdp=fsdp), expected))


def test_replicating_instead_of_sharding_changes_nothing(expected: Curve) -> None:
    plan = moe_plan(plans.mesh(1, 2), local=2)
    print(check(replace(plan, fsdp=replace(plan.fsdp, strategy="ddp", units=())), expected))


def tensor_moe_plan(grid: Mesh, sequence_parallel: bool = True, local: int = 2) -> Plan:
    model = plans.tiny_moe_model()
    rows = tensor_parallel_rows(model, sequence_parallel=sequence_parallel, loss_parallel=True)
    options = TensorParallel(
        sequence_parallel=sequence_parallel, loss_parallel=True, async_tp=False, kv_replicas=grid.tp // 2
    )
    return moe_plan(grid, local=local, tensor_parallel=options, sharding=rows + expert_rows(model, grid))


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"tp": 2}, id="tp2"),
        pytest.param({"tp": 2, "dp_replicate": 2}, id="ddp2xtp2"),
        pytest.param({"tp": 2, "dp_replicate": 2, "ep": 2}, id="ddp2xtp2-ep2"),
        pytest.param({"tp": 2, "dp_replicate": 2, "etp": 2}, id="ddp2xtp2-etp2"),
        pytest.param({"tp": 4, "ep": 2}, id="tp4-ep2"),
    ],
)
def test_replicated_experts_are_shared_by_tensor_ranks(degrees: dict[str, int], expected: Curve) -> None:
    plan = tensor_moe_plan(plans.mesh(**degrees))
    print(check(replace(plan, fsdp=replace(plan.fsdp, strategy="ddp", units=())), expected))


@pytest.mark.parametrize(
    ("degrees", "sequence_parallel"),
    [
        pytest.param({"dp_shard": 1}, False, id="tp2"),
        pytest.param({"dp_shard": 1, "ep": 2}, True, id="tp2-ep2"),
        pytest.param({"dp_shard": 2, "ep": 2}, True, id="dp2xtp2-ep2"),
        pytest.param({"dp_shard": 2, "ep": 4}, False, id="dp2xtp2-ep4"),
        pytest.param({"dp_shard": 2, "ep": 2, "etp": 2}, True, id="dp2xtp2-ep2-etp2"),
        pytest.param({"dp_shard": 2, "etp": 2}, True, id="dp2xtp2-etp2"),
    ],
)
def test_tensor_ranks_share_the_experts(degrees: dict[str, int], sequence_parallel: bool, expected: Curve) -> None:
    print(check(tensor_moe_plan(plans.mesh(**degrees, tp=2), sequence_parallel, local=4), expected))


def test_stages_with_and_without_experts() -> None:
    """Two stages of two ranks each: embedding and the dense layer, and the layers with experts, spread over both ranks."""
    grid = plans.mesh(2, pp=2, ep=2)
    plan = moe_plan(grid, local=4)
    stage_of = {"tok_embeddings": 0, "layers.0": 0}
    plan = replace(
        plan,
        batch=replace(plan.batch, microbatch_size=1),
        pipeline=Pipeline(
            schedule="1F1B", stages=tuple(Stage(index=i, pp_rank=i) for i in range(2)), microbatches=4, actions=None
        ),
        layers=tuple(replace(layer, stage=stage_of.get(layer.fqn, 1)) for layer in plan.layers),
        fsdp=replace(plan.fsdp, units=plans.units(plan.model, False)),
    )
    print(check(plan, reference(plan)))


def test_ranks_whose_experts_nobody_chooses_take_part() -> None:
    plan = moe_plan(plans.mesh(4, ep=2), local=2)
    skewed = reference(plan, leaning=5.0)
    assert skewed.imbalances[-1] == {"1": 4.0, "2": 4.0}
    print(check(plan, skewed, leaning=5.0))


def test_stacks_of_few_experts_are_sharded_inside_of_them() -> None:
    """With two experts on four ranks that are two expert ranks, FSDP cuts each expert's matrices instead."""
    layer = {
        "num_experts": 2,
        "top_k": 1,
        "route_norm": False,
        "score_function": "softmax",
        "score_before_experts": True,
    }
    plan = moe_plan(plans.mesh(4, ep=2), local=2, model=plans.tiny_moe_model(**layer, num_shared_experts=0))
    assert {fsdp_dim(p, plan.mesh) for p in parameters(plan.model) if p.is_expert} == {1}
    print(check(plan, reference(plan)))


@pytest.mark.parametrize(("mode", "sent"), [("full", 13), ("selective-alternating", 13), ("planned", 10)])
def test_recomputation_changes_nothing(mode: str, sent: int, expected: Curve) -> None:
    plan = checkpointed(moe_plan(plans.mesh(2, ep=2), local=2), "full" if mode == "full" else "selective-alternating")
    if mode == "planned":  # the planner's list keeps what was exchanged
        none, some = plan.activation_checkpoint.policies
        policies = (none, replace(some, save_ops=SAVE_OPS))
        plan = replace(plan, activation_checkpoint=replace(plan.activation_checkpoint, policies=policies))
    print(check(plan, expected))
    assert run_ranks(exchanges, 2, plan) == [sent, sent]


def exchanges(rank: Rank, plan: Plan) -> int:
    """All-to-alls of one step. Two layers send counts and rows, and rows back; gradients go both ways; one is checkpointed."""
    from tests.runtime.test_apply import CountOps
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh

    module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    tokens = torch.arange(64).view(2, 32)
    with CountOps() as count:
        module(tokens).sum().backward()
    return count.counts["_c10d_functional.all_to_all_single.default"]


def test_what_the_planner_saves_keeps_experts_products_and_every_bit() -> None:
    """A block checkpointed by the planner's list computes no grouped product again, and has the gradients of none."""
    plain = moe_plan(plans.mesh(1), local=2)
    some = checkpointed(plain, "selective-alternating")
    keep_all, listed = some.activation_checkpoint.policies
    unlisted = replace(listed, save_ops=tuple(op for op in SAVE_OPS if "grouped" not in op))
    plans_ = [plain] + [
        replace(some, activation_checkpoint=replace(some.activation_checkpoint, policies=(keep_all, policy)))
        for policy in (replace(listed, save_ops=SAVE_OPS), unlisted)
    ]
    (count, gradients), (kept, same), (again, _) = run_ranks(grouped_products, 1, plans_)[0]
    assert kept == count == 2 * 3 * 3  # layers, weights, and the forward with its two gradients
    assert again > count
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradients[fqn], same[fqn]) for fqn in gradients)


def grouped_products(rank: Rank, variants: list[Plan]) -> list[tuple[int, dict[str, Tensor]]]:
    """Grouped products in one forward and backward, and the gradients, of each plan."""
    from tests.runtime.test_apply import CountOps
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh

    found = []
    for plan in variants:
        module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
        with CountOps() as count:
            module(torch.arange(64).view(2, 32)).square().mean().backward()
        gradients = {fqn: p.grad.full_tensor() for fqn, p in module.named_parameters() if isinstance(p.grad, DTensor)}
        found.append((count.counts["aten._grouped_mm.default"], gradients))
    return found


def test_compiling_what_is_around_the_routing_changes_nothing(expected: Curve) -> None:
    plan = checkpointed(moe_plan(plans.mesh(2, ep=2), local=4), "full")
    print(check(replace(plan, compile=replace(plan.compile, enable=True, backend="aot_eager")), expected))


def test_bfloat16_computing_stays_near_float32(expected: Curve) -> None:
    plan = moe_plan(plans.mesh(2, ep=2), local=4)
    curve = run_ranks(run, 2, replace(plan, fsdp=replace(plan.fsdp, param_dtype="bfloat16")))[0]
    assert curve.losses == pytest.approx(expected.losses, rel=1e-2)
    assert curve.losses != pytest.approx(expected.losses, rel=1e-6)
    assert all(weight.dtype is torch.float32 for weight in curve.weights.values())
