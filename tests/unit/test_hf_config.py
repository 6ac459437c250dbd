"""Hugging Face config.json of the Llama family: the same model as the catalogue's, and every unknown field named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.inventory import num_params
from titan_planner.models import MODELS
from titan_planner.models.hf_config import read_hf_config

# Values of the published Llama-3.1-8B and Llama-3.2-1B configurations.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "vocab_size": 128256, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
LLAMA_1B = {
    **LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True, "rope_scaling": {**LLAMA_8B["rope_scaling"], "factor": 32.0},
}  # fmt: skip


def read(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return read_hf_config(path)


@pytest.mark.parametrize(("config", "flavor"), [(LLAMA_8B, "8B"), (LLAMA_1B, "1B")])
def test_equals_the_catalogue(tmp_path, config, flavor):
    model = read(tmp_path, config)
    assert replace(model, flavor=flavor) == MODELS["llama3"][flavor]
    assert num_params(model) == num_params(MODELS["llama3"][flavor])


def test_rope_parameters_of_newer_transformers(tmp_path):
    config = {key: value for key, value in LLAMA_8B.items() if key not in ("rope_scaling", "rope_theta")}
    config["rope_parameters"] = {**LLAMA_8B["rope_scaling"], "rope_theta": 500000.0}
    assert replace(read(tmp_path, config), flavor="8B") == MODELS["llama3"]["8B"]


def test_null_is_the_default(tmp_path):
    model = read(tmp_path, {**LLAMA_8B, "rms_norm_eps": None, "tie_word_embeddings": None, "rope_theta": None})
    assert (model.norm.eps, model.tied, model.blocks[0].block.attention.rope.theta) == (1e-6, False, 10000.0)


def test_without_scaling(tmp_path):
    assert read(tmp_path, {**LLAMA_8B, "rope_scaling": None}).blocks[0].block.attention.rope.scaling is None


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"hidden_act": "gelu"}, "`hidden_act`"),
        ({"shiny_new_feature": 3}, "`shiny_new_feature` is unknown"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"num_attention_heads": 33}, "does not divide hidden_size"),
        ({"vocab_size": "many"}, "must be a whole number"),
        ({"model_type": "qwen3"}, "type `qwen3`"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "type `yarn`"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling lacks factor, low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {**LLAMA_8B["rope_scaling"], "low_freq_factor": None}}, "rope_scaling lacks low_freq_factor"),
        (
            {"rope_scaling": {**LLAMA_8B["rope_scaling"], "original_max_position_embeddings": 8192.5}},
            "`original_max_position_embeddings` must be a whole number, but is 8192.5",
        ),
        ({"rope_scaling": {**LLAMA_8B["rope_scaling"], "factor": "8"}}, "`factor` must be a number"),
        ({"rope_theta": 0}, "`rope_theta` is 0, but must be a finite number greater than 0"),
        ({"rope_theta": 10**400}, "cannot be used"),
        ({"rope_scaling": {**LLAMA_8B["rope_scaling"], "rope_theta": 0}}, "`rope_theta` is 0"),
        ({"tie_word_embeddings": "false"}, '`tie_word_embeddings` must be true or false, but is "false"'),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0, but must be at least 1"),
        ({"rms_norm_eps": "small"}, "`rms_norm_eps` must be a number"),
        ({"rope_scaling": [1]}, "cannot be used"),
        ({"num_hidden_layers": 0}, "`repeat` is 0"),
    ],
)
def test_what_cannot_be_expressed_is_named(tmp_path, change, fragment):
    with pytest.raises(InvariantError) as caught:
        read(tmp_path, {**LLAMA_8B, **change})
    assert fragment in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "[1]", "3", '{"a": ' * 10000])
def test_not_a_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvariantError):
        read_hf_config(path)
