"""Slot attention in portable XLA, on a split cache: loops over query blocks and, inside, over the blocks of live keys.

Work and memory traffic follow the live lengths, not S. Online softmax as in FlashAttention (arXiv 2205.14135).
"""

import jax.numpy as jnp
from jax import lax

BLOCK_K = 128
BLOCK_Q = 16


def write(layer_cache, k, v, slots, positions, *, num_decode):
    """See `write_rows`. One scatter each; rows past the end of a slot are dropped too."""
    at = (slots, slice(None), positions)
    keys, values = layer_cache
    return (
        keys.at[at].set(k.astype(keys.dtype), mode="drop"),
        values.at[at].set(v.astype(values.dtype), mode="drop"),
    )


def attend(q, layer_cache, slots, positions, *, num_decode, window, soft_cap, scale):
    """See `slot_attention`. A decode row is a query block of one row."""
    k, v = layer_cache
    attend_block = _make_attend(k, v, window, soft_cap, scale)
    parts = []
    if num_decode:
        parts.append(_attend_blocks(attend_block, q[:num_decode], slots[:num_decode], positions[:num_decode], 1))
    if num_decode < q.shape[0]:
        parts.append(_attend_blocks(attend_block, q[num_decode:], slots[num_decode:], positions[num_decode:], BLOCK_Q))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _attend_blocks(attend_block, q, slots, positions, block):
    """Run `attend_block` on each block of `block` rows, one after the other: [T, N, H] -> [T, N, H]."""
    T, N, H = q.shape
    blocks = (q.reshape(T // block, block, N, H), slots.reshape(-1, block), positions.reshape(-1, block))
    return lax.map(lambda args: attend_block(*args), blocks).reshape(T, N, H)


def _make_attend(k, v, window, soft_cap, scale):
    B, K, S, H = k.shape
    block_k = min(BLOCK_K, S)
    assert S % block_k == 0, f"a slot of {S} rows is not blocks of {block_k}"

    def attend_block(q, slots, positions):
        """One query block: q [R, N, H], slots and positions [R]. Rows not of the first row's slot are padding."""
        R, N, _ = q.shape
        G = N // K
        slot = slots[0]
        valid = (slots == slot) & (slot < B)
        queries = q.reshape(R, K, G, H).transpose(1, 2, 0, 3).reshape(K, G * R, H).astype(jnp.float32) * scale
        last = jnp.max(jnp.where(valid, positions, -1))
        first = 0 if window is None else jnp.maximum(jnp.min(jnp.where(valid, positions, S)) - window + 1, 0)

        def body(state):
            index, top, total, out = state
            start = index * block_k
            keys = lax.dynamic_slice(k, (slot, 0, start, 0), (1, K, block_k, H))[0].astype(jnp.float32)
            values = lax.dynamic_slice(v, (slot, 0, start, 0), (1, K, block_k, H))[0].astype(jnp.float32)
            rows = start + jnp.arange(block_k)
            # Stale rows may hold NaN, and 0 * NaN is NaN: mask the values, not only the scores.
            values = jnp.where(((rows >= first) & (rows <= last))[None, :, None], values, 0.0)
            scores = jnp.einsum("kqh,ksh->kqs", queries, keys)
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            live = (rows[None, :] <= positions[:, None]) & valid[:, None]
            if window is not None:
                live &= rows[None, :] > positions[:, None] - window
            scores = jnp.where(jnp.tile(live, (G, 1))[None], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            # No live key yet: subtract 0, so that exp(-inf - 0) = 0 and not exp(-inf + inf) = NaN.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights = jnp.exp(scores - shift[..., None])
            keep = jnp.exp(top - shift)
            total = total * keep + weights.sum(-1)
            out = out * keep[..., None] + jnp.einsum("kqs,ksh->kqh", weights, values)
            return index + 1, new_top, total, out

        start = (
            lax.div(jnp.asarray(first, jnp.int32), jnp.int32(block_k)),
            jnp.full((K, G * R), -jnp.inf, jnp.float32),
            jnp.zeros((K, G * R), jnp.float32),
            jnp.zeros((K, G * R, H), jnp.float32),
        )
        _, _, total, out = lax.while_loop(lambda state: state[0] * block_k <= last, body, start)
        out = out / jnp.where(total > 0, total, 1.0)[..., None]
        return out.reshape(K, G, R, H).transpose(2, 0, 1, 3).reshape(R, N, H).astype(q.dtype)

    return attend_block
