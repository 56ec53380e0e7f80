"""Attention of packed sequences, for training: one call's own rows are the cache. Plain JAX, so it has gradients.

The cache `(k, v)` is `[R, K, L, H]` for R rows of L tokens, and token row t lies at `(t // L, t % L)` of it, whatever
its slot and position are. Slots are the sequences within one row of tokens, and since at most L of them fit there, slot
L is padding. A position is a token's place in its sequence, and the tokens of a sequence stand in their order.

Scores are dense, `[R, N, Q, L]` in float32 for one of a few blocks of queries after the other, and computed again for
the gradient: right for rows of up to a few thousand tokens. The products take operands of q's dtype and sum in float32,
so in bfloat16 each softmax weight (at most 1) is rounded, as in every flash attention.
Unlike in a slot cache no row here is stale: NaN in one sequence reaches the others of its row of tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

BLOCKS, LEAST_BLOCK = 4, 64  # queries of a row of tokens, and the least number of them, that are computed together


def unavailable():
    """See `Implementation`: wherever JAX runs it does, but what it attends to is gone after the call."""
    return "it is for training: its cache holds the rows of one call alone"


def write(layer_cache, k, v, slots, positions, *, num_decode):
    """See `write_rows`. The rows become the cache, in their order; of the old one only shape and dtype matter."""
    R, K, L, H = layer_cache[0].shape
    if k.shape[0] != R * L:
        raise ValueError(f"attention implementation 'packed' takes all {R} x {L} rows of its cache, not {k.shape[0]}")
    rows = (new.reshape(R, L, K, H).transpose(0, 2, 1, 3) for new in (k, v))
    return tuple(new.astype(old.dtype) for new, old in zip(rows, layer_cache, strict=True))


def attend(q, layer_cache, slots, positions, *, num_decode, window, soft_cap, scale):
    """See `slot_attention`. Every row of tokens by itself; `num_decode` makes no difference."""
    k, v = (one.astype(q.dtype) for one in layer_cache)
    R, K, L, H = k.shape
    T, N, _ = q.shape
    if T != R * L:
        raise ValueError(f"attention implementation 'packed' takes all {R} x {L} rows of its cache, not {T}")
    live = _mask(slots.reshape(R, L), positions.reshape(R, L), window)
    queries = q.reshape(R, L, K, N // K, H).transpose(0, 2, 3, 1, 4)
    block = -(-L // max(1, min(BLOCKS, L // LEAST_BLOCK)))
    one_block = jax.checkpoint(functools.partial(_attend_block, soft_cap=soft_cap, scale=scale))
    parts = []  # each against the keys up to its end: those after it are in no query's past
    for start in range(0, L, block):
        end = min(start + block, L)
        parts.append(one_block(queries[:, :, :, start:end], k[:, :, :end], v[:, :, :end], live[:, start:end, :end]))
    return jnp.concatenate(parts, axis=3).transpose(0, 3, 1, 2, 4).reshape(T, N, H)


def _attend_block(queries, keys, values, live, *, soft_cap, scale):
    """[R, K, G, Q, H], twice [R, K, S, H], [R, Q, S] -> [R, K, G, Q, H]."""
    R, K, G, Q, H = queries.shape
    live = jnp.broadcast_to(live[:, None, None], (R, K, G, *live.shape[1:])).reshape(R, K, G * Q, -1)
    products = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = products("rkqh,rksh->rkqs", queries.reshape(R, K, G * Q, H), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(live, scores, -jnp.inf)
    # The result does not depend on what is subtracted, so neither does its gradient. A padding row has no live score:
    # any finite maximum will do, its weights are all exp(-inf) = 0.
    top = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    out = products("rkqs,rksh->rkqh", weights.astype(values.dtype), values) / jnp.where(total > 0, total, 1.0)
    return out.reshape(R, K, G, Q, H).astype(queries.dtype)


def _mask(slots, positions, window):
    """[R, L], [R, L] -> [R, L, L]: whether a query sees a key, of its own sequence and not after it."""
    own, others = slots[:, :, None], slots[:, None, :]
    at, there = positions[:, :, None], positions[:, None, :]
    live = (own == others) & (own < slots.shape[1]) & (there <= at)
    return live if window is None else live & (there > at - window)
