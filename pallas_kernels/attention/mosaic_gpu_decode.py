"""Decode rows on Hopper: flash-decoding over splits of a fixed size, by a persistent grid that walks the live ones."""

import functools
import math
from collections import namedtuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.mosaic_gpu import MOST_HEADS
from pallas_kernels.attention.tuning import Tuning

M = MOST_HEADS  # rows of a wgmma: the query heads of one KV head come first, what follows them is never stored
SHARED_PER_SM, SHARED_RESERVED = 233472, 1024 + 1024  # bytes; what the driver and barriers take of them
COMBINE_STAGES = 4
# Multiprocessors of an H100 or H200 SXM; the persistent grid is as many times the CTAs that one of them holds. Other
# Hoppers have fewer: there some CTAs wait for others to end, and results are the same.
NUM_SMS = 132


class _Sizes(namedtuple("_Sizes", "B R N K S H split")):
    """The sizes of a call as `decode` names them, and the keys of a split."""

    @property
    def padded(self):  # rows that a KV head's queries and results take in memory
        return pl.cdiv(self.N // self.K, 8) * 8

    @property
    def num_splits(self):
        return pl.cdiv(self.S, self.split)


# What both kernels know of the rows. The list of live splits holds each row's in turn: `ends` of a row is what it holds
# up to and with that row's, `row_of_item` says whose an item is. `window` is one number, or None.
_Rows = namedtuple("_Rows", "slots positions window ends row_of_item")
# Shared memory and the barriers on which its copies arrive.
_Scratch = namedtuple("_Scratch", "q k v o log_sum p q_barrier k_barriers v_barriers")
_CombineScratch = namedtuple("_CombineScratch", "o log_sum result o_barriers log_sum_barriers")


def decode(
    q: Float[Array, "R N H"],
    kv: Float[Array, "B K S 2H"],
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    *,
    window: int | Int[Array, ""] | None,
    soft_cap: float | None,
    scale: float,
    tuning: Tuning,
    interpret=False,
) -> Float[Array, "R N H"]:
    """Row r attends to rows `max(0, positions[r] - window + 1) .. positions[r]` of slot `slots[r]`; slot B is padding.

    A row's keys are cut at multiples of a size that depends on H alone, so its result does not depend on the other
    rows. The splits with a key to read, of all rows, are the work list; one KV head of a split is a unit of work.
    """
    (R, N, H), (B, K, S, _) = q.shape, kv.shape
    G = N // K
    sizes = _Sizes(B, R, N, K, S, H, split=512 if H <= 128 else 256)
    padded, num_splits = sizes.padded, sizes.num_splits
    for what, rows in (("a slot", S), ("a split", sizes.split)):
        if rows % tuning.decode_block_k:
            raise ValueError(f"{what} of {rows} rows is not blocks of {tuning.decode_block_k}")
    rows = _live_splits(slots, positions, window, sizes)

    queries = q.reshape(R * K, G, H)
    if padded > G:
        queries = jnp.pad(queries, ((0, 0), (0, padded - G), (0, 0)))
    scratch, shared = _scratch(H, q.dtype, tuning, interpret)
    ctas = NUM_SMS * max(1, min(3 if H <= 96 else 2, SHARED_PER_SM // (shared + SHARED_RESERVED)))  # registers, memory
    ctas = min(3 if interpret else ctas, R * K * num_splits)
    outputs, log_sums = plgpu.kernel(
        functools.partial(_decode_kernel, sizes=sizes, ctas=ctas, tuning=tuning, soft_cap=soft_cap, scale=scale),
        out_type=(
            jax.ShapeDtypeStruct((num_splits * R * K * padded, H), jnp.float32),
            jax.ShapeDtypeStruct((num_splits * R * K * padded,), jnp.float32),
        ),
        scratch_types=[scratch],
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret or None,
        kernel_name="slot_decode",
    )(queries.reshape(R * K * padded, H), kv.reshape(B * K * S, 2 * H), rows)
    if num_splits == 1:
        outputs = outputs.reshape(R, K, padded, H)[:, :, :G].reshape(R, N, H)
        return jnp.where((slots < B)[:, None, None], outputs, 0.0).astype(q.dtype)
    return _combine(outputs, log_sums, rows, sizes, q.dtype, interpret)


def _live_splits(slots, positions, window, sizes):
    """Sums over comparisons, where cumsum and searchsorted would take several programs each."""
    split = sizes.split
    first = 0 if window is None else jnp.maximum(positions - window + 1, 0) // split
    count = jnp.where(slots < sizes.B, positions // split - first + 1, 0)
    rows = jnp.arange(sizes.R, dtype=jnp.int32)
    ends = jnp.sum(jnp.where(rows[None, :] <= rows[:, None], count[None, :], 0), axis=1, dtype=jnp.int32)
    items = jnp.arange(sizes.R * sizes.num_splits, dtype=jnp.int32)
    row_of_item = jnp.sum(ends[None, :] <= items[:, None], axis=1, dtype=jnp.int32)  # R beyond the last item
    window = None if window is None else jnp.full((1,), window, jnp.int32)
    return _Rows(slots, positions, window, ends, row_of_item)


def _scratch(H, dtype, tuning, interpret):
    """The decode kernel's scratch, and how many bytes of shared memory it takes."""
    stages, block_k = tuning.decode_stages, tuning.decode_block_k
    memory = (
        _swizzled((M, H), dtype),
        _swizzled((stages, block_k, H), dtype),
        _swizzled((stages, block_k, H), dtype),
        # Half of the lanes at a time, where all of them would leave H = 128 one block an SM.
        plgpu.SMEM((M, H if H < 128 else H // 2), jnp.float32),
        plgpu.SMEM((M,), jnp.float32),
    )
    shared = sum(math.prod(x.shape) * x.dtype.itemsize for x in memory)
    weights = _swizzled((M, block_k), dtype) if interpret else None  # else they stay in registers
    full = plgpu.Barrier(num_barriers=stages)
    return _Scratch(*memory, weights, plgpu.Barrier(), full, full), shared


def _swizzled(shape, dtype):
    """Shared memory that both TMA and wgmma address, with the widest swizzle that divides a row."""
    row = shape[-1] * dtype.itemsize
    swizzle = next(width for width in (128, 64, 32) if row % width == 0)
    tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # pyright: ignore[reportAbstractUsage]


def _decode_kernel(q_ref, kv_ref, rows, out_ref, log_sum_ref, smem, *, sizes, ctas, tuning, soft_cap, scale):
    _, R, _, K, S, H, split = sizes
    padded, block_k, stages = sizes.padded, tuning.decode_block_k, tuning.decode_stages
    num_units = rows.ends[R - 1] * K
    start = lax.axis_index("cta")

    def unit(index):
        """Row, KV head and split of a unit, its slot, its first and its last key."""
        index = jnp.maximum(jnp.minimum(index, num_units - 1), 0)
        item = lax.div(index, K)
        head = index - item * K
        row = jnp.minimum(rows.row_of_item[item], R - 1)
        position = rows.positions[row]
        cut = lax.div(position, split) - (rows.ends[row] - 1 - item)
        low, high = cut * split, jnp.minimum(cut * split + split - 1, position)
        if rows.window is not None:
            low = jnp.maximum(low, position - rows.window[0] + 1)
        return row, head, cut, rows.slots[row], low, high

    # The place that copies have come to: a unit, a block of it and its last block, counted over the whole cache.
    def opened(index):
        _, head, _, slot, low, high = unit(index)
        base = (slot * K + head) * (S // block_k)
        return index, base + lax.div(low, block_k), base + lax.div(high, block_k)

    def advanced(place):
        index, block, last = place
        return lax.cond(block < last, lambda: (index, block + 1, last), lambda: opened(index + ctas))

    def copy(place, lane, target, barriers, stage):
        index, block, _ = place

        @pl.when(index < num_units)
        def _():
            keys = pl.ds(block * block_k, block_k)
            plgpu.copy_gmem_to_smem(kv_ref.at[keys, pl.ds(lane, H)], target.at[stage], barriers.at[stage])

    def copy_queries(index):
        @pl.when(index < num_units)
        def _():
            row, head, *_ = unit(index)
            source = q_ref.at[pl.ds((row * K + head) * padded, padded)]
            plgpu.copy_gmem_to_smem(source, smem.q.at[pl.ds(0, padded)], smem.q_barrier)

    def attend_unit(step, carry):
        stage, place = carry
        index = start + step * ctas
        row, head, cut, _, low, high = unit(index)
        plgpu.barrier_wait(smem.q_barrier)

        def attend_block(block, carry):
            acc, top, total, stage, place = carry
            base = block * block_k

            def scores_of(acc_ref):
                plgpu.wgmma(acc_ref, smem.q, smem.k.at[stage].transpose((1, 0)))
                return acc_ref[...]

            plgpu.barrier_wait(smem.k_barriers.at[stage])
            scores = pl.run_scoped(scores_of, plgpu.WGMMAAccumulatorRef((M, block_k), jnp.float32))
            copy(place, 0, smem.k, smem.k_barriers, stage)

            scores, factor = _capped(scores, scale, soft_cap)
            keys = base + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where((keys >= low) & (keys <= high), scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(axis=1) * factor)
            p = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0])).astype(smem.v.dtype)
            alpha = jnp.exp2(top - new_top)
            acc *= lax.broadcast_in_dim(alpha, acc.shape, [0])
            total = total * alpha + p.astype(jnp.float32).sum(axis=1)  # of the weights as they are used

            plgpu.barrier_wait(smem.v_barriers.at[stage])

            @pl.when((base < low) | (base + block_k - 1 > high))
            def _():  # 0 * NaN is NaN: rows that the mask excludes must not reach wgmma
                for lane in range(0, H, lanes := math.gcd(H, 128)):  # as many as there are registers for
                    part = smem.v.at[stage, :, pl.ds(lane, lanes)]
                    keys = base + plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
                    v = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
                    part[...] = jnp.where((keys >= low) & (keys <= high), v, jnp.zeros_like(v))
                plgpu.commit_smem()

            acc = _accumulate(acc, p, smem.v.at[stage], smem.p)
            copy(place, H, smem.v, smem.v_barriers, stage)
            return acc, new_top, total, lax.rem(stage + 1, stages), advanced(place)

        acc, top, total, stage, place = lax.fori_loop(
            lax.div(low, block_k), lax.div(high, block_k) + 1, attend_block, (*_initial(H), stage, place)
        )
        copy_queries(index + ctas)
        acc *= lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        target, some = pl.ds(((cut * R + row) * K + head) * padded, padded), pl.ds(0, padded)
        lanes = smem.o.shape[1]
        for lane in range(0, H, lanes):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before has left
            smem.o[...] = acc[:, lane : lane + lanes]
            if lane == 0:
                smem.log_sum[...] = top + jnp.log(total) * math.log2(math.e)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem.o.at[some], out_ref.at[target, pl.ds(lane, lanes)])
            if lane == 0:
                plgpu.copy_smem_to_gmem(smem.log_sum.at[some], log_sum_ref.at[target])
        return stage, place

    smem.q[...] = plgpu.layout_cast(jnp.zeros((M, H), smem.q.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    copy_queries(start)
    place = opened(start)
    for stage in range(stages):
        copy(place, 0, smem.k, smem.k_barriers, stage)
        copy(place, H, smem.v, smem.v_barriers, stage)
        place = advanced(place)
    steps = lax.div(jnp.maximum(num_units - start, 0) + ctas - 1, ctas)
    lax.fori_loop(0, steps, attend_unit, (jnp.int32(0), place))
    plgpu.wait_smem_to_gmem(0)


def _capped(scores, scale, soft_cap):
    """Scores up to a factor, and the factor that makes them logarithms to base 2."""
    log2e = math.log2(math.e)
    if soft_cap is None:
        return scores, scale * log2e
    # tanh(x) = 1 - 2 / (exp(2 x) + 1): the approximate instruction for tanh has 11 bits.
    return 1.0 - 2.0 / (jnp.exp2(scores * (2 * scale * log2e / soft_cap)) + 1.0), soft_cap * log2e


def _accumulate(acc, p, v_ref, p_smem):
    """acc + p @ v. The interpreter takes neither registers as an operand nor an accumulator that starts at a value."""
    if p_smem is None:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_ref))(plgpu.WGMMAAccumulatorRef.init(acc))
    p_smem[...] = p
    plgpu.commit_smem()

    def product(acc_ref):
        plgpu.wgmma(acc_ref, p_smem, v_ref)
        return acc_ref[...]

    return acc + pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))


def _combine(outputs, log_sums, rows, sizes, dtype, interpret):
    """Sum the splits of every row, weighted by their log-sum-exp; zero for a row without any."""
    _, R, N, K, _, H, _ = sizes
    heads = max(heads for heads in range(1, M // sizes.padded + 1) if K % heads == 0)  # KV heads a block
    lanes = math.gcd(H, 32)
    full = plgpu.Barrier(num_barriers=COMBINE_STAGES)
    scratch = _CombineScratch(
        plgpu.SMEM((COMBINE_STAGES, M, lanes), jnp.float32),
        plgpu.SMEM((COMBINE_STAGES, M), jnp.float32),
        plgpu.SMEM((M, lanes), dtype),
        full,
        full,
    )
    return plgpu.kernel(
        functools.partial(_combine_kernel, sizes=sizes, heads=heads, lanes=lanes),
        out_type=jax.ShapeDtypeStruct((R * N, H), dtype),
        scratch_types=[scratch],
        grid=(R, K // heads, H // lanes),
        grid_names=("row", "heads", "lanes"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret or None,
        kernel_name="slot_decode_combine",
    )(outputs, log_sums, rows).reshape(R, N, H)


def _combine_kernel(outputs_ref, log_sums_ref, rows, out_ref, smem, *, sizes, heads, lanes):
    (B, R, N, K, _, _, split), padded = sizes, sizes.padded
    row, head = lax.axis_index("row"), lax.axis_index("heads") * heads
    columns = pl.ds(lax.axis_index("lanes") * lanes, lanes)
    position = rows.positions[row]
    first = 0 if rows.window is None else lax.div(jnp.maximum(position - rows.window[0] + 1, 0), split)
    count = jnp.where(rows.slots[row] < B, lax.div(position, split) - first + 1, 0)
    some = pl.ds(0, heads * padded)

    def copy(step, stage):
        @pl.when(step < count)
        def _():
            source = pl.ds((((first + step) * R + row) * K + head) * padded, heads * padded)
            plgpu.copy_gmem_to_smem(outputs_ref.at[source, columns], smem.o.at[stage, some], smem.o_barriers.at[stage])
            plgpu.copy_gmem_to_smem(
                log_sums_ref.at[source], smem.log_sum.at[stage, some], smem.log_sum_barriers.at[stage]
            )

    def add(step, carry):
        acc, top, total = carry
        stage = lax.rem(step, COMBINE_STAGES)
        plgpu.barrier_wait(smem.log_sum_barriers.at[stage])
        plgpu.barrier_wait(smem.o_barriers.at[stage])
        log_sum = plgpu.layout_cast(smem.log_sum[stage], plgpu.Layout.WGMMA.reduce(1))
        o = plgpu.layout_cast(smem.o[stage], plgpu.Layout.WGMMA)
        copy(step + COMBINE_STAGES, stage)
        new_top = jnp.maximum(top, log_sum)
        alpha, weight = jnp.exp2(top - new_top), jnp.exp2(log_sum - new_top)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0]) + o * lax.broadcast_in_dim(weight, acc.shape, [0])
        return acc, new_top, total * alpha + weight

    for stage in range(COMBINE_STAGES):
        copy(stage, stage)
    acc, _, total = lax.fori_loop(0, count, add, _initial(lanes))
    inverse = jnp.where(total > 0, 1.0 / total, jnp.zeros_like(total))
    smem.result[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(smem.result.dtype)
    plgpu.commit_smem()
    G = N // K
    for one in range(heads):
        target = out_ref.at[pl.ds(row * N + (head + one) * G, G), columns]
        plgpu.copy_smem_to_gmem(smem.result.at[pl.ds(one * padded, G)], target)
    plgpu.wait_smem_to_gmem(0)


def _initial(lanes):
    """No output yet, and the running maximum and sum of none."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.zeros((M, lanes), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((M,), -jnp.inf, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((M,), jnp.float32), per_row),
    )
