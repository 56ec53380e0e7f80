"""Attention of packed sequences: against slots of their own, float64 loops, and float64 finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import choose_implementation, slot_attention, write_rows
from pallas_kernels.attention import packed as packed_module
from tests.oracle import attention as oracle

# Sums of some 24 products of float32 rounded to 2**-24, on values near one; gradients add as many of those.
TOLERANCE = 2e-6


def rows_of(lengths, L):
    """Slots and positions `[R * L]` of sequences of so many tokens, one list a row; the rest is padding."""
    slots, positions = np.full((len(lengths), L), L, np.int32), np.zeros((len(lengths), L), np.int32)
    for row, counts in enumerate(lengths):
        start = 0
        for segment, count in enumerate(counts):
            slots[row, start : start + count] = segment
            positions[row, start : start + count] = np.arange(count)
            start += count
    return slots.reshape(-1), positions.reshape(-1)


def values(R, L, K, G, H, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(R * L, heads, H)).astype(np.float32) for heads in (K * G, K, K)]


def packed(q, k, v, slots, positions, *, R, **options):
    """Write and attend, as a layer does."""
    how = {"num_decode": 0, "implementation": "packed"}
    T, K, H = k.shape
    cache = tuple(jnp.zeros((R, K, T // R, H), k.dtype) for _ in range(2))
    cache = write_rows(cache, k, v, slots, positions, **how)
    return slot_attention(q, cache, slots, positions, **how, **options)


def slotted(k, v, slots, positions, R):
    """The same rows as slots of their own: keys and values `[B, K, L, H]` and each row's slot there, B for padding."""
    L = len(slots) // R
    row = np.arange(R * L) // L
    own = np.where(slots < L, row * L + slots, R * L)
    cache = np.zeros((2, R * L, k.shape[1], L, k.shape[2]), k.dtype)
    for which, new in enumerate((k, v)):
        for t in np.flatnonzero(slots < L):
            cache[which, own[t], :, positions[t]] = new[t]
    return cache, own.astype(np.int32)


def reference(q, k, v, slots, positions, *, R, **options):
    cache, own = slotted(k, v, slots, positions, R)
    how = {"num_decode": len(own), "implementation": "reference"}
    return slot_attention(jnp.asarray(q), tuple(map(jnp.asarray, cache)), own, positions, **how, **options)


OPTIONS = [
    {},
    {"window": 1},
    {"window": 5},
    {"soft_cap": 2.0, "scale": 0.7},
    {"window": 3, "soft_cap": 5.0},
]
LENGTHS = [[24], [1, 9, 1, 13], [7, 4], []]  # one alone; four that fill a row; two and padding; padding alone


@pytest.mark.parametrize(("K", "G"), [(1, 4), (2, 1), (2, 3)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_matches_slots_of_their_own(options, K, G):
    slots, positions = rows_of(LENGTHS, 24)
    q, k, v = values(4, 24, K, G, 8)
    out = np.asarray(jax.jit(functools.partial(packed, R=4, **options))(q, k, v, slots, positions))
    cache, own = slotted(k, v, slots, positions, 4)
    right = oracle(q, *cache, own, positions, **options)
    np.testing.assert_allclose(out, right, rtol=0, atol=TOLERANCE * np.abs(right).max())
    again = np.asarray(reference(q, k, v, slots, positions, R=4, **options))
    np.testing.assert_allclose(out, again, rtol=0, atol=TOLERANCE * np.abs(right).max())
    assert not out[slots == 24].any(), "padding gives zero"


@pytest.mark.parametrize("window", [None, 50])
def test_blocks_of_a_long_row(window, monkeypatch):
    """200 queries are three blocks, the last one shorter: values as in float64, gradients as in one block."""
    R, L = 3, 200
    slots, positions = rows_of([[70, 130], [200], [66, 3]], L)
    q, k, v = values(R, L, 1, 2, 4)

    def gradients():
        total = jax.jit(lambda *qkv: jnp.sum(packed(*qkv, slots, positions, R=R, window=window) * jnp.cos(q)))
        return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

    out = np.asarray(packed(q, k, v, slots, positions, R=R, window=window))
    cache, own = slotted(k, v, slots, positions, R)
    np.testing.assert_allclose(out, oracle(q, *cache, own, positions, window=window), rtol=0, atol=2 * TOLERANCE)
    found = gradients()
    monkeypatch.setattr(packed_module, "BLOCKS", 1)
    for one, right in zip(found, gradients(), strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=2 * TOLERANCE * np.abs(right).max())


@pytest.fixture(scope="module")
def run():
    return jax.jit(functools.partial(packed, R=2))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 12), max_size=5), min_size=2, max_size=2), window=st.integers(1, 14))
def test_any_pack_and_any_traced_window(run, lengths, window):
    L = 12
    fitting = [[n for i, n in enumerate(counts) if sum(counts[: i + 1]) <= L] for counts in lengths]
    slots, positions = rows_of(fitting, L)
    q, k, v = values(2, L, 2, 2, 4, seed=window)
    out = np.asarray(run(q, k, v, slots, positions, window=jnp.int32(window)))
    cache, own = slotted(k, v, slots, positions, 2)
    np.testing.assert_allclose(out, oracle(q, *cache, own, positions, window=window), rtol=0, atol=4 * TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"soft_cap": 1.5, "scale": 0.9}], ids=str)
def test_gradients_are_float64_finite_differences(options, monkeypatch):
    """Each component of queries, keys and values of a pack with padding, in it and a whole row of it; in three blocks.

    Central differences over 2e-5 of the float64 loops are right to some 1e-9, so what differs is float32.
    """
    monkeypatch.setattr(packed_module, "LEAST_BLOCK", 2)
    R, L, K, G, H = 3, 6, 1, 2, 3
    slots, positions = rows_of([[2, 4], [3, 1], []], L)
    q, k, v = values(R, L, K, G, H)
    into = np.random.default_rng(1).normal(size=q.shape)

    def loss(q, k, v):
        return jnp.sum(packed(q, k, v, slots, positions, R=R, **options) * into.astype(np.float32))

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    exact, step = [array.astype(np.float64) for array in (q, k, v)], 1e-5

    def exactly():
        cache, own = slotted(*exact[1:], slots, positions, R)
        return np.sum(oracle(exact[0], *cache, own, positions, **options) * into)

    for array, gradient in zip(exact, found, strict=True):
        right = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + step
            above = exactly()
            array[index] = kept - step
            right[index] = (above - exactly()) / (2 * step)
            array[index] = kept
        assert np.abs(right).max() > 0.1
        np.testing.assert_allclose(gradient, right, rtol=0, atol=5e-6)
        assert not np.asarray(gradient)[slots == L].any(), "padding has no gradient"


def test_large_scores_have_finite_gradients():
    """Weights that round to nought, beside padding: 0 times infinity would be NaN."""
    slots, positions = rows_of([[5, 3], []], 12)
    q, k, v = (100.0 * array for array in values(2, 12, 1, 1, 4))
    gradients = jax.grad(lambda *qkv: packed(*qkv, slots, positions, R=2).sum(), argnums=(0, 1, 2))(q, k, v)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert np.abs(gradients[2]).max() > 0


def test_bfloat16():
    """Inputs and result are rounded to 2**-9 relative, and each weight, at most 1, too; sums are float32."""
    slots, positions = rows_of(LENGTHS, 24)
    q, k, v = (jnp.asarray(array, jnp.bfloat16) for array in values(4, 24, 2, 2, 8))
    out = packed(q, k, v, slots, positions, R=4)
    assert out.dtype == jnp.bfloat16
    wide = [np.asarray(array, np.float32) for array in (q, k, v)]
    cache, own = slotted(*wide[1:], slots, positions, 4)
    right = oracle(wide[0], *cache, own, positions)
    np.testing.assert_allclose(np.asarray(out, np.float32), right, rtol=0, atol=2.0**-8 * np.abs(right).max())


def test_it_is_for_training():
    sizes = {"dtype": jnp.float32, "cache_dtype": jnp.float32, "head_dim": 64, "heads": 4, "kv_heads": 2}
    with pytest.raises(ValueError, match="'packed' cannot run here: it is for training"):
        choose_implementation("packed", **sizes)
    q, k, v = values(2, 12, 1, 1, 4)
    slots, positions = rows_of([[5], [12]], 12)
    cache, how = (jnp.zeros((2, 1, 12, 4)),) * 2, {"num_decode": 0, "implementation": "packed"}
    with pytest.raises(ValueError, match="takes all 2 x 12 rows of its cache, not 23"):
        write_rows(cache, k[1:], v[1:], slots[1:], positions[1:], **how)
    with pytest.raises(ValueError, match="takes all 2 x 12 rows of its cache, not 23"):
        slot_attention(q[1:], cache, slots[1:], positions[1:], **how)
