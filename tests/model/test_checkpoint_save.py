"""Saving as Orbax and as safetensors: the same bits come back, and half a folder is never taken for a whole one."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from safetensors.numpy import load_file

from model.checkpoint import load, save_orbax, save_safetensors
from model.weights import INDEX
from tests.model.gguf_converter import DATA, assert_equal, parameters

FOLDERS = sorted(path.parent for path in DATA.glob("*/model.safetensors"))


def with_tokenizer(folder):
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "a", "b"])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["llama_untied", "mixtral_moe", "gemma3_text"])
def test_orbax_round_trip(tmp_path, name, dtype):
    loaded = load(DATA / name, dtype=dtype)
    save_orbax(tmp_path / "saved", loaded.hf_config, loaded.model)
    again = load(tmp_path / "saved", dtype=dtype)
    assert_equal(parameters(again.model), parameters(loaded.model))
    assert (again.config, again.eos_ids, again.tokenizer) == (loaded.config, loaded.eos_ids, None)


def test_orbax_casts_and_keeps_ids_and_tokenizer(tmp_path):
    source = shutil.copytree(DATA / "llama_tied_gqa4", tmp_path / "source")
    with_tokenizer(source)
    loaded = load(source, dtype=jnp.bfloat16)
    save_orbax(tmp_path / "a" / "saved", loaded.hf_config, loaded.model, eos_ids=[9, 5], tokenizer_from=loaded.path)
    again = load(tmp_path / "a" / "saved", dtype=jnp.float32)
    assert again.eos_ids == {2, 5, 9}
    assert again.tokenizer.encode("b a") == [4, 3]
    assert_equal(parameters(again.model), {n: v.astype(np.float32) for n, v in parameters(loaded.model).items()})
    save_orbax(tmp_path / "twice", again.hf_config, again.model, tokenizer_from=again.path)
    assert load(tmp_path / "twice").tokenizer.encode("b a") == [4, 3]


def test_an_incomplete_orbax_folder_is_refused(tmp_path):
    loaded = load(DATA / "llama_tied_gqa4")
    save_orbax(tmp_path / "saved", loaded.hf_config, loaded.model)
    files = sorted(file.relative_to(tmp_path / "saved") for file in (tmp_path / "saved").rglob("*") if file.is_file())
    assert len(files) > 5
    for file in files:
        for cut in (None, 0, -1):
            copy = shutil.copytree(tmp_path / "saved", tmp_path / "copy")
            content = (copy / file).read_bytes()
            (copy / file).unlink()
            if cut is not None:
                (copy / file).write_bytes(content[:cut])
            with pytest.raises((ValueError, FileNotFoundError), match=file.name):
                load(copy)
            shutil.rmtree(copy)
    shutil.rmtree(tmp_path / "saved" / "orbax")
    with pytest.raises(ValueError, match="orbax"):
        load(tmp_path / "saved")


def test_an_orbax_folder_of_another_model_is_refused(tmp_path):
    loaded = load(DATA / "llama_tied_gqa4")
    save_orbax(tmp_path / "saved", loaded.hf_config, loaded.model)
    config = tmp_path / "saved" / "config.json"
    manifest = json.loads((tmp_path / "saved" / "complete.json").read_text())
    for change, word in (
        ({"tie_word_embeddings": False}, "head.weight"),
        ({"num_hidden_layers": 2}, "layers.2.attention"),
        ({"vocab_size": 321}, r"embed.weight.*\(321, 64\).*\(320, 64\)"),
    ):
        config.write_text(json.dumps(loaded.hf_config | change))
        manifest["bytes"]["config.json"] = config.stat().st_size
        (tmp_path / "saved" / "complete.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=f"not a checkpoint of this model: .*{word}"):
            load(tmp_path / "saved")


@pytest.mark.parametrize("save", [save_orbax, save_safetensors])
def test_a_save_is_whole_or_not_there(tmp_path, save, monkeypatch):
    loaded = load(DATA / "llama_tied_gqa4")
    (tmp_path / "saved").mkdir()
    with pytest.raises(FileExistsError, match="saved"):
        save(tmp_path / "saved", loaded.hf_config, loaded.model)
    with pytest.raises(ValueError, match="another model"):
        save(tmp_path / "other", loaded.hf_config | {"rms_norm_eps": 0.5}, loaded.model)

    def fail(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr("model.checkpoint.save_file", fail)
    monkeypatch.setattr("model.checkpoint.ocp.StandardCheckpointer", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "other", loaded.hf_config, loaded.model)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_safetensors_are_the_original_s(tmp_path, folder):
    loaded = load(folder)
    save_safetensors(tmp_path / "saved", loaded.hf_config, loaded.model)
    assert_equal(load_file(tmp_path / "saved" / "model.safetensors"), load_file(folder / "model.safetensors"))
    with safe_open(tmp_path / "saved" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}  # HF transformers asks for it
    again = load(tmp_path / "saved")
    assert (again.config, again.eos_ids) == (loaded.config, loaded.eos_ids)
    assert_equal(parameters(again.model), parameters(loaded.model))


def test_safetensors_in_bfloat16_and_shards(tmp_path):
    source = shutil.copytree(DATA / "mixtral_moe", tmp_path / "source")
    with_tokenizer(source)
    loaded = load(source, dtype=jnp.bfloat16)
    folder = tmp_path / "saved"
    save_safetensors(folder, loaded.hf_config, loaded.model, eos_ids=[8], tokenizer_from=source, shard_bytes=100_000)
    index = json.loads((folder / INDEX).read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert len(files) > 5
    assert all(sum(value.nbytes for value in load_file(file).values()) <= 100_000 for file in files)
    assert index["metadata"]["total_size"] == sum(value.nbytes for f in files for value in load_file(f).values())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    again = load(folder, dtype=jnp.bfloat16)
    assert_equal(parameters(again.model), parameters(loaded.model))
    assert again.eos_ids == {2, 8}
    assert again.tokenizer is not None
