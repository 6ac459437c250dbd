"""Model FLOPs per token."""

from __future__ import annotations

from typing import assert_never

from titan_planner.ir.inventory import num_active_params
from titan_planner.ir.model import Gqa, Model


def flops_per_token(model: Model, seq_len: int) -> float:
    """FLOPs of forward and backward for one token: 6 per matmul weight + 6 x layers x heads x (qk + v dims) x seq_len.

    The convention of PaLM's appendix B (arXiv 2204.02311) and of TorchTitan's logs: embeddings are not counted (all weights
    are when tied), recomputation is not, and causal attention is not halved. Of routed experts, those that a token goes to count.
    """
    weights = num_active_params(model) - (0 if model.tied else model.vocab_size * model.dim)
    attention = 0
    for run in model.blocks:
        match run.block.attention:
            case Gqa() as gqa:
                attention += run.repeat * gqa.num_heads * 2 * gqa.head_dim
            case _:
                assert_never(run.block.attention)
    return float(6 * weights + 6 * attention * seq_len)
