"""Every rank gathers all keys and values, and attends with its own queries. One collective each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from titan_runtime.attention.blockwise import Merged, attend, attend_backward
from titan_runtime.attention.share import Share
from titan_runtime.collectives import all_gather, reduce_scatter


def allgather_attention(q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence, [batch, heads, local sequence, head_dim].

    The queries see their own rank's keys through an ordinary causal mask, and of all others one or two stretches
    without any. Keys and values of the whole sequence stay for backward, unless the block is checkpointed.
    """
    return _AllGatherAttention.apply(q, k, v, share.rank, share.size, share.chunks, share.group)


class _AllGatherAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: int, size: int, chunks: int, group: str) -> Tensor:
        share = Share(rank, size, chunks, group)
        every = all_gather(torch.cat((k, v), dim=1).unsqueeze(0), 0, share.ranks)
        keys, values = share.join(every).chunk(2, dim=1)
        merged = Merged(*attend(q, k, v, causal=True))
        for rows, seen in share.pieces_of_all(q.shape[2]):
            merged.add(rows, *attend(q[:, :, rows], keys[:, :, seen], values[:, :, seen]))
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, keys, values, out, merged.lse)
        ctx.place = (rank, size, chunks, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, values, out, lse = ctx.saved_tensors
        share = Share(*ctx.place)
        own = attend_backward(grad, q, k, v, out, lse, causal=True)
        wide = lse.dtype
        grad_q, grad_own = own[0].to(wide, copy=True), torch.cat(own[1:], dim=1)
        grad_keys = torch.zeros_like(keys, dtype=wide)
        grad_values = torch.zeros_like(values, dtype=wide)
        for rows, seen in share.pieces_of_all(q.shape[2]):
            cut = (t[:, :, rows] for t in (out, lse))
            dq, dk, dv = attend_backward(grad[:, :, rows], q[:, :, rows], keys[:, :, seen], values[:, :, seen], *cut)
            grad_q[:, :, rows] += dq
            grad_keys[:, :, seen] += dk
            grad_values[:, :, seen] += dv
        parts = share.split(torch.cat((grad_keys, grad_values), dim=1))
        grad_k, grad_v = (reduce_scatter(parts, 0, share.ranks).squeeze(0) + grad_own).chunk(2, dim=1)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None
