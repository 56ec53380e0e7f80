"""GGUF files that are damaged, incomplete or not covered: an error that names the file and what is wrong."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from model.checkpoint import load
from model.gguf_file import GGUFFile
from tests.model.gguf_converter import DATA, assert_equal, convert_tensors, parameters, read_folder, write_gguf


@pytest.fixture
def llama(tmp_path):
    config, tensors = read_folder("llama_tied_gqa4")
    return tmp_path / "m.gguf", config, convert_tensors(config, tensors)


def refused(path, *words):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(path)
    for word in (str(path), *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_a_file_cut_anywhere_is_refused(llama, tmp_path):
    path, config, tensors = llama
    whole = write_gguf(
        path, config, {**tensors, "blk.2.ffn_norm.weight": tensors["blk.2.ffn_norm.weight"]}
    ).read_bytes()
    file = GGUFFile(path)
    start = min(tensor.offset for tensor in file.tensors.values())
    end = max(tensor.offset + tensor.size for tensor in file.tensors.values())
    cuts = [*range(0, start, 23), *range(start, end, 20011), start - 1, start, start + 1, end - 1]
    part = tmp_path / "cut.gguf"
    for cut in cuts:
        part.write_bytes(whole[:cut])
        refused(part)
    part.write_bytes(whole[:end])
    assert_equal(parameters(load(part).model), parameters(load(path).model))


def test_metadata_alone_is_a_file_and_cut_is_refused(llama, tmp_path):
    path, config, tensors = llama
    file = GGUFFile(write_gguf(path, config, tensors, extra=lambda writer: writer.add_string("last", "a text")))
    part = tmp_path / "metadata.gguf"
    part.write_bytes(file.metadata())
    assert GGUFFile(part).fields == file.fields
    assert not GGUFFile(part).tensors
    for cut in range(len(file.metadata())):
        part.write_bytes(file.metadata()[:cut])
        with pytest.raises(ValueError, match=r"metadata\.gguf"):
            GGUFFile(part)


def test_other_files_and_versions_are_refused(llama):
    path, config, tensors = llama
    data = bytearray(write_gguf(path, config, tensors).read_bytes())
    for at, value in ((0, b"GGML"), (4, bytes([1, 0, 0, 0])), (4, bytes([0, 0, 0, 3]))):
        changed = data.copy()
        changed[at : at + 4] = value
        path.write_bytes(changed)
        refused(path, "version")


def test_a_tensor_that_is_missing_extra_or_misshapen_is_named(llama):
    path, config, tensors = llama
    name = "blk.1.ffn_down.weight"
    write_gguf(path, config, {n: t for n, t in tensors.items() if n != name})
    refused(path, name, "(64, 160)", "no such tensor")
    write_gguf(path, config, tensors | {name: np.zeros((64, 128), np.float32)})
    refused(path, name, "(64, 160)", "(64, 128)")
    write_gguf(path, config, tensors | {"blk.1.ffn_secret.weight": np.zeros((4, 4), np.float32)})
    refused(path, "blk.1.ffn_secret.weight")
    write_gguf(path, config, tensors | {"blk.7.ffn_norm.weight": np.zeros(64, np.float32)})
    refused(path, "blk.7.ffn_norm.weight")
    write_gguf(path, config, {n: t for n, t in tensors.items() if n != "token_embd.weight"})
    refused(path, "token_embd.weight")


def test_experts_that_are_missing_or_of_another_number_are_named(tmp_path):
    config, tensors = read_folder("mixtral_moe")
    stored, name = convert_tensors(config, tensors), "blk.1.ffn_up_exps.weight"
    path = write_gguf(tmp_path / "m.gguf", config, {n: t for n, t in stored.items() if n != name})
    refused(path, name)
    refused(write_gguf(path, config, stored | {name: stored[name][:3]}), name)
    refused(write_gguf(path, config, stored | {name: np.concatenate([stored[name]] * 2)}), name)


def test_a_type_that_is_not_supported_is_named(llama):
    path, config, tensors = llama
    refused(write_gguf(path, config, tensors, Kind.Q5_0), "token_embd.weight", "Q5_0")
    whole = tensors | {"blk.0.ffn_up.weight": np.zeros((160, 64), np.int8)}
    refused(write_gguf(path, config, whole), "blk.0.ffn_up.weight", "I8")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.attention.scale", 0.5, "llama.attention.scale"),
        ("llama.logit_scale", 2.0, "llama.logit_scale"),
        ("llama.rope.dimension_count", 4, "llama.rope.dimension_count"),
        ("llama.attention.causal", False, "llama.attention.causal"),
        ("llama.rope.scaling.yarn_attn_factor", 1.5, "yarn_attn_factor"),
        ("llama.something_new", 1, "llama.something_new"),
        ("split.count", 2, "split.count"),
        ("general.type", "adapter", "adapter"),
    ],
)
def test_metadata_that_is_not_covered_is_named(llama, key, value, word):
    path, config, tensors = llama

    def extra(writer):
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)

    refused(write_gguf(path, config, tensors, extra=extra), word)


def test_metadata_that_differs_by_layer_or_is_missing_is_named(llama):
    path, config, tensors = llama
    refused(write_gguf(path, config | {"num_key_value_heads": [2, 2, 4]}, tensors), "llama.attention.head_count_kv")
    write_gguf(path, config | {"num_key_value_heads": [2, 2, 2]}, tensors)
    assert load(path).config == load(DATA / "llama_tied_gqa4").config
    data = path.read_bytes()
    path.write_bytes(data.replace(b"llama.block_count", b"other.block_count"))
    refused(path, "llama.block_count")


def test_an_architecture_that_is_not_supported_is_named(llama):
    path, config, tensors = llama
    refused(write_gguf(path, config, tensors, architecture="mamba"), "mamba")


def test_a_name_twice_and_overlapping_tensors_are_refused(llama):
    path, config, tensors = llama
    data = write_gguf(path, config, tensors).read_bytes()
    path.write_bytes(data.replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"))
    refused(path, "a tensor name is there twice")
    path.write_bytes(data.replace(b"ggml.eos_token_id", b"ggml.eot_token_id"))
    refused(path, "'tokenizer.ggml.eot_token_id' is there twice")
    name = b"blk.1.attn_norm.weight"
    at = data.index(name) + len(name) + 4 + 8 + 4  # its offset, behind the rank, one dimension and the type
    path.write_bytes(data[:at] + bytes(8) + data[at + 8 :])
    refused(path, "expected", "bytes at")
