"""One conformance suite for every implementation of `slot_attention`, against float64 loops.

What has no device here runs in Pallas' interpreter, where a program takes seconds.
"""

import dataclasses
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import IMPLEMENTATIONS, cache_shapes, choose_implementation, slot_attention, write_rows
from tests.cases import CASES, LONG_CASES, AttentionCase
from tests.oracle import attention as oracle
from tests.pallas_kernels.interpreters import interpreted

# The GPU interpreter multiplies in NumPy, which warns of the NaN in rows that the masks then exclude.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

# float32: sums of up to 1536 products rounded to 2**-24, on values near one: a few 1e-7; 2e-6 leaves room for order.
# bfloat16, float16: inputs and result are rounded (2**-9 and 2**-12 relative), and the Mosaic kernels round each weight
# (at most 1) before the product with the values, as every flash attention does; sums are float32.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def takes(implementation, case, dtype):
    sizes = jnp.dtype(dtype), jnp.dtype(dtype), case.head_dim, case.heads, case.kv_heads
    return IMPLEMENTATIONS[implementation].unsupported(*sizes) is None


def dtypes_of(implementation, case):
    return [dtype for dtype in TOLERANCE if takes(implementation, case, dtype)]


RUNS = [
    pytest.param(name, case, dtype, id=f"{name}-{case.name}-{dtype}")
    for name, case in itertools.product(IMPLEMENTATIONS, (*CASES, *LONG_CASES))
    for dtype in dtypes_of(name, case)[: 1 if case in LONG_CASES else None]
]


def build(case, dtype, implementation, seed=0):
    """The flat rows of a case, and keys and values `[2, B, K, S, H]`: NaN in every row that may not be read."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()) + seed)
    block_q = IMPLEMENTATIONS[implementation].block_q
    segments = [(start, count, 1) for start, count in ((p, 1) if p is not None else (0, 0) for p in case.decode)]
    segments += [(start, count, block_q) for start, count in case.chunks]
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
    q, cache = (jnp.asarray(x, dtype) for x in (q, cache))
    return q, cache, jnp.asarray(slots), jnp.asarray(positions)


def laid_out(cache, implementation):
    """Keys and values as the layer cache that the implementation reads."""
    k, v = cache
    shapes = cache_shapes(implementation, *k.shape)
    if len(shapes) == 2:
        return k, v
    return (jnp.concatenate((k, v, jnp.zeros((*k.shape[:3], shapes[0][-1] - 2 * k.shape[-1]), k.dtype)), axis=-1),)


def program(case, implementation):
    """Jitted: (q, keys and values, slots, positions, window) -> attention."""

    def run(q, cache, slots, positions, window=case.window):
        options = {"window": window, "soft_cap": case.soft_cap, "scale": case.scale}
        cache = laid_out(cache, implementation)
        how = {"num_decode": len(case.decode), "implementation": implementation}
        return slot_attention(q, cache, slots, positions, **how, **options)

    return jax.jit(run)


def expected(case, q, cache, slots, positions):
    k, v = (np.asarray(x.astype(jnp.float32)) for x in cache)
    options = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.scale}
    return oracle(np.asarray(q.astype(jnp.float32)), k, v, np.asarray(slots), np.asarray(positions), **options)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    interpreted(request.param, monkeypatch)
    return request.param


@pytest.mark.parametrize(("implementation", "case", "dtype"), RUNS, indirect=["implementation"])
def test_matches_float64(implementation, case, dtype):
    inputs = build(case, dtype, implementation)
    out = np.asarray(program(case, implementation)(*inputs), np.float64)
    right = expected(case, *inputs)
    np.testing.assert_allclose(out, right, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(right).max()))


def test_a_row_does_not_depend_on_its_neighbours(implementation):
    """Bitwise: the same program with every other row changed gives this row the same bits."""
    case = next(case for case in CASES if case.name == "mixed")
    dtype = dtypes_of(implementation, case)[0]
    q, cache, slots, positions = build(case, dtype, implementation)
    run = program(case, implementation)
    first = np.asarray(run(q, cache, slots, positions))
    for row in (0, 3, len(case.decode) + 3):
        slot = int(slots[row])
        alone = jnp.where((slots == slot)[:, None, None], q, jnp.asarray(7.0, q.dtype))
        mine = (jnp.arange(cache.shape[1]) == slot)[None, :, None, None, None]
        others = jnp.where(mine, cache, jnp.asarray(jnp.nan, cache.dtype))
        quiet = jnp.where(slots == slot, slots, cache.shape[1])
        np.testing.assert_array_equal(np.asarray(run(alone, others, quiet, positions))[row], first[row])


def test_one_program_serves_every_window(implementation):
    case = next(case for case in CASES if case.name == "window_4")
    dtype = dtypes_of(implementation, case)[0]
    run = program(case, implementation)
    for window in (4, 100):
        one = dataclasses.replace(case, window=window)
        inputs = build(one, dtype, implementation)
        out = np.asarray(run(*inputs, jnp.int32(window)), np.float64)
        right = expected(one, *inputs)
        np.testing.assert_allclose(out, right, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(right).max()))


def test_write_changes_its_rows_alone(implementation):
    """Decode rows and chunks, at any offset, to the bit; rows of slot B go nowhere."""
    case = AttentionCase(
        "write", 2, 2, 64, 256, decode=(0, 77, None, 255), chunks=((0, 70), (101, 150), (0, 0), (9, 3))
    )
    dtype = dtypes_of(implementation, case)[0]
    q, cache, slots, positions = build(case, dtype, implementation)
    k, v = 2 * q + 1, -q
    how = {"num_decode": len(case.decode), "implementation": implementation}
    written = jax.jit(lambda *args: write_rows(laid_out(args[0], implementation), *args[1:], **how))(
        cache, k, v, slots, positions
    )
    right = np.array(cache)
    for new, kept in zip((k, v), right, strict=True):
        for row, slot in enumerate(np.asarray(slots)):
            if slot < len(kept):
                kept[slot, :, positions[row]] = new[row]
    for array, wanted in zip(written, laid_out(right, implementation), strict=True):
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(wanted, np.float32))


def test_nothing_is_read_past_the_end_of_a_slot(implementation):
    """Nor written: positions from S on, as decode rows and in a block that runs over the end, with NaN behind."""
    case = AttentionCase("past_the_end", 2, 1, 64, 256, decode=(255, 255, 255), chunks=((192, 64), (252, 4)), window=90)
    dtype = dtypes_of(implementation, case)[0]
    q, cache, slots, positions = build(case, dtype, implementation)
    run = program(case, implementation)
    right = np.asarray(run(q, cache, slots, positions))
    D, B = len(case.decode), cache.shape[1]
    # The slots that follow in memory are those of nobody.
    apart = jnp.full((2, 2 * B, *cache.shape[2:]), jnp.nan, cache.dtype).at[:, ::2].set(cache)
    doubled = jnp.where(slots < B, 2 * slots, 2 * B)
    beyond = positions.at[1:D].set(jnp.asarray([256, 100_000]))
    block_q = IMPLEMENTATIONS[implementation].block_q
    if block_q > 1:  # the last chunk's rows go on past the end
        first = len(slots) - block_q
        beyond = beyond.at[first:].set(252 + jnp.arange(block_q))
        doubled = doubled.at[first:].set(doubled[first])
    out = np.asarray(run(q, apart, doubled, beyond))
    live = np.asarray(slots) < B
    np.testing.assert_array_equal(out[live], right[live])
    assert np.isfinite(out).all()
    how = {"num_decode": D, "implementation": implementation}
    write = jax.jit(lambda cache, *args: write_rows(laid_out(cache, implementation), *args, **how))
    zeros, new = jnp.zeros_like(apart), jnp.ones((len(slots), 1, 64), cache.dtype)
    for array in write(zeros, new, new, doubled, beyond):
        written = np.asarray(array.astype(jnp.float32)).any(axis=(1, 3))  # [slot, row]
        assert not written[1::2].any()
        for row in np.flatnonzero(np.asarray(beyond) < 256):
            if live[row]:
                assert written[doubled[row], beyond[row]]
        assert written.sum() == len(
            {(int(s), int(p)) for s, p in zip(doubled, beyond, strict=True) if p < 256 and s < 2 * B}
        )


def test_a_traced_window_is_at_least_one(implementation):
    case = dataclasses.replace(next(case for case in CASES if case.name == "window_1"), chunks=())
    inputs = build(case, dtypes_of(implementation, case)[0], implementation)
    run = program(case, implementation)
    right = np.asarray(run(*inputs, jnp.int32(1)))
    assert np.isfinite(right).all()
    np.testing.assert_array_equal(np.asarray(run(*inputs, jnp.int32(-3))), right)


def test_what_serves_many_query_heads_of_a_kv_head(monkeypatch):
    """GPU decode has one wgmma of 64 rows for them: beyond that the next implementation serves."""
    gpu = IMPLEMENTATIONS["mosaic_gpu"]._replace(unavailable=lambda: None)
    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_gpu", gpu)
    monkeypatch.setitem(IMPLEMENTATIONS, "cpu", IMPLEMENTATIONS["cpu"]._replace(unavailable=lambda: "not here"))
    sizes = {"dtype": jnp.bfloat16, "cache_dtype": jnp.bfloat16, "head_dim": 64, "kv_heads": 1}
    assert choose_implementation(None, **sizes, heads=64) == "mosaic_gpu"
    assert choose_implementation(None, **sizes, heads=71) == "xla"
    with pytest.raises(ValueError, match="71 query heads a KV head are more than 64"):
        choose_implementation("mosaic_gpu", **sizes, heads=71)


def test_refusals():
    case = CASES[0]
    q, cache, slots, positions = build(case, "float32", "xla")
    sizes = {"dtype": q.dtype, "cache_dtype": q.dtype, "head_dim": 64, "heads": 3, "kv_heads": 1}
    with pytest.raises(ValueError, match="'nope' is not one of"):
        choose_implementation("nope", **sizes)
    with pytest.raises(ValueError, match="'mosaic_gpu' cannot run here"):
        choose_implementation("mosaic_gpu", **sizes)
    for window in (0, -1, np.int32(0)):
        with pytest.raises(ValueError, match=f"window must be at least 1, not {window}"):
            slot_attention(q, tuple(cache), slots, positions, num_decode=6, window=window, implementation="xla")
    with pytest.raises(ValueError, match="6 rows less 2 decode rows are not blocks of 16"):
        slot_attention(q, tuple(cache), slots, positions, num_decode=2, implementation="xla")
    with pytest.raises(ValueError, match="'cpu': it takes float32 and bfloat16, not float16"):
        slot_attention(q.astype("float16"), tuple(cache), slots, positions, num_decode=6, implementation="cpu")
    with pytest.raises(ValueError, match="scale must be positive, not 0"):
        slot_attention(q, tuple(cache), slots, positions, num_decode=6, scale=0.0, implementation="xla")


@pytest.mark.parametrize(("name", "other"), list(itertools.permutations(["xla", "mosaic_gpu", "mosaic_tpu"], 2)))
def test_a_cache_of_another_layout_is_refused(name, other):
    case = AttentionCase("layouts", 2, 2, 80, 128, decode=(3,))
    q, cache, slots, positions = build(case, "bfloat16", name)
    wrong, how = laid_out(cache, other), {"num_decode": 1, "implementation": name}
    for call in (
        lambda: slot_attention(q, wrong, slots, positions, **how),
        lambda: write_rows(wrong, q, q, slots, positions, **how),
        lambda: write_rows(laid_out(cache, name)[:1] * 3, q, q, slots, positions, **how),
    ):
        with pytest.raises(ValueError, match=f"'{name}' reads a cache of"):
            call()


def test_rows_without_blocks_in_any_order():
    """The CPU kernel makes its own tiles: of one row or many, in order or not, the bits of each row are the same."""
    if reason := IMPLEMENTATIONS["cpu"].unavailable():
        pytest.skip(reason)
    case = next(case for case in CASES if case.name == "mixed")
    q, cache, slots, positions = build(case, "float32", "cpu")
    run = jax.jit(lambda *args: slot_attention(args[0], tuple(cache), *args[1:], num_decode=0, implementation="cpu"))
    straight = np.asarray(run(q, slots, positions))
    order = np.random.default_rng(0).permutation(len(slots))
    np.testing.assert_array_equal(np.asarray(run(q[order], slots[order], positions[order])), straight[order])
