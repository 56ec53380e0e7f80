"""From logits to tokens: each row with its own temperature, filters and random key."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from model.filters import keep
from model.logits import SamplingState, Uses, edit
from pallas_kernels import cpu

# Below this a temperature means greedy: dividing by it would overflow float32 logits.
GREEDY_BELOW = 1e-5
NOT_FINITE, NOTHING_ALLOWED = -1, -2  # in place of a token
BLOCK = 256  # tokens of a block; how many changes which tokens are drawn


class Settings(NamedTuple):
    """How each row's token is drawn."""

    temperature: Float[Array, " M"]
    top_k: Int[Array, " M"]  # 0 or at least V: all
    top_p: Float[Array, " M"]
    min_p: Float[Array, " M"]
    seeds: UInt32[Array, "M 2"]  # high and low words of 64-bit seeds
    uses: Uses


def sample(
    logits: Float[Array, "M V"],
    settings: Settings,
    state: SamplingState,
    slots: Int[Array, " M"],
    positions: Int[Array, " M"],
) -> Int[Array, " M"]:
    """One token a row, for `positions` of `slots`; -1 where a row's logits are not finite, -2 where all tokens are
    forbidden.

    Bias, penalties and masks first (`edit`). Then temperature below 1e-5 is greedy, ties to the lowest id; otherwise
    the tokens that the filters keep are drawn from.
    """
    greedy = settings.temperature < GREEDY_BELOW

    def plain():
        return first_of(logits, logits.max(axis=-1))

    def whole():
        edited = edit(logits, settings.uses, state, slots)
        largest = edited.max(axis=-1)
        best = first_of(edited, largest)

        def drawn():
            # At most 0, so that no temperature overflows it.
            scaled = (edited - largest[:, None]) / jnp.maximum(settings.temperature, GREEDY_BELOW)[:, None]
            kept = keep(
                scaled,
                top_k=jnp.where(greedy, 0, settings.top_k),
                top_p=jnp.where(greedy, 1.0, settings.top_p),
                min_p=jnp.where(greedy, 0.0, settings.min_p),
            )
            return jnp.where(greedy, best, categorical(kept, settings.seeds, positions))

        tokens = lax.cond(greedy.all(), lambda: best, drawn)
        return jnp.where(largest == -jnp.inf, NOTHING_ALLOWED, tokens)

    with jax.named_scope("sample"):
        # What a turn of greedy rows needs is no more than an argmax; all else costs as much as a small model's head.
        tokens = lax.cond(greedy.all() & ~settings.uses.any(), plain, whole)
        return jnp.where(jnp.isfinite(logits).all(axis=-1), tokens, NOT_FINITE).astype(jnp.int32)


def first_of(values: Float[Array, "M V"], wanted: Float[Array, " M"]) -> Int[Array, " M"]:
    """The lowest index at which a row has its wanted value: of the maximum, an argmax ten times faster on CPUs."""
    ids = jnp.arange(values.shape[-1])[None, :]
    return jnp.where(values == wanted[:, None], ids, values.shape[-1]).min(axis=-1)


def categorical(
    scaled: Float[Array, "M V"], seeds: UInt32[Array, "M 2"], positions: Int[Array, " M"]
) -> Int[Array, " M"]:
    """A token of each row with the probabilities `softmax(scaled)`. The largest of a row is 0, -inf is never drawn.

    A block of 256 tokens is drawn by its probability, then a token of the block, both by Gumbel-max: a row needs noise
    for `ceil(V / 256) + 256` values, not for V, and that costs next to nothing. Its key is
    `fold_in(key(seed), position)`, so a draw is a function of the request's seed and the position of the token: the
    same whatever slot, turn or neighbours the row has. A small change of the logits rarely changes a token, as it
    would if a sum of probabilities were inverted.
    """
    M, V = scaled.shape
    blocks = -(-V // BLOCK)
    scaled = jnp.pad(scaled, ((0, 0), (0, blocks * BLOCK - V)), constant_values=-jnp.inf).reshape(M, blocks, BLOCK)

    noise = gumbel(random_bits(seeds, positions, blocks + BLOCK))
    masses = jnp.log(cpu.sum_exp(scaled)) + noise[:, :blocks]
    block = first_of(masses, masses.max(axis=-1))
    inside = scaled[jnp.arange(M), block] + noise[:, blocks:]
    return block * BLOCK + first_of(inside, inside.max(axis=-1))


def random_bits(seeds: UInt32[Array, "M 2"], positions: Int[Array, " M"], count: int) -> UInt32[Array, "M count"]:
    """`random.bits(fold_in(key(seed), position), (count,))` of each row, bit for bit.

    JAX's own takes a loop a hash, and several times as long to compile: here each hash is one kernel.
    """
    zero = jnp.zeros_like(positions, jnp.uint32)
    key = threefry(seeds[:, 0], seeds[:, 1], zero, positions.astype(jnp.uint32))
    counter = jnp.arange(count, dtype=jnp.uint32)[None, :]
    first, second = threefry(key[0][:, None], key[1][:, None], jnp.zeros_like(counter), counter)
    return first ^ second


def threefry(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 in 20 rounds (Salmon et al., SC '11)."""
    keys = key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA)
    x0, x1 = x0 + key0, x1 + key1
    for group in range(5):
        for turns in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(turns)) | (x1 >> jnp.uint32(32 - turns))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def gumbel(bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Gumbel noise from uniform bits, exact in its upper tail, where maxima are decided: up to 22.9."""
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2**-24))))
