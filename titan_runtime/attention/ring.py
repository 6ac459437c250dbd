"""Keys and values travel around the ring of ranks; each rank merges what its queries see of the block it holds.

Only two ranks' keys are in memory at a time, and a block is on its way to the next rank while it is being used.
Gradients of keys and values travel with them, and are home after the last step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from titan_runtime.attention.blockwise import Merged, attend, attend_backward
from titan_runtime.attention.share import Share
from titan_runtime.collectives import start_shift, wait


def ring_attention(q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence, [batch, heads, local sequence, head_dim]."""
    return _RingAttention.apply(q, k, v, share.rank, share.size, share.chunks, share.group)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: int, size: int, chunks: int, group: str) -> Tensor:
        share = Share(rank, size, chunks, group)
        # One tensor, so one message a step: keys and values side by side among the heads.
        coming = start_shift(torch.cat((k, v), dim=1), share.ranks)
        merged = Merged(*attend(q, k, v, causal=True))
        for step in range(1, size):
            held = wait(coming)
            if step + 1 < size:
                coming = start_shift(held, share.ranks)
            keys, values = held.chunk(2, dim=1)
            for rows, seen in share.pieces((rank - step) % size, q.shape[2]):
                merged.add(rows, *attend(q[:, :, rows], keys[:, :, seen], values[:, :, seen]))
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.place = (rank, size, chunks, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        share = Share(*ctx.place)
        rank, size, wide = share.rank, share.size, lse.dtype
        coming = start_shift(torch.cat((k, v), dim=1), share.ranks)
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, causal=True)
        grad_q = dq.to(wide, copy=True)
        # Gradients travel in float32: every rank adds to them.
        grads = start_shift(torch.cat((dk, dv), dim=1).to(wide), share.ranks)
        for step in range(1, size):
            held = wait(coming)
            if step + 1 < size:
                coming = start_shift(held, share.ranks)
            keys, values = held.chunk(2, dim=1)
            mine = torch.zeros_like(held, dtype=wide)
            for rows, seen in share.pieces((rank - step) % size, q.shape[2]):
                cut = (t[:, :, rows] for t in (out, lse))
                dq, dk, dv = attend_backward(
                    grad[:, :, rows], q[:, :, rows], keys[:, :, seen], values[:, :, seen], *cut
                )
                grad_q[:, :, rows] += dq
                mine[:, :, seen] += torch.cat((dk, dv), dim=1)
            grads = start_shift(wait(grads) + mine, share.ranks)
        grad_k, grad_v = wait(grads).chunk(2, dim=1)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None
