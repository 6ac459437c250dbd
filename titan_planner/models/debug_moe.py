"""A small mixture of experts to try things with: of no published family, but with every part that those have."""

from __future__ import annotations

from titan_planner.ir.model import Block, Blocks, Gqa, Model, Moe, RmsNorm, Rope, SwiGlu

_NORM = RmsNorm(eps=1e-5)
_ATTENTION = Gqa(num_heads=16, num_kv_heads=16, head_dim=16, rope=Rope(theta=10000.0, scaling=None))

FLAVORS: dict[str, Model] = {
    "debugmodel": Model(
        family="debug_moe",
        flavor="debugmodel",
        vocab_size=2048,
        dim=256,
        max_seq_len=4096,
        blocks=(
            # The first layer is dense, as in DeepSeek V3: routing raw embeddings balances badly.
            Blocks(repeat=1, block=Block(attention=_ATTENTION, feed_forward=SwiGlu(hidden_dim=768), norm=_NORM)),
            Blocks(
                repeat=5,
                block=Block(
                    attention=_ATTENTION,
                    feed_forward=Moe(
                        num_experts=8,
                        hidden_dim=256,
                        top_k=2,
                        num_shared_experts=1,
                        score_function="sigmoid",
                        score_before_experts=False,
                        route_norm=True,
                        route_scale=1.0,
                        num_groups=None,
                        num_limited_groups=None,
                        load_balance_coeff=1e-3,
                    ),
                    norm=_NORM,
                ),
            ),
        ),
        norm=_NORM,
        tied=False,
    ),
}

FLAVOR_ALIASES = {"debug": "debugmodel"}
