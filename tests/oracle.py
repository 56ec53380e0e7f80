"""Slot attention in float64 NumPy, written as loops: what every implementation is compared with."""

import numpy as np


def attention(q, k, v, slots, positions, *, window=None, soft_cap=None, scale=None):
    """q [T, N, H], k and v [B, K, S, H], slots and positions [T] -> [T, N, H] float64. Rows of slot B give zero."""
    T, N, H = q.shape
    B, K, _, _ = k.shape
    scale = H**-0.5 if scale is None else scale
    out = np.zeros((T, N, H))
    for t in range(T):
        if slots[t] >= B:
            continue
        first = 0 if window is None else max(0, positions[t] - window + 1)
        for n in range(N):
            keys = np.asarray(k[slots[t], n // (N // K), first : positions[t] + 1], np.float64)
            values = np.asarray(v[slots[t], n // (N // K), first : positions[t] + 1], np.float64)
            scores = keys @ np.asarray(q[t, n], np.float64) * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ values / weights.sum()
    return out
