"""Sampling against exact distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from model.sampling import sample


def draw(logits, temperatures, seeds, positions):
    words = jnp.asarray([divmod(seed, 2**32) for seed in seeds], jnp.uint32)
    return np.asarray(
        jax.jit(sample)(jnp.asarray(logits), jnp.asarray(temperatures, jnp.float32), words, jnp.asarray(positions))
    )


def test_greedy_takes_the_lowest_of_equal_ids_and_ignores_the_seed():
    logits = np.float32([[1, 3, 3, 2], [5, 5, 5, 5], [-1e30, -2, -1, -1]])
    for temperature in (0.0, 0.9e-5):
        assert draw(logits, [temperature] * 3, [1, 2, 3], [0, 1, 2]).tolist() == [1, 0, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_minus_one_alone(bad, temperature):
    logits = np.float32([[1, 2, 50], [1, bad, 0], [60, 2, 3]])
    assert draw(logits, [temperature] * 3, [1, 2, 3], [0, 0, 0]).tolist() == [2, -1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature_gives_the_softmax(temperature):
    """4096 draws, one a position, beside greedy rows: a chi-square test with a false-alarm rate of 1e-4."""
    count, logits = 4096, np.float32([0.3, -1.0, 2.0, 0.0, 1.1])
    rows = np.tile(logits, (count + 1, 1))
    tokens = draw(rows, [0.0] + [temperature] * count, [7] * (count + 1), range(count + 1))
    assert tokens[0] == 2
    weights = np.exp(logits / temperature)
    expected = weights / weights.sum() * count
    assert stats.chisquare(np.bincount(tokens[1:], minlength=5), expected, sum_check=False).pvalue > 1e-4


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(0)
    logits = np.float32(rng.normal(size=(1, 50)))
    alone = [draw(logits, [1.0], [seed], [position])[0] for seed in (3, 4) for position in range(8)]
    assert len(set(alone)) > 4
    noise = np.float32(rng.normal(size=(20, 50)) * 5)
    noise[2:18] = logits
    seeds = [0, 1, *[3] * 8, *[4] * 8, 2, 3]
    beside = draw(noise, [2.0] * 2 + [1.0] * 16 + [0.0] * 2, seeds, [0, 0, *range(8), *range(8), 0, 0])
    assert beside[2:18].tolist() == alone


def test_the_noise_is_jaxs_own_for_the_same_key():
    """In public terms, so that others can replay a draw: Gumbel noise of `fold_in(key(seed), position)`."""
    logits = np.float32(np.random.default_rng(1).normal(size=50))
    key = jax.random.fold_in(jax.random.key(11), 42)
    expected = int(jnp.argmax(jnp.asarray(logits) / 0.7 + jax.random.gumbel(key, (50,))))
    assert draw(logits[None], [0.7], [11], [42]).tolist() == [expected]
