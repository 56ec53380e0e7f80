"""Slot attention on TPUs, on a fused cache. Kernels are imported when one is traced: Pallas takes long to import."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import support

BLOCK_Q = 64


def unavailable():
    """See `Implementation`."""
    backend = jax.default_backend()
    return None if backend == "tpu" else f"the default backend is {backend}, not a TPU"


def unsupported(*sizes):
    """See `Implementation`."""
    return support.unsupported(*sizes, dtypes=(jnp.bfloat16, jnp.float32))


def attend(*args, **kwargs):
    """See `slot_attention`. `interpret`: False, True or `pltpu.InterpretParams`, for tests without a TPU."""
    from pallas_kernels.attention import mosaic_tpu_attend

    return mosaic_tpu_attend.attend(*args, **kwargs)


def write(*args, **kwargs):
    """See `write_rows`. `interpret`: as `attend`."""
    from pallas_kernels.attention import mosaic_tpu_write

    return mosaic_tpu_write.write(*args, **kwargs)
