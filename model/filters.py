"""Top-k, top-p and min-p: which tokens of a row may be drawn, without sorting the vocabulary."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import cpu

HEAD = 64  # most probable tokens of a row that are sorted; filters that keep more of them take longer


def keep(
    scaled: Float[Array, "M V"],
    *,
    top_k: Int[Array, " M"],
    top_p: Float[Array, " M"],
    min_p: Float[Array, " M"],
) -> Float[Array, "M V"]:
    """-inf for the tokens that the filters leave out, in this order. The largest of a row is 0, and stays.

    Each is a threshold, so that tokens as probable as the last one kept are kept too: with ties at the k-th place more
    than k tokens, with ties at the one that reaches `top_p` more than it asks for. `top_k` 0 or at least V, `top_p` 1
    and `min_p` 0 keep all. Shares of probability are as exact as float32 sums.
    """
    V = scaled.shape[-1]
    top_k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)

    def found():
        least, known = head_threshold(scaled, top_k, top_p)

        def row(inputs):
            known, least, *search = inputs
            return lax.cond(known, lambda: least, lambda: searched_threshold(*search))

        # Row by row: few need it, and on CPUs a row stays in the cache.
        return lax.cond(known.all(), lambda: least, lambda: lax.map(row, (known, least, scaled, top_k, top_p)))

    least = lax.cond(((top_k < V) | (top_p < 1)).any(), found, lambda: jnp.full_like(top_p, -jnp.inf))
    least = jnp.maximum(least, jnp.where(min_p > 0, jnp.log(min_p), -jnp.inf))
    return jnp.where(scaled >= least[:, None], scaled, -jnp.inf)


def head_threshold(
    scaled: Float[Array, "M V"], top_k: Int[Array, " M"], top_p: Float[Array, " M"]
) -> tuple[Float[Array, " M"], Bool[Array, " M"]]:
    """The least value that top-k and then top-p keep, and of which rows the 64 largest values tell it."""
    head = lax.top_k(scaled, min(HEAD, scaled.shape[-1]))[0]
    by_k, by_p = top_k < scaled.shape[-1], top_p < 1
    last = jnp.minimum(top_k, head.shape[-1])[:, None] - 1
    least = jnp.where(by_k, jnp.take_along_axis(head, last, axis=-1)[:, 0], -jnp.inf)
    left = cpu.sum_exp(jnp.where(scaled >= least[:, None], scaled, -jnp.inf))
    places = jnp.arange(head.shape[-1])
    up_to = (places[:, None] >= places[None, :])[None]
    sums = cpu.sum_exp(jnp.where(up_to, head[:, None, :], -jnp.inf))
    reached = sums >= (top_p * left)[:, None]
    by_share = jnp.maximum(jnp.where(reached, head, -jnp.inf).max(axis=-1), least)
    known = (~by_k | (top_k <= head.shape[-1])) & (~by_p | reached.any(axis=-1))
    return jnp.where(by_p, by_share, least), known


def searched_threshold(scaled: Float[Array, " V"], top_k: Int[Array, ""], top_p: Float[Array, ""]) -> Float[Array, ""]:
    """The least value of a row that top-k and then top-p keep, exactly and without a sort.

    By bisection over the values' bits: for floats of one sign these are in the order of the floats.
    """
    keys = jnp.abs(scaled).view(jnp.int32)  # rise as the values fall

    def stage(by, limit):
        """The least limit for which the weights of keys up to it, counts or probabilities, reach their target."""
        weights = jnp.where(by == 0, 1.0, jnp.exp(scaled))
        sum_to = lambda limit: jnp.where(keys <= limit, weights, 0.0).sum()  # noqa: E731
        most = sum_to(limit)
        target = jnp.where(by == 0, top_k.astype(jnp.float32), top_p * most)

        def is_open(bounds):
            """Whether more than one value lies between the bounds: each weighs at least what the upper one does."""
            low, high, below, within = bounds
            least = jnp.where(by == 0, 1.0, jnp.exp(-high.view(jnp.float32)))
            return (high - low > 1) & (within - below > 1.5 * least)

        def halve(bounds):
            low, high, below, within = bounds
            middle = low + (high - low) // 2
            new = sum_to(middle)
            reached = new >= target
            return (
                jnp.where(reached, low, middle),
                jnp.where(reached, middle, high),
                jnp.where(reached, below, new),
                jnp.where(reached, new, within),
            )

        low = jnp.where(jnp.where(by == 0, top_k < scaled.shape[0], top_p < 1), -1, limit)
        return lax.while_loop(is_open, halve, (low, limit, jnp.zeros_like(most), most))[1]

    return -lax.fori_loop(0, 2, stage, jnp.float32(jnp.inf).view(jnp.int32)).view(jnp.float32)
