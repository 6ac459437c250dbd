"""From the plan's description of the model to modules: one `match` over each closed set of layer kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

import torch
from torch import nn

from titan_planner.ir.model import Attention, FeedForward, Gqa, Mlp, Model, Moe, Rope, SwiGlu
from titan_runtime.modules.block import TransformerBlock
from titan_runtime.modules.gqa import GroupedQueryAttention
from titan_runtime.modules.mlp import MLP
from titan_runtime.modules.moe import MixtureOfExperts
from titan_runtime.modules.rope import RotaryTable
from titan_runtime.modules.swiglu import SwiGLU
from titan_runtime.modules.transformer import Transformer


def build(
    model: Model,
    *,
    seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "meta",
) -> Transformer:
    """The modules of `model`, with parameters of `dtype` that nobody has filled yet.

    Parameter names and shapes are those of `titan_planner.ir.inventory.parameters(model)`. Rotary tables cover
    `seq_len` positions, the model's longest sequence when None. On the meta device (the default) nothing is allocated:
    a model of any size is built in milliseconds, then sharded, and only then given memory.
    """
    with torch.device(device), _default_dtype(dtype):
        ropes: list[tuple[Rope, int]] = []
        table_of: list[int] = []
        blocks: list[TransformerBlock] = []
        for block in model.layers():
            attention, rope = _attention(model.dim, block.attention)
            feed_forward = _feed_forward(model.dim, block.feed_forward)
            blocks.append(TransformerBlock(model.dim, attention, feed_forward, block.norm.eps))
            if rope not in ropes:
                ropes.append(rope)
            table_of.append(ropes.index(rope))
        tables = [RotaryTable(rope, head_dim, seq_len or model.max_seq_len) for rope, head_dim in ropes]
        return Transformer(
            model.vocab_size, model.dim, blocks, tables, table_of, norm_eps=model.norm.eps, tied=model.tied
        )


def _attention(dim: int, attention: Attention) -> tuple[nn.Module, tuple[Rope, int]]:
    match attention:
        case Gqa():
            return GroupedQueryAttention(dim, attention), (attention.rope, attention.head_dim)
        case _:
            assert_never(attention)


def _feed_forward(dim: int, feed_forward: FeedForward) -> nn.Module:
    match feed_forward:
        case SwiGlu():
            return SwiGLU(dim, feed_forward.hidden_dim)
        case Mlp():
            return MLP(dim, feed_forward.hidden_dim, feed_forward.activation)
        case Moe():
            return MixtureOfExperts(dim, feed_forward)
        case _:
            assert_never(feed_forward)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
