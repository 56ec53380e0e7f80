"""Slot attention on a CPU by the kernel in `pallas_kernels/cpu/attention.cc`, on a split cache.

Reads each live key and value once a tile of rows, on all of XLA's threads.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import unavailable as unavailable


def unsupported(dtype, cache_dtype, head_dim, heads, kv_heads):
    """See `Implementation`."""
    wrong = {str(jnp.dtype(one)) for one in (dtype, cache_dtype) if one not in (jnp.float32, jnp.bfloat16)}
    return f"it takes float32 and bfloat16, not {' and '.join(sorted(wrong))}" if wrong else None


def attend(q, layer_cache, slots, positions, *, num_decode, window, soft_cap, scale):
    """See `slot_attention`. Decode rows are chunks of one: every run of consecutive positions is split into tiles."""
    if reason := unavailable():  # which registers the kernel where it can run
        raise ValueError(f"attention implementation 'cpu' cannot run here: {reason}")
    call = jax.ffi.ffi_call("carousel_slot_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    window = jnp.asarray(0 if window is None else window, jnp.int32)
    return call(q, *layer_cache, slots, positions, window, soft_cap=float(soft_cap or 0.0), scale=float(scale))
