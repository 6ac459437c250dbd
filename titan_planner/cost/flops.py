"""Model FLOPs per token, by both conventions in use."""

from __future__ import annotations

import functools
from typing import assert_never

from titan_planner.ir.inventory import num_active_params
from titan_planner.ir.model import Gqa, Model


@functools.lru_cache(maxsize=64)
def flops_per_token(model: Model, seq_len: int) -> float:
    """FLOPs of forward and backward for one token: 6 per matmul weight + 6 x layers x heads x (qk + v dims) x seq_len.

    The convention of PaLM's appendix B (arXiv 2204.02311) and of TorchTitan's logs: embeddings are not counted (all weights
    are when tied), recomputation is not, and causal attention is not halved. Of routed experts, those that a token goes to count.
    """
    return float(6 * _matmul_weights(model) + 6 * _attention_width(model) * seq_len)


@functools.lru_cache(maxsize=64)
def flops_per_token_causal(model: Model, seq_len: int) -> float:
    """As `flops_per_token`, counting only the (seq_len + 1) / 2 keys that the mean query sees under the causal mask.

    The convention of Megatron-Bridge and of hardware counters with FlashAttention, up to the + 1 that they leave out.
    """
    return float(6 * _matmul_weights(model) + 3 * _attention_width(model) * (seq_len + 1))


def _matmul_weights(model: Model) -> int:
    return num_active_params(model) - (0 if model.tied else model.vocab_size * model.dim)


def _attention_width(model: Model) -> int:
    """Sum over layers of heads x (qk + v dims)."""
    width = 0
    for run in model.blocks:
        match run.block.attention:
            case Gqa() as gqa:
                width += run.repeat * gqa.num_heads * 2 * gqa.head_dim
            case _:
                assert_never(run.block.attention)
    return width
