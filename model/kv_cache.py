"""The fixed-slot KV cache: every slot owns S rows of every layer for as long as its request runs."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import LayerCache, cache_shapes

# Attention reads whole blocks of this many rows, so a slot's rows are rounded up to it.
ROWS_MULTIPLE = 128

KVCache = tuple[LayerCache, ...]  # one a layer


def init_cache(
    *, layers: int, slots: int, max_len: int, kv_heads: int, head_dim: int, dtype, implementation: str
) -> KVCache:
    """A cache of zeros in the layout that the attention implementation reads.

    Rows past `max_len` exist only to fill the last block and are never written.
    """
    rows = -(-max_len // ROWS_MULTIPLE) * ROWS_MULTIPLE
    shapes = cache_shapes(implementation, slots, kv_heads, rows, head_dim)
    return tuple(tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(layers))


def cache_bytes(cache: KVCache) -> int:
    """Bytes that the cache holds on the device."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
