"""Slot attention on TPUs, on a fused cache: one Mosaic kernel, over tiles of a decode row or of a block of a chunk.

Copies of key blocks run ahead of the arithmetic through a ring of buffers, across tiles, and of live rows only: time
and traffic follow the live lengths, not S. Online softmax as in FlashAttention (arXiv 2205.14135).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.mosaic_tpu_write import BLOCK_Q, block_ends, in_hbm
from pallas_kernels.attention.tuning import tuning

LANES = 128
COPY_ROWS = 128  # rows of the cache in one copy; S is a multiple of it
MAX_TILE_ROWS = 512  # query rows of a tile, the heads of a group times BLOCK_Q
MAX_RING_BYTES = {2: 8 << 20, 4: 4 << 20}  # of 16 MB; products of float32 take copies of their inputs
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a difference of two is 0, not NaN


def attend(q, layer_cache, slots, positions, *, num_decode, window, soft_cap, scale, interpret=False):
    """See `slot_attention`. `interpret`: False, True or `pltpu.InterpretParams`, for tests without a TPU."""
    (kv,) = layer_cache
    T, N, H = q.shape
    B, K, S, _ = kv.shape
    G = N // K
    if S % COPY_ROWS:
        raise ValueError(f"a slot of {S} rows is not a multiple of {COPY_ROWS}")
    kind = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""
    tuned = tuning("mosaic_tpu", kind, str(q.dtype), H)
    run = functools.partial(
        _attend_tiles, kv=kv, window=window, soft_cap=soft_cap, scale=scale, value_dim=H, interpret=interpret
    )
    if H % LANES:
        # Keys and values share a lane tile: zeros meet the values in the scores, and the keys' part of the sums is cut.
        q = jnp.pad(q, ((0, 0), (0, 0), (0, kv.shape[-1] - H)))
    D = q.shape[-1]
    parts = []
    if num_decode:
        # Whole sublane tiles of query rows; a row's zeros are cut off again.
        sublanes = 32 // q.dtype.itemsize
        rows = jnp.pad(q[:num_decode].reshape(num_decode, K, G, D), ((0, 0), (0, 0), (0, -G % sublanes), (0, 0)))
        at = (slots[:num_decode], positions[:num_decode], positions[:num_decode])
        stages = tuned.decode_stages
        heads = heads_together(kv, stages)
        out = run(rows, *at, tokens=1, heads=heads, block_k=tuned.decode_block_k, stages=stages)
        parts.append(out[:, :, :G].reshape(num_decode, N, H))
    if num_decode < T:
        blocks = (T - num_decode) // BLOCK_Q
        # Query heads of one key head that share a tile.
        shared = max(n for n in range(1, G + 1) if G % n == 0 and (n == 1 or n * BLOCK_Q <= MAX_TILE_ROWS))
        tiles = q[num_decode:].reshape(blocks, BLOCK_Q, N, D).swapaxes(1, 2)
        tiles = tiles.reshape(blocks, N // shared, shared * BLOCK_Q, D)
        at = block_ends(slots[num_decode:], positions[num_decode:], B)
        out = run(tiles, *at, tokens=BLOCK_Q, heads=1, block_k=tuned.chunk_block_k, stages=tuned.chunk_stages)
        parts.append(out.reshape(blocks, N, BLOCK_Q, H).swapaxes(1, 2).reshape(T - num_decode, N, H))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def heads_together(kv, stages):
    """KV heads that a decode row's grid step takes: as many as the ring of buffers has a copy's rows of."""
    K = kv.shape[1]
    return max(n for n in range(1, K + 1) if K % n == 0 and (n == 1 or _rows_that_fit(kv, stages * n)))


def block_rows(kv, block_k, stages, heads):
    """Keys of a block where `block_k` are asked for: no more than a slot has, nor than the ring of buffers holds."""
    return max(min(block_k, kv.shape[2], _rows_that_fit(kv, stages * heads)), COPY_ROWS)


def _rows_that_fit(kv, heads):
    """Rows of so many heads that the ring of buffers may hold, a multiple of `COPY_ROWS`."""
    lanes_in_memory = -(-kv.shape[-1] // LANES) * LANES
    row_bytes = heads * lanes_in_memory * kv.dtype.itemsize
    return MAX_RING_BYTES[kv.dtype.itemsize] // row_bytes // COPY_ROWS * COPY_ROWS


def _attend_tiles(
    q, slots, firsts, lasts, *, kv, window, soft_cap, scale, value_dim, tokens, heads, block_k, stages, interpret
):
    """q [tiles, groups * heads, rows, D] -> [tiles, groups * heads, rows, value_dim].

    Tile i belongs to slot `slots[i]`, its tokens have positions `firsts[i]..lasts[i]`; row r is of token `r % tokens`.
    A grid step takes `heads` rows of axis 1, and as many key heads.
    """
    B, K, S, lanes = kv.shape
    tiles, groups, rows, D = q.shape
    groups //= heads
    block_k = block_rows(kv, block_k, stages, heads)
    # `following[i]`: the first tile from i on that is not padding, `tiles` if there is none.
    live = jnp.where(slots < B, jnp.arange(tiles), tiles)
    following = jnp.append(lax.cummin(live, reverse=True), tiles)
    tables = [slots, firsts, jnp.minimum(lasts, S - 1), following, jnp.asarray(0 if window is None else window)[None]]
    kernel = functools.partial(
        _attend_kernel,
        num_slots=B,
        groups_per_head=groups * heads // K,
        tokens=tokens,
        windowed=window is not None,
        soft_cap=soft_cap,
        scale=scale,
        value_dim=value_dim,
    )
    sums = lanes if _share_lanes(q, kv) else value_dim
    tile = lambda i, j, *_: (i, j, 0, 0)  # noqa: E731
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((*q.shape[:3], value_dim), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(tiles, groups),
            in_specs=[pl.BlockSpec((1, heads, rows, D), tile), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec((1, heads, rows, value_dim), tile),
            scratch_shapes=[
                pltpu.VMEM((stages, heads, block_k, lanes), kv.dtype),
                pltpu.SemaphoreType.DMA((stages,)),
                pltpu.SMEM((5,), jnp.int32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, sums), jnp.float32),
            ],
        ),
        # One step after the other: the ring of buffers lives on from step to step.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="slot_attention_decode" if tokens == 1 else "slot_attention_chunk",
        interpret=interpret,
    )(*(table.astype(jnp.int32) for table in tables), q, kv if interpret else in_hbm(kv))


def _attend_kernel(
    slots, firsts, lasts, following, window,  # scalars: see `_attend_tiles`
    q_ref, kv_ref, o_ref,
    ring, arrived,  # key blocks [stages, heads, block_k, lanes], and a semaphore each
    cursor,  # tile, group, block and buffer of the next copy, buffer of the next block to use
    top_ref, total_ref, sum_ref,  # the running softmax; the first two with the same number in all lanes
    *, num_slots, groups_per_head, tokens, windowed, soft_cap, scale, value_dim,
):  # fmt: skip
    tile, group = pl.program_id(0), pl.program_id(1)
    tiles, groups = pl.num_programs(0), pl.num_programs(1)
    stages, heads, block_k, lanes = ring.shape
    _, _, rows, D = q_ref.shape
    shared_lanes = _share_lanes(q_ref, ring)

    def bounds(tile):
        """The first and the last key that any row of the tile attends to."""
        return jnp.clip(firsts[tile] - window[0] + 1, 0, lasts[tile]) if windowed else 0, lasts[tile]

    def copies(tile, group, block, stage, act):
        """`act` on the copies of a key block's live rows into a buffer."""
        low, high = bounds(tile)
        start = block * block_k
        head = pl.ds(lax.div(group, groups_per_head) * heads, heads)

        def one(i, _):
            there = pl.ds(pl.multiple_of(start + i * COPY_ROWS, COPY_ROWS), COPY_ROWS)
            here = pl.ds(pl.multiple_of(i * COPY_ROWS, COPY_ROWS), COPY_ROWS)
            act(pltpu.make_async_copy(kv_ref.at[slots[tile], head, there], ring.at[stage, :, here], arrived.at[stage]))

        first = lax.div(jnp.maximum(low - start, 0), COPY_ROWS)
        lax.fori_loop(first, lax.div(jnp.minimum(high - start, block_k - 1), COPY_ROWS) + 1, one, None)

    def fetch():
        """Start the next copy, if any is left, and move the cursor on."""
        tile, group, block, stage = (cursor[i] for i in range(4))

        @pl.when(tile < tiles)
        def _():
            copies(tile, group, block, stage, lambda copy: copy.start())
            _, high = bounds(tile)
            done = block == lax.div(high, block_k)
            last_group = group == groups - 1
            next_tile = jnp.where(done & last_group, following[tile + 1], tile)
            next_low, _ = bounds(jnp.minimum(next_tile, tiles - 1))
            cursor[0] = next_tile
            cursor[1] = jnp.where(done, jnp.where(last_group, 0, group + 1), group)
            cursor[2] = jnp.where(done, lax.div(next_low, block_k), block + 1)
            cursor[3] = lax.rem(stage + 1, stages)

    @pl.when((tile == 0) & (group == 0))
    def _():
        low, _ = bounds(jnp.minimum(following[0], tiles - 1))
        for i, value in enumerate((following[0], 0, lax.div(low, block_k), 0, 0)):
            cursor[i] = value
        # What no copy has written, and no mask cleaned, is multiplied by a weight of 0: it must not be NaN.
        ring[...] = jnp.zeros(ring.shape, ring.dtype)
        for _ in range(stages - 1):
            fetch()

    def clean(stage, start, key):
        """Zero the rows that no mask allows among those that were copied with `key`: they may hold NaN."""
        low, high = bounds(tile)
        at = lax.div(key - start, COPY_ROWS) * COPY_ROWS
        here = pl.ds(pl.multiple_of(at, COPY_ROWS), COPY_ROWS)
        keys = start + at + lax.broadcasted_iota(jnp.int32, (COPY_ROWS, lanes), 0)
        live = (keys >= low) & (keys <= high)

        def one(head, _):
            kept = jnp.where(live, ring[stage, head, here].astype(jnp.float32), 0.0)
            ring[stage, head, here] = kept.astype(ring.dtype)

        lax.fori_loop(0, heads, one, None)

    def accumulate(stage, start, masked):
        """One more key block into the running softmax."""
        precision = lax.Precision.HIGHEST if ring.dtype == jnp.float32 else None
        keys = ring[stage, :, :, :D]
        values = keys if shared_lanes else ring[stage, :, :, D:]
        dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        scores = dot(q_ref[0], keys, (((2,), (2,)), ((0,), (0,)))) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if masked:
            shape = (rows, block_k)
            keys_at = start + lax.broadcasted_iota(jnp.int32, shape, 1)
            rows_at = firsts[tile] + lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), tokens)
            live = keys_at <= jnp.minimum(rows_at, lasts[tile])
            if windowed:
                live &= keys_at > rows_at - window[0]
            scores = jnp.where(live[None], scores, MASKED)
        # A row without a live key so far has equal weights here, and `keep` 0 at its first live key.
        before = top_ref[...]
        top = jnp.maximum(before, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - _to_lanes(top, block_k))
        keep = jnp.exp(before - top)
        top_ref[...] = top
        total_ref[...] = total_ref[...] * keep + weights.sum(-1, keepdims=True)
        sums = dot(weights.astype(ring.dtype), values, (((2,), (1,)), ((0,), (0,))))
        sum_ref[...] = sum_ref[...] * _to_lanes(keep, sums.shape[-1]) + sums

    live_tile = slots[tile] < num_slots

    @pl.when(jnp.logical_not(live_tile))
    def _():
        o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)

    @pl.when(live_tile)
    def _():
        low, high = bounds(tile)
        low_block, high_block = lax.div(low, block_k), lax.div(high, block_k)
        # Of the first token's causal mask and of the last token's window, were the tile full.
        all_from = firsts[tile] + tokens - window[0] if windowed else 0
        all_to = firsts[tile]
        top_ref[...] = jnp.full(top_ref.shape, MASKED)
        total_ref[...] = jnp.zeros(total_ref.shape)
        sum_ref[...] = jnp.zeros(sum_ref.shape)

        def one(block, _):
            fetch()
            stage, start = cursor[4], block * block_k
            copies(tile, group, block, stage, lambda copy: copy.wait())
            pl.when(block == high_block)(lambda: clean(stage, start, high))
            if windowed:
                pl.when(block == low_block)(lambda: clean(stage, start, low))
            plain = (start >= all_from) & (start + block_k - 1 <= all_to)
            pl.when(plain)(lambda: accumulate(stage, start, masked=False))
            pl.when(jnp.logical_not(plain))(lambda: accumulate(stage, start, masked=True))
            cursor[4] = lax.rem(stage + 1, stages)

        lax.fori_loop(low_block, high_block + 1, one, None)
        out = sum_ref[...] / _to_lanes(total_ref[...], sum_ref.shape[-1])
        if shared_lanes:
            out = out[..., value_dim : 2 * value_dim]
        token = lax.rem(lax.broadcasted_iota(jnp.int32, out.shape, 1), tokens)
        o_ref[0] = jnp.where(token <= lasts[tile] - firsts[tile], out, 0.0).astype(o_ref.dtype)


def _share_lanes(q, kv):
    """Whether keys and values are not cut apart, see `attend`."""
    return q.shape[-1] == kv.shape[-1]


def _to_lanes(x, lanes):
    """x [..., 128], where all lanes hold the same, with another number of lanes."""
    return jnp.concatenate([x] * -(-lanes // LANES), axis=-1)[..., :lanes]
