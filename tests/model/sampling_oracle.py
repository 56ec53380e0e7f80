"""Which tokens a row may draw and with what probability, in float64 NumPy written as loops, step by step."""

import numpy as np


def edited(logits, *, bias=0.0, prompt=(), output=(), stops=(), mask=None, words=(), **row):
    """The logits after bias, penalties and masks. `row`: repetition, presence, frequency."""
    x = np.asarray(logits, np.float64) + bias
    for token in range(len(x)):
        count = list(output).count(token)
        if count or token in prompt:
            x[token] = x[token] / row["repetition"] if x[token] > 0 else x[token] * row["repetition"]
        x[token] -= row["frequency"] * count + row["presence"] * (count > 0)
    forbidden = set(stops) | (set() if mask is None else set(range(len(x))) - set(mask))
    for word in words:
        before = list(word[:-1])
        if not before or list(output)[-len(before) :] == before:
            forbidden.add(word[-1])
    x[sorted(forbidden)] = -np.inf
    return x


def kept(x, *, top_k=0, top_p=1.0, min_p=0.0, **_):
    """Tokens that the filters leave of `x`, which temperature has divided already. Ties are kept."""
    values = np.sort(x[np.isfinite(x)])[::-1]
    left = np.isfinite(x)
    if 0 < top_k < len(x):
        left &= x >= values[min(top_k, len(values)) - 1]
    share = np.exp(x - values[0]) * left
    share /= share.sum()
    if top_p < 1:
        total = 0.0
        for value in values:
            total = share[x >= value].sum()
            if total >= top_p:
                break
        left &= x >= value
    return left & (np.exp(x - values[0]) >= min_p)


def distribution(logits, row, slot):
    """Probabilities of all tokens for a row that draws."""
    row = dict(repetition=1.0, presence=0.0, frequency=0.0) | row
    x = edited(logits, **slot, **{name: row[name] for name in ("repetition", "presence", "frequency")})
    x = x / row["temperature"]
    weights = np.where(kept(x, **row), np.exp(x - x.max()), 0.0)
    return weights / weights.sum()
