"""GGUF: the header, the metadata as an HF-form config, the tensors under their HF names and in HF's form.

The format is ggml's docs/gguf.md. What llama.cpp's converter did to an HF checkpoint is undone here: the row order of
Q and K (Llama, SmolLM3), the 1 added to Gemma's norms, the stacked experts, the names.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEQUANTIZED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
_CHUNK = 1 << 19  # values that are dequantized in one call: few enough to stay in the cache, many for few calls


class GGUFTensor(NamedTuple):
    """`shape` is row-major (GGUF stores it reversed); `offset` and `size` are bytes of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int


class GGUFFile:
    """A GGUF file, memory-mapped: `fields` (metadata, as Python values) and `tensors`.

    Raises ValueError, naming the file: not GGUF, cut short, damaged, or with a tensor of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header(_Cursor(self._data))
        except (ValueError, OverflowError, struct.error) as error:
            raise ValueError(f"{path}: not a GGUF file that can be read whole: {error}") from error

    def _read_header(self, cursor: "_Cursor") -> None:
        magic, version = cursor.number("<I"), cursor.number("<I")
        if magic != gguf.GGUF_MAGIC or version not in (2, 3):
            raise ValueError(f"magic {magic:#x} version {version}; expected {gguf.GGUF_MAGIC:#x} (GGUF), 2 or 3")
        tensors, fields = cursor.number("<Q"), cursor.number("<Q")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key = cursor.texts(1)[0]
            if key in self.fields:
                raise ValueError(f"metadata {key!r} is there twice")
            self.fields[key] = cursor.value(cursor.number("<I"))
        self._metadata_end = cursor.at
        infos = [self._read_tensor_info(cursor) for _ in range(tensors)]
        alignment = self.fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-cursor.at // alignment) * alignment
        infos = sorted((info._replace(offset=start + info.offset) for info in infos), key=lambda info: info.offset)
        self.tensors = {info.name: info for info in infos}
        if len(self.tensors) != len(infos):
            raise ValueError("a tensor name is there twice")
        for info, following in zip(infos, [*(info.offset for info in infos[1:]), len(self._data)], strict=False):
            if info.offset + info.size > following:
                found = following - info.offset
                raise ValueError(f"tensor {info.name!r}: expected {info.size} bytes at {info.offset}, found {found}")

    def _read_tensor_info(self, cursor: "_Cursor") -> GGUFTensor:
        name, rank = cursor.texts(1)[0], cursor.number("<I")
        shape = tuple(cursor.number("<Q") for _ in range(min(rank, 5)))[::-1]
        if not 1 <= rank <= 4 or 0 in shape:
            raise ValueError(f"tensor {name!r}: expected 1 to 4 dimensions that are not 0, found {rank}: {shape}")
        number, offset = cursor.number("<I"), cursor.number("<Q")
        kind = GGMLQuantizationType(number) if number in GGMLQuantizationType else None
        if kind is None or kind.name not in _DEQUANTIZED:
            raise ValueError(f"tensor {name!r}: type {kind.name if kind else number} is not one of {_DEQUANTIZED}")
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"tensor {name!r}: rows of {shape[-1]} values are not whole {kind.name} blocks of {block}")
        return GGUFTensor(name, kind, shape, offset, math.prod(shape) // block * size)

    def metadata(self) -> bytes:
        """The file without its tensors, a GGUF file itself."""
        return self._data[:8] + struct.pack("<Q", 0) + self._data[16 : self._metadata_end]

    def values(self, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop` in float32 (a row: the last axis), bit for bit what the gguf package makes of them."""
        size = tensor.size // math.prod(tensor.shape[:-1])
        raw = np.frombuffer(self._data, np.uint8, (stop - start) * size, tensor.offset + start * size)
        # As one long row: the package works through 16 rows a call, which for short rows is mostly overhead.
        return gguf.dequantize(raw.reshape(1, -1), tensor.kind).reshape(-1, tensor.shape[-1])


class _Cursor:
    """Reads a GGUF header. Running past the end raises ValueError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def texts(self, count: int) -> list[str]:
        data, at, end, length = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0]
            if at > end:
                raise ValueError(f"a string ends at byte {at}, the file at {end}")
            texts.append(data[start:at].decode())
        self.at = at
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.texts(1)[0]
        if kind == _ARRAY:
            kind, count = self.number("<I"), self.number("<Q")
            if kind == _STRING:
                return self.texts(count)
            if kind == _ARRAY or not count:
                return [self.value(kind) for _ in range(count)]
            if kind in _SCALARS:
                values = np.frombuffer(self.data, _SCALARS[kind], count, self.at)
                self.at += values.nbytes
                return values.tolist()
        if kind not in _SCALARS:
            raise ValueError(f"metadata type {kind} is unknown")
        return self.number(_SCALARS[kind])


_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "olmo2", "smollm3")
_MODEL_TYPES = {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}  # HF's names where they differ
_ONLY = {"attention.causal": True, "expert_gating_func": 1, "expert_weights_norm": True}  # 1: softmax


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The metadata as the `config.json` it came from, as far as it matters.

    Raises ValueError, naming the key: an architecture, a key or a value that is not covered.
    """
    architecture, kind = file.fields.get("general.architecture"), file.fields.get("general.type", "model")
    if architecture not in _ARCHITECTURES or kind != "model":
        raise ValueError(f"general.architecture {architecture!r} ({kind}) is not a model of one of {_ARCHITECTURES}")
    if file.fields.get("split.count", 1) > 1:
        raise ValueError(f"split.count is {file.fields['split.count']}: merge the parts into one file first")
    if "token_embd.weight" not in file.tensors:
        raise ValueError("tensor 'token_embd.weight' is missing")
    rest = {key: value for key, value in file.fields.items() if key.startswith(architecture + ".")}

    def take(key: str, *default: Any) -> Any:
        """A float32 as the shortest decimal that rounds to it, which is what the original config said."""
        if (key := f"{architecture}.{key}") not in rest and not default:
            raise ValueError(f"metadata {key} is missing")
        value = rest.pop(key, *default)
        if isinstance(value, list) and not all(isinstance(item, bool) for item in value):
            if len(set(value)) != 1:
                raise ValueError(f"metadata {key} differs from layer to layer: {value}")
            value = value[0]
        return float(str(np.float32(value))) if isinstance(value, float) else value

    width, heads = take("embedding_length"), take("attention.head_count")
    head_dim = take("attention.key_length", width // heads)
    for key, value in (_ONLY | {"attention.value_length": head_dim, "rope.dimension_count": head_dim}).items():
        if (found := take(key, value)) != value:
            raise ValueError(f"metadata {architecture}.{key} is {found}; only {value} is supported")
    config = {
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": take("vocab_size", file.tensors["token_embd.weight"].shape[0]),
        "hidden_size": width,
        "intermediate_size": take("feed_forward_length"),
        "num_hidden_layers": take("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": take("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": take("context_length"),
        "rms_norm_eps": take("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(take),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    ends = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    config["eos_token_id"] = [file.fields[key] for key in ends if key in file.fields]
    if "rope_freqs.weight" in file.tensors:
        config["rope_freq_factors"] = file.values(file.tensors["rope_freqs.weight"], 0, 1)[0].tolist()
    if "blk.0.attn_q.bias" in file.tensors and architecture != "qwen2":  # Qwen 2 always has it, and no such field
        config["attention_bias"] = True
    if "blk.0.ffn_up.bias" in file.tensors:
        config["mlp_bias"] = True
    config |= _special(architecture, take, config)
    if rest:
        raise ValueError(f"metadata that is not supported and may change the mathematics: {rest}")
    return config


def _rope(take: Callable[..., Any]) -> dict[str, Any]:
    """`rope_parameters`, with the defaults that llama.cpp has."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": take("rope.freq_base", 10000.0)}
    kind, factor = take("rope.scaling.type", "linear"), take("rope.scaling.factor", None)
    original, _ = take("rope.scaling.original_context_length", None), take("rope.scaling.finetuned", None)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"metadata rope.scaling.type {kind!r} is not supported")
    if kind != "none" and factor not in (None, 0.0, 1.0):
        rope |= {"rope_type": kind, "factor": factor}
    if rope["rope_type"] == "yarn":
        betas = {key: take(f"rope.scaling.yarn_{key}", None) for key in ("beta_fast", "beta_slow")}
        rope |= betas | {"original_max_position_embeddings": original}
    return {key: value for key, value in rope.items() if value is not None}


def _special(architecture: str, take: Callable[..., Any], config: dict[str, Any]) -> dict[str, Any]:
    """The fields that are one architecture's own."""
    layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    if architecture == "llama":  # Mistral and Mixtral too
        window, experts = take("attention.sliding_window", 0), take("expert_count", 0)
        extra: dict[str, Any] = {"model_type": "mistral", "sliding_window": window} if window else {}
        counts = {"num_local_experts": experts, "num_experts_per_tok": take("expert_used_count", 0)}
        return extra | {"model_type": "mixtral", **counts} if experts else extra
    if architecture == "qwen3moe":
        counts = {"num_experts": take("expert_count"), "num_experts_per_tok": take("expert_used_count")}
        return counts | {"moe_intermediate_size": take("expert_feed_forward_length"), "norm_topk_prob": True}
    if architecture == "smollm3":  # llama.cpp has the interval in its code, not in the file
        return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)]}
    if architecture not in ("gemma2", "gemma3"):
        return {}
    gemma2 = architecture == "gemma2"
    window, period = take("attention.sliding_window", 0), take("attention.sliding_window_pattern", 2 if gemma2 else 6)
    slides = period if isinstance(period, list) else [(layer + 1) % period != 0 for layer in range(layers)]
    largest = layers == (46 if gemma2 else 62)  # the 27B models scale by width / heads
    local = {"rope_type": "default", "rope_theta": take("rope.freq_base_swa", 10000.0)}
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {
        "layer_types": ["sliding_attention" if window and slide else "full_attention" for slide in slides],
        "sliding_window": window or None,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": take("attn_logit_softcapping") if gemma2 else None,
        "final_logit_softcapping": take("final_logit_softcapping", None),
        "rope_parameters": rope if gemma2 else {"full_attention": rope, "sliding_attention": local},
    }


_LAYER_PARTS = """input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm
    self_attn.k_norm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm mlp.gate_proj
    mlp.up_proj mlp.down_proj mlp.gate mlp.experts.gate_proj mlp.experts.up_proj mlp.experts.down_proj""".split()


class GGUFWeights:
    """The tensors of a GGUF file under their HF names and in HF's form: a `checkpoint.Weights`."""

    def __init__(self, file: GGUFFile, config: dict[str, Any]) -> None:
        self._file, self._architecture = file, file.fields["general.architecture"]
        self._head_dim, layers = config["head_dim"], config["num_hidden_layers"]
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self._architecture.upper()], layers)
        parts = [f"model.layers.{layer}.{part}" for layer in range(layers) for part in _LAYER_PARTS]
        stems = {hf: names.get_name(hf) for hf in ("model.embed_tokens", "model.norm", "lm_head", *parts)}
        self._stems = {hf: stem for hf, stem in stems.items() if stem}
        hf_names = {stem: hf for hf, stem in self._stems.items()}
        self._parts: dict[str, tuple[GGUFTensor, int]] = {}  # the tensor, and the row where the part begins
        self.shapes: dict[str, tuple[int, ...]] = {}
        for tensor in file.tensors.values():
            stem, _, kind = tensor.name.rpartition(".")
            hf, shape = hf_names.get(stem, stem), tensor.shape
            if tensor.name == "rope_freqs.weight":  # it went into the config
                continue
            if ".experts." not in hf or len(shape) != 3:
                self._parts[f"{hf}.{kind}"], self.shapes[f"{hf}.{kind}"] = (tensor, 0), shape
                continue
            for expert in range(shape[0]):
                name = f"{hf}.{kind}".replace(".experts.", f".experts.{expert}.")
                self._parts[name], self.shapes[name] = (tensor, expert * shape[1]), shape[1:]

    def where(self, name: str) -> str:
        stem, _, kind = re.sub(r"\.experts\.\d+", ".experts", name).rpartition(".")
        return f"{self._file.path}: tensor {self._stems.get(stem, stem) + '.' + kind!r}"

    def chunks(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        (tensor, first), shape = self._parts[name], self.shapes[name]
        rows = math.prod(shape[:-1])
        permuted = self._architecture in ("llama", "smollm3") and re.search(r"\.[qk]_proj\.", name)
        unit = self._head_dim if permuted else 1
        step = max(1, _CHUNK // (shape[-1] * unit)) * unit
        for start in range(0, rows, step):
            values = self._file.values(tensor, first + start, first + min(start + step, rows))
            values = values if len(shape) > 1 else values[0]
            if permuted:  # the converter interleaved the halves of each head's rows: [2, H/2] became [H/2, 2]
                pairs = values.reshape(-1, unit // 2, 2, *values.shape[1:])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            if self._architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
                values = values - np.float32(1)  # the converter stored 1 + weight
            yield slice(start, start + step) if len(shape) > 1 else slice(None), values
