"""Ulysses: ranks trade their part of the sequence for a part of the heads, attend to all of it, and trade back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

from titan_runtime.attention.share import Share
from titan_runtime.collectives import all_to_all


def alltoall_attention(q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence, [batch, heads, local sequence, head_dim].

    The ranks must divide the heads of the keys: neighbouring query heads share a key head, and go where it goes.
    """
    size = share.size
    heads, kv_heads = q.shape[1] // size, k.shape[1] // size
    # [size, batch, heads of one rank, local sequence, head_dim], the three side by side: one collective.
    parts = torch.cat([t.unflatten(1, (size, -1)) for t in (q, k, v)], dim=2).movedim(1, 0)
    whole = share.join(_AllToAll.apply(parts, share.rank, size, share.chunks, share.group))
    queries, keys, values = whole.split((heads, kv_heads, kv_heads), dim=1)
    mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=heads != kv_heads)
    back = _AllToAll.apply(share.split(mixed), share.rank, size, share.chunks, share.group)
    return back.movedim(0, 1).flatten(1, 2)


class _AllToAll(Function):
    """Its own transpose: what came from a rank has its gradient go back there."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, rank: int, size: int, chunks: int, group: str) -> Tensor:
        ctx.place = (rank, size, chunks, group)
        return all_to_all(parts, Share(rank, size, chunks, group).ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(grad, Share(*ctx.place).ranks), None, None, None, None
