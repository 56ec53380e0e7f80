"""Writing rows into a fused cache on TPUs, in place: XLA's scatter would copy the cache.

Memory is written in whole sublane tiles, so a tile that is not wholly new is read, changed and written back.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.mosaic_tpu import BLOCK_Q

STEP_UNITS = 8  # decode rows a grid step
MAX_BUFFERS = 8
MAX_BUFFER_BYTES = 4 << 20


def block_ends(slots, positions, padding_slot):
    """Slot, first and last position of each block of `BLOCK_Q` rows. All padding: the last is before the first."""
    slots, positions = slots.reshape(-1, BLOCK_Q), positions.reshape(-1, BLOCK_Q)
    return slots[:, 0], positions[:, 0], positions[:, 0] + (slots < padding_slot).sum(1, dtype=jnp.int32) - 1


def in_hbm(kv):
    """The cache, which XLA is not to copy to VMEM ahead of a kernel, as it would with a small one."""
    return pltpu.with_memory_space_constraint(kv, pltpu.HBM)


def write(layer_cache, k, v, slots, positions, *, num_decode, interpret=False):
    """See `write_rows`. `interpret`: False, True or `pltpu.InterpretParams`, for tests without a TPU."""
    (kv,) = layer_cache
    T, K, _ = k.shape
    B, lanes = kv.shape[0], kv.shape[-1]
    new = jnp.concatenate([k, v], axis=-1).astype(kv.dtype)
    new = jnp.pad(new, ((0, 0), (0, 0), (0, lanes - new.shape[-1])))
    if num_decode:
        rows = new[:num_decode]
        if kv.dtype.itemsize == 2:  # the same bits in both halves of a word, for an even row and for an odd one
            rows = lax.bitcast_convert_type(rows, jnp.uint16).astype(jnp.uint32) * 0x10001
        rows = lax.bitcast_convert_type(rows, jnp.int32).reshape(num_decode, K, 1, lanes)
        more = -num_decode % STEP_UNITS
        rows = jnp.pad(rows, ((0, more), (0, 0), (0, 0), (0, 0)))
        at = jnp.pad(slots[:num_decode], (0, more), constant_values=B), jnp.pad(positions[:num_decode], (0, more))
        kv = _write_units(kv, rows, *at, at[1], step_units=STEP_UNITS, interpret=interpret)
    if num_decode < T:
        blocks = new[num_decode:].reshape(-1, BLOCK_Q, K, lanes).swapaxes(1, 2)
        at = block_ends(slots[num_decode:], positions[num_decode:], B)
        kv = _write_units(kv, blocks, *at, step_units=1, interpret=interpret)
    return (kv,)


def _write_units(kv, new, slots, firsts, lasts, *, step_units, interpret):
    """new [units, K, tokens, lanes]: unit i goes to rows `firsts[i]..lasts[i]` of `slots[i]`, or nowhere (slot B)."""
    B, K, S, lanes = kv.shape
    units, _, tokens, _ = new.shape
    sublanes = 32 // kv.dtype.itemsize
    # Rows of a buffer: the tiles that `tokens` rows can touch.
    span = sublanes if tokens == 1 else tokens + sublanes
    lanes_in_memory = -(-lanes // 128) * 128
    buffers = MAX_BUFFER_BYTES // (K * span * lanes_in_memory * kv.dtype.itemsize)
    buffers = max(2, min(buffers, MAX_BUFFERS, units))
    tables = [slots, firsts, jnp.where(slots < B, jnp.minimum(lasts, S - 1), -1)]
    return pl.pallas_call(
        _write_kernel,
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(units // step_units,),
            in_specs=[
                pl.BlockSpec((step_units, K, tokens, lanes), lambda i, *_: (i, 0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((buffers, K, span, lanes), kv.dtype),
                pltpu.SemaphoreType.DMA((buffers,)),
                pltpu.SemaphoreType.DMA((buffers,)),
                pltpu.SMEM((buffers,), jnp.int32),
                pltpu.SMEM((buffers,), jnp.int32),
            ],
        ),
        input_output_aliases={len(tables) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="write_rows_decode" if tokens == 1 else "write_rows_chunk",
        interpret=interpret,
    )(*(table.astype(jnp.int32) for table in tables), new, kv if interpret else in_hbm(kv))


def _write_kernel(
    slots, firsts, lasts,  # scalars: see `_write_units`
    new_ref, _, kv_ref,  # the cache is read and written as `kv_ref`, which is the ignored input too
    ring, read, written,  # tiles of a unit [buffers, K, span, lanes], and two semaphores each
    reading, writing,  # of each buffer: whether its unit's reads have begun, whether writes are on their way
):  # fmt: skip
    step = pl.program_id(0)
    buffers, K, span, lanes = ring.shape
    step_units, _, tokens, _ = new_ref.shape
    units = pl.num_programs(0) * step_units
    packing = 4 // ring.dtype.itemsize
    sublanes = 8 * packing
    ahead = buffers // 2

    def live(unit):
        return lasts[unit] >= firsts[unit]

    def tiles(unit):
        """The first and the last sublane tile of the slot that the unit touches."""
        return lax.div(firsts[unit], sublanes), lax.div(lasts[unit], sublanes)

    def copies(unit, act, *, back):
        """`act` on the copy of each tile that is to be read (only what is not wholly new) or to be written back."""
        first, last = tiles(unit)
        buffer = lax.rem(unit, buffers)

        def one(tile, _):
            at = pl.multiple_of(tile * sublanes, sublanes)
            here = ring.at[buffer, :, pl.ds(pl.multiple_of((tile - first) * sublanes, sublanes), sublanes)]
            there = kv_ref.at[slots[unit], :, pl.ds(at, sublanes)]
            if back:
                act(pltpu.make_async_copy(here, there, written.at[buffer]))
            else:

                @pl.when((at < firsts[unit]) | (at + sublanes - 1 > lasts[unit]))
                def _():
                    act(pltpu.make_async_copy(there, here, read.at[buffer]))

        lax.fori_loop(first, last + 1, one, None)

    start, wait = (lambda copy: copy.start()), (lambda copy: copy.wait())

    def drain(unit):
        """Wait until `unit` is in the cache, if it may be on its way there."""
        buffer = lax.rem(unit, buffers)

        @pl.when(writing[buffer] == 1)
        def _():
            copies(unit, wait, back=True)
            writing[buffer] = 0

    def begin(unit):
        """Read the tiles of `unit`, unless a unit that may still be on its way to the cache changes one of them."""
        buffer = lax.rem(unit, buffers)

        @pl.when(unit >= buffers)
        def _():
            drain(unit - buffers)

        first, last = tiles(unit)

        def clashes(other, found):
            other_first, other_last = tiles(other)
            touches = live(other) & (slots[other] == slots[unit]) & (other_first <= last) & (first <= other_last)
            return found | touches.astype(jnp.int32)

        clash = lax.fori_loop(jnp.maximum(unit - buffers + 1, 0), unit, clashes, 0)
        go = live(unit) & (clash == 0)
        reading[buffer] = go.astype(jnp.int32)

        @pl.when(go)
        def _():
            copies(unit, start, back=False)

    def drain_all(unit):
        """Wait for all writes of units before `unit`."""
        lax.fori_loop(jnp.maximum(unit - buffers, 0), unit, lambda other, _: drain(other), None)

    def change(u, unit):
        """Put the new rows into the tiles, as words of 32 bits: of one row, or of the two that a sublane holds."""
        buffer = lax.rem(unit, buffers)
        first, _ = tiles(unit)
        low, high = firsts[unit] - first * sublanes, lasts[unit] - first * sublanes
        words = span // packing
        word = lax.broadcasted_iota(jnp.int32, (words, lanes), 0)
        if packing == 1:
            mask = jnp.where((word >= low) & (word <= high), -1, 0)
        else:
            even, odd = 2 * word, 2 * word + 1
            mask = jnp.where((even >= low) & (even <= high), 0xFFFF, 0)
            mask |= jnp.where((odd >= low) & (odd <= high), -0x10000, 0)

        def one(head, _):
            if tokens == 1:
                rows = jnp.broadcast_to(new_ref[u, head], (words, lanes))
            else:
                rows = pltpu.bitcast(new_ref[u, head], jnp.int32)
                rows = jnp.concatenate([rows, jnp.zeros((words - rows.shape[0], lanes), jnp.int32)], axis=0)
                rows = _shift_rows(rows, low, packing)
            old = pltpu.bitcast(ring[buffer, head], jnp.int32)
            ring[buffer, head] = pltpu.bitcast((old & ~mask) | (rows & mask), ring.dtype)

        lax.fori_loop(0, K, one, None)

    def one(u, _):
        unit = step * step_units + u
        buffer = lax.rem(unit, buffers)

        @pl.when(unit + ahead < units)
        def _():
            begin(unit + ahead)

        @pl.when(live(unit))
        def _():
            @pl.when(reading[buffer] == 0)
            def _():
                drain_all(unit)
                copies(unit, start, back=False)

            copies(unit, wait, back=False)
            change(u, unit)
            copies(unit, start, back=True)
            writing[buffer] = 1

    @pl.when(step == 0)
    def _():
        def clear(buffer, _):
            reading[buffer] = 0
            writing[buffer] = 0

        lax.fori_loop(0, buffers, clear, None)
        lax.fori_loop(0, jnp.minimum(ahead, units), lambda unit, _: begin(unit), None)

    lax.fori_loop(0, step_units, one, None)

    @pl.when(step == pl.num_programs(0) - 1)
    def _():
        drain_all(units)


def _shift_rows(words, count, packing):
    """Rows moved down by `count`, where a word holds one row or, the even one in its low half, two."""
    moved = pltpu.roll(words, lax.div(count, packing), 0)
    if packing == 1:
        return moved
    further = pltpu.roll(words, lax.div(count, packing) + 1, 0)
    return jnp.where(lax.rem(count, 2) == 1, (moved << 16) | lax.shift_right_logical(further, 16), moved)
