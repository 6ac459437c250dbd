"""Attention in blocks of keys that are merged exactly, and its gradient block by block.

A block's result is only ever needed with the logarithm of the sum of its exponentials: with both, two blocks merge into
what attention over their keys together gives. In backward the same numbers, of all blocks together, make the gradient of
every block independent of the others. The blocks run in torch's flash kernels, which never hold a matrix of scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention.default
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention [batch, heads, queries, head_dim], and the logarithm of each query's sum [batch, heads, queries].

    Queries may have a multiple of the keys' heads. `causal` only for as many queries as keys: the kernels do not agree
    on where the diagonal of a rectangle starts.
    """
    _require_square(q, k, causal)
    match _kernel(q):
        case "cpu":
            return _CPU(q, k, v, 0.0, causal)
        case "cuda":
            out, lse, *_ = _CUDA(q, k, v, 0.0, causal, False)
            return out, lse
        case _:
            return _portable(q, k, v, causal)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v. `out` and `lse` are those over all blocks of keys."""
    _require_square(q, k, causal)
    match _kernel(q):
        case "cpu":
            return _CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal)
        case "cuda":
            # No random state: there is no dropout. No cumulative lengths: these are not packed sequences.
            unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
            lengths = (None, None, q.shape[2], k.shape[2])
            more = (0.0, causal, unused, unused)
            return _CUDA_BACKWARD(grad, q, k, v, out, lse.contiguous(), *lengths, *more)
        case _:
            return _portable_backward(grad, q, k, v, out, lse, causal)


class Merged:
    """The blocks so far of one attention, in float32 or better: rounding each block would add up over ranks."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """Begin with a block that has at least one key for every query, so that nothing is infinite."""
        # A copy: the kernel's results may be kept by selective checkpointing, which must find them unchanged.
        self.out = out.to(lse.dtype, copy=True)
        self.lse = lse.clone()

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take in a block that belongs to the queries `rows`."""
        so_far, so_far_lse = self.out[:, :, rows], self.lse[:, :, rows]
        difference = lse - so_far_lse
        # out e^a + new e^b over e^a + e^b, without an exponential that could overflow.
        merged = so_far + torch.sigmoid(difference).unsqueeze(-1) * (out - so_far)
        self.lse[:, :, rows] = so_far_lse - logsigmoid(-difference)
        self.out[:, :, rows] = merged


def _kernel(q: Tensor) -> str:
    if q.device.type == "cpu":
        return "cpu"
    flash = q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0
    # The CUDA flash kernel has no float32. What is left is for small checks: it holds all scores of a block.
    return "cuda" if flash else "portable"


def _require_square(q: Tensor, k: Tensor, causal: bool) -> None:
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"a causal block of {q.shape[2]} queries and {k.shape[2]} keys")


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[batch, KV heads, queries of a KV head, queries, keys] in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores = grouped @ k.to(wide).unsqueeze(2).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores


def _portable(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype).unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _portable_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k, causal)
    heads = (k.shape[1], -1)
    wide = scores.dtype
    queries, grad, out = (t.to(wide).unflatten(1, heads) for t in (q, grad, out))
    weights = (scores - lse.unflatten(1, heads).unsqueeze(-1)).exp()
    grad_v = (weights.transpose(-1, -2) @ grad).sum(2)
    grad_weights = grad @ v.to(wide).unsqueeze(2).transpose(-1, -2)
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    grad_q = (grad_scores @ k.to(wide).unsqueeze(2)).flatten(1, 2)
    grad_k = (grad_scores.transpose(-1, -2) @ queries).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
