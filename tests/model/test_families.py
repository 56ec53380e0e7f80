"""What a config.json means, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.rope import resolve_rope

DATA = Path(__file__).parents[1] / "data"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 160,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}


def windows(config):
    return [layer.window for layer in ModelConfig.from_hf(config).layers]


def test_defaults_of_a_silent_config():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.tie_embeddings) == (4, 16, 1e-6, False)
    assert config.layers[0].rope.frequencies[1] == 10000.0 ** (-1 / 8)


@pytest.mark.parametrize("name", ["llama_yarn", "llama_linear", "gemma3_linear"])
def test_flat_and_nested_rope_are_the_same(name):
    nested, flat = (json.loads((DATA / name / file).read_text()) for file in ("config.json", "config_flat.json"))
    assert ModelConfig.from_hf(nested) == ModelConfig.from_hf(flat)


def test_windows():
    mistral = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}
    assert windows(mistral) == [4096, 4096]
    assert windows(mistral | {"sliding_window": 8}) == [8, 8]
    assert windows(mistral | {"sliding_window": None}) == [None, None]
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert windows(qwen) == [None, None]
    assert windows(qwen | {"use_sliding_window": True}) == [None, 8]
    gemma2 = LLAMA | {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 8}
    assert windows(gemma2) == [8, None, 8, None]
    gemma3 = gemma2 | {"model_type": "gemma3_text", "num_hidden_layers": 7}
    assert windows(gemma3) == [8, 8, 8, 8, 8, None, 8]
    assert windows(gemma3 | {"sliding_window_pattern": 3}) == [8, 8, None, 8, 8, None, 8]
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(gemma2 | {"layer_types": types}) == [None, 8, None, 8]


def test_gemma3_has_two_ropes():
    gemma3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8}
    scaled = ModelConfig.from_hf(gemma3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    local, full = scaled.layers[0].rope, scaled.layers[5].rope
    assert local.frequencies[1] == 10000.0 ** (-1 / 8)
    assert full.frequencies[1] == 1e6 ** (-1 / 8) / 8


def test_smollm3_leaves_rope_out_of_every_fourth_layer():
    smollm3 = LLAMA | {"model_type": "smollm3", "num_hidden_layers": 4, "num_key_value_heads": 2}
    ropes = [layer.rope is not None for layer in ModelConfig.from_hf(smollm3).layers]
    assert ropes == [True, True, True, False]


def test_rope_freq_factors_divide_the_frequencies():
    plain, divided = (ModelConfig.from_hf(LLAMA | extra) for extra in ({}, {"rope_freq_factors": [2.0] * 8}))
    assert np.allclose(np.array(plain.layers[0].rope.frequencies) / 2, divided.layers[0].rope.frequencies, rtol=1e-15)


REFUSED = [
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"logit_scale": 0.5}, "logit_scale = 0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ({"hidden_size": "64"}, "'hidden_size' must be a positive integer, not '64'"),
    ({"hidden_size": 66}, "head_dim is absent and hidden_size 66"),
    ({"num_key_value_heads": 3}, "4 is not a multiple of 3"),
    ({"num_key_value_heads": 0}, "'num_key_value_heads' must be a positive integer, not 0"),
    ({"head_dim": 0}, "'head_dim' must be a positive integer, not 0"),
    ({"vocab_size": None}, "'vocab_size' must be a positive integer, not None"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not supported"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' needs the field 'factor'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, r"not supported: \['beta'\]"),
    ({"layer_types": ["full_attention"]}, "layer_types must be 2 of"),
    ({"layer_types": ["chunked_attention"] * 2}, "layer_types must be 2 of"),
    ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
    (
        {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3, "num_key_value_heads": 2},
        "3 is not in 1..2",
    ),
    ({"model_type": "smollm3", "no_rope_layers": [1], "num_key_value_heads": 2}, "1 entries for 2 layers"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_neutral_fields_are_allowed():
    neutral = {"use_cache": True, "torch_dtype": "bfloat16", "attention_dropout": 0.1, "rope_interleaved": False}
    assert ModelConfig.from_hf(LLAMA | neutral) == ModelConfig.from_hf(LLAMA)


def test_yarn_against_worked_values():
    """Head dim 16, theta 10000, factor 4, original 32: the range is 0 .. 2, the attention factor 0.1 ln 4 + 1."""
    fields = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rope = resolve_rope(fields, 16, 128)
    plain = 10000.0 ** (-np.arange(8) / 8)
    ramp = np.array([0, 0.5, 1, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(rope.frequencies, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-12)
    assert rope.scale == pytest.approx(1.138629436)
