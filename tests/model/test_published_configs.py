"""The config.json of models as they were published, and what it means."""

import json
from pathlib import Path

import pytest

from model.config import ModelConfig

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
# head_dim, qkv_bias, tied, theta of the first and of the last layer (None: no RoPE)
EXPECTED = {
    "meta-llama/Llama-3.2-1B": (64, False, True, 500000, 500000),
    "HuggingFaceTB/SmolLM2-135M": (64, False, True, 100000, 100000),
    "mistralai/Mistral-7B-v0.1": (128, False, False, 10000, 10000),
    "mistralai/Mistral-7B-Instruct-v0.3": (128, False, False, 1000000, 1000000),
    "mistralai/Mixtral-8x7B-v0.1": (128, False, False, 1000000, 1000000),
    "Qwen/Qwen2.5-0.5B": (64, True, True, 1000000, 1000000),
    "Qwen/Qwen3-0.6B": (128, False, True, 1000000, 1000000),
    "Qwen/Qwen3-30B-A3B": (128, False, False, 1000000, 1000000),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (128, False, False, 10000000, 10000000),
    "HuggingFaceTB/SmolLM3-3B": (128, False, True, 5000000, None),
    "allenai/OLMo-2-0425-1B": (128, False, False, 500000, 500000),
    "google/gemma-2-2b": (256, False, True, 10000, 10000),
    "google/gemma-2-9b": (256, False, True, 10000, 10000),
    "google/gemma-3-1b-it": (256, False, True, 10000, 10000),
}
WINDOWS = {
    "mistralai/Mistral-7B-v0.1": [4096] * 32,
    "google/gemma-2-2b": [4096, None] * 13,
    "google/gemma-2-9b": [4096, None] * 21,
    "google/gemma-3-1b-it": ([512] * 5 + [None]) * 4 + [512, 512],
}
EXPERTS = {
    "mistralai/Mixtral-8x7B-v0.1": (8, 2, 14336, True),
    "Qwen/Qwen3-30B-A3B": (128, 8, 768, True),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (160, 8, 2560, True),
}


def theta(layer, head_dim):
    """From the second component, which no scaling here changes."""
    return layer.rope and round(layer.rope.frequencies[1] ** (-head_dim / 2), 3)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config(name):
    config = ModelConfig.from_hf(CONFIGS[name])
    first, last = (theta(config.layers[index], config.head_dim) for index in (0, -1))
    assert (config.head_dim, config.qkv_bias, config.tie_embeddings, first, last) == EXPECTED[name]
    assert [layer.window for layer in config.layers] == WINDOWS.get(name, [None] * len(config.layers))
    assert (config.o_bias, config.mlp_bias, config.norm_eps) == (False, False, CONFIGS[name]["rms_norm_eps"])
    assert config.max_positions == CONFIGS[name]["max_position_embeddings"]
    assert all(layer.moe == (name in EXPERTS) for layer in config.layers)
    if name in EXPERTS:
        found = (config.num_experts, config.experts_per_token, config.moe_intermediate_size, config.norm_topk)
        assert found == EXPERTS[name]


def test_what_is_special():
    layers = ModelConfig.from_hf(CONFIGS["google/gemma-3-1b-it"]).layers
    assert [theta(layer, 256) for layer in layers] == [10000 if layer.window else 1000000 for layer in layers]
    layers = ModelConfig.from_hf(CONFIGS["HuggingFaceTB/SmolLM3-3B"]).layers
    assert [layer.rope is not None for layer in layers] == [True, True, True, False] * 9
    llama = ModelConfig.from_hf(CONFIGS["meta-llama/Llama-3.2-1B"]).layers[0].rope
    assert llama.frequencies[-1] == pytest.approx(500000.0 ** (-31 / 32) / 32)  # the low band is slowed by the factor
    gemma = ModelConfig.from_hf(CONFIGS["google/gemma-2-9b"])
    assert (gemma.attention_soft_cap, gemma.final_soft_cap, gemma.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (gemma.activation, gemma.embedding_scale) == ("gelu_tanh", 3584**0.5)
    assert ModelConfig.from_hf(CONFIGS["Qwen/Qwen3-0.6B"]).qk_norm == "head"
    assert ModelConfig.from_hf(CONFIGS["allenai/OLMo-2-0425-1B"]).qk_norm == "full"
