"""Reported logprobs against float64, and where they are not asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.logprobs import BLOCK, logprobs_of, prompt_logprobs, sampled_logprobs


def exact(logits):
    wide = np.float64(logits)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("V", [7, 20, 333])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_log_softmax_and_the_most_probable(V, scale):
    logits = np.float32(np.random.default_rng(V).normal(size=(6, V)) * scale)
    logits[3], logits[4, 3:6] = 1.5, logits[4].max() + 1  # ties go to the lower id
    tokens = np.int32([0, 3, V - 1, 2, 1, 5])
    values, ids = jax.jit(logprobs_of)(logits, tokens)
    expected, top = exact(logits), min(20, V)
    assert ids.shape == (6, top)
    assert ids[3].tolist() == list(range(top))
    assert ids[4, :3].tolist() == [3, 4, 5]
    np.testing.assert_allclose(values[:, 0], expected[np.arange(6), tokens], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(values[:, 1:], -np.sort(-expected)[:, :top], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(values[:, 1:], np.take_along_axis(expected, np.asarray(ids), -1), rtol=1e-6, atol=2e-6)


def test_rows_that_are_not_finite_give_nan_alone():
    logits = np.float32([[1, 2, 3], [1, np.nan, 3], [1, np.inf, 0], [0, 0, 0]])
    values, _ = logprobs_of(jnp.asarray(logits), jnp.zeros(4, jnp.int32))
    assert np.isnan(values).any(axis=-1).tolist() == [False, True, True, False]


def test_nobody_asks():
    logits = jnp.ones((3, 5))
    for told in (
        sampled_logprobs(logits, jnp.zeros(3, jnp.int32), jnp.zeros(3, bool)),
        prompt_logprobs(lambda x: x, logits, jnp.full(3, -1), 5),
    ):
        assert told.values.shape == (3, 6)
        assert not told.values.any()


@pytest.mark.parametrize("T", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_prompt_rows_in_blocks(T):
    """Rows without a target are zeros where their whole block has none, and nobody's otherwise."""
    rng = np.random.default_rng(T)
    hidden, head = np.float32(rng.normal(size=(T, 8))), np.float32(rng.normal(size=(8, 50)))
    targets = np.int32(np.where(np.arange(T) % 3, -1, rng.integers(0, 50, T)))
    targets[BLOCK : 2 * BLOCK] = -1
    values, ids = jax.jit(lambda h, t: prompt_logprobs(lambda rows: rows @ head, h, t, 50))(hidden, targets)
    expected = exact(hidden @ head)
    assert values.shape == (T, 21)
    assert not values[BLOCK : 2 * BLOCK].any()
    for row in np.flatnonzero(targets >= 0):
        np.testing.assert_allclose(values[row, 0], expected[row, targets[row]], atol=1e-5)
        np.testing.assert_allclose(expected[row, ids[row]], values[row, 1:], atol=1e-5)
