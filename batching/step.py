"""The one jitted step: token rows in, one sampled token a sampled row out, the state donated and returned."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Int

from batching.plan import NUMBERS, Flag, Rows, Sampled
from model.config import ModelConfig
from model.kv_cache import ROWS_MULTIPLE, KVCache, init_cache
from model.logits import SamplingState, Uses, init_sampling, record
from model.logprobs import prompt_logprobs, sampled_logprobs
from model.sampling import Settings, sample
from model.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """All that lives on the device from turn to turn, besides the weights."""

    cache: KVCache
    last_token: Int[Array, " B"]  # sampled last in each slot
    sampling: SamplingState


class ModelGraph(NamedTuple):
    """A model without its weights. They go to the step as a flat tuple, which costs a launch least."""

    graph: nnx.GraphDef
    structure: Any  # of the tree that the weights were

    def model(self, weights: tuple[jax.Array, ...]) -> Transformer:
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, weights))


def split_model(model: Transformer) -> tuple[ModelGraph, tuple[jax.Array, ...]]:
    """The model's graph and its weights."""
    graph, state = nnx.split(model)
    weights, structure = jax.tree.flatten(state)
    return ModelGraph(graph, structure), tuple(weights)


def init_state(config: ModelConfig, *, slots: int, max_len: int, cache_dtype, implementation: str) -> EngineState:
    cache = init_cache(
        layers=len(config.layers),
        slots=slots,
        max_len=max_len,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=cache_dtype,
        implementation=implementation,
    )
    return EngineState(cache, jnp.zeros((slots,), jnp.int32), init_sampling(slots, config.vocab_size))


def settings_of(rows: Rows) -> Settings:
    """The parameters of the sampled rows, unpacked."""
    number = {name: rows.numbers[:, column] for column, name in enumerate(NUMBERS)}
    flags = rows.words[:, 0]

    def flagged(flag: Flag):
        return flags & jnp.uint32(flag) != 0

    uses = Uses(
        bias=flagged(Flag.BIAS),
        penalties=flagged(Flag.PENALTIES),
        stops=flagged(Flag.STOPS),
        mask=flagged(Flag.MASK),
        words=flagged(Flag.BAD_WORDS),
        repetition=number["repetition_penalty"],
        presence=number["presence_penalty"],
        frequency=number["frequency_penalty"],
    )
    return Settings(
        temperature=number["temperature"],
        top_k=rows.words[:, 1].astype(jnp.int32),
        top_p=number["top_p"],
        min_p=number["min_p"],
        seeds=rows.words[:, 2:],
        uses=uses,
    )


@partial(jax.jit, static_argnames=("graph", "num_decode", "implementation"), donate_argnames="state")
def step(
    weights: tuple[jax.Array, ...],
    state: EngineState,
    rows: Rows,
    *,
    graph: ModelGraph,
    num_decode: int,
    implementation: str,
) -> tuple[EngineState, Sampled]:
    """Compute one turn. `state` is donated: the cache is updated in place, never copied.

    What is reported beside the tokens is computed where it was asked for, and zeros where not.
    """
    model = graph.model(weights)
    # Padding rows read slot 0's last token by clamping; what they compute goes nowhere.
    known = jnp.minimum(rows.slots, state.last_token.shape[0] - 1)
    tokens = jnp.where(rows.tokens < 0, state.last_token[known], rows.tokens)
    hidden, cache = model(
        tokens, rows.slots, rows.positions, state.cache, num_decode=num_decode, implementation=implementation
    )
    logits = model.unembed(hidden[rows.sample_rows])
    positions = rows.positions[rows.sample_rows] + 1  # of the tokens that are drawn
    settings = settings_of(rows)
    sampled = sample(logits, settings, state.sampling, rows.sample_slots, positions)
    told = sampled_logprobs(logits, sampled, rows.words[:, 0] & jnp.uint32(Flag.LOGPROBS) != 0)
    prompt = prompt_logprobs(model.unembed, hidden, rows.targets, logits.shape[-1])
    last_token = state.last_token.at[rows.sample_slots].set(sampled, mode="drop")
    sampling = record(state.sampling, settings.uses, rows.sample_slots, sampled)
    return EngineState(cache, last_token, sampling), Sampled(sampled, *told, *prompt)


@partial(jax.jit, donate_argnames="state")
def copy_prefix(
    state: EngineState, source: Int[Array, ""], target: Int[Array, ""], length: Int[Array, ""]
) -> EngineState:
    """Copy the first `length` rows of slot `source` to slot `target`, in all layers and in place.

    Whole blocks are copied: what lies behind the rows, up to the end of their last block, comes along.
    """

    def copy_block(block, cache: KVCache) -> KVCache:
        def copy(leaf):
            size = (1, leaf.shape[1], ROWS_MULTIPLE, *leaf.shape[3:])
            rest = (0,) * (leaf.ndim - 3)
            rows = lax.dynamic_slice(leaf, (source, 0, block * ROWS_MULTIPLE, *rest), size)
            return lax.dynamic_update_slice(leaf, rows, (target, 0, block * ROWS_MULTIPLE, *rest))

        return jax.tree.map(copy, cache)

    blocks = (length + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE
    return replace(state, cache=lax.fori_loop(0, blocks, copy_block, state.cache))
