"""Where a run starts: a model from nothing or from weights that are there, and the tokenizer that goes with it."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from model.checkpoint import load, read_tokenizer, resolve
from model.config import ModelConfig
from model.fields import positive_number
from model.tokenizer import Tokenizer, load_tokenizer
from model.transformer import Transformer
from scripts.training.tokens import Document, train_tokenizer

# Fields of a config with which HF adds noise in training.
NOISE = "attention_dropout embd_pdrop hidden_dropout neftune_noise_alpha resid_pdrop router_jitter_noise".split()


@dataclass(frozen=True)
class Base:
    """`tokenizer_from` is the folder or .gguf file it was read from; `eos_ids` end a generation."""

    hf_config: dict[str, Any]
    model: Transformer  # float32
    tokenizer: Tokenizer
    tokenizer_from: Path
    eos_ids: frozenset[int]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def fingerprint(self) -> str:
        """The same for the same weights."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(nnx.state(self.model)):
            digest.update(np.ascontiguousarray(leaf).data)
        return digest.hexdigest()[:16]


def loaded_base(name: str, tokenizer: str | None) -> Base:
    """Of a checkpoint. `tokenizer` is for one that has none of its own. Raises ValueError or FileNotFoundError."""
    loaded = load(name, progress=True)
    if loaded.tokenizer is None and tokenizer is None:
        raise ValueError(f"{name} has no tokenizer: --tokenizer names one")
    if loaded.tokenizer is not None and tokenizer is not None:
        raise ValueError(f"{name} has a tokenizer of its own, which --tokenizer {tokenizer} cannot replace")
    if loaded.tokenizer is not None:
        return Base(loaded.hf_config, loaded.model, loaded.tokenizer, loaded.path, loaded.eos_ids)
    path, own = named_tokenizer(str(tokenizer))
    return Base(loaded.hf_config, loaded.model, own, path, loaded.eos_ids | own.eos_ids)


def new_base(hf_config: dict[str, Any], tokenizer: Tokenizer, tokenizer_from: Path, seed: int) -> Base:
    """Random weights, and the tokenizer's EOS in the config. Raises ValueError for what cannot be."""
    if not tokenizer.eos_ids:
        raise ValueError(f"the tokenizer of {tokenizer_from} names no EOS token, with which documents end")
    hf_config = {name: value for name, value in hf_config.items() if name not in ("bos_token_id", "pad_token_id")}
    hf_config |= {"eos_token_id": min(tokenizer.eos_ids)}
    model = Transformer(ModelConfig.from_hf(hf_config), rngs=nnx.Rngs(seed))
    if (deviation := hf_config.get("initializer_range")) is None:
        shrink_residuals(model)
    else:
        set_deviation(model, positive_number("initializer_range", deviation))
    return Base(hf_config, model, tokenizer, tokenizer_from, tokenizer.eos_ids)


def shrink_residuals(model: Transformer) -> None:
    """Makes what all layers together add to a new model's residual stream as large as the embedding that it begins
    with: else a token is lost in noise, which many steps are spent on. Normalised outputs have the norm's size."""
    factor = (2 * len(model.layers) * model.config.width) ** -0.5
    if not model.config.post_norm:
        for layer in model.layers:
            for matrix in (layer.attention.o, layer.mlp.down):
                matrix.weight.set_value(matrix.weight[...] * factor)


def set_deviation(model: Transformer, deviation: float) -> None:
    """Of all matrices of a new model, as HF has it for its `initializer_range`."""
    for _, parameter in nnx.to_flat_state(nnx.state(model)):
        if parameter.ndim >= 2:
            parameter.set_value(parameter[...] * (deviation * parameter.shape[-1] ** 0.5))


def check_honoured(hf_config: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of a new model's config that would change its training, and does not here."""
    for name in NOISE:
        if hf_config.get(name):
            raise ValueError(f"config field {name!r} is {hf_config[name]!r}; only 0 is supported in training")
    if hf_config.get("output_router_logits"):
        raise ValueError("config field 'output_router_logits' is true; routers have no loss of their own here")


def named_tokenizer(name: str) -> tuple[Path, Tokenizer]:
    """Of a model or a folder, and where that is. Raises ValueError or FileNotFoundError."""
    path = resolve(name)
    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer")
    return path, tokenizer


def own_tokenizer(folder: Path, documents: Iterable[Document], vocab_size: int, new: bool) -> Tokenizer:
    """The one in the folder; for a `new` run it is trained on the documents. Raises ValueError where it is missing."""
    if new:
        train_tokenizer(documents, vocab_size, folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: that of the run is missing")
    return tokenizer
