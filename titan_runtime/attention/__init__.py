"""Causal attention over a sequence that several ranks share: three ways for keys and values to meet the queries.

Each is a function of this rank's q, k, v [batch, heads, local sequence, head_dim] and its `Share` of the sequence, and is
put in the place of a module's `inner_attention` by `titan_runtime.apply.context`.
"""

from titan_runtime.attention.allgather import allgather_attention
from titan_runtime.attention.alltoall import alltoall_attention
from titan_runtime.attention.ring import ring_attention
from titan_runtime.attention.share import Share

__all__ = ["Share", "allgather_attention", "alltoall_attention", "ring_attention"]
