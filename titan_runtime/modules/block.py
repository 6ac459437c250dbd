"""One pre-norm transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from titan_runtime.modules.rms_norm import RMSNorm


class TransformerBlock(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x)."""

    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module, norm_eps: float) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.ffn_norm = RMSNorm(dim, norm_eps)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[batch, sequence, dim] and the rotary table -> [batch, sequence, dim]."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))
