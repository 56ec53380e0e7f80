"""Counting by hand, and sums over the vocabulary."""

import math

import numpy as np
import pytest

from scripts.training.baselines import KneserNey, baselines, trigrams
from tests.training.test_data import corpus


def of(*documents, counts=None):
    """A corpus of these token ids, all of which count but the first of each."""
    made = corpus([len(document) for document in documents])
    ids = np.array([token for document in documents for token in document], np.int32)
    return type(made)(ids, made.counts if counts is None else np.array(counts), made.starts, made.where, 0)


def test_trigrams_stay_in_their_documents():
    found = trigrams(of([4, 5, 6], [], [7], [8, 9]), 99)
    assert found.tolist() == [[99, 99, 4], [99, 4, 5], [4, 5, 6], [99, 99, 7], [99, 99, 8], [99, 8, 9]]


def test_unigrams_by_hand():
    """Seven tokens, of which 0 was seen 4 times, and 4 added ones."""
    found = baselines(of([0, 0, 1, 0], [0, 1, 2]), of([3, 0, 3]), 4)
    assert found.unigram == pytest.approx(-(math.log(5 / 11) + math.log(1 / 11)) / 2)


def test_trigrams_by_hand():
    """The document 0 1 0 2 0 1 over 3 tokens; M is the mark.

    Trigrams, each once but for none: MM0, M01, 010, 102, 020, 201: all once, so n2 = 0 and their discount is 1.
    Bigrams by contexts before them: M0 1 (of MM0), 01 2 (M01, 201), 10 1, 02 1, 20 1: n1 = 4, n2 = 1, discount 4 / 6.
    Unigrams by the bigrams they end: 0 ends M0, 10, 20: 3; 1 ends 01: 1; 2 ends 02: 1. n1 = 2, n2 = 0: discount 1.
    """
    model = KneserNey(trigrams(of([0, 1, 0, 2, 0, 1]), 3), 3)
    assert [order.discount for order in model._orders] == pytest.approx([1, 4 / 6, 1])
    uniform, every = 1 / 3, 3 / 5  # of the 5 bigrams, the discounts of 3 kinds of token
    unigram = [2 / 5 + every * uniform, every * uniform, every * uniform]
    # Behind 0 there were 01 twice and 02 once.
    share = 4 / 6 * 2 / 3
    bigram = [share * unigram[0], (2 - 4 / 6) / 3 + share * unigram[1], (1 - 4 / 6) / 3 + share * unigram[2]]
    # Behind 1 0 there was 2, once: its discount takes all. Behind 2 2 there was nothing, behind 2 not either but 0.
    grams = np.array([[1, 0, 0], [1, 0, 1], [1, 0, 2], [2, 2, 0]])
    twenty = (1 - 4 / 6) / 1 + 4 / 6 * unigram[0]
    assert model.probabilities(grams) == pytest.approx([*bigram, twenty])


@pytest.mark.parametrize("length", [1, 2, 30, 2000])
def test_probabilities_sum_to_one(length):
    """Behind contexts that were seen, and behind those that were not."""
    rng = np.random.default_rng(length)
    model = KneserNey(trigrams(of(rng.integers(0, 12, length).tolist(), [3]), 20), 20)
    for context in ([20, 20], [20, 3], [3, 7], [7, 15], [15, 3]):
        grams = np.array([[*context, token] for token in range(20)])
        probabilities = model.probabilities(grams)
        assert probabilities.sum() == pytest.approx(1)
        assert probabilities.min() > 0


def test_trigrams_know_an_order_that_unigrams_do_not():
    chain = [token % 7 for token in range(300)]
    found = baselines(of(chain), of(chain[:50]), 7)
    assert found.unigram == pytest.approx(math.log(7), abs=0.01)
    assert found.trigram < 0.1


def test_only_what_counts_is_scored():
    counted = of([5, 0, 0, 1], counts=[False, False, False, True])
    trained = of([0, 0, 1, 0], [0, 1, 2])
    assert baselines(trained, counted, 8).unigram == pytest.approx(-math.log(3 / 15))
