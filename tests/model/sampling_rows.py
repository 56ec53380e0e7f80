"""Rows for `sample`: what tests of it share."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from model.logits import (
    ANY,
    BAD_WORD_TOKENS,
    BAD_WORDS,
    NOTHING,
    SamplingState,
    SlotRows,
    Uses,
    init_sampling,
    set_slot,
)
from model.sampling import Settings, sample

NEUTRAL = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0, seed=0)


def settings_of(rows) -> Settings:
    """From one dict a row with what differs from a plain greedy row; `uses` names what it uses of its slot."""
    rows = [NEUTRAL | {"uses": ()} | row for row in rows]

    def column(name, dtype=jnp.float32):
        return jnp.asarray([row[name] for row in rows], dtype)

    def used(name):
        return jnp.asarray([name in row["uses"] for row in rows])

    flags = [used(name) for name in ("bias", "penalties", "stops", "mask", "words")]
    return Settings(
        temperature=column("temperature"),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        seeds=jnp.asarray([divmod(row["seed"], 2**32) for row in rows], jnp.uint32),
        uses=Uses(*flags, column("repetition"), column("presence"), column("frequency")),
    )


def bits_of(ids, vocabulary):
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words


def slot_state(slots, vocabulary, **of_slot) -> SamplingState:
    """`of_slot`: `s0={"bias": ..., "prompt": ids, "output": ids, "stops": ids, "mask": ids, "words": lists of ids}`."""
    state = init_sampling(slots, vocabulary)
    for name, one in of_slot.items():
        slot, output = int(name[1:]), one.get("output", [])
        words = np.full((BAD_WORDS, BAD_WORD_TOKENS), ANY, np.int32)
        for index, word in enumerate(one.get("words", [])):
            words[index, -len(word) :] = word
        bits = (bits_of(one.get(key, []), vocabulary) for key in ("prompt", "stops"))
        bias = np.broadcast_to(np.float32(one.get("bias", 0)), vocabulary)
        counts = np.bincount(np.int64(output), minlength=vocabulary).astype(np.int32)
        recent = np.int32(([NOTHING] * BAD_WORD_TOKENS + list(output))[1 - BAD_WORD_TOKENS :])
        state = set_slot(state, slot, SlotRows(bias, *bits, words, counts, recent))
        mask = jnp.asarray(bits_of(one.get("mask", []), vocabulary))
        state = replace(state, mask=jnp.asarray(state.mask).at[slot].set(mask))
    return state


run = jax.jit(sample)


def draw(logits, rows, *, state=None, slots=None, positions=None):
    """The tokens of `rows`, dicts as `settings_of` takes them."""
    logits = jnp.asarray(logits, jnp.float32)
    M, V = logits.shape
    state = init_sampling(M, V) if state is None else state
    slots = jnp.arange(M) if slots is None else jnp.asarray(slots)
    positions = jnp.zeros(M, jnp.int32) if positions is None else jnp.asarray(positions, jnp.int32)
    return np.asarray(run(logits, settings_of(rows), state, slots.astype(jnp.int32), positions))
