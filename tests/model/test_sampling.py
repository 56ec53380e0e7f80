"""Sampling against exact distributions, and what a draw depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from batching import params
from model import sampling
from tests.model.sampling_oracle import distribution
from tests.model.sampling_rows import draw, slot_state

FALSE_ALARM = 1e-6  # of each test of a distribution, were the seeds not fixed
DRAWS = 8192


def test_greedy_takes_the_lowest_of_equal_ids_and_ignores_the_seed():
    logits = np.float32([[1, 3, 3, 2], [5, 5, 5, 5], [-1e30, -2, -1, -1]])
    for temperature in (0.0, 1e-38, 0.9e-5):
        rows = [{"temperature": temperature, "seed": seed, "top_k": 2, "top_p": 0.1, "min_p": 1} for seed in range(3)]
        assert draw(logits, rows).tolist() == [1, 0, 2]
    assert params.GREEDY_BELOW == sampling.GREEDY_BELOW


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"uses": ("bias",)}])
def test_a_row_that_is_not_finite_gives_minus_one_alone(bad, row):
    logits = np.float32([[1, 2, 50], [1, bad, 0], [60, 2, 3]])
    assert draw(logits, [row] * 3).tolist() == [2, -1, 0]


@pytest.mark.parametrize("row", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.9}])
def test_a_row_that_may_draw_nothing_gives_minus_two_alone(row):
    logits = np.float32([[1, 2, 50], [1, 2, 0], [60, 2, 3]])
    state = slot_state(3, 3, s0={"mask": [2]}, s1={"mask": []}, s2={"bias": [0, -np.inf, -np.inf]})
    rows = [row | {"uses": uses} for uses in (("mask",), ("mask",), ("bias",))]
    assert draw(logits, rows, state=state).tolist() == [2, -2, 0]


SLOT = {
    "bias": np.float32([0, 1.5, -2, 0, 0, 0, 0.25, 0] + [0] * 29),
    "prompt": [0, 3, 3, 36],
    "output": [4, 4, 7, 1],
    "stops": [5],
    "mask": [*range(6, 37), 0, 1, 3, 5],
    "words": [[9], [7, 1, 2], [1, 8], [8, 1, 10]],
}
CASES = {
    "temperature below 1": {"temperature": 0.5},
    "temperature 1": {"temperature": 1.0},
    "temperature above 1": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k at least V": {"temperature": 1.0, "top_k": 37},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.3, "min_p": 0.1},
    "all filters": {"temperature": 1.4, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    "bias": {"temperature": 1.0, "uses": ("bias",)},
    "repetition": {"temperature": 1.0, "repetition": 1.6, "uses": ("penalties",)},
    "presence and frequency": {"temperature": 1.0, "presence": -0.7, "frequency": 0.4, "uses": ("penalties",)},
    "stops": {"temperature": 1.0, "uses": ("stops",)},
    "mask": {"temperature": 1.0, "uses": ("mask",)},
    "words": {"temperature": 1.0, "uses": ("words",)},
    "everything": {
        "temperature": 0.9,
        "top_k": 25,
        "top_p": 0.97,
        "min_p": 0.005,
        "repetition": 1.3,
        "presence": 0.5,
        "frequency": -0.25,
        "uses": ("bias", "penalties", "stops", "mask", "words"),
    },
}


@pytest.fixture(scope="module")
def logits():
    return np.float32(np.random.default_rng(5).normal(size=37) * 1.5)


@pytest.fixture(scope="module")
def drawn(logits):
    """All cases in one batch, their rows shuffled: case -> its draws."""
    names = np.repeat(np.arange(len(CASES)), DRAWS)
    np.random.default_rng(6).shuffle(names)
    rows = [list(CASES.values())[name] | {"seed": 2**33 + int(name)} for name in names]
    tokens = draw(
        np.tile(logits, (len(names), 1)),
        rows,
        state=slot_state(2, 37, s1=SLOT),
        slots=np.ones(len(names), np.int32),
        positions=np.arange(len(names)),
    )
    return {case: tokens[names == index] for index, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_distribution(drawn, logits, case):
    """Chi-square against the probabilities in closed form, beside rows of all other kinds."""
    row = CASES[case]
    keys = {"bias": ("bias",), "penalties": ("prompt", "output"), "stops": ("stops",), "mask": ("mask",)}
    keys |= {"words": ("words", "output")}
    used = {key for use in row.get("uses", ()) for key in keys[use]}
    expected = distribution(logits, row, {key: SLOT[key] for key in used}) * DRAWS
    counts = np.bincount(drawn[case], minlength=37)
    assert counts[expected == 0].sum() == 0, "a token was drawn that may not be"
    rare = (expected < 5) & (expected > 0)  # together, so that the test's approximation holds
    observed, wanted = counts[expected >= 5], expected[expected >= 5]
    if rare.any():
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    assert stats.chisquare(observed, wanted, sum_check=False).pvalue > FALSE_ALARM


def test_distribution_over_blocks():
    """A vocabulary of several blocks, the last one not whole, and probabilities that fall over eight decades."""
    V = 3 * sampling.BLOCK + 41
    logits = np.float32(np.random.default_rng(8).permutation(np.linspace(-9, 9, V)))
    tokens = draw(np.tile(logits, (DRAWS, 1)), [{"temperature": 1.0, "seed": 9}] * DRAWS, positions=np.arange(DRAWS))
    expected = np.exp(np.float64(logits))
    expected *= DRAWS / expected.sum()
    order = np.argsort(-expected)
    edges = np.flatnonzero(np.diff(np.floor(np.cumsum(expected[order]) / 64))) + 1  # at least 64 a bin
    bins = np.searchsorted(edges, np.argsort(order), side="right")
    observed, wanted = np.bincount(bins[tokens], minlength=bins.max() + 1), np.bincount(bins, expected)
    observed[-2] += observed[-1]
    wanted[-2] += wanted[-1]
    assert stats.chisquare(observed[:-1], wanted[:-1], sum_check=False).pvalue > FALSE_ALARM


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(0)
    logits = np.float32(rng.normal(size=(1, 300)))
    row = {"temperature": 1.0, "top_k": 200, "top_p": 0.99}
    alone = [
        draw(logits, [row | {"seed": seed}], positions=[position])[0]
        for seed in (3, 4, 2**32 + 3)
        for position in range(8)
    ]
    assert len(set(alone)) > 12
    beside = np.float32(rng.normal(size=(28, 300)) * 5)
    beside[2:26] = logits
    other = {"temperature": 2.0, "uses": ("penalties", "stops"), "repetition": 3.0}
    rows = [other, {}, *[row | {"seed": seed} for seed in (3, 4, 2**32 + 3) for _ in range(8)], other, {}]
    drawn = draw(beside, rows, positions=[0, 0, *[*range(8)] * 3, 5, 6])
    assert drawn[2:26].tolist() == alone


def test_a_draw_can_be_replayed_in_public_terms():
    """From `random.bits` of `fold_in(key(seed), position)`: Gumbel noise for blocks of 256 tokens and within one."""
    logits = np.float64(np.random.default_rng(1).normal(size=700)) / 0.7
    for position in range(20):
        key = jax.random.fold_in(jax.random.key(11), position)
        bits = np.float64(np.asarray(jax.random.bits(key, (3 + 256,))))
        noise = -np.log(-np.log1p(-(bits + 0.5) / 2**32))
        masses = [np.log(np.exp(logits[start : start + 256]).sum()) for start in (0, 256, 512)]
        block = int(np.argmax(masses + noise[:3]))
        inside = logits[256 * block : 256 * block + 256]
        expected = 256 * block + int(np.argmax(inside + noise[3 : 3 + len(inside)]))
        row = {"temperature": 0.7, "seed": 11}
        assert draw(np.float32(logits * 0.7)[None], [row], positions=[position]).tolist() == [expected]


def test_noise_is_finite_for_all_bits():
    noise = sampling.gumbel(jnp.asarray([0, 1, 2**31, 2**32 - 2, 2**32 - 1], jnp.uint32))
    assert np.isfinite(noise).all()
    np.testing.assert_allclose(noise, [22.87, 21.77, 0.3665, -2.81, -2.81], atol=0.01)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 3e38])
def test_no_temperature_overflows(scale):
    logits = np.float32([[0.1, 0.9, -1.0, 0.9]]) * np.float32(scale)
    for temperature in (1e-5, 1.0, 3.4e38):
        assert draw(logits, [{"temperature": temperature, "min_p": 0.5}])[0] in range(4)
    assert draw(logits, [{"temperature": 1e-5, "seed": 5}])[0] in ((1, 3) if scale >= 1 else range(4))
