"""Read a Hugging Face config.json of the Llama family into the same description as the catalogue's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.model import Block, Blocks, Gqa, Model, RmsNorm, Rope, RopeScaling, SwiGlu

# Fields that say nothing about the network that is trained.
_IRRELEVANT = {
    "_name_or_path", "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "return_dict", "output_attentions",
    "output_hidden_states", "is_decoder", "is_encoder_decoder", "id2label", "label2id", "problem_type", "task_specific_params",
}  # fmt: skip

# Fields with the only value that this version can express.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "pretraining_tp": (1,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (None,),
}

_READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings",
}  # fmt: skip

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_hf_config(path: Path) -> Model:
    """The model of the config.json at `path`. Raises `InvariantError` on `hf_config` naming every field it cannot express."""
    config = _load(path)
    kind = config.get("model_type", "llama")
    if kind != "llama":
        raise InvariantError("hf_config", f"`{path}` describes a model of type `{kind}`; this version reads `llama`")
    problems = [f"`{name}` is missing" for name in _REQUIRED if config.get(name) is None]
    problems += [
        f"`{name}` is {json.dumps(value)[:60]}, which this version cannot express"
        for name, value in config.items()
        if name in _FIXED and value not in _FIXED[name]
    ]
    problems += [
        f"`{name}` is unknown"
        for name in config
        if name not in _READ and name not in _FIXED and name not in _IRRELEVANT
    ]
    if problems:
        raise InvariantError("hf_config", f"`{path}` cannot be used: {'; '.join(problems)}")
    try:
        return _model(path, config)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise InvariantError("hf_config", f"`{path}` cannot be used: {error}") from None


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.is_dir():
            path = path / "config.json"
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvariantError(
            "hf_config", f"`{path}` cannot be read: {error.strerror}", "the path is relative to the spec file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvariantError("hf_config", f"`{path}` is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvariantError("hf_config", f"`{path}` holds no JSON object")
    return config


def _model(path: Path, config: dict[str, Any]) -> Model:
    dim, heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    if heads < 1:
        raise ValueError(f"`num_attention_heads` is {heads}, but must be at least 1")
    if config.get("head_dim") is None and dim % heads:
        raise InvariantError("hf_config", f"num_attention_heads {heads} does not divide hidden_size {dim}")
    norm = RmsNorm(eps=_float(config, "rms_norm_eps", 1e-6))
    # transformers 5 moved theta and scaling into one mapping, `rope_parameters`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the rope scaling must be a mapping, but is {json.dumps(rope)[:40]}")
    attention = Gqa(
        num_heads=heads,
        num_kv_heads=_int(config, "num_key_value_heads", heads),
        head_dim=_int(config, "head_dim", dim // heads),
        rope=Rope(theta=_float(rope, "rope_theta", _float(config, "rope_theta", 10000.0)), scaling=_scaling(rope)),
    )
    block = Block(attention=attention, feed_forward=SwiGlu(hidden_dim=_int(config, "intermediate_size")), norm=norm)
    return Model(
        family="llama3",
        flavor=path.stem if path.stem != "config" else path.resolve().parent.name,
        vocab_size=_int(config, "vocab_size"),
        dim=dim,
        max_seq_len=_int(config, "max_position_embeddings", 2048),
        blocks=(Blocks(repeat=_int(config, "num_hidden_layers"), block=block),),
        norm=norm,
        tied=_bool(config, "tie_word_embeddings", False),
    )


def _int(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"`{name}` must be a whole number, but is {json.dumps(value)[:40]}")
    return value


def _float(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"`{name}` must be a number, but is {json.dumps(value)[:40]}")
    if not 0 < value < math.inf:
        raise ValueError(f"`{name}` is {json.dumps(value)[:40]}, but must be a finite number greater than 0")
    return float(value)


def _bool(config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be true or false, but is {json.dumps(value)[:40]}")
    return value


_SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope scaling of type `{kind}` is not supported; `llama3` is")
    missing = [name for name in _SCALING_FIELDS if rope.get(name) is None]
    if missing:
        raise ValueError(f"rope_scaling lacks {', '.join(missing)}")
    return RopeScaling(
        factor=_float(rope, "factor", 1.0),
        low_freq_factor=_float(rope, "low_freq_factor", 1.0),
        high_freq_factor=_float(rope, "high_freq_factor", 1.0),
        original_max_seq_len=_int(rope, "original_max_position_embeddings"),
    )
