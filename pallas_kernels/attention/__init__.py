"""`slot_attention`: ragged causal attention of flat token rows over a fixed-slot KV cache."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.cpu import cpu_attention
from pallas_kernels.attention.reference import reference_attention
from pallas_kernels.attention.xla import xla_attention
from pallas_kernels.cpu import unavailable as cpu_unavailable

__all__ = ["BLOCK_Q", "IMPLEMENTATIONS", "choose_implementation", "slot_attention"]

# Where prompt chunks come in blocks, they have this many rows, of one slot and of consecutive positions.
BLOCK_Q = 16


class SlotCache(Protocol):
    """What attention needs of a layer's cache; `model.kv_cache.LayerCache` is one."""

    @property
    def k(self) -> Float[Array, "B K S H"]: ...

    @property
    def v(self) -> Float[Array, "B K S H"]: ...


class Implementation(NamedTuple):
    """`unavailable` says why it cannot run on this machine, None if it can; it may compile something."""

    attend: Callable[..., jax.Array]
    block_q: int  # rows of a block of a prompt chunk; 1: no blocks, decode rows are chunks of one
    unavailable: Callable[[], str | None]


# In order of preference.
IMPLEMENTATIONS = {
    "cpu": Implementation(cpu_attention, 1, cpu_unavailable),
    "xla": Implementation(xla_attention, BLOCK_Q, lambda: None),
    "reference": Implementation(reference_attention, BLOCK_Q, lambda: None),
}


def choose_implementation(name: str | None) -> str:
    """`name` if it can run here; for None the first that can. Raises ValueError saying why a named one cannot."""
    if name is None:
        return next(name for name, one in IMPLEMENTATIONS.items() if one.unavailable() is None)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {name!r} is not one of {list(IMPLEMENTATIONS)}")
    if reason := IMPLEMENTATIONS[name].unavailable():
        raise ValueError(f"attention implementation {name!r} cannot run here: {reason}")
    return name


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
    come in blocks of the implementation's `block_q` rows that belong to one slot and whose positions rise by one.
    A row of slot B is padding: it reads nothing and its result is zero. Rows of the cache that the mask excludes may
    hold anything, NaN included. Scores, softmax and sums are float32; the result has q's dtype.

    Args:
        scale: factor on the scores; `H ** -0.5` if None.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` after scaling (Gemma 2).
        implementation: one of `IMPLEMENTATIONS`; None takes the first that can run here.

    Raises:
        ValueError: an implementation that is unknown or cannot run here, or rows that cannot be blocked.
    """
    attend, block_q, _ = IMPLEMENTATIONS[choose_implementation(implementation)]
    if (q.shape[0] - num_decode) % block_q or num_decode > q.shape[0]:
        raise ValueError(f"{q.shape[0]} rows less {num_decode} decode rows are not blocks of {block_q}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with jax.named_scope("slot_attention"):
        return attend(
            q,
            layer_cache.k,
            layer_cache.v,
            slots,
            positions,
            num_decode=num_decode,
            block_q=block_q,
            window=window,
            soft_cap=soft_cap,
            scale=scale,
        )
