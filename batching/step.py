"""The one jitted step: token rows in, one sampled token a sampled row out, the state donated and returned."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from batching.plan import Rows
from model.config import ModelConfig
from model.kv_cache import KVCache, init_cache
from model.sampling import sample
from model.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """All that lives on the device from turn to turn, besides the weights."""

    cache: KVCache
    last_token: Int[Array, " B"]  # sampled last in each slot


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
    return EngineState(cache, jnp.zeros((slots,), jnp.int32))


@partial(jax.jit, static_argnames=("graph", "num_decode", "implementation"), donate_argnames="state")
def step(
    weights: tuple[jax.Array, ...],
    state: EngineState,
    rows: Rows,
    *,
    graph: ModelGraph,
    num_decode: int,
    implementation: str,
) -> tuple[EngineState, Int[Array, " M"]]:
    """Compute one turn. `state` is donated: the cache is updated in place, never copied.

    Returns the new state and the sampled tokens, -1 where a row's logits are not finite.
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
    sampled = sample(logits, rows.temperatures, rows.seeds, positions)
    last_token = state.last_token.at[rows.sample_slots].set(sampled, mode="drop")
    return EngineState(cache, last_token), sampled
