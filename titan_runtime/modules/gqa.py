"""Grouped-query causal self-attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from titan_planner.ir.model import Gqa
from titan_runtime.modules.rope import rotate

InnerAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q, k, v [batch, heads, sequence, head_dim] to [batch, heads, sequence, head_dim]; a rank may hold some heads only."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, causal; queries may have a multiple of the keys' heads."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class GroupedQueryAttention(nn.Module):
    """wo(softmax(q k^T / sqrt(head_dim)) v), causal; each KV head serves num_heads / num_kv_heads queries."""

    def __init__(self, dim: int, attention: Gqa) -> None:
        super().__init__()
        self.head_dim = attention.head_dim
        queries = attention.num_heads * attention.head_dim
        keys = attention.num_kv_heads * attention.head_dim
        self.wq = nn.Linear(dim, queries, bias=False)
        self.wk = nn.Linear(dim, keys, bias=False)
        self.wv = nn.Linear(dim, keys, bias=False)
        self.wo = nn.Linear(queries, dim, bias=False)
        # Exchanged where ranks share a sequence, see apply/context.py. No module: it has no name in checkpoints.
        self.inner_attention: InnerAttention = causal_attention

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[batch, sequence, dim] and the rotary table -> [batch, sequence, dim]."""
        # -1 heads: under tensor parallelism a rank holds only its share of them.
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        q, k = rotate(q, table), rotate(k, table)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [batch, heads, sequence, head_dim]
        mixed = self.inner_attention(q, k, v)
        return self.wo(mixed.transpose(1, 2).flatten(2))
