"""The definition of slot attention: float32, dense, one masked softmax a row. For tests and for reading."""

import jax.numpy as jnp


def attend(q, layer_cache, slots, positions, *, num_decode, window, soft_cap, scale):
    """See `slot_attention`. Gathers a whole slot for every row: O(T K S H) memory."""
    k, v = layer_cache
    T, N, H = q.shape
    B, K, S, _ = k.shape
    clamped = jnp.minimum(slots, B - 1)
    rows = jnp.arange(S)[None, :]
    live = (rows <= positions[:, None]) & (slots < B)[:, None]
    if window is not None:
        live &= rows > positions[:, None] - window
    # Stale rows may hold NaN, and 0 * NaN is NaN: mask the values, not only the scores.
    keys = jnp.where(live[:, None, :, None], k[clamped].astype(jnp.float32), 0.0)
    values = jnp.where(live[:, None, :, None], v[clamped].astype(jnp.float32), 0.0)
    queries = q.reshape(T, K, N // K, H).astype(jnp.float32)
    scores = jnp.einsum("tkgh,tksh->tkgs", queries, keys, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(live[:, None, None, :], scores, -jnp.inf)
    # A padding row has no live score: give it any finite maximum, its weights are all exp(-inf) = 0.
    top = jnp.where(live.any(-1)[:, None, None], scores.max(-1), 0.0)
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(-1)
    out = jnp.einsum("tkgs,tksh->tkgh", weights, values, precision="highest")
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(T, N, H).astype(q.dtype)
