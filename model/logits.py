"""What changes logits before a token is drawn (bias, penalties, forbidden tokens), and the state per slot for it.

A slot's state is written when a request that uses it takes the slot, and read for rows that say so: what a slot holds
otherwise may be stale.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

BAD_WORDS, BAD_WORD_TOKENS = 32, 8  # of several tokens: so many a slot, each of at most so many tokens
ANY, NOTHING = -1, -2  # in a bad word: before its first token; among recent tokens: before the output's first
LARGEST = jnp.finfo(jnp.float32).max


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """By slot. Bits: token `t` is bit `t % 32` of word `t // 32`; there are `W = ceil(V / 32)`."""

    counts: Int[Array, "B V"]  # how often each token is in the output
    bias: Float[Array, "B V"]  # -inf: forbidden
    prompted: UInt32[Array, "B W"]  # bits: tokens of the prompt
    stops: UInt32[Array, "B W"]  # bits: what ends a request, and may not be sampled before min_tokens
    mask: UInt32[Array, "B W"]  # bits: what a grammar allows
    words: Int[Array, "B N L"]  # bad words, at the end of rows of ANY
    recent: Int[Array, "B L-1"]  # the output's last tokens


class SlotRows(NamedTuple):
    """One slot's part of the sampling state, as `set_slot` takes it: NumPy arrays outside, traced ones inside."""

    bias: Any  # float32 [V]
    prompted: Any  # uint32 [W]
    stops: Any  # uint32 [W]
    words: Any  # int32 [N, L]
    counts: Any  # int32 [V]: of the output so far, if the request goes on after it lost its slot
    recent: Any  # int32 [L-1]


class Uses(NamedTuple):
    """Which rows use what, and their penalties."""

    bias: Bool[Array, " M"]
    penalties: Bool[Array, " M"]
    stops: Bool[Array, " M"]
    mask: Bool[Array, " M"]
    words: Bool[Array, " M"]
    repetition: Float[Array, " M"]
    presence: Float[Array, " M"]
    frequency: Float[Array, " M"]

    def any(self) -> Bool[Array, ""]:
        return (self.bias | self.penalties | self.stops | self.mask | self.words).any()


def init_sampling(slots: int, vocabulary: int) -> SamplingState:
    bits = jnp.zeros((slots, -(-vocabulary // 32)), jnp.uint32)
    return SamplingState(
        counts=jnp.zeros((slots, vocabulary), jnp.int32),
        bias=jnp.zeros((slots, vocabulary), jnp.float32),
        prompted=bits,
        stops=bits.copy(),
        mask=bits.copy(),
        words=jnp.full((slots, BAD_WORDS, BAD_WORD_TOKENS), ANY, jnp.int32),
        recent=jnp.full((slots, BAD_WORD_TOKENS - 1), NOTHING, jnp.int32),
    )


def set_slot(state: SamplingState, slot: Int[Array, ""], rows: SlotRows) -> SamplingState:
    """For the request that takes `slot`: what it asks for, and its output so far. The slot's mask stays."""
    return replace(
        state,
        counts=state.counts.at[slot].set(rows.counts),
        bias=state.bias.at[slot].set(rows.bias),
        prompted=state.prompted.at[slot].set(rows.prompted),
        stops=state.stops.at[slot].set(rows.stops),
        words=state.words.at[slot].set(rows.words),
        recent=state.recent.at[slot].set(rows.recent),
    )


def set_masks(state: SamplingState, slots: Int[Array, " B"], masks: UInt32[Array, "B W"]) -> SamplingState:
    """What grammars allow next in these slots; slot B: nobody's."""
    return replace(state, mask=state.mask.at[slots].set(masks, mode="drop"))


def edit(logits: Float[Array, "M V"], uses: Uses, state: SamplingState, slots: Int[Array, " M"]) -> Float[Array, "M V"]:
    """Bias, then penalties, then what is forbidden becomes -inf. A row that uses nothing keeps its bits.

    In turns where no row uses anything nothing is computed.
    """

    def edited(logits):
        V, at = logits.shape[-1], jnp.minimum(slots, state.counts.shape[0] - 1)  # of padding rows: any
        biased = jnp.where(uses.bias[:, None], logits + state.bias[at], logits)
        penalised = jnp.where(uses.penalties[:, None], penalise(biased, uses, state, at), biased)
        none = jnp.uint32(0)
        forbidden = jnp.where(uses.stops[:, None], state.stops[at], none)
        forbidden |= jnp.where(uses.mask[:, None], ~state.mask[at], none)
        left = jnp.where(unpack(forbidden, V), -jnp.inf, penalised)
        return forbid_words(left, jnp.where(uses.words[:, None, None], state.words[at], ANY), state.recent[at])

    with jax.named_scope("edit_logits"):
        return lax.cond(uses.any(), edited, lambda logits: logits, logits)


def penalise(
    logits: Float[Array, "M V"], uses: Uses, state: SamplingState, slots: Int[Array, " M"]
) -> Float[Array, "M V"]:
    """Repetition (Keskar et al., arXiv 1909.05858) for what is in prompt or output, then frequency and presence for
    what is in the output. What would leave float32 stays at its end, what is forbidden stays forbidden."""
    counts = state.counts[slots]
    seen = (counts > 0) | unpack(state.prompted[slots], logits.shape[-1])
    repetition = uses.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalty = uses.frequency[:, None] * counts + jnp.where(counts > 0, uses.presence[:, None], 0.0)
    penalised = jnp.where(seen, repeated, logits) - penalty
    return jnp.where(logits == -jnp.inf, logits, jnp.clip(penalised, -LARGEST, LARGEST))


def forbid_words(
    logits: Float[Array, "M V"], words: Int[Array, "M N L"], recent: Int[Array, "M L-1"]
) -> Float[Array, "M V"]:
    """Without the last token of each bad word whose other tokens are the output's last ones."""
    before = words[:, :, :-1]
    complete = ((before == ANY) | (before == recent[:, None, :])).all(axis=-1)
    last = jnp.where(complete & (words[:, :, -1] != ANY), words[:, :, -1], logits.shape[-1])  # past the end: none
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, last].set(-jnp.inf, mode="drop")


def record(state: SamplingState, uses: Uses, slots: Int[Array, " M"], tokens: Int[Array, " M"]) -> SamplingState:
    """Enter the drawn tokens (none where negative) for the slots whose next draws look at them."""
    B = state.counts.shape[0]
    counted = jnp.where(uses.penalties & (tokens >= 0), slots, B)
    kept = jnp.where(uses.words & (tokens >= 0), slots, B)
    recent = jnp.concatenate([state.recent[jnp.minimum(slots, B - 1), 1:], tokens[:, None]], axis=1)
    return replace(
        state,
        counts=state.counts.at[counted, tokens].add(1, mode="drop"),
        recent=state.recent.at[kept].set(recent, mode="drop"),
    )


def unpack(bits: UInt32[Array, "M W"], vocabulary: int) -> Bool[Array, "M V"]:
    """The first `vocabulary` bits of each row."""
    each = (bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    return each.reshape(bits.shape[0], -1)[:, :vocabulary].astype(bool)
