"""`slot_attention`: ragged causal attention of flat token rows over a fixed-slot KV cache."""

from typing import Protocol

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import reference_attention
from pallas_kernels.attention.xla import xla_attention

__all__ = ["BLOCK_Q", "IMPLEMENTATIONS", "slot_attention"]

# Prompt chunks come in blocks of this many rows, each block of one slot and of consecutive positions.
BLOCK_Q = 16


class SlotCache(Protocol):
    """What attention needs of a layer's cache; `model.kv_cache.LayerCache` is one."""

    @property
    def k(self) -> Float[Array, "B K S H"]: ...

    @property
    def v(self) -> Float[Array, "B K S H"]: ...


# In order of preference.
IMPLEMENTATIONS = {"xla": xla_attention, "reference": reference_attention}


def slot_attention(
    q: Float[Array, "T N H"],
    layer_cache: SlotCache,
    slots: Int[Array, " T"],
    positions: Int[Array, " T"],
    *,
    num_decode: int,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Row t attends to rows `max(0, positions[t] - window + 1) .. positions[t]` of slot `slots[t]`.

    The cache already holds the rows' own keys and values. The first `num_decode` rows may name any slots; the rest
    come in blocks of `BLOCK_Q` rows that belong to one slot and whose positions rise by one. A row of slot B is
    padding: it reads nothing and its result is zero. Rows of the cache that the mask excludes may hold anything,
    NaN included. Scores, softmax and sums are float32; the result has q's dtype.

    Args:
        scale: factor on the scores; `H ** -0.5` if None.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` after scaling (Gemma 2).
        implementation: one of `IMPLEMENTATIONS`; None takes the first.

    Raises:
        ValueError: an unknown implementation, or rows that cannot be blocked.
    """
    if implementation is None:
        implementation = next(iter(IMPLEMENTATIONS))
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {implementation!r} is not one of {list(IMPLEMENTATIONS)}")
    if (q.shape[0] - num_decode) % BLOCK_Q or num_decode > q.shape[0]:
        raise ValueError(f"{q.shape[0]} rows less {num_decode} decode rows are not blocks of {BLOCK_Q}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with jax.named_scope("slot_attention"):
        return IMPLEMENTATIONS[implementation](
            q,
            layer_cache.k,
            layer_cache.v,
            slots,
            positions,
            num_decode=num_decode,
            block_q=BLOCK_Q,
            window=window,
            soft_cap=soft_cap,
            scale=scale,
        )
