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
    assert windows(mistral | {"sliding_window": None, "use_sliding_window": False}) == [None, None]
    mixtral = mistral | {"model_type": "mixtral"}
    assert windows(mixtral) == [None, None]
    assert windows(mixtral | {"sliding_window": 8}) == [8, 8]
    qwen = mistral | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert windows(qwen) == [None, None]
    assert windows(qwen | {"use_sliding_window": True}) == [None, 8]
    assert windows(qwen | {"use_sliding_window": True, "sliding_window": None}) == [None, None]
    assert windows(qwen | {"use_sliding_window": True, "max_window_layers": 0}) == [8, 8]
    gemma2 = mistral | {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 8}
    assert windows(gemma2) == [8, None, 8, None]
    gemma3 = gemma2 | {"model_type": "gemma3_text", "num_hidden_layers": 7}
    assert windows(gemma3) == [8, 8, 8, 8, 8, None, 8]
    assert windows(gemma3 | {"sliding_window_pattern": 3}) == [8, 8, None, 8, 8, None, 8]
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(gemma2 | {"layer_types": types}) == [None, 8, None, 8]


def test_windows_of_qwen3_moe_and_smollm3():
    """HF's Qwen3-MoE slides in all layers; SmolLM3 in those without RoPE, and it has no window of its own."""
    on = LLAMA | {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 1}
    moe = on | {"model_type": "qwen3_moe"}
    assert windows(moe) == [4096, 4096]
    assert windows(moe | {"sliding_window": 8}) == [8, 8]
    assert windows(moe | {"use_sliding_window": False}) == [None, None]
    smollm3 = on | {"model_type": "smollm3", "num_hidden_layers": 4}
    assert windows(smollm3) == [None] * 4
    assert windows(smollm3 | {"sliding_window": 8}) == [None, None, None, 8]
    assert windows(smollm3 | {"sliding_window": 8, "no_rope_layers": [1, 0, 1, 1]}) == [None, 8, None, None]
    assert windows(smollm3 | {"sliding_window": 8, "use_sliding_window": False}) == [None] * 4


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


def test_gemma3_takes_each_theta_that_is_missing_from_its_own_older_field():
    gemma3 = LLAMA | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 6,
        "rope_local_base_freq": 500.0,
    }
    for nested in ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, {}):
        layers = ModelConfig.from_hf(gemma3 | {"rope_parameters": nested}).layers
        assert layers[0].rope.frequencies[1] == 500.0 ** (-1 / 8)
        assert layers[5].rope.frequencies[1] == 1e6 ** (-1 / 8)


def test_rope_freq_factors_divide_the_frequencies():
    """They are no field of HF, so a user's config.json must not have them."""
    factors = {"rope_freq_factors": [2.0] * 8}
    plain, divided = ModelConfig.from_hf(LLAMA), ModelConfig.from_hf(LLAMA | factors, freq_factors=True)
    assert np.allclose(np.array(plain.layers[0].rope.frequencies) / 2, divided.layers[0].rope.frequencies, rtol=1e-15)
    with pytest.raises(ValueError, match="rope_freq_factors"):
        ModelConfig.from_hf(LLAMA | factors)
    for wrong in ([2.0] * 7, [0.0] * 8, 2.0):
        with pytest.raises(ValueError, match="rope_freq_factors"):
            ModelConfig.from_hf(LLAMA | {"rope_freq_factors": wrong}, freq_factors=True)


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 10000.0}])
@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": {"type": "linear", "factor": 2}}])
def test_the_older_rope_fields_may_agree_with_rope_parameters(theta, scaling):
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    assert ModelConfig.from_hf(LLAMA | new | theta | scaling) == ModelConfig.from_hf(LLAMA | new)


def test_gemma_null_softcaps_are_off():
    gemma2 = LLAMA | {"model_type": "gemma2", "num_key_value_heads": 2}
    assert ModelConfig.from_hf(gemma2).attention_soft_cap == 50.0
    off = ModelConfig.from_hf(gemma2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (off.attention_soft_cap, off.final_soft_cap) == (None, None)


def test_either_name_of_num_experts():
    moe = LLAMA | {"num_key_value_heads": 2}
    for family, default in (("mixtral", 8), ("qwen3_moe", 128)):
        assert ModelConfig.from_hf(moe | {"model_type": family}).num_experts == default
        for name in ("num_experts", "num_local_experts"):
            assert ModelConfig.from_hf(moe | {"model_type": family, name: 16}).num_experts == 16


# What HF assumes for a field that a config leaves out, where it is not what Llama has.
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2}
MIXTRAL = {"model_type": "mixtral", "num_key_value_heads": 2}
QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2}
MOE = {"model_type": "qwen3_moe", "num_key_value_heads": 2}
GEMMA2 = {"model_type": "gemma2", "num_key_value_heads": 2}
GEMMA3 = {"model_type": "gemma3_text", "num_key_value_heads": 2}
SMOLLM3 = {"model_type": "smollm3", "num_key_value_heads": 2}
SLIDING = {"layer_types": ["sliding_attention"] * 2}


def rope(**fields):
    return {"rope_scaling": fields}


REFUSED = [
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
    ({"logit_scale": 0.5}, "logit_scale = 0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ({"hidden_act": ["silu"]}, "hidden_act .* is not supported"),
    ({"hidden_act": None}, "hidden_act None is not supported"),
    ({"hidden_size": 66}, "head_dim is absent and hidden_size 66"),
    ({"num_key_value_heads": 3}, "4 is not a multiple of 3"),
    # Fields that HF's class of that family does not have.
    ({"sliding_window": 8}, "llama does not have .* sliding_window = 8"),
    ({"model_type": "olmo2", "sliding_window": 8}, "olmo2 does not have .* sliding_window = 8"),
    ({"use_sliding_window": True}, "'use_sliding_window' is True; only False"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ({"hidden_activation": "gelu"}, "hidden_activation"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ({"query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
    ({"num_local_experts": 4}, "num_local_experts"),
    (SLIDING, "layer_types"),
    ({"model_type": "olmo2", "mlp_bias": True}, "'mlp_bias' is True; only False"),
    (MISTRAL | {"use_sliding_window": False}, "use_sliding_window is false and layers have 'sliding_attention'"),
    (MISTRAL | {"attention_bias": True}, "'attention_bias' is True"),
    (MISTRAL | SLIDING, "layer_types"),
    (QWEN2 | {"use_mrope": True}, "'use_mrope' is True; only False"),
    (QWEN2 | {"use_mrope": 0}, "'use_mrope' is 0; only False"),
    (QWEN2 | {"sliding_window_size": 4096}, "sliding_window_size"),
    (MOE | SLIDING, "layer_types"),
    (MOE | {"use_qk_norm": False}, "'use_qk_norm' is False; only True"),
    (MOE | {"shared_expert_intermediate_size": 64}, "'shared_expert_intermediate_size' is 64"),
    (GEMMA2 | {"sliding_window_size": 8}, "'sliding_window_size' is 8; only 4096"),
    (GEMMA2 | {"hidden_act": "silu"}, "'hidden_act' is 'silu'"),
    (GEMMA2 | {"sliding_window_pattern": 3}, "'sliding_window_pattern' is 3; only 2"),
    (GEMMA2 | {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
    (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),  # HF's attention leaves it out
    (GEMMA3 | {"_sliding_window_pattern": 3}, "'_sliding_window_pattern' is 3; only 6"),
    # Windows.
    (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types must be 2 of"),
    (QWEN2 | {"layer_types": ["chunked_attention"] * 2}, "layer_types must be 2 of"),
    (QWEN2 | {"layer_types": [["x"], 1]}, "layer_types must be 2 of"),
    (QWEN2 | {"layer_types": "ab"}, "layer_types must be 2 of"),
    (QWEN2 | SLIDING, "use_sliding_window is false"),
    (QWEN2 | SLIDING | {"use_sliding_window": True, "sliding_window": None}, "sliding_window is None"),
    (QWEN2 | {"use_sliding_window": True, "max_window_layers": -1}, "'max_window_layers' must be"),
    (GEMMA2 | {"sliding_window": None}, "sliding_window is None"),
    (SMOLLM3 | {"no_rope_layers": [1]}, "1 entries for 2 layers"),
    (SMOLLM3 | {"no_rope_layers": ["1", "0"]}, "'no_rope_layers' must be a list of integers"),
    (SMOLLM3 | {"no_rope_layers": 4}, "'no_rope_layers' must be a list of integers"),
    (SMOLLM3 | {"no_rope_layer_interval": 0}, "'no_rope_layer_interval' must be a positive integer"),
    # Experts.
    (MIXTRAL | {"num_local_experts": 2, "num_experts_per_tok": 3}, "3 is not in 1..2"),
    (MIXTRAL | {"num_local_experts": 2, "num_experts": 3}, "num_experts and num_local_experts differ"),
    (MOE | {"mlp_only_layers": 0}, "'mlp_only_layers' must be a list of integers"),
    (MOE | {"decoder_sparse_step": 0}, "'decoder_sparse_step' must be a positive integer"),
    # RoPE.
    ({"rope_theta": None}, "'rope_theta' must be a positive number, not None"),
    (rope(rope_type="longrope", factor=2.0), "rope_type 'longrope' is not supported"),
    (rope(rope_type=["linear"]), "rope_type .* is not supported"),
    (rope(rope_type="linear"), "rope_type 'linear' needs the field 'factor'"),
    (rope(rope_type="linear", factor=2.0, beta=1), r"not supported: \['beta'\]"),
    (rope(rope_type="linear", factor=0), "'factor' must be a positive number, not 0"),
    (rope(rope_type="default", freq_factors=[2.0] * 8), "freq_factors"),
    (rope(rope_type="yarn", factor=-4.0), "'factor' must be a positive number"),
    (rope(rope_type="yarn", factor=4.0, attention_factor=0.0), "'attention_factor' must be a positive number"),
    (rope(rope_type="yarn", factor=4.0, truncate="false"), "'truncate' must be true or false"),
    (rope(rope_type="yarn", factor=4.0, beta_fast=1, beta_slow=2), "beta_slow 2.0 is not below beta_fast 1.0"),
    (
        rope(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=4, original_max_position_embeddings=9),
        "low_freq_factor 4.0 is not below high_freq_factor 4.0",
    ),
    ({"rope_scaling": 2.0}, "'rope_scaling' must be an object"),
    ({"rope_parameters": []}, "'rope_parameters' must be an object"),
    (
        {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 2e4},
        "rope_parameters says rope_theta 10000.0, .* 20000.0",
    ),
    (
        {"rope_parameters": {"rope_theta": 1e4}} | rope(type="linear", factor=2),
        "rope_parameters says rope_type 'default'",
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"not supported: \['full_attention'\]"),
    (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must have"),
    (GEMMA3 | {"rope_parameters": {"full_attention": {}, "factor": 8.0}}, "rope_parameters must have"),
    (
        GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}, "rope_local_base_freq": 2e4},
        "rope_parameters.sliding_attention says rope_theta 10000.0",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(LLAMA | change)


INTEGERS = [({}, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")]
INTEGERS += [({}, name) for name in ("intermediate_size", "max_position_embeddings", "head_dim", "num_key_value_heads")]
INTEGERS += [(MISTRAL, "sliding_window"), (MIXTRAL, "num_local_experts"), (MIXTRAL, "num_experts_per_tok")]
INTEGERS += [(MOE, "moe_intermediate_size"), (MOE, "decoder_sparse_step"), (GEMMA3, "sliding_window_pattern")]
NUMBERS = [({}, "rms_norm_eps"), ({}, "rope_theta"), (GEMMA3, "rope_local_base_freq")]
NUMBERS += [(GEMMA2, name) for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")]
FLAGS = [({}, "tie_word_embeddings"), ({}, "attention_bias"), ({}, "mlp_bias"), (MOE, "norm_topk_prob")]
FLAGS += [(QWEN2, "use_sliding_window"), (SMOLLM3, "mlp_bias"), (GEMMA2, "attention_bias")]
WRONG = [(case, (0, -1, 2.0, "8", True, [8]), "a positive integer") for case in INTEGERS]
WRONG += [(case, (0, 0.0, -1, "x", True, [1.0], float("nan"), float("inf")), "a positive number") for case in NUMBERS]
WRONG += [(case, ("false", "true", 0, 1, []), "true or false") for case in FLAGS]


@pytest.mark.parametrize(("case", "values", "what"), WRONG, ids=lambda value: str(value)[-40:])
def test_a_value_of_another_type_is_refused(case, values, what):
    family, name = case
    for value in values:
        with pytest.raises(ValueError, match=f"'{name}' must be {what}, not"):
            ModelConfig.from_hf(LLAMA | family | {name: value})


@pytest.mark.parametrize("family", [{}, MISTRAL, MIXTRAL, QWEN2, MOE, GEMMA2, GEMMA3, SMOLLM3, {"model_type": "olmo2"}])
def test_sizes_are_required(family):
    config = LLAMA | family
    ModelConfig.from_hf(config)
    for name in LLAMA.keys() - {"model_type"}:
        for silent in (config | {name: None}, {key: value for key, value in config.items() if key != name}):
            with pytest.raises(ValueError, match=f"'{name}' must be a positive integer, not None"):
                ModelConfig.from_hf(silent)


@pytest.mark.parametrize("family", [{}, MISTRAL, MIXTRAL, QWEN2, MOE, GEMMA2, GEMMA3, SMOLLM3, {"model_type": "olmo2"}])
def test_neutral_fields_are_allowed(family):
    neutral = {"use_cache": True, "torch_dtype": "bfloat16", "attention_dropout": 0.1, "rope_interleaved": False}
    neutral |= {"_attn_implementation_autoset": True, "max_length": 20, "do_sample": False, "temperature": 1.0}
    neutral |= {"top_p": 1.0, "top_k": 50, "num_beams": 1, "id2label": {"0": "LABEL_0"}, "pruned_heads": {}}
    neutral |= {"use_mrope": False, "attention_bias": False, "mlp_bias": False, "clip_qkv": None, "layer_types": None}
    assert ModelConfig.from_hf(LLAMA | family | neutral) == ModelConfig.from_hf(LLAMA | family)


def test_yarn_against_worked_values():
    """Head dim 16, theta 10000, factor 4, original 32: the range is 0 .. 2, the attention factor 0.1 ln 4 + 1."""
    fields = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rope = resolve_rope(fields, 16, 128)
    plain = 10000.0 ** (-np.arange(8) / 8)
    ramp = np.array([0, 0.5, 1, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(rope.frequencies, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-12)
    assert rope.scale == pytest.approx(1.138629436)
