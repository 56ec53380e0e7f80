"""Slot attention on TPUs, on a fused cache. Kernels are imported when one is traced: Pallas takes long to import."""

import jax
import jax.numpy as jnp

BLOCK_Q = 64
HEAD_DIMS = (64, 80, 96, 128, 256)


def unavailable():
    """See `Implementation`."""
    backend = jax.default_backend()
    return None if backend == "tpu" else f"the default backend is {backend}, not a TPU"


def unsupported(dtype, cache_dtype, head_dim):
    """See `Implementation`."""
    dtype, cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries are {dtype}, not bfloat16 or float32"
    if dtype != cache_dtype:
        return f"queries are {dtype}, the cache is {cache_dtype}"
    if head_dim not in HEAD_DIMS:
        return f"a head dim of {head_dim} is not one of {HEAD_DIMS}"
    return None


def attend(*args, **kwargs):
    """See `slot_attention`. `interpret`: False, True or `pltpu.InterpretParams`, for tests without a TPU."""
    from pallas_kernels.attention import mosaic_tpu_attend

    return mosaic_tpu_attend.attend(*args, **kwargs)


def write(*args, **kwargs):
    """See `write_rows`. `interpret`: as `attend`."""
    from pallas_kernels.attention import mosaic_tpu_write

    return mosaic_tpu_write.write(*args, **kwargs)
