"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return self.w2(silu(self.w1(x)) * self.w3(x))
