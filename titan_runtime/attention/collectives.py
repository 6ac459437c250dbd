"""The collectives of context parallelism, on gloo and NCCL alike, each of which can be compiled and overlapped.

torch's functional collectives start at once and are waited for by name, so that a kernel may run in between. Every one
takes and gives the ranks' parts along dim 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_runtime.attention.share import Share

_OPS = torch.ops._c10d_functional
wait = _OPS.wait_tensor


def all_gather(part: Tensor, share: Share) -> Tensor:
    """[...] of every rank -> [size, ...]."""
    return wait(_OPS.all_gather_into_tensor(part.contiguous().unsqueeze(0), share.size, share.group))


def reduce_scatter(parts: Tensor, share: Share) -> Tensor:
    """[size, ...] of every rank -> the sum of what all have for this one, [...]."""
    return wait(_OPS.reduce_scatter_tensor(parts.contiguous(), "sum", share.size, share.group)).squeeze(0)


def all_to_all(parts: Tensor, share: Share) -> Tensor:
    """[size, ...]: part i goes to rank i, and part i of the result comes from rank i."""
    one_each = [1] * share.size
    return wait(_OPS.all_to_all_single(parts.contiguous(), one_each, one_each, share.group))


def start_shift(tensor: Tensor, share: Share) -> Tensor:
    """Send `tensor` to the next rank of the ring and receive the one before's. The result must be waited for."""
    rows = tensor.shape[0]
    to = [rows if rank == (share.rank + 1) % share.size else 0 for rank in range(share.size)]
    of = [rows if rank == (share.rank - 1) % share.size else 0 for rank in range(share.size)]
    return _OPS.all_to_all_single(tensor.contiguous(), of, to, share.group)
