"""What the Mosaic kernels take, for GPUs and TPUs alike."""

import jax.numpy as jnp

HEAD_DIMS = (64, 80, 96, 128, 256)


def unsupported(dtype, cache_dtype, head_dim, heads, kv_heads, *, dtypes, most_heads=None):
    """See `Implementation`. `dtypes`: of the queries; the cache's is the same. `most_heads`: queries' a KV head."""
    dtype, cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
    if dtype not in dtypes:
        return f"queries are {dtype}, not {' or '.join(jnp.dtype(one).name for one in dtypes)}"
    if dtype != cache_dtype:
        return f"queries are {dtype}, the cache is {cache_dtype}"
    if head_dim not in HEAD_DIMS:
        return f"a head dim of {head_dim} is not one of {HEAD_DIMS}"
    if heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} KV heads"
    if most_heads is not None and heads // kv_heads > most_heads:
        return f"{heads // kv_heads} query heads a KV head are more than {most_heads}"
    return None
