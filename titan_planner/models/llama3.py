"""Llama 3, 3.1 and 3.2: pre-norm blocks of grouped-query attention and SwiGLU, rotary embedding with theta 500000.

Sizes: "The Llama 3 Herd of Models" (arXiv 2407.21783, table 3) and the published config.json files. The rotary scaling of
the 3.2 models has factor 32, where 3.1 has 8.
"""

from __future__ import annotations

from titan_planner.ir.model import Block, Blocks, Gqa, Model, RmsNorm, Rope, RopeScaling, SwiGlu


def llama3(
    flavor: str,
    *,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int = 128256,
    factor: float = 8.0,
    max_seq_len: int = 131072,
    tied: bool = False,
) -> Model:
    """A Llama 3 of the given sizes; `hidden` is the width inside the feed-forward layer."""
    norm = RmsNorm(eps=1e-5)
    scaling = RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    attention = Gqa(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim // heads, rope=Rope(theta=500000.0, scaling=scaling)
    )
    block = Block(attention=attention, feed_forward=SwiGlu(hidden_dim=hidden), norm=norm)
    return Model(
        family="llama3",
        flavor=flavor,
        vocab_size=vocab,
        dim=dim,
        max_seq_len=max_seq_len,
        blocks=(Blocks(repeat=layers, block=block),),
        norm=norm,
        tied=tied,
    )


FLAVORS: dict[str, Model] = {
    "debugmodel": llama3("debugmodel", dim=256, layers=6, heads=16, kv_heads=16, hidden=768, vocab=2048),
    "1B": llama3("1B", dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, factor=32.0, tied=True),
    "3B": llama3("3B", dim=3072, layers=28, heads=24, kv_heads=8, hidden=8192, factor=32.0, tied=True),
    "8B": llama3("8B", dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336),
    "70B": llama3("70B", dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672),
    "405B": llama3("405B", dim=16384, layers=126, heads=128, kv_heads=8, hidden=53248),
}

FLAVOR_ALIASES = {"debug": "debugmodel"}
