"""The catalogue: family -> flavor -> Model. One file a family; a new family is one more line here."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.model import Blocks, Gqa, Mlp, Model, Moe, RopeScaling, SwiGlu
from titan_planner.ir.request import ModelOverrides, MoeOverrides, RopeScalingSpec
from titan_planner.models import debug_mlp, debug_moe, llama3

MODELS: dict[str, dict[str, Model]] = {
    "llama3": llama3.FLAVORS,
    "debug_moe": debug_moe.FLAVORS,
    "debug_mlp": debug_mlp.FLAVORS,
}
FAMILY_ALIASES = {"llama3.1": "llama3", "llama3.2": "llama3", "llama-3": "llama3", "llama-3.1": "llama3"}
FLAVOR_ALIASES: dict[str, dict[str, str]] = {
    "llama3": llama3.FLAVOR_ALIASES,
    "debug_moe": debug_moe.FLAVOR_ALIASES,
    "debug_mlp": debug_mlp.FLAVOR_ALIASES,
}


def find_model(family: str, flavor: str) -> Model:
    """The catalogue's model, by names or aliases, case ignored. Raises `InvariantError` on `family` or `flavor`."""
    families = {name.casefold(): name for name in MODELS} | FAMILY_ALIASES
    name = families.get(family.casefold())
    if name is None:
        raise InvariantError(
            "family",
            f"there is no model family `{family}`",
            _nearest(family, list(MODELS), "`titan-plan models` lists them"),
        )
    flavors = {entry.casefold(): entry for entry in MODELS[name]} | FLAVOR_ALIASES[name]
    found = flavors.get(flavor.casefold())
    if found is None:
        known = list(MODELS[name])
        raise InvariantError(
            "flavor",
            f"the family `{name}` has no flavor `{flavor}`",
            _nearest(flavor, known, f"it has {', '.join(known)}"),
        )
    return MODELS[name][found]


def _nearest(word: str, known: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(word.casefold(), [name.casefold() for name in known], 1, 0.6)
    match = next((name for name in known if close and name.casefold() == close[0]), None)
    return f"did you mean `{match}`?" if match else otherwise


def override(model: Model, changes: ModelOverrides) -> Model:
    """`model` with the given values replaced. Raises `InvariantError` naming the override that makes it impossible."""
    dim = changes.dim or model.dim
    blocks = []
    for run in model.blocks:
        attention = run.block.attention
        heads = changes.num_heads or attention.num_heads
        head_dim = changes.head_dim or (
            attention.head_dim if dim == model.dim and heads == attention.num_heads else dim // heads
        )
        if changes.head_dim is None and dim % heads:
            raise InvariantError(
                "num_heads",
                f"`num_heads` {heads} does not divide `dim` {dim}",
                "set `head_dim` as well, or change one",
                rule="model-heads",
            )
        rope = attention.rope
        if changes.rope_theta is not None:
            rope = replace(rope, theta=changes.rope_theta)
        if changes.rope_scaling is not None:
            rope = replace(rope, scaling=_scaling(rope.scaling, changes.rope_scaling))
        kv_heads = changes.num_kv_heads or (attention.num_kv_heads if heads % attention.num_kv_heads == 0 else heads)
        attention = Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope=rope)
        norm = run.block.norm if changes.norm_eps is None else replace(run.block.norm, eps=changes.norm_eps)
        feed_forward = run.block.feed_forward
        if changes.hidden_dim is not None and isinstance(feed_forward, SwiGlu | Mlp):
            feed_forward = replace(feed_forward, hidden_dim=changes.hidden_dim)
        if changes.moe is not None and isinstance(feed_forward, Moe):
            feed_forward = _experts(feed_forward, changes.moe)
        block = replace(run.block, attention=attention, feed_forward=feed_forward, norm=norm)
        blocks.append(Blocks(repeat=run.repeat, block=block))
    if changes.moe is not None and not any(isinstance(run.block.feed_forward, Moe) for run in blocks):
        raise InvariantError(
            "moe",
            "`moe` changes layers with experts, and the model has none",
            "remove it, or use a family with experts",
        )
    if changes.num_layers is not None:
        if len(blocks) > 1:
            raise InvariantError(
                "num_layers", "`num_layers` cannot be overridden: the model has several kinds of blocks"
            )
        blocks = [replace(blocks[0], repeat=changes.num_layers)]
    return replace(
        model,
        dim=dim,
        vocab_size=changes.vocab_size or model.vocab_size,
        max_seq_len=changes.max_seq_len or model.max_seq_len,
        tied=model.tied if changes.tied is None else changes.tied,
        norm=model.norm if changes.norm_eps is None else replace(model.norm, eps=changes.norm_eps),
        blocks=tuple(blocks),
    )


def _experts(old: Moe, changes: MoeOverrides) -> Moe:
    values: dict[str, Any] = {
        name: None if value == "none" else value
        for name in MoeOverrides.__dataclass_fields__
        if (value := getattr(changes, name)) is not None
    }
    if changes.num_groups == "none":
        values["num_limited_groups"] = None
    try:
        return replace(old, **values)
    except InvariantError as error:
        raise InvariantError(f"moe.{error.field}", error.message, error.hint, error.rule) from None


def _scaling(old: RopeScaling | None, changes: RopeScalingSpec) -> RopeScaling:
    values = {
        name: getattr(changes, name) if getattr(changes, name) is not None else getattr(old, name, None)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
    }
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise InvariantError(
            "rope_scaling", f"`rope_scaling` lacks `{missing[0]}`, and the model has no scaling to take it from"
        )
    try:
        return RopeScaling(**values)  # type: ignore[arg-type]
    except InvariantError as error:
        raise InvariantError(f"rope_scaling.{error.field}", error.message, error.hint, error.rule) from None
