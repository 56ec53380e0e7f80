"""Queries and caches for attention cases, and whether a result is right: against float64 on the host.

No cache is gathered: each check fetches the keys and values of one head of one slot.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import IMPLEMENTATIONS, cache_shapes
from scripts.attention_cases import Case

TOLERANCE = {"bfloat16": 3 * 2.0**-8, "float16": 2.0**-9, "float32": 2.0**-16}


class Inputs(NamedTuple):
    """Arrays of JAX or of NumPy. `slots`: one array a copy; all copies live in one cache, in slots of their own."""

    q: Any
    cache: tuple[Any, ...]
    slots: tuple[np.ndarray, ...]
    positions: np.ndarray
    num_decode: int


def tolerance(dtype: str, platform: str, name: str) -> float:
    """Largest error, as a share of a head's largest value, that rounding explains.

    A result is rounded by up to 2**-8 in bfloat16 and 2**-11 in float16, and so is each softmax weight; sums are
    float32, where the order of thousands of terms and the exponential cost a few bits of 24. On accelerators XLA
    multiplies float32 in fewer bits unless told otherwise (TF32, bfloat16); `name`: only ours but `xla` tell it.
    """
    told = name in IMPLEMENTATIONS and name != "xla"
    return TOLERANCE["bfloat16" if dtype == "float32" and platform != "cpu" and not told else dtype]


def make_inputs(case: Case, *, implementation: str, dtype: Any, copies: int = 1) -> Inputs:
    """On the device: normal queries, keys and values; NaN in every cache row that no row may read.

    In the implementation's layout, with zeros in the lanes that are there to fill tiles.
    """
    rows, B = case.lay_out(IMPLEMENTATIONS[implementation].block_q), len(case.segments)
    first, end = (np.tile(bound, copies).astype(np.int32) for bound in case.readable())
    q, cache = _make_arrays(
        first,
        end,
        cache_shapes=tuple(cache_shapes(implementation, B * copies, case.kv_heads, case.slot_rows, case.head_dim)),
        q_shape=(len(rows.slots), case.heads, case.head_dim),
        dtype=jnp.dtype(dtype).name,
    )
    live = rows.slots < B
    slots = tuple(np.where(live, rows.slots + copy * B, B * copies).astype(np.int32) for copy in range(copies))
    return Inputs(q, cache, slots, rows.positions, rows.num_decode)


@partial(jax.jit, static_argnames=("cache_shapes", "q_shape", "dtype"))
def _make_arrays(first, end, *, cache_shapes, q_shape, dtype):
    B, K, S, lanes = cache_shapes[0]
    H = q_shape[-1]
    keys = jax.random.split(jax.random.key(0, impl="rbg"))
    kv = jax.random.normal(keys[0], (B, K, S, 2 * H), dtype)
    rows = jnp.arange(S)[None, :]
    readable = (rows >= first[:, None]) & (rows < end[:, None])
    kv = jnp.where(readable[:, None, :, None], kv, jnp.asarray(jnp.nan, dtype))
    cache = (kv[..., :H], kv[..., H:]) if len(cache_shapes) == 2 else (_filled(jnp, kv, lanes),)
    return jax.random.normal(keys[1], q_shape, dtype), cache


def _filled(library: Any, kv: Any, lanes: int) -> Any:
    """With zeros up to so many lanes."""
    more = lanes - kv.shape[-1]
    return library.pad(kv, ((0, 0), (0, 0), (0, 0), (0, more))) if more else kv


def make_small_inputs(case: Case, *, implementation: str, dtype: Any) -> Inputs:
    """The same in NumPy, with the slots in another order than the rows: nothing is compiled for it."""
    rng, kind, B = np.random.default_rng(0), jnp.dtype(dtype), len(case.segments)
    order = rng.permutation(B)
    rows = case.lay_out(IMPLEMENTATIONS[implementation].block_q, order)
    shapes = cache_shapes(implementation, B, case.kv_heads, case.slot_rows, case.head_dim)
    kv = np.full((*shapes[0][:3], 2 * case.head_dim), np.nan, kind)
    for slot, first, end in zip(order, *case.readable(), strict=True):
        shape = (case.kv_heads, end - first, 2 * case.head_dim)
        kv[slot, :, first:end] = rng.standard_normal(shape, np.float32).astype(kind)
    q = rng.standard_normal((len(rows.slots), case.heads, case.head_dim), np.float32).astype(kind)
    split = len(shapes) == 2
    cache = tuple(map(np.ascontiguousarray, np.split(kv, 2, -1))) if split else (_filled(np, kv, shapes[0][-1]),)
    return Inputs(q, cache, (rows.slots,), rows.positions, rows.num_decode)


def one_head(cache: tuple[Any, ...], slot: int, head: int) -> np.ndarray:
    """Keys and values of one head of one slot, [S, 2H], and zeros to fill tiles where the layout has them."""
    if isinstance(cache[0], np.ndarray):
        return np.concatenate([array[slot, head] for array in cache], -1)
    return np.asarray(_one_head(cache, slot, head))


@jax.jit
def _one_head(cache, slot, head):
    return jnp.concatenate([array[slot, head] for array in cache], -1)


def expected(q, keys, values, *, scale: float, soft_cap: float | None = None) -> np.ndarray:
    """float64: queries [G, H] that all see the keys and values [n, H] -> [G, H]."""
    q, keys, values = (np.asarray(x).astype(np.float64) for x in (q, keys, values))
    scores = q @ keys.T * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ values / weights.sum(-1, keepdims=True)


def head_error(got: np.ndarray, right: np.ndarray) -> float:
    """The largest error of [G, H], as a share of each head's largest value; infinite for what is not a number."""
    error = np.abs(got.astype(np.float64) - right).max(-1) / np.abs(right).max(-1)
    return float(np.where(np.isfinite(error), error, np.inf).max())


def sample_rows(case: Case, live: np.ndarray, positions: np.ndarray, count: int) -> Iterable[tuple[int, int]]:
    """(row, KV head): rows with the shortest and longest reach, the first and last of all, and others at random."""
    rng = np.random.default_rng(0)
    by_reach = live[np.argsort(positions[live], kind="stable")]
    rows = [by_reach[0], by_reach[-1], live[0], live[-1], *rng.choice(live, max(count - 4, 0))]
    return [(int(row), int(rng.integers(case.kv_heads))) for row in dict.fromkeys(rows)]


def worst_error(case: Case, inputs: Inputs, out: Any, *, samples: int | None = 8) -> float:
    """Of a result over copy 0, as `head_error`; of a sample of rows and heads, or of all with None.

    Whatever is sampled, a value anywhere that is not finite, and a padding row that is not zero, count as infinite.
    """
    slots, positions, out = inputs.slots[0], inputs.positions, np.asarray(out)
    is_live = slots < inputs.cache[0].shape[0]
    live = np.flatnonzero(is_live)
    if not np.isfinite(out).all() or (out[~is_live] != 0).any():
        return float("inf")
    if not len(live):
        return 0.0
    H, G = case.head_dim, case.heads // case.kv_heads
    scale = H**-0.5 if case.scale is None else case.scale
    every = ((int(row), head) for row in live for head in range(case.kv_heads))
    chosen = every if samples is None else sample_rows(case, live, positions, samples)
    queries, worst = np.asarray(inputs.q), 0.0
    for row, head in chosen:
        seen = slice(max(0, positions[row] - (case.window or case.slot_rows) + 1), positions[row] + 1)
        kv = one_head(inputs.cache, int(slots[row]), head)[seen]
        heads = slice(head * G, (head + 1) * G)
        right = expected(queries[row, heads], kv[:, :H], kv[:, H : 2 * H], scale=scale, soft_cap=case.soft_cap)
        worst = max(worst, head_error(out[row, heads], right))
    return worst
