"""However the work is split, a run has the losses, gradient norms and weights of one plain process.

The reference is a loop written out here: a module without FSDP, torch's AdamW without groups, clipping by hand, the
mean cross-entropy of the whole batch in one forward. Text and tokenizer are the real ones of the repository.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from tests import plans
from tests.harness import Rank, run_ranks
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.parallel import Mesh
from titan_planner.ir.plan import Plan
from titan_runtime.data import DataLoader, open_stream
from titan_runtime.init import initialise
from titan_runtime.lr_schedule import lr_factor
from titan_runtime.modules import build
from titan_runtime.step import StepResult

STEPS = 10
TOLERANCE = 1e-6


@dataclass
class Curve:
    """What a run did."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def parity_plan(grid: Mesh | None = None, **sections: object) -> Plan:
    """A plan in which every step clips: norms are between 0.5 and 1."""
    plan = plans.on_disk(plans.tiny_plan(grid, **sections))
    return replace(plan, optimizer=replace(plan.optimizer, lr=3e-3, max_norm=0.3))


def open_loader(plan: Plan, dp_rank: int) -> DataLoader:
    stream = open_stream("text", plans.TEXT, plans.TOKENIZER, plan.batch.seq_len, add_bos=True)
    return DataLoader(
        stream,
        global_batch_size=plan.batch.global_batch_size,
        dp_rank=dp_rank,
        dp_degree=plan.mesh.dp,
        local_batch_size=plan.batch.local_batch_size,
        prefetch=0,
    )


def masked(labels: Tensor, first_sample: int) -> Tensor:
    """Ignore labels unevenly: sample number n of the global batch keeps its first 4 n + 1 labels."""
    labels = labels.clone()
    for row in range(len(labels)):
        labels[row, 4 * (first_sample + row) + 1 :] = -100
    return labels


def nothing(*_: object) -> None:
    """Do not intervene."""


def train_plainly(
    plan: Plan,
    mask: bool = False,
    prepare: Callable[[torch.nn.Module], None] = nothing,
    after_step: Callable[[torch.nn.Module], None] = nothing,
) -> tuple[torch.nn.Module, Curve]:
    """One process, one forward a step; the trained module, and a curve without weights.

    `prepare` is given the module before the first step, `after_step` after each.
    """
    module = build(plan.model, seq_len=plan.batch.seq_len).to_empty(device="cpu")
    initialise(module, plan.model, plan.seeds.seed)
    prepare(module)
    values = plan.optimizer
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=values.lr, betas=(values.beta1, values.beta2), eps=values.eps, weight_decay=0.1
    )
    whole = replace(plan, mesh=plans.mesh(1), batch=replace(plan.batch, local_batch_size=plan.batch.global_batch_size))
    curve = Curve([], [], {})
    for step, [(tokens, labels)] in zip(range(STEPS), open_loader(whole, 0), strict=False):
        labels = masked(labels, 0) if mask else labels
        loss = cross_entropy(module(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        # By hand: torch's own norm adds up in float32, and on a CPU its sixth digit depends on how tensors are cut.
        norm = torch.stack([p.grad.double().square().sum() for p in module.parameters()]).sum().sqrt()
        for parameter in module.parameters():
            parameter.grad *= min(1.0, values.max_norm / norm.item())
        for group in optimizer.param_groups:
            group["lr"] = values.lr * lr_factor(plan.lr_schedule, step)
        optimizer.step()
        optimizer.zero_grad()
        after_step(module)
        curve.losses.append(loss.item())
        curve.norms.append(norm.item())
    return module, curve


def reference(plan: Plan, mask: bool = False) -> Curve:
    """What one plain process does."""
    module, curve = train_plainly(plan, mask)
    curve.weights = {fqn: parameter.detach() for fqn, parameter in module.named_parameters()}
    return curve


def train_rank(
    rank: Rank,
    plan: Plan,
    mask: bool = False,
    prepare: Callable[[torch.nn.Module], None] = nothing,
    after_step: Callable[[StepResult], None] = nothing,
) -> tuple[torch.nn.Module, Curve]:
    """The runtime's own parts, on one of several ranks; the trained module, and a curve without weights."""
    from titan_planner.ir.inventory import muon_parameters
    from titan_runtime.apply import build_model
    from titan_runtime.apply.compile import compiled_loss
    from titan_runtime.apply.context import shard_sequences
    from titan_runtime.distributed import rank_device
    from titan_runtime.loss import loss_function
    from titan_runtime.mesh import build_mesh, data_group, data_rank
    from titan_runtime.optimizer import build_optimizer
    from titan_runtime.step import train_step

    device = rank_device(plan.cluster.gpu)
    world = build_mesh(plan.mesh, device.type)
    group = data_group(world)
    module = build_model(plan, world, device)
    prepare(module)
    optimizer = build_optimizer(module, plan.optimizer, muon_parameters(plan.model))
    loss = compiled_loss(loss_function(plan, world), plan)
    share = data_rank(plan.mesh, rank.index)
    local, accumulation = plan.batch.local_batch_size, plan.batch.accumulation_steps
    curve = Curve([], [], {})
    for step, batch in zip(range(STEPS), open_loader(plan, share), strict=False):
        if mask:
            batch = [
                (tokens, masked(labels, (share * accumulation + number) * local))
                for number, (tokens, labels) in enumerate(batch)
            ]
        result = train_step(
            plan,
            module,
            optimizer,
            loss,
            shard_sequences(batch, plan, rank.index),
            step=step + 1,
            schedule_step=step,
            device=device,
            group=group,
        )
        curve.losses.append(result.loss)
        curve.norms.append(result.grad_norm)
        after_step(result)
    return module, curve


def run(rank: Rank, plan: Plan, mask: bool, inspect: Callable[[torch.nn.Module], None] | None = None) -> Curve:
    """What the runtime does on this rank; `inspect` is given the module after the last step."""
    from titan_runtime.distributed import rank_device

    module, curve = train_rank(rank, plan, mask)
    device = rank_device(plan.cluster.gpu)
    for fqn, parameter in module.named_parameters():
        tensor = parameter.detach()
        whole = tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor
        curve.weights[fqn] = whole.cpu()
    if inspect is not None:
        inspect(module)
    return curve


def check(plan: Plan, expected: Curve, mask: bool = False) -> None:
    curves = run_ranks(run, plan.mesh.world_size, plan, mask)
    for curve in curves:
        assert curve.losses == curves[0].losses
        assert curve.norms == curves[0].norms
    assert curves[0].losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert curves[0].norms == pytest.approx(expected.norms, rel=TOLERANCE)
    assert curves[0].weights.keys() == expected.weights.keys()
    for fqn, weight in curves[0].weights.items():
        # Adam divides by the root of the squared gradient, so that an element whose gradient is nearly zero may move by
        # a full step either way for a rounding error; a step is at most lr.
        torch.testing.assert_close(weight, expected.weights[fqn], rtol=1e-4, atol=2e-4, msg=fqn)


@pytest.fixture(scope="module")
def expected() -> Curve:
    return reference(parity_plan())


def test_the_reference_learns_and_clips(expected: Curve) -> None:
    assert expected.losses[-1] < expected.losses[0] - 0.3
    assert min(expected.norms) > 0.3


@pytest.mark.parametrize(
    ("grid", "local"),
    [
        pytest.param(plans.mesh(1), 8, id="one-rank-1x8"),
        pytest.param(plans.mesh(1), 4, id="one-rank-2x4"),
        pytest.param(plans.mesh(1), 1, id="one-rank-8x1"),
        pytest.param(plans.mesh(2), 4, id="fsdp-2"),
        pytest.param(plans.mesh(2), 1, id="fsdp-2-accumulating-4"),
        pytest.param(plans.mesh(4), 2, id="fsdp-4"),
        pytest.param(plans.mesh(2, 2), 1, id="hsdp-2x2-accumulating-2"),
        pytest.param(plans.mesh(1, 2), 4, id="replicas-only"),
    ],
)
def test_splitting_the_batch_changes_nothing(grid: Mesh, local: int, expected: Curve) -> None:
    check(parity_plan(grid, local=local), expected)


def test_gradients_reduced_once_a_step_are_the_same(expected: Curve) -> None:
    plan = parity_plan(plans.mesh(2), local=1)
    check(replace(plan, fsdp=replace(plan.fsdp, defer_gradient_sync=True)), expected)


def test_replicating_instead_of_sharding_changes_nothing(expected: Curve) -> None:
    plan = parity_plan(plans.mesh(1, 2), local=2)
    check(replace(plan, fsdp=replace(plan.fsdp, strategy="ddp", units=(), defer_gradient_sync=True)), expected)


@pytest.mark.parametrize("chunks", [2, 8])
def test_taking_the_loss_in_chunks_changes_nothing(chunks: int, expected: Curve) -> None:
    plan = parity_plan(plans.mesh(2), local=2)
    check(replace(plan, loss=replace(plan.loss, chunks=chunks)), expected)


@pytest.mark.parametrize("reshard", [False, 2], ids=["never", "to-2"])
def test_when_weights_are_freed_changes_nothing(reshard: bool | int, expected: Curve) -> None:
    plan = parity_plan(plans.mesh(4), local=2)
    fsdp = replace(plan.fsdp, units=plans.units(plan.model, reshard), prefetch_forward=1, prefetch_backward=2)
    check(replace(plan, fsdp=fsdp), expected)


def test_ignored_labels_that_fall_unevenly_on_ranks_weigh_equally() -> None:
    plan = parity_plan(plans.mesh(2), local=2)
    check(plan, reference(plan, mask=True), mask=True)


def test_a_tied_model_stays_tied_and_learns_the_same() -> None:
    plan = parity_plan(plans.mesh(2), local=2, model=plans.tiny_model(tied=True))
    check(plan, reference(plan))


def test_recomputation_changes_no_bit() -> None:
    plan = parity_plan(plans.mesh(2), local=4)
    kept, *others = (
        run_ranks(run, 2, each, False)[0]
        for each in (plan, *(checkpointed(plan, mode) for mode in ("full", "selective", "selective-alternating")))
    )
    for curve in others:
        assert (curve.losses, curve.norms) == (kept.losses, kept.norms)
        assert all(torch.equal(weight, kept.weights[fqn]) for fqn, weight in curve.weights.items())


@pytest.mark.parametrize("mode", [None, "full", "selective-alternating"])
def test_compiling_changes_nothing(mode: str | None, expected: Curve) -> None:
    plan = parity_plan(plans.mesh(2), local=4)
    plan = checkpointed(plan, mode) if mode else plan
    # Traces and differentiates as inductor does, without its minute of code generation.
    check(replace(plan, compile=replace(plan.compile, enable=True, backend="aot_eager")), expected)


@pytest.mark.slow
def test_inductor_with_sharding_and_recomputation_trains_the_same(
    expected: Curve, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled in the forked ranks only, each without helper processes: this process has to stay fit for forking.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    plan = checkpointed(parity_plan(plans.mesh(2), local=4), "selective-alternating")
    plan = replace(plan, compile=replace(plan.compile, enable=True, backend="inductor"))
    curve = run_ranks(run, 2, plan, False, timeout=400.0)[0]
    assert curve.losses == pytest.approx(expected.losses, rel=1e-5)
    assert curve.norms == pytest.approx(expected.norms, rel=1e-5)


def checkpointed(plan: Plan, mode: str) -> Plan:
    """`plan` with its first block kept whole and its second under a policy."""
    saved = ("aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default")
    policy = CheckpointPolicy(
        name="some",
        mode="full" if mode == "full" else "selective",
        save_ops=() if mode == "full" else saved,
        recompute_every_second_matmul=mode == "selective-alternating",
        force_recompute_fqns=("layers.*.attention.wk",) if mode == "selective-alternating" else (),
        memory_budget=None,
    )
    return replace(
        plan,
        layers=tuple(replace(layer, checkpoint="some" if layer.fqn == "layers.1" else "none") for layer in plan.layers),
        activation_checkpoint=replace(
            plan.activation_checkpoint, policies=(*plan.activation_checkpoint.policies, policy)
        ),
    )


def test_muon_trains_alike_on_any_mesh() -> None:
    curves = []
    for grid, local in ((plans.mesh(1), 8), (plans.mesh(2), 2)):
        plan = parity_plan(grid, local=local)
        curves.append(run_ranks(run, grid.dp, replace(plan, optimizer=replace(plan.optimizer, name="Muon")), False)[0])
    # Newton-Schulz works in bfloat16, where the last bit of a gradient can become the eighth of an update.
    assert curves[1].losses == pytest.approx(curves[0].losses, rel=1e-3)
    assert curves[1].losses[:2] == pytest.approx(curves[0].losses[:2], rel=1e-5)
    assert curves[0].losses[-1] < curves[0].losses[0] - 0.2


def test_bfloat16_storage_trains(expected: Curve) -> None:
    plan = parity_plan(plans.mesh(2), local=4)
    fsdp = replace(plan.fsdp, param_dtype="bfloat16")
    plan = replace(plan, dtype="bfloat16", fsdp=fsdp, optimizer=replace(plan.optimizer, state_dtype="bfloat16"))
    curve = run_ranks(run, 2, plan, False)[0]
    assert curve.losses == pytest.approx(expected.losses, rel=5e-2)
    assert all(weight.dtype is torch.bfloat16 for weight in curve.weights.values())


def test_bfloat16_computing_stays_near_float32(expected: Curve) -> None:
    plan = parity_plan(plans.mesh(2), local=4)
    plan = replace(plan, fsdp=replace(plan.fsdp, param_dtype="bfloat16"))
    curve = run_ranks(run, 2, plan, False)[0]
    assert curve.losses == pytest.approx(expected.losses, rel=5e-3)
    assert curve.losses != pytest.approx(expected.losses, rel=1e-6)
    assert all(weight.dtype is torch.float32 for weight in curve.weights.values())
