"""A small model whose feed-forward layers have no gate, as GPT, MPT, BLOOM (GELU) and Nemotron (squared ReLU) have them."""

from __future__ import annotations

from typing import Literal

from titan_planner.ir.model import Block, Blocks, Gqa, Mlp, Model, RmsNorm, Rope

_NORM = RmsNorm(eps=1e-5)
_ATTENTION = Gqa(num_heads=16, num_kv_heads=16, head_dim=16, rope=Rope(theta=10000.0, scaling=None))


def _model(flavor: str, activation: Literal["gelu", "relu2"]) -> Model:
    block = Block(attention=_ATTENTION, feed_forward=Mlp(hidden_dim=1024, activation=activation), norm=_NORM)
    return Model(
        family="debug_mlp",
        flavor=flavor,
        vocab_size=2048,
        dim=256,
        max_seq_len=4096,
        blocks=(Blocks(repeat=6, block=block),),
        norm=_NORM,
        tied=False,
    )


FLAVORS: dict[str, Model] = {"debugmodel": _model("debugmodel", "gelu"), "relu2": _model("relu2", "relu2")}

FLAVOR_ALIASES = {"debug": "debugmodel", "gelu": "debugmodel"}
