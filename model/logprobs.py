"""Logprobs that are reported: of the model's own logits, of tokens that were drawn or are in the prompt."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import cpu

MOST = 20  # most probable tokens of a row that are told
BLOCK = 16  # rows of a prompt that are unembedded at once


class Logprobs(NamedTuple):
    """Of R rows: the logprob of a row's token, then those of the most probable ones, falling, equal ones by id."""

    values: Float[Array, "R 1+top"]
    top_ids: Int[Array, "R top"]


def nothing(rows: int, vocabulary: int) -> Logprobs:
    top = min(MOST, vocabulary)
    return Logprobs(jnp.zeros((rows, 1 + top), jnp.float32), jnp.zeros((rows, top), jnp.int32))


def logprobs_of(logits: Float[Array, "R V"], tokens: Int[Array, " R"]) -> Logprobs:
    """Log-softmax in float32. NaN where logits are not finite; for a negative token its own value means nothing."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    total = jnp.log(cpu.sum_exp(logits))[:, None]
    top, ids = lax.top_k(logits, min(MOST, logits.shape[-1]))
    own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)
    return Logprobs(jnp.concatenate([own, top], axis=-1) - total, ids)


def sampled_logprobs(logits: Float[Array, "M V"], tokens: Int[Array, " M"], wanted: Bool[Array, " M"]) -> Logprobs:
    """Computed in turns where some row wants them; zeros in others."""
    with jax.named_scope("logprobs"):
        return lax.cond(wanted.any(), lambda: logprobs_of(logits, tokens), lambda: nothing(*logits.shape))


def prompt_logprobs(
    unembed: Callable[[Float[Array, "R D"]], Float[Array, "R V"]],
    hidden: Float[Array, "T D"],
    targets: Int[Array, " T"],
    vocabulary: int,
) -> Logprobs:
    """Of each row's target; zeros where it is negative. A few rows at a time: T rows of logits may not fit memory."""
    T = targets.shape[0]
    blocks = -(-T // BLOCK)

    def block(inputs):
        rows, wanted = inputs
        return lax.cond(
            (wanted >= 0).any(), lambda: logprobs_of(unembed(rows), wanted), lambda: nothing(BLOCK, vocabulary)
        )

    def compute():
        rows = jnp.pad(hidden, ((0, blocks * BLOCK - T), (0, 0))).reshape(blocks, BLOCK, -1)
        wanted = jnp.pad(targets, (0, blocks * BLOCK - T), constant_values=-1).reshape(blocks, BLOCK)
        return jax.tree.map(lambda x: x.reshape(blocks * BLOCK, -1)[:T], lax.map(block, (rows, wanted)))

    with jax.named_scope("prompt_logprobs"):
        return lax.cond((targets >= 0).any(), compute, lambda: nothing(T, vocabulary))
