"""Slot attention on Hopper GPUs, on a fused cache: one Mosaic kernel for decode rows, another for prompt chunks.

The kernels are imported when one is traced: Pallas takes long to import.
"""

import functools
import warnings

import jax
import jax.numpy as jnp

from pallas_kernels.attention import support
from pallas_kernels.attention.tuning import tuning

BLOCK_Q = 64
MOST_HEADS = 64  # query heads of a KV head: the rows of a wgmma, in which a decode row's all lie


@functools.cache
def unavailable():
    """See `Implementation`. Only Hopper has wgmma; on another GPU it warns once that `xla` serves."""
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()}, not a GPU"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", None))
    if capability.partition(".")[0] == "9":
        return None
    # What it would take before Hopper: kernels of their own on `plgpu.mma` (Ampere's, from registers to registers) and
    # on `copy_gmem_to_smem`, which is cp.async there. It takes no barriers, so no producer could load for others, and
    # does not mask what is out of bounds. JAX has both from 0.11 on; they are untried here.
    reason = f"{device.device_kind} has compute capability {capability}, the kernels need 9.x (Hopper)"
    warnings.warn(f"attention runs as `xla`: {reason}", stacklevel=2)
    return reason


def unsupported(*sizes):
    """See `Implementation`."""
    return support.unsupported(*sizes, dtypes=(jnp.bfloat16, jnp.float16), most_heads=MOST_HEADS)


def write(layer_cache, k, v, slots, positions, *, num_decode, interpret=False):
    """See `write_rows`. One scatter; rows past the end of a slot are dropped too."""
    (kv,) = layer_cache
    rows = jnp.concatenate([k, v], axis=-1).astype(kv.dtype)
    return (kv.at[slots, :, positions].set(rows, mode="drop"),)


def attend(q, layer_cache, slots, positions, *, num_decode, window, soft_cap, scale, interpret=False):
    """See `slot_attention`. `interpret`: False or `InterpretGPUParams`, for tests without a GPU."""
    from pallas_kernels.attention.mosaic_gpu_chunk import chunk
    from pallas_kernels.attention.mosaic_gpu_decode import decode

    (kv,) = layer_cache
    kind = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else ""
    options = {
        "window": window,
        "soft_cap": soft_cap,
        "scale": scale,
        "tuning": tuning("mosaic_gpu", kind, str(q.dtype), q.shape[-1]),
        "interpret": interpret,
    }
    T, D = q.shape[0], num_decode
    parts = []
    if D:
        parts.append(decode(q[:D], kv, slots[:D], positions[:D], **options))
    if T > D:
        parts.append(chunk(q[D:], kv, slots[D:], positions[D:], **options))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
