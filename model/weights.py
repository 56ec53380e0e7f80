"""The tensors of an HF checkpoint: which of them make up which parameter, and reading them from safetensors."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from model.config import ModelConfig
from model.files import read_json

INDEX = "model.safetensors.index.json"
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_CHUNK = 1 << 21  # values read from a file in one call


class Part(NamedTuple):
    """One HF tensor, and where in a parameter it goes."""

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...]


class Source(NamedTuple):
    """What fills one parameter of `shape`."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def parameter_sources(config: ModelConfig, names: Collection[str]) -> dict[str, Source]:
    """Parameter path -> the HF tensors it is made of. `names`, a checkpoint's, tell how it calls experts."""
    sources: dict[str, Source] = {}
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = config.width
    mixtral = any(".block_sparse_moe." in name for name in names)
    router, experts = ("block_sparse_moe.gate", "block_sparse_moe.experts") if mixtral else ("mlp.gate", "mlp.experts")
    gate_name, up_name, down_name = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")

    def join(path: str, rows: Mapping[str, int], *rest: int) -> None:
        """HF tensors with so many rows each, one after the other."""
        parts, start = [], 0
        for name, count in rows.items():
            parts.append(Part(name, (count, *rest), (slice(start, start + count),)))
            start += count
        sources[path] = Source((start, *rest), tuple(parts))

    def linear(path: str, rows: Mapping[str, int], inputs: int, bias: bool = False) -> None:
        join(f"{path}.weight", {f"{name}.weight": count for name, count in rows.items()}, inputs)
        if bias:
            join(f"{path}.bias", {f"{name}.bias": count for name, count in rows.items()})

    def norm(path: str, name: str, size: int = width) -> None:
        join(f"{path}.weight", {f"{name}.weight": size})

    def mixture(path: str, name: str) -> None:
        E, F = config.num_experts, config.moe_intermediate_size
        gate_up, down = [], []
        for expert in range(E):
            one = f"{name}.{experts}.{expert}"
            gate_up.append(Part(f"{one}.{gate_name}.weight", (F, width), (expert, slice(0, F))))
            gate_up.append(Part(f"{one}.{up_name}.weight", (F, width), (expert, slice(F, 2 * F))))
            down.append(Part(f"{one}.{down_name}.weight", (width, F), (expert,)))
        linear(f"{path}.router", {f"{name}.{router}": E}, width)
        sources[f"{path}.gate_up.weight"] = Source((E, 2 * F, width), tuple(gate_up))
        sources[f"{path}.down.weight"] = Source((E, width, F), tuple(down))

    linear("embed", {"model.embed_tokens": config.vocab_size}, width)
    norm("final_norm", "model.norm")
    if not config.tie_embeddings:
        linear("head", {"lm_head": config.vocab_size}, width)
    for index, layer in enumerate(config.layers):
        path, name = f"layers.{index}", f"model.layers.{index}"
        if config.pre_norm:
            before_mlp = "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"
            norm(f"{path}.input_norm", f"{name}.input_layernorm")
            norm(f"{path}.mlp_norm", f"{name}.{before_mlp}")
        if config.post_norm:
            norm(f"{path}.post_attention_norm", f"{name}.post_attention_layernorm")
            norm(f"{path}.post_mlp_norm", f"{name}.post_feedforward_layernorm")
        if config.qk_norm:
            full = config.qk_norm == "full"
            norm(f"{path}.attention.q_norm", f"{name}.self_attn.q_norm", heads if full else config.head_dim)
            norm(f"{path}.attention.k_norm", f"{name}.self_attn.k_norm", kv_heads if full else config.head_dim)
        qkv = {
            f"{name}.self_attn.{one}_proj": rows for one, rows in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        }
        linear(f"{path}.attention.qkv", qkv, width, config.qkv_bias)
        linear(f"{path}.attention.o", {f"{name}.self_attn.o_proj": width}, heads, config.o_bias)
        if layer.moe:
            mixture(f"{path}.mlp", name)
            continue
        gate_up = {f"{name}.mlp.{one}_proj": config.mlp_width for one in ("gate", "up")}
        linear(f"{path}.mlp.gate_up", gate_up, width, config.mlp_bias)
        linear(f"{path}.mlp.down", {f"{name}.mlp.down_proj": width}, config.mlp_width, config.mlp_bias)
    return sources


class Weights(Protocol):
    """A checkpoint's tensors under their HF names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def where(self, name: str) -> str:
        """File and tensor for a message, also for a tensor that is not there."""
        ...

    def chunks(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        """Pieces along the first axis, so that no tensor is ever held besides its parameter."""
        ...


class SafetensorsWeights:
    """The safetensors of an HF folder, memory-mapped: the shards of its index, else model.safetensors, else all.

    Raises ValueError or FileNotFoundError, naming file and tensor: a file that is missing, cut or of another dtype
    than F32, F16, BF16; a tensor that is there twice or elsewhere than the index says.
    """

    def __init__(self, folder: Path) -> None:
        index_path = folder / INDEX
        index = _weight_map(index_path) if index_path.exists() else None
        self._folder = folder
        self._tensors: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _shards(folder, index):
            try:
                reader = safe_open(path, "np")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: not a complete safetensors file: {_defect(path) or error}") from error
            for name in reader.keys():  # noqa: SIM118 - not a dict
                tensor, where = reader.get_slice(name), f"{path}: tensor {name!r}"
                if name in self._files:
                    raise ValueError(f"{where} is in {self._files[name]} too")
                if index is not None and index.get(name) != path.name:
                    raise ValueError(f"{where}: expected in {index.get(name)} by {INDEX}, found here")
                self._files[name] = path
                if name.endswith(".rotary_emb.inv_freq"):  # a buffer of old Llama checkpoints, computed here
                    continue
                if tensor.get_dtype() not in _BYTES:
                    raise ValueError(f"{where}: expected F32, F16 or BF16, found {tensor.get_dtype()}")
                self._tensors[name], self.shapes[name] = tensor, tuple(tensor.get_shape())
        for name, file in (index or {}).items():
            if name not in self._files:
                raise ValueError(f"{folder / file}: tensor {name!r}: expected by {INDEX}, not found")

    def where(self, name: str) -> str:
        return f"{self._files.get(name, self._folder)}: tensor {name!r}"

    def chunks(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        tensor, (length, *rest) = self._tensors[name], self.shapes[name]
        rows = max(1, _CHUNK // math.prod(rest))
        for start in range(0, length, rows):
            piece = slice(start, min(start + rows, length))
            yield piece, tensor[piece]


def _defect(path: Path) -> str:
    """The first tensor that is cut or of another size than its shape, which the library does not name; else ''."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size - 8 - length
            header = json.loads(file.read(length if size >= 0 else 0))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                wanted = math.prod(entry["shape"]) * _BYTES.get(entry["dtype"], 0) or end - begin
                if (found := min(end, size) - begin) != wanted:
                    return f"tensor {name!r}: expected {wanted} bytes, found {max(found, 0)}"
    except (OSError, OverflowError, ValueError, TypeError, KeyError, AttributeError):
        pass  # the header itself is damaged
    return ""


def _weight_map(path: Path) -> dict[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{path}: expected 'weight_map' to give the file of each tensor, found {names!r}")
    for name, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: 'weight_map' gives tensor {name!r} a file that is not in this folder: {file!r}")
    return names


def _shards(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if index is None:
        if not files:
            pickles = [file.name for kind in ("bin", "pt", "pth", "ckpt", "pkl") for file in folder.glob(f"*.{kind}")]
            also = f", only pickle, which is never opened: {pickles}" if pickles else ""
            raise FileNotFoundError(f"{folder}: expected *.safetensors, found none{also}")
        return [file for file in files if file.name == "model.safetensors"] or files
    listed = {folder / name for name in index.values()}
    for file in sorted(listed):
        if not file.is_file():
            raise FileNotFoundError(f"{file}: listed in {INDEX}, not found in {folder}")
    for file in files:
        if file not in listed and file.name.startswith("model"):
            raise ValueError(f"{file}: a shard that {INDEX} does not list")
    return sorted(listed)
