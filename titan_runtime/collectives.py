"""Collectives that autograd can go through: each changes how a tensor is spread over a group of ranks, and undoes that in
backward.

Plain tensors in, plain tensors out. The results have always arrived: torch's functional collectives hand out a tensor
subclass that waits when it is first read, and a compiled block that gets one as input fails in its backward. Waiting for it
outside of autograd (in a hook, say) runs, but cuts the graph there, and everything before it silently stops learning. Here the
wait is inside of an autograd function, and the compiler, which must see the collectives to overlap them, traces through.

`R` means that every rank holds the same values, `S(d)` that each holds its part along dim d, `P` that the values of all ranks
have to be added up. A gradient has a layout too: that of an `R` that each rank used for something else is `P`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

_OPS = torch.ops._c10d_functional
wait = _OPS.wait_tensor


@dataclass(frozen=True)
class Ranks:
    """A process group by name, which compiled code can hold, unlike the group itself.

    `overlapped` says that the compiler shall overlap the group's collectives with matrix products.
    """

    name: str
    size: int
    rank: int
    overlapped: bool = False


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """The ranks along a 1-D mesh."""
    return Ranks(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def all_gather(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """The parts of all ranks, put together along `dim`. Not differentiable."""
    if ranks.overlapped:
        # Written out, because the compiler knows it by this form only. torch's own gather of a batch of one is a view.
        return torch.cat(all_gather(x, 0, replace(ranks, overlapped=False)).chunk(ranks.size), dim=dim)
    return _arrived(functional.all_gather_single(x.contiguous(), dim % x.dim(), ranks.name))


def reduce_scatter(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's part along `dim` of the sum over ranks. Not differentiable."""
    if x.shape[dim] % ranks.size:
        # Some backends end the process here, without an exception.
        raise ValueError(f"{x.shape[dim]} elements along dim {dim} cannot be shared evenly by {ranks.size} ranks")
    return _arrived(functional.reduce_scatter_single(x.contiguous(), "sum", dim % x.dim(), ranks.name))


def all_reduce(x: Tensor, ranks: Ranks, operation: str = "sum") -> Tensor:
    """The sum (or `max`) over ranks, as a new tensor. Not differentiable."""
    return _arrived(functional.all_reduce(x.contiguous(), operation, ranks.name))


def all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    """[size, ...]: part i goes to rank i, and part i of the result comes from rank i. Not differentiable."""
    one_each = [1] * ranks.size
    return wait(_OPS.all_to_all_single(parts.contiguous(), one_each, one_each, ranks.name))


def start_shift(x: Tensor, ranks: Ranks) -> Tensor:
    """Send `x` to the next rank of the ring and receive the one before's, while kernels run.

    The result must be given to `wait` before it is read. Not differentiable.
    """
    rows = x.shape[0]
    to = [rows if rank == (ranks.rank + 1) % ranks.size else 0 for rank in range(ranks.size)]
    of = [rows if rank == (ranks.rank - 1) % ranks.size else 0 for rank in range(ranks.size)]
    return _OPS.all_to_all_single(x.contiguous(), of, to, ranks.name)


def _arrived(x: Tensor) -> Tensor:
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


class GatherForPartial(Function):
    """S(dim) -> R; the gradient comes as P and goes back as S(dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return all_gather(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradient, ctx.dim, ctx.ranks), None, None


class GatherForReplicated(Function):
    """S(dim) -> R; the gradient comes as R, since all ranks go on with the same, and goes back as S(dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return all_gather(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        size = gradient.shape[ctx.dim] // ctx.ranks.size
        return gradient.narrow(ctx.dim, ctx.ranks.rank * size, size).contiguous(), None, None


class Scatter(Function):
    """P -> S(dim); the gradient comes as S(dim) and goes back as R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return reduce_scatter(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.dim, ctx.ranks), None, None


class Sum(Function):
    """P -> R; the gradient comes as R and goes back as R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return all_reduce(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SumGradient(Function):
    """R -> R; the gradient comes as P and goes back as R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.ranks), None
