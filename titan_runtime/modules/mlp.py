"""The feed-forward layer without a gate."""

from __future__ import annotations

from typing import Literal, assert_never

from torch import Tensor, nn
from torch.nn.functional import gelu, relu


class MLP(nn.Module):
    """w2(activation(w1 x))."""

    def __init__(self, dim: int, hidden_dim: int, activation: Literal["gelu", "relu2"]) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        h = self.w1(x)
        match self.activation:
            case "gelu":
                h = gelu(h)
            case "relu2":
                h = relu(h).square()
            case _:
                assert_never(self.activation)
        return self.w2(h)
