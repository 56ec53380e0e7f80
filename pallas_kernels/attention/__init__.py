"""`slot_attention`: ragged causal attention of flat token rows over a fixed-slot KV cache.

A layer's cache is a tuple of arrays whose layout belongs to the implementation that reads it: "split" is `(k, v)`, each
`[B, K, S, H]`; "fused" is `(kv,)`, `[B, K, S, 2H]` with keys in lanes `[0, H)`, values in `[H, 2H)`, and zeros up to
whole tiles where the platform wants them. Both are head-major, so that the rows of one (slot, head) lie together.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import cpu, mosaic_gpu, mosaic_tpu, packed, reference, xla

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "LayerCache",
    "cache_shapes",
    "choose_implementation",
    "slot_attention",
    "write_rows",
]

LayerCache = tuple[jax.Array, ...]


class Implementation(NamedTuple):
    """One way to attend and to write, on a cache of one layout.

    `unavailable()` says why it cannot run on this machine, `unsupported(dtype, cache_dtype, head_dim, heads, kv_heads)`
    why it cannot take queries and a cache of these dtypes and heads of this size and number; None: it can. The first
    may compile something.
    """

    attend: Callable[..., jax.Array]
    write: Callable[..., LayerCache]
    layout: Literal["split", "fused"]
    lanes: int  # a fused row is a multiple of so many
    block_q: int  # rows of a block of a prompt chunk; 1: no blocks, decode rows are chunks of one
    unavailable: Callable[[], str | None]
    unsupported: Callable[[Any, Any, int, int, int], str | None] = lambda *sizes: None


# In order of preference.
IMPLEMENTATIONS = {
    "cpu": Implementation(cpu.attend, xla.write, "split", 1, 1, cpu.unavailable, cpu.unsupported),
    "mosaic_gpu": Implementation(
        mosaic_gpu.attend,
        mosaic_gpu.write,
        "fused",
        1,
        mosaic_gpu.BLOCK_Q,
        mosaic_gpu.unavailable,
        mosaic_gpu.unsupported,
    ),
    "mosaic_tpu": Implementation(
        mosaic_tpu.attend,
        mosaic_tpu.write,
        "fused",
        128,
        mosaic_tpu.BLOCK_Q,
        mosaic_tpu.unavailable,
        mosaic_tpu.unsupported,
    ),
    "xla": Implementation(xla.attend, xla.write, "split", 1, xla.BLOCK_Q, lambda: None),
    "reference": Implementation(reference.attend, xla.write, "split", 1, xla.BLOCK_Q, lambda: None),
}
# Taken by name where a gradient is wanted, never chosen to serve: see `packed.py` for what its cache and slots are.
TRAINING = {"packed": Implementation(packed.attend, packed.write, "split", 1, 1, packed.unavailable)}


def choose_implementation(
    name: str | None, *, dtype: Any, cache_dtype: Any, head_dim: int, heads: int, kv_heads: int
) -> str:
    """`name` if it can run here; for None the first that can. Raises ValueError saying why a named one cannot."""
    sizes = dtype, cache_dtype, head_dim, heads, kv_heads
    if name is None:
        return next(name for name in IMPLEMENTATIONS if _refusal(name, sizes) is None)
    if name not in IMPLEMENTATIONS | TRAINING:
        raise ValueError(f"attention implementation {name!r} is not one of {list(IMPLEMENTATIONS)}")
    if reason := _refusal(name, sizes):
        raise ValueError(f"attention implementation {name!r} cannot run here: {reason}")
    return name


def _named(name: str) -> Implementation:
    return TRAINING[name] if name in TRAINING else IMPLEMENTATIONS[name]


def _refusal(name: str, sizes: tuple[Any, Any, int, int, int]) -> str | None:
    one = _named(name)
    return one.unavailable() or one.unsupported(*sizes)


def cache_shapes(implementation: str, slots: int, kv_heads: int, rows: int, head_dim: int) -> list[tuple[int, ...]]:
    """Of the arrays of one layer's cache."""
    one = _named(implementation)
    if one.layout == "split":
        return [(slots, kv_heads, rows, head_dim)] * 2
    return [(slots, kv_heads, rows, -(-2 * head_dim // one.lanes) * one.lanes)]


def _check_cache(implementation: str, layer_cache: LayerCache, head_dim: int) -> None:
    """Raises ValueError for arrays that are not those of the implementation's layout."""
    shapes = [tuple(array.shape) for array in layer_cache]
    slots, kv_heads, rows, _ = shapes[0]
    if (wanted := cache_shapes(implementation, slots, kv_heads, rows, head_dim)) != shapes:
        raise ValueError(f"attention implementation {implementation!r} reads a cache of {wanted}, not {shapes}")


def write_rows(
    layer_cache: LayerCache,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slots: Int[Array, " T"],
    positions: Int[Array, " T"],
    *,
    num_decode: int,
    implementation: str,
) -> LayerCache:
    """Put row t at `(slots[t], positions[t])`, in place where the cache is donated.

    The rows come as `slot_attention` takes them. Rows of slot B, and rows at S and beyond, are dropped.

    Raises:
        ValueError: a cache that is not of the implementation's layout.
    """
    _check_cache(implementation, layer_cache, k.shape[-1])
    with jax.named_scope("write_rows"):
        return _named(implementation).write(layer_cache, k, v, slots, positions, num_decode=num_decode)


def slot_attention(
    q: Float[Array, "T N H"],
    layer_cache: LayerCache,
    slots: Int[Array, " T"],
    positions: Int[Array, " T"],
    *,
    num_decode: int,
    window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str,
) -> Float[Array, "T N H"]:
    """Row t attends to rows `max(0, positions[t] - window + 1) .. positions[t]` of slot `slots[t]`.

    The cache already holds the rows' own keys and values. The first `num_decode` rows may name any slots; the rest
    come in blocks of the implementation's `block_q` rows that belong to one slot and whose positions rise by one,
    padding rows last. A row of slot B is padding: it reads nothing and its result is zero. Rows of the cache that the
    mask excludes may hold anything, NaN included. Scores, softmax and sums are float32; the result has q's dtype.

    Positions are to be from 0 to S - 1 and are clamped to that: what a row elsewhere gives is nobody's business, but it
    too reads nothing outside its slot.

    Args:
        window: at least 1. May be traced, and is then taken as 1 where it is less.
        scale: factor on the scores; `H ** -0.5` if None.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` after scaling (Gemma 2).
        implementation: one of `IMPLEMENTATIONS`, as `choose_implementation` gives it, or of `TRAINING`. It is lowered
            for whatever platform the program is compiled for, this machine's or another.

    Raises:
        ValueError: an implementation that does not take these dtypes and dims, a cache that is not of its layout, rows
            that cannot be blocked, or a scale or window that makes no sense.
    """
    one, (T, N, H) = _named(implementation), q.shape
    _, K, S, _ = layer_cache[0].shape
    if reason := one.unsupported(q.dtype, layer_cache[0].dtype, H, N, K):
        raise ValueError(f"attention implementation {implementation!r}: {reason}")
    _check_cache(implementation, layer_cache, H)
    if (T - num_decode) % one.block_q or num_decode > T:
        raise ValueError(f"{T} rows less {num_decode} decode rows are not blocks of {one.block_q}")
    scale = float(H**-0.5 if scale is None else scale)
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
    if isinstance(window, jax.Array):
        window = jnp.maximum(window, 1)
    elif window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    positions = jnp.clip(positions, 0, S - 1)
    with jax.named_scope("slot_attention"):
        return one.attend(
            q, layer_cache, slots, positions, num_decode=num_decode, window=window, soft_cap=soft_cap, scale=scale
        )
