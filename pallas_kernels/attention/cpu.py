"""Slot attention on a CPU by the kernel in `pallas_kernels/cpu/attention.cc`.

Reads each live key and value once a tile of rows, on all of XLA's threads.
"""

import jax
import jax.numpy as jnp


def cpu_attention(q, k, v, slots, positions, *, num_decode, block_q, window, soft_cap, scale):
    """See `slot_attention`. Decode rows are chunks of one: every run of consecutive positions is split into tiles."""
    if any(array.dtype not in (jnp.float32, jnp.bfloat16) for array in (q, k, v)):
        raise ValueError(f"the CPU kernel takes float32 and bfloat16, not {q.dtype}, {k.dtype} and {v.dtype}")
    call = jax.ffi.ffi_call("carousel_slot_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        k,
        v,
        slots,
        positions,
        window=window or 0,
        soft_cap=float(soft_cap or 0.0),
        scale=float(scale),
    )
