"""A row's model as the planner's description."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

from benchmarks.published.rows import MALFORMED, NOT_PUBLISHED, Row, Unusable
from titan_planner.ir.inventory import num_params
from titan_planner.ir.model import Block, Blocks, Gqa, Mlp, Model, Moe, RmsNorm, Rope, SwiGlu

NO_KIND = "no layer kind yet"

_NORM = RmsNorm(eps=1e-5)  # its value costs nothing
_ROPE = Rope(theta=10000.0, scaling=None)


def model_of(row: Row, vocab_multiple: int, assume: list[str]) -> Model:
    """The row's model. The vocabulary is padded to `vocab_multiple` unless the row says how much it is padded.

    Norms, rotary embedding and the absence of biases are this project's: LayerNorm, learned positions and biases are not
    described, and change counts by far less than a percent. Raises `Unusable`.
    """
    _refuse(row)
    layers, hidden, heads = row.required("model.layers", "model.hidden", "model.heads")
    seq_len, vocab = row.required("model.seq_len", "model.vocab")
    kv_heads = row.count("model.kv_heads") or heads
    head_dim = row.count("model.head_dim")
    if head_dim is None:
        if hidden % heads:
            raise Unusable(MALFORMED, f"{heads} heads do not divide hidden {hidden}, and no head_dim is given")
        head_dim = hidden // heads
    padded = row.count("model.vocab_padded") or -(-vocab // vocab_multiple) * vocab_multiple
    attention = Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope=_ROPE)

    def build(tied: bool) -> Model:
        return Model(
            family="published",
            flavor=row.text("model.name")[:80] or row.id,
            vocab_size=padded,
            dim=hidden,
            max_seq_len=seq_len,
            blocks=_blocks(row, layers, hidden, attention, assume),
            norm=_NORM,
            tied=tied,
        )

    return build(_tied(row, build(False), assume))


def _refuse(row: Row) -> None:
    kind = row.text("model.attention.type").casefold()
    if kind and kind not in ("gqa", "mha", "mqa"):
        raise Unusable(NO_KIND, f"attention {row.text('model.attention.type').upper()[:20]}")
    if "sliding" in row.text("model.attention").casefold() or row.value("model.sliding_window"):
        raise Unusable(NO_KIND, "sliding-window attention")
    name = row.text("model.name").casefold()
    if row.text("tags.arch") == "hybrid_or_other" or re.search(r"mamba|hybrid", name):
        raise Unusable(NO_KIND, "hybrid of attention and other mixers")
    if row.value("model.mtp_layers"):
        raise Unusable(NO_KIND, "multi-token prediction")


def _blocks(row: Row, layers: int, hidden: int, attention: Gqa, assume: list[str]) -> tuple[Blocks, ...]:
    def run(repeat: int, feed_forward: SwiGlu | Mlp | Moe) -> Blocks:
        return Blocks(repeat=repeat, block=Block(attention=attention, feed_forward=feed_forward, norm=_NORM))

    if not row.section("model.moe"):
        if row.text("tags.arch") == "moe":
            raise Unusable(NOT_PUBLISHED, "model.moe")
        return (run(layers, _dense(row, hidden, assume)),)
    moe = _moe(row, assume)
    dense = row.count("model.moe.dense_layers", minimum=0) or 0
    if dense > layers:
        raise Unusable(MALFORMED, f"{dense} dense layers of {layers}")
    if dense == 0:
        return (run(layers, moe),)
    plain = _dense(row, hidden, assume)
    if dense == layers:
        return (run(layers, plain),)
    if 2 * dense == layers and re.search(r"every (second|other)|alternat|interleav", row.text("model.moe").casefold()):
        return tuple(run(1, plain if index % 2 == 0 else moe) for index in range(layers))
    return run(dense, plain), run(layers - dense, moe)


def _is_gated(row: Row) -> bool:
    gated = row.flag("model.gated")
    if gated is not None:
        return gated
    activation = row.text("model.activation").casefold()
    if not activation:
        raise Unusable(NOT_PUBLISHED, "model.activation")
    return "glu" in activation or activation == "silu"


def _dense(row: Row, hidden: int, assume: list[str]) -> SwiGlu | Mlp:
    gated = _is_gated(row)
    ffn = row.count("model.ffn")
    if ffn is None:
        ratio = row.text("model.mlp_ratio")
        if not ratio:
            raise Unusable(NOT_PUBLISHED, "model.ffn")
        try:
            exact = hidden * Fraction(ratio.replace(" ", ""))
        except (ValueError, ZeroDivisionError):
            raise Unusable(MALFORMED, f"`model.mlp_ratio` is `{ratio[:40]}`") from None
        # Widths made from a ratio are rounded up to a multiple of 256 (Meta's Llama code and those after it).
        ffn = math.ceil(exact / 256) * 256
        assume.append(f"feed-forward width {ffn} from the ratio {ratio}")
        if ffn < 1:
            raise Unusable(MALFORMED, f"`model.mlp_ratio` is `{ratio[:40]}`")
    if gated:
        return SwiGlu(hidden_dim=ffn)
    squared = re.search(r"squared|relu\^?2|sq", row.text("model.activation").casefold()) is not None
    activation: Literal["gelu", "relu2"] = "relu2" if squared else "gelu"
    return Mlp(hidden_dim=ffn, activation=activation)


def _moe(row: Row, assume: list[str]) -> Moe:
    if not _is_gated(row):
        raise Unusable(NO_KIND, "experts without a gate")
    experts, top_k, width = row.required("model.moe.experts", "model.moe.top_k", "model.moe.expert_ffn")
    shared = row.count("model.moe.shared_experts", minimum=0) or 0
    total = row.count("model.moe.shared_expert_ffn")
    if shared and total is not None:
        if total % width:
            raise Unusable(NO_KIND, f"shared experts of {total} beside experts of {width}")
        shared = total // width
    return Moe(
        num_experts=experts,
        hidden_dim=width,
        top_k=top_k,
        num_shared_experts=shared,
        score_function="softmax",
        score_before_experts=False,
        route_norm=False,
        route_scale=1.0,
        num_groups=None,
        num_limited_groups=None,
        load_balance_coeff=None,
    )


def _tied(row: Row, untied: Model, assume: list[str]) -> bool:
    """Whether output and embedding share a weight: as the row says, else as its size says, else as such models do."""
    told = row.flag("model.tie_embeddings")
    if told is not None:
        return told
    apart = num_params(untied)
    together = apart - untied.vocab_size * untied.dim
    size, worth, close = row.positive("model.params_total"), 0.02, 0.1
    if size is None:
        # A size in a name is rounded ("14B" has 14.8, "1B" 1.24): it tells only where the embedding is a large part.
        printed = re.search(r"(\d+(?:\.\d+)?)\s*b\b", row.text("model.name").casefold())
        size, worth, close = (float(printed[1]) * 1e9 if printed else None), 0.08, 0.25
    # And only where it is the size of these dimensions, and not of a model that they were cut from.
    near = size is not None and min(abs(apart - size), abs(together - size)) < close * size
    if size is not None and near and apart - together > worth * apart:
        return abs(together - size) < abs(apart - size)
    tied = row.text("model.activation").casefold() == "gelu"
    assume.append("embedding and output tied, as in GPT" if tied else "embedding and output not tied")
    return tied
