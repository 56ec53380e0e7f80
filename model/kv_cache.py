"""The fixed-slot KV cache: every slot owns S rows of every layer for as long as its request runs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Attention reads whole blocks of this many rows, so a slot's rows are rounded up to it.
ROWS_MULTIPLE = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer. Head-major, so that the rows of one (slot, head) lie together."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]

    def write(
        self,
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        slots: Int[Array, " T"],
        positions: Int[Array, " T"],
    ) -> "LayerCache":
        """Put row t at `(slots[t], positions[t])`; rows of slot B (padding) and past the end are dropped."""
        at = (slots, slice(None), positions)
        return LayerCache(
            self.k.at[at].set(k.astype(self.k.dtype), mode="drop"),
            self.v.at[at].set(v.astype(self.v.dtype), mode="drop"),
        )


KVCache = tuple[LayerCache, ...]


def init_cache(*, layers: int, slots: int, max_len: int, kv_heads: int, head_dim: int, dtype) -> KVCache:
    """A cache of zeros. Rows past `max_len` exist only to fill the last block and are never written."""
    rows = -(-max_len // ROWS_MULTIPLE) * ROWS_MULTIPLE
    shape = (slots, kv_heads, rows, head_dim)
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def cache_bytes(cache: KVCache) -> int:
    """Bytes that the cache holds on the device."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
