"""One pre-norm transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from titan_runtime.modules.moe import MixtureOfExperts
from titan_runtime.modules.rms_norm import RMSNorm


class TransformerBlock(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x)."""

    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module, norm_eps: float) -> None:
        super().__init__()
        self.attention = attention
        # A mixture has a name of its own, the one that checkpoints and tools know.
        self.branch = "moe" if isinstance(feed_forward, MixtureOfExperts) else "feed_forward"
        self.add_module(self.branch, feed_forward)
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.ffn_norm = RMSNorm(dim, norm_eps)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[batch, sequence, dim] and the rotary table -> [batch, sequence, dim]."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + getattr(self, self.branch)(self.ffn_norm(x))
