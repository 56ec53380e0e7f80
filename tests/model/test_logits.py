"""Bias, penalties, masks and filters: against Hugging Face's processors, an oracle, and each other."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import filters, sampling
from model.logits import ANY, BAD_WORD_TOKENS, NOTHING, edit, record
from tests.model.sampling_oracle import edited, kept
from tests.model.sampling_rows import bits_of, settings_of, slot_state

# Scores of 11 lists of processors of Hugging Face transformers 5.24 (RepetitionPenaltyLogitsProcessor,
# TemperatureLogitsWarper, TopK-, TopP- and MinPLogitsWarper, SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor,
# MinNewTokensLengthLogitsProcessor) for the same logits [12, 131], normal with a deviation of 3, prompts of 9 tokens
# and outputs of 6: `cases` says in JSON what each list does, the array of its name what it gives.
EXPECTED = np.load(Path(__file__).parents[1] / "data" / "hf_processors.npz")
HF_CASES = json.loads(str(EXPECTED["cases"]))
USED = {"repetition": "penalties", "bias": "bias", "words": "words", "stops": "stops"}


@jax.jit
def filtered(scaled, settings):
    return filters.keep(scaled, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p)


@jax.jit
def changed(logits, settings, state, slots):
    """The logits that a draw takes, at most 0."""
    logits = edit(logits, settings.uses, state, slots)
    scaled = logits - logits.max(axis=-1, keepdims=True)
    return filtered(scaled / jnp.maximum(settings.temperature, sampling.GREEDY_BELOW)[:, None], settings)


@pytest.mark.parametrize("name", HF_CASES)
def test_as_hugging_face(name):
    case = dict(HF_CASES[name])
    logits, (R, V) = EXPECTED["logits"], EXPECTED["logits"].shape
    slot = {key: case.pop(key) for key in ("words", "stops") if key in case}
    if "bias" in case:
        slot["bias"] = np.zeros(V, np.float32)
        for token, value in case.pop("bias").items():
            slot["bias"][int(token)] = value
    uses = [use for key, use in USED.items() if key in case or key in slot]
    state = slot_state(
        R, V, **{f"s{r}": {"prompt": EXPECTED["prompt"][r], "output": EXPECTED["output"][r]} | slot for r in range(R)}
    )
    rows = [{"temperature": 1.0, "uses": uses} | case] * R
    ours = np.asarray(changed(logits, settings_of(rows), state, np.arange(R, dtype=np.int32)))
    theirs = EXPECTED[name] - EXPECTED[name].max(axis=-1, keepdims=True)
    assert (np.isneginf(ours) == np.isneginf(theirs)).all()
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def scaled_rows():
    """Rows of logits, at most 0, that are hard for thresholds: ties, steep, flat, few finite ones."""
    rng = np.random.default_rng(3)
    V = 333
    rows = [rng.normal(size=V) * scale for scale in (0.1, 1.0, 3.0, 30.0)]
    rows += [np.round(rng.normal(size=V) * scale) for scale in (0.5, 2.0, 8.0)]
    rows += [
        np.zeros(V),
        np.where(np.arange(V) == 7, 50.0, 0.0),
        np.where(np.arange(V) % 90, -np.inf, rng.normal(size=V)),
    ]
    rows += [np.linspace(-1e-3, 0, V), -np.exp(rng.normal(size=V) * 10)]
    return np.float32([row - row.max() for row in rows])


@pytest.mark.parametrize("top_p", [1e-38, 1e-5, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [-1, 0, 1, 2, 63, 64, 65, 332, 333, 334])
def test_filters_keep_what_they_say(top_k, top_p):
    """By the oracle: every number, ties too; a share that sums reach only by rounding may fall either way.

    Of tokens whose probability is a float32: others are never drawn.
    """
    scaled = scaled_rows()
    for min_p in (0.0, 1e-38, 0.05, 1.0):
        row = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        ours = np.isfinite(np.asarray(filtered(scaled, settings_of([row] * len(scaled)))))
        for values, mine in zip(np.float64(scaled), ours, strict=True):
            near = [kept(values, **row | {"top_p": min(top_p * factor, 1.0)}) for factor in (1 - 1e-5, 1, 1 + 1e-5)]
            if top_p == 1:
                near = [kept(values, **row)]
            assert any((mine == one)[values > -80].all() for one in near)


def test_both_ways_to_a_threshold_agree():
    scaled = scaled_rows()
    rows = [
        {"temperature": 1.0, "top_k": top_k, "top_p": top_p}
        for top_k, top_p in zip([3, 0, 40, 64] * 3, [1.0, 0.5, 0.7, 0.95] * 3, strict=True)
    ]
    settings = settings_of(rows)
    top_k = jnp.where(settings.top_k > 0, settings.top_k, scaled.shape[1])
    quick, known = filters.head_threshold(scaled, top_k, settings.top_p)
    searched = jax.vmap(filters.searched_threshold)(scaled, top_k, settings.top_p)
    assert known.sum() >= 8
    assert not known.all()
    for row in np.flatnonzero(known):
        assert ((scaled[row] >= quick[row]) == (scaled[row] >= searched[row])).all()


def test_a_row_keeps_its_bits_beside_others_that_use_everything():
    rng = np.random.default_rng(4)
    logits = np.float32(rng.normal(size=(5, 97)) * 4)
    slot = {
        "bias": np.float32(rng.normal(size=97)),
        "prompt": [1, 2],
        "output": [3, 4, 4],
        "stops": [5],
        "mask": [6, 7],
    }
    state = slot_state(5, 97, **{f"s{index}": slot | {"words": [[4, 8], [9]]} for index in range(5)})
    everything = {
        "temperature": 0.7,
        "top_k": 70,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition": 1.5,
        "presence": 1,
        "frequency": 1,
        "uses": ("bias", "penalties", "stops", "words"),
    }
    alone = [{}, {"temperature": 1.3}, {"temperature": 1.0, "top_k": 5}, {"uses": ("bias",)}, everything]
    slots = np.arange(5, dtype=np.int32)
    for row, kind in enumerate(alone):
        expected = changed(logits, settings_of([kind] * 5), state, slots)[row]
        others = [{**everything, "uses": (*everything["uses"], "mask")}] * 5
        others[row] = kind
        assert np.array_equal(changed(logits, settings_of(others), state, slots)[row], expected, equal_nan=True)
    untouched = edit(logits, settings_of([{}, *[everything] * 4]).uses, state, slots)[0]
    assert np.array_equal(untouched, logits[0])


def test_penalties_stay_in_float32():
    logits = np.float32([[3e38, -3e38, 1.0, -1.0, 0.0, 2.0]])
    for repetition in (1e-5, 1e5):
        row = {"uses": ("penalties", "mask"), "repetition": repetition}
        state = slot_state(1, 6, s0={"prompt": range(5), "mask": range(5)})
        result = np.asarray(edit(logits, settings_of([row]).uses, state, jnp.zeros(1, jnp.int32)))[0]
        assert np.isfinite(result[:5]).all()
        assert result[5] == -np.inf
        expected = edited(logits[0], prompt=range(5), mask=range(5), repetition=repetition, presence=0, frequency=0)
        np.testing.assert_allclose(result[:5], np.clip(expected[:5], -3.4028235e38, 3.4028235e38), rtol=1e-6)


def test_record():
    """What was drawn is entered for rows that will look at it, and for nobody else; nothing of rows that failed."""
    used = ("penalties", "words"), (), ("words",), ("penalties",), ("words",)
    uses = settings_of([{"uses": names} for names in used]).uses
    state = slot_state(4, 40, s0={"output": [7, 39]}, s1={"output": [1]}, s2={"output": list(range(9))})
    slots, tokens = np.int32([0, 1, 2, 3, 4]), np.int32([39, 5, 6, -1, 9])  # the last one is padding
    after = record(state, uses, slots, tokens)
    counts = np.array(state.counts)
    counts[0, 39] += 1
    assert np.array_equal(after.counts, counts)
    L = BAD_WORD_TOKENS - 1
    recent = np.array(state.recent)
    recent[0], recent[2] = [NOTHING] * (L - 3) + [7, 39, 39], [3, 4, 5, 6, 7, 8, 6]
    assert np.array_equal(after.recent, recent)
    for name in ("bias", "prompted", "stops", "mask", "words"):
        assert getattr(after, name) is getattr(state, name)


def test_words_need_their_whole_beginning():
    logits = np.zeros((1, 40), np.float32)
    words = [[5, 6], [9, 9, 7], [8], [ANY - 5, 3], list(range(10, 10 + BAD_WORD_TOKENS))]
    for output, forbidden in (
        ([], {8}),
        ([5], {6, 8}),
        ([9], {8}),
        ([9, 9], {7, 8}),
        ([5, 1], {8}),
        (list(range(10, 17)), {8, 17}),
        ([99, *range(11, 17)], {8}),
    ):
        state = slot_state(1, 128, s0={"words": words, "output": output})
        uses = settings_of([{"uses": ("words",)}]).uses
        result = np.asarray(edit(jnp.pad(logits, ((0, 0), (0, 88))), uses, state, jnp.zeros(1, jnp.int32)))[0]
        assert set(np.flatnonzero(np.isneginf(result)).tolist()) == forbidden


def test_bits():
    assert bits_of([0, 31, 33], 40).tolist() == [2**31 + 1, 2]
