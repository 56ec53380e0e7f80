"""The transformer: flat token rows and a cache in, hidden states and the cache out."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.config import LayerConfig, ModelConfig
from model.kv_cache import KVCache
from model.layers import MLP, Attention, Linear, MixtureOfExperts, init_normal, make_norm, matmul, normed
from model.rope import Rope, Rotation, rotation
from pallas_kernels.attention import LayerCache


@jax.custom_vjp
def rows_of(table: Float[Array, "V D"], tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """`table[tokens]`. The gradient of a row, of as many parts as its token is there, is summed in float32."""
    return table[tokens]


def _rows_forward(table, tokens):
    return table[tokens], (table, tokens)


def _rows_backward(kept, gradient):
    table, tokens = kept
    total = jnp.zeros_like(table, dtype=jnp.float32).at[tokens].add(gradient.astype(jnp.float32))
    return total.astype(table.dtype), None


rows_of.defvjp(_rows_forward, _rows_backward)


class Embedding(nnx.Module):
    def __init__(self, rows: int, width: int, *, dtype, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(init_normal(rngs, (rows, width), dtype))


class Layer(nnx.Module):
    """Attention and MLP, each on the residual stream, normalised before, after, or both."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype, rngs: nnx.Rngs) -> None:
        self.input_norm = make_norm(config, dtype) if config.pre_norm else None
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.post_attention_norm = make_norm(config, dtype) if config.post_norm else None
        self.mlp_norm = make_norm(config, dtype) if config.pre_norm else None
        self.mlp = (MixtureOfExperts if layer.moe else MLP)(config, dtype=dtype, rngs=rngs)
        self.post_mlp_norm = make_norm(config, dtype) if config.post_norm else None

    def __call__(
        self, x: Float[Array, "T D"], rotation: Rotation | None, cache: LayerCache, slots, positions, **how
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """`how`: as `Attention.attend`."""
        inner, cache = self.attention(normed(self.input_norm, x), rotation, cache, slots, positions, **how)
        x = x + normed(self.post_attention_norm, inner)
        inner = self.mlp(normed(self.mlp_norm, x))
        return x + normed(self.post_mlp_norm, inner), cache


@functools.partial(jax.jit, static_argnames=("graph", "num_decode", "implementation"))
def run_layer(params, x, rotation, cache, slots, positions, *, graph, **how):
    """A function of its own, so that layers of one kind are traced once; XLA inlines it."""
    return nnx.merge(graph, params)(x, rotation, cache, slots, positions, **how)


class Transformer(nnx.Module):
    """A decoder-only transformer over a fixed-slot cache. All families of `ModelConfig` are this one class."""

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers])
        self.final_norm = make_norm(config, dtype)
        self.head = None if config.tie_embeddings else Linear(config.width, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, " T"],
        slots: Int[Array, " T"],
        positions: Int[Array, " T"],
        cache: KVCache,
        *,
        num_decode: int,
        implementation: str,
        remat: bool = False,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Row t writes its key and value at cache row `(slots[t], positions[t])` and attends to rows up to it.

        `num_decode`, `implementation` and the meaning of slot B: see `slot_attention`. The layers run unrolled. `remat`
        computes a layer again where its gradient is taken, instead of keeping what is inside it.
        """
        with jax.named_scope("embed"):
            x = rows_of(self.embed.weight[...], tokens)
            if self.config.embedding_scale != 1.0:
                x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        rotations, layer_caches = self.rotations(positions), []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                graph, params = nnx.split(layer)
                run = functools.partial(run_layer, graph=graph, num_decode=num_decode, implementation=implementation)
                run = jax.checkpoint(run) if remat else run
                turned = rotations[layer.attention.layer.rope]
                x, layer_cache = run(params, x, turned, cache[index], slots, positions)
                layer_caches.append(layer_cache)
        return x, tuple(layer_caches)

    def rotations(self, positions: Int[Array, " T"]) -> dict[Rope | None, Rotation | None]:
        """What each kind of RoPE in the model turns these rows by."""
        ropes = dict.fromkeys(layer.rope for layer in self.config.layers)
        with jax.named_scope("rope"):
            return {rope: None if rope is None else rotation(positions, rope) for rope in ropes}

    def unembed(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Logits in float32, for the rows that are sampled only: the head is a large part of a small model."""
        with jax.named_scope("unembed"):
            weight = (self.head or self.embed).weight[...]
            logits = matmul(self.final_norm(hidden), weight, dtype=jnp.float32)
            cap = self.config.final_soft_cap
            return logits if cap is None else cap * jnp.tanh(logits / cap)
