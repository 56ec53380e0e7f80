"""What a broken small file of a checkpoint raises: a ValueError that names the file and the field."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from model.checkpoint import load, save_orbax, save_safetensors
from model.weights import INDEX
from tests.model.gguf_converter import DATA, assert_equal, convert_tensors, parameters, read_folder, write_gguf


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(DATA / "llama_tied_gqa4", tmp_path / "model"))


def refused(folder, *words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words below
        load(folder)
    for word in words:
        assert str(word) in str(caught.value)
    assert str(caught.value).count(str(folder)) == 1  # named once


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta"),
        ({"hidden_size": {}}, "hidden_size"),
        ({"layer_types": 3}, "layer_types"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_freq_factors": [1.0] * 4}, "rope_freq_factors"),
    ],
)
def test_config(folder, change, word):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(folder, path, word)


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, {}, 2.0])
def test_generation_config(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refused(folder, folder / "generation_config.json", "eos_token_id")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": None}, {"weight_map": {"a": 3}}])
def test_index(folder, index):
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, folder / INDEX, "weight_map")


@pytest.mark.parametrize("manifest", [{}, {"bytes": []}, {"bytes": None}])
def test_manifest_of_an_orbax_folder(folder, manifest):
    (folder / "complete.json").write_text(json.dumps(manifest))
    refused(folder, folder / "complete.json", "bytes")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "vocab.txt"])
def test_a_vocabulary_in_another_form_is_not_overlooked(folder, name):
    (folder / name).write_bytes(b"x")
    refused(folder, folder / name, "tokenizer.json is needed", "save_pretrained")


def test_rope_freqs_are_kept_by_orbax_only(tmp_path):
    config, tensors = read_folder("llama_untied")
    factors = np.linspace(1, 8, config["head_dim"] // 2, dtype=np.float32)
    file = write_gguf(tmp_path / "m.gguf", config, convert_tensors(config, tensors) | {"rope_freqs.weight": factors})
    loaded = load(file)
    assert loaded.config != load(DATA / "llama_untied").config
    save_orbax(tmp_path / "orbax", loaded.hf_config, loaded.model)
    again = load(tmp_path / "orbax")
    assert again.config == loaded.config
    assert_equal(parameters(again.model), parameters(loaded.model))
    with pytest.raises(ValueError, match="rope_freqs"):
        save_safetensors(tmp_path / "hf", loaded.hf_config, loaded.model)
    assert not (tmp_path / "hf").exists()
