"""Expert parallelism: whole experts on the ranks of the ep axis, and tokens sent to the ranks that hold theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_planner.ir.plan import Plan
from titan_runtime.collectives import Ranks, SumGradient, ranks_of
from titan_runtime.modules.moe import GroupedExperts, MixtureOfExperts, run_experts


def mixtures(module: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """(FQN, mixture) of every mixture of experts in `module`, in order."""
    return ((fqn, part) for fqn, part in module.named_modules() if isinstance(part, MixtureOfExperts))


def apply_experts(module: nn.Module, plan: Plan, world: DeviceMesh, experts: DeviceMesh | None) -> None:
    """Set the plan's routing options, and spread every layer's experts over the ep and etp ranks of the mesh `experts`.

    Experts become DTensors sharded on their first dim over ep, and inside as tp cuts a SwiGLU over etp; FSDP shards them
    further, over the ranks with the same ones, and DDP leaves them whole there. Whole experts (etp 1) under tensor
    parallelism: all tensor ranks have the same tokens, so each routes a part of them, and what they have is added up on
    leaving the layer.
    """
    options, degrees = plan.expert_parallel, plan.mesh
    for _, part in mixtures(module):
        part.capacity_factor = options.capacity_factor
        part.force_load_balance = options.force_load_balance
        if degrees.tp > 1 and degrees.etp == 1:
            part.token_part = (world.get_local_rank("tp"), degrees.tp)
            COUNTED_OVER[part] = world.get_group("tp")
        if experts is not None:
            # Data parallelism shards experts over efsdp and sums their gradients there, but not the one that replicates:
            # it knows dp_replicate alone.
            replicated = plan.fsdp.strategy == "ddp" and degrees.efsdp > 1
            _spread(part.experts, experts, inside=degrees.etp > 1, replicated=replicated)


COUNTED_OVER: WeakKeyDictionary[MixtureOfExperts, dist.ProcessGroup] = WeakKeyDictionary()
"""Mixture -> the tensor ranks that route different tokens of the same samples; absent where all route the same."""

_ETP_DIMS = {"w1": 1, "w2": 2, "w3": 1}


def _spread(experts: GroupedExperts, mesh: DeviceMesh, inside: bool, replicated: bool) -> None:
    """Make the weights this rank's parts: over etp too if `inside`, and the same on all efsdp ranks if `replicated`.

    Never both: with etp = tp every tensor rank has a part of its own, and none is left to replicate over.
    """
    own = mesh["efsdp", "ep"] if replicated else mesh["ep", "etp"] if inside else mesh["ep"]
    for name, parameter in list(experts.named_parameters(recurse=False)):
        dims = (0, _ETP_DIMS[name]) if inside else (0,)
        part = parameter
        for axis, dim in zip(("ep", "etp"), dims, strict=False):
            # Still on the meta device, so nothing is sent: each rank makes the shape of its part.
            part = part.chunk(mesh[axis].size(), dim=dim)[mesh.get_local_rank(axis)]
        spread = DTensor.from_local(
            part.contiguous(),
            own,
            [*([Replicate()] * replicated), *(Shard(dim) for dim in dims)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        experts.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
    sum_gradient = ranks_of(mesh["efsdp"]) if replicated else None
    experts.forward = _exchanging(experts, mesh["ep"].get_group(), sum_gradient)  # type: ignore[method-assign]


def _exchanging(
    experts: GroupedExperts, group: dist.ProcessGroup, sum_gradient: Ranks | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The forward of `experts` whose weights are spread over `group`: send rows, compute, and send the results back.

    `sum_gradient` are the ranks that hold the same experts and compute with other tokens.
    """
    ranks = dist.get_world_size(group)

    def compute(x: Tensor, counts: Tensor) -> Tensor:
        weights = [_local(experts, name) for name in ("w1", "w2", "w3")]
        if sum_gradient is not None:
            weights = [SumGradient.apply(weight, sum_gradient) for weight in weights]
        return run_experts(x, counts, *weights, product=experts.product)

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        # Whom I send how much is known; who sends me how much has to be asked. [sender, local expert]
        arriving = all_to_all_single(counts, None, None, group)
        arriving = torch.ops._c10d_functional.wait_tensor(arriving).view(ranks, -1)
        # Splits are lists on the host: the one point where it waits for the device.
        sent, got = torch.stack((counts.view(ranks, -1).sum(1), arriving.sum(1))).tolist()
        rows = _exchange(x, got, sent, group)
        # They come sender by sender; the product wants them expert by expert.
        order = _by_expert(arriving)
        done = compute(rows[order], arriving.sum(0))
        return _exchange(torch.empty_like(done).index_copy(0, order, done), sent, got, group)

    return forward if ranks > 1 else compute


def _exchange(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of `x` to the ranks of `group`, `send` of them to each, and `receive` back from each; differentiable."""
    moved = all_to_all_single_autograd(x.contiguous(), receive, send, group)
    return cast(Tensor, torch.ops._c10d_functional.wait_tensor(moved))


def _by_expert(arriving: Tensor) -> Tensor:
    """The permutation from rows ordered by (sender, expert) to rows ordered by (expert, sender)."""
    ranks, local = arriving.shape
    expert = torch.arange(local, device=arriving.device).repeat(ranks)
    return expert.repeat_interleave(arriving.flatten()).argsort(stable=True)


def _local(experts: GroupedExperts, name: str) -> Tensor:
    weight = getattr(experts, name)
    return weight.to_local() if isinstance(weight, DTensor) else weight
