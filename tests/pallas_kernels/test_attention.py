"""One conformance suite for every implementation of `slot_attention`, against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.kv_cache import LayerCache
from pallas_kernels.attention import BLOCK_Q, IMPLEMENTATIONS, slot_attention
from tests.cases import CASES
from tests.oracle import attention as oracle

# float32: sums of up to 256 products rounded to 2**-24, on values near one: a few 1e-7; 2e-6 leaves room for order.
# bfloat16: only inputs and result are rounded (2**-9 relative), sums are float32; outputs are below 1 in size.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8}


def build(case, dtype, seed=0):
    """The flat rows of a case, and a cache in which every row that may not be read is NaN."""
    rng = np.random.default_rng(seed)
    segments = [(start, count, 1) for start, count in ((p, 1) if p is not None else (0, 0) for p in case.decode)]
    segments += [(start, count, BLOCK_Q) for start, count in case.chunks]
    B, T = len(segments), sum(max(block, -(-count // block) * block) for _, count, block in segments)
    order = rng.permutation(B)  # a segment's slot is not its place in the plan
    slots, positions = np.full(T, B, np.int32), np.zeros(T, np.int32)
    cache = np.full((2, B, case.kv_heads, case.rows, case.head_dim), np.nan, np.float32)
    row = 0
    for slot, (start, count, block) in zip(order, segments, strict=True):
        slots[row : row + count] = slot
        positions[row : row + count] = np.arange(start, start + count)
        first = 0 if case.window is None else max(0, start - case.window + 1)
        if count:
            live = (2, case.kv_heads, start + count - first, case.head_dim)
            cache[:, slot, :, first : start + count] = rng.normal(size=live)
        row += max(block, -(-count // block) * block)
    q = rng.normal(size=(T, case.heads, case.head_dim)).astype(np.float32)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, *cache))
    return q, LayerCache(k, v), jnp.asarray(slots), jnp.asarray(positions)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    if reason := IMPLEMENTATIONS[request.param].unavailable():
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_float64(implementation, case, dtype):
    q, cache, slots, positions = build(case, dtype)
    options = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.scale}
    run = jax.jit(
        lambda q, cache, slots, positions: slot_attention(
            q, cache, slots, positions, num_decode=len(case.decode), implementation=implementation, **options
        )
    )
    out = np.asarray(run(q, cache, slots, positions), np.float64)
    wide = [np.asarray(x.astype(jnp.float32)) for x in (q, cache.k, cache.v)]
    expected = oracle(*wide, np.asarray(slots), np.asarray(positions), **options)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(expected).max()))


def test_a_row_does_not_depend_on_its_neighbours(implementation):
    """Bitwise: the same program with every other row changed gives this row the same bits."""
    case = next(case for case in CASES if case.name == "mixed")
    q, cache, slots, positions = build(case, "float32")
    run = jax.jit(lambda *args: slot_attention(*args, num_decode=len(case.decode), implementation=implementation))
    first = np.asarray(run(q, cache, slots, positions))
    for row in (0, 3, len(case.decode) + 3):
        slot = int(slots[row])
        alone = jnp.where((slots == slot)[:, None, None], q, 7.0)
        mine = (jnp.arange(cache.k.shape[0]) == slot)[:, None, None, None]
        others = [jnp.where(mine, x, jnp.nan) for x in (cache.k, cache.v)]
        quiet = jnp.where(slots == slot, slots, len(cache.k))
        np.testing.assert_array_equal(np.asarray(run(alone, LayerCache(*others), quiet, positions))[row], first[row])


def test_refusals():
    case = CASES[0]
    q, cache, slots, positions = build(case, "float32")
    with pytest.raises(ValueError, match="'nope' is not one of"):
        slot_attention(q, cache, slots, positions, num_decode=6, implementation="nope")
    with pytest.raises(ValueError, match="6 rows less 2 decode rows are not blocks of 16"):
        slot_attention(q, cache, slots, positions, num_decode=2, implementation="xla")


def test_rows_without_blocks_in_any_order():
    """The CPU kernel makes its own tiles: of one row or many, in order or not, the bits of each row are the same."""
    if reason := IMPLEMENTATIONS["cpu"].unavailable():
        pytest.skip(reason)
    case = next(case for case in CASES if case.name == "mixed")
    q, cache, slots, positions = build(case, "float32")
    run = jax.jit(lambda *args: slot_attention(*args, num_decode=0, implementation="cpu"))
    straight = np.asarray(run(q, cache, slots, positions))
    order = np.random.default_rng(0).permutation(len(slots))
    np.testing.assert_array_equal(np.asarray(run(q[order], cache, slots[order], positions[order])), straight[order])
