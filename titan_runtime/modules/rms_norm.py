"""Root-mean-square normalisation, computed in float32 whatever comes in."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; the result has the input's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        # Scaled in float32 too and rounded once: two roundings in bfloat16 would cost a bit of the eight.
        return (normed * self.weight.float()).type_as(x)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"
