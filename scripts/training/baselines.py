"""What counting achieves on the same tokens: a unigram model, and a trigram model with Kneser-Ney smoothing."""

from typing import NamedTuple

import numpy as np

from scripts.training.tokens import Corpus


class Baselines(NamedTuple):
    """Mean negative log-likelihood, nats a token."""

    unigram: float
    trigram: float


def baselines(trained: Corpus, held_out: Corpus, vocab_size: int) -> Baselines:
    """Of the tokens that count in `held_out`, by models of all tokens in `trained`.

    The unigram model adds one to every count. The trigram model is interpolated Kneser-Ney (Chen and Goodman, 1999,
    section 2.7), with one discount an order by the numbers of n-grams seen once and twice, `n1 / (n1 + 2 n2)`, and a
    uniform distribution below the unigrams. A document's second token has one token before it, and a mark.
    """
    counts = np.bincount(trained.ids, minlength=vocab_size)
    grams, wanted = trigrams(trained, vocab_size), trigrams(held_out, vocab_size)[held_out.counts]
    unigram = -np.log((counts[wanted[:, 2]] + 1) / (counts.sum() + vocab_size))
    trigram = -np.log(KneserNey(grams, vocab_size).probabilities(wanted))
    return Baselines(float(unigram.mean()), float(trigram.mean()))


def trigrams(corpus: Corpus, mark: int) -> np.ndarray:
    """[T, 3]: every token behind the two before it in its document, `mark` where there are none."""
    place = np.arange(len(corpus.ids)) - np.repeat(corpus.starts[:-1], np.diff(corpus.starts))
    before = [np.where(place >= back, np.roll(corpus.ids, back), mark) for back in (2, 1)]
    return np.stack([*before, corpus.ids], axis=1).astype(np.int64)


class KneserNey:
    """Of trigrams [T, 3] of tokens below `vocab_size`, which itself is the mark of a document's start."""

    def __init__(self, grams: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # Each order counts in how many contexts the next higher one has it: not how often, which the highest does.
        highest, counts = np.unique(grams, axis=0, return_counts=True)
        middle, before = np.unique(highest[:, 1:], axis=0, return_counts=True)
        lowest, contexts = np.unique(middle[:, 1:], axis=0, return_counts=True)
        self._orders = [_Order(one, many, self._key) for one, many in ((lowest, contexts), (middle, before))]
        self._orders.append(_Order(highest, counts, self._key))

    def probabilities(self, grams: np.ndarray) -> np.ndarray:
        """[n]: of each last token behind the two before it."""
        result = np.full(len(grams), 1.0 / self.vocab_size)
        for width, order in enumerate(self._orders, start=1):
            result = order.interpolated(grams[:, -width:], result)
        return result

    def _key(self, grams: np.ndarray) -> np.ndarray:
        """One number for each n-gram of one length."""
        key = np.zeros(len(grams), np.int64)
        for column in grams.T:
            key = key * (self.vocab_size + 1) + column
        return key


class _Order:
    """n-grams of one length, each once, and their counts."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, key) -> None:
        self._key = key
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        self.discount = once / (once + 2 * twice) if once else 0.5
        self._grams, self._counts = _sorted(key(grams), counts)
        contexts = key(grams[:, :-1])
        self._contexts, place = np.unique(contexts, return_inverse=True)
        self._totals = np.bincount(place, weights=counts)
        self._followers = np.bincount(place)

    def interpolated(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """What the discount takes from the counts of a context goes to the lower order; all does, if it is new."""
        contexts = self._key(grams[:, :-1])
        totals, followers = (_found(self._contexts, values, contexts) for values in (self._totals, self._followers))
        counts = _found(self._grams, self._counts, self._key(grams))
        known = totals > 0
        totals = np.where(known, totals, 1.0)
        share = np.where(known, self.discount * followers / totals, 1.0)
        return np.maximum(counts - self.discount, 0.0) / totals + share * lower


def _sorted(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(keys)
    return keys[order], values[order]


def _found(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where there is none; `keys` rise."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0).astype(np.float64)
