"""Slot attention of prompt chunks on Hopper GPUs.

A CTA has two consumer warpgroups and a producer. A consumer takes one head of one block of 64 rows; both read the same
tiles of keys and values, which the producer loads by TMA. They take turns on the tensor cores, one's softmax beside the
other's products, as FlashAttention-3 does (arXiv 2407.08608). A pair of consumers, called a unit, is

* two heads of a group on one block of rows;
* where a group's size is odd, its last head on two neighbouring blocks. If the second continues the first, the pair
  walks the keys of both once and shares all but the edges; else it walks the keys of the first, then of the second.

All three warpgroups walk all of a unit's steps, so that every barrier turns as often for each of them; a consumer
passes over the steps that are not its own. A unit of padding has no step: its consumers only write zeros.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu import BLOCK_Q

LOG2_E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)  # not -inf: a row that sees nothing of its first key blocks stays finite
WGMMA = plgpu.Layout.WGMMA
WGMMA_ROW = WGMMA.reduce(1)
accumulator = plgpu.WGMMAAccumulatorRef


class _Walk(NamedTuple):
    """What one block of rows reads: keys `first .. end - 1` of `slot`, in key blocks `lo .. hi - 1`; maybe none."""

    slot: jax.Array
    position: jax.Array  # of the block's first row
    live: jax.Array  # rows
    first: jax.Array
    end: jax.Array
    lo: jax.Array
    hi: jax.Array


class _Unit(NamedTuple):
    """What the two consumers do, and the steps of their pair."""

    blocks: tuple[jax.Array, jax.Array]
    heads: tuple[jax.Array, jax.Array]  # within the group
    walks: tuple[_Walk, _Walk]
    skip: jax.Array  # steps before the second consumer's own
    together: jax.Array  # the first steps walk from the first block's keys ..
    end: jax.Array  # .. up to this one; the rest walk those of the second block
    steps: jax.Array


def chunk(q, kv, slots, positions, *, window, soft_cap, scale, tuning, interpret=False):
    """Blocks of 64 rows against `kv`; see `slot_attention`.

    Args:
        q: [T, N, H], T a multiple of 64.
        kv: [B, K, S, 2H] of the same dtype, keys in lanes [0, H), values in [H, 2H).
        slots, positions: [T].
    """
    (T, N, H), (B, K, S, _) = q.shape, kv.shape
    G, block_k, stages = N // K, tuning.chunk_block_k, tuning.chunk_stages
    for what, rows, block in (("a chunk", T, BLOCK_Q), ("a slot", S, block_k), ("a block of keys", block_k, 64)):
        if rows % block:
            raise ValueError(f"{what} of {rows} rows is not blocks of {block}")
    if stages < 2:
        raise ValueError(f"copies need at least 2 blocks in flight, not {stages}")
    blocks = T // BLOCK_Q
    units = blocks * G // 2 if G % 2 == 0 else -(-blocks // 2) * G
    swizzle = plgpu.find_swizzle(H * 16)
    tiling = plgpu.TilingTransform((8, swizzle // 2))  # pyright: ignore[reportAbstractUsage]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]
    scratch = [
        plgpu.SMEM((2, BLOCK_Q, H), q.dtype, transforms=transforms),  # queries, then outputs
        plgpu.SMEM((stages, block_k, H), q.dtype, transforms=transforms),  # keys
        plgpu.SMEM((stages, block_k, H), q.dtype, transforms=transforms),  # values
        plgpu.Barrier(num_barriers=2),  # queries are there
        plgpu.Barrier(num_barriers=stages),  # keys are there
        plgpu.Barrier(num_barriers=stages),  # values are there
        plgpu.Barrier(),  # values are there, stale rows and all
        plgpu.Barrier(num_barriers=stages, num_arrivals=2),  # both consumers are done with the keys
        plgpu.Barrier(num_barriers=stages, num_arrivals=2),  # and with the values
        plgpu.Barrier(num_arrivals=2),  # whose turn it is on the tensor cores
    ]
    if interpret:  # The interpreter takes no weights in registers.
        scratch.append(plgpu.SMEM((2, BLOCK_Q, block_k), q.dtype))
    body = _make_kernel(
        blocks=blocks, G=G, block_k=block_k, stages=stages, windowed=window is not None, soft_cap=soft_cap, scale=scale
    )
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=scratch,
        grid=(K, units),
        grid_names=("kv_head", "unit"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
        kernel_name="chunk_attention",
    )
    return kernel(q, kv, _describe(slots, positions, blocks + blocks % 2, B, S, window))


def _describe(slots, positions, blocks, B, S, window):
    """`[slot of every block, position of its first row, its live rows, window]` flat, int32, padded to `blocks`."""
    slots, positions = (x.astype(jnp.int32).reshape(-1, BLOCK_Q) for x in (slots, positions))
    slot = slots[:, :1]
    live = jnp.sum((slots == slot) & (slot < B), axis=1, dtype=jnp.int32)
    live = jnp.minimum(live, S - positions[:, 0])  # rows past the end of the slot are passed over
    rows = jnp.stack([slot[:, 0], positions[:, 0], live])
    rows = jnp.pad(rows, ((0, 0), (0, blocks - rows.shape[1])))
    return jnp.append(rows.reshape(-1), jnp.asarray(0 if window is None else window, jnp.int32))


def _make_kernel(*, blocks, G, block_k, stages, windowed, soft_cap, scale):
    """The body of one CTA; `blocks` blocks of rows, `G` query heads a key head."""
    padded = blocks + blocks % 2

    def divide(a, b):
        return lax.div(a, jnp.asarray(b, jnp.int32))

    def remainder(a, b):
        return lax.rem(a, jnp.asarray(b, jnp.int32))

    def walk(meta, block):
        slot, position, live = meta[block], meta[padded + block], meta[2 * padded + block]
        end = jnp.where(live > 0, position + live, 0)
        first = jnp.maximum(position - meta[3 * padded] + 1, 0) if windowed else jnp.asarray(0, jnp.int32)
        first = jnp.where(live > 0, first, 0)
        lo, hi = divide(first, block_k), divide(end + block_k - 1, block_k)
        return _Walk(slot, position, live, first, end, lo, hi)

    def describe_unit(meta, index):
        """Late blocks first: they are the longest where a prompt starts."""
        if G % 2 == 0:
            block, pair = blocks - 1 - divide(index, G // 2), remainder(index, G // 2)
            one = walk(meta, block)
            steps = one.hi - one.lo
            heads = (2 * pair, 2 * pair + 1)
            return _Unit((block, block), heads, (one, one), jnp.asarray(0, jnp.int32), steps, one.end, steps)
        half = max(G // 2, 1)
        below, part = padded - 2 - 2 * divide(index, G), remainder(index, G)
        last = part == G - 1
        block = jnp.where(last, below, below + divide(part, half))
        pair = remainder(part, half)
        others = (block, jnp.where(last, block + 1, block))
        heads = (jnp.where(last, G - 1, 2 * pair), jnp.where(last, G - 1, 2 * pair + 1))
        one, two = walk(meta, others[0]), walk(meta, others[1])
        continues = (one.slot == two.slot) & (one.live > 0) & (two.live > 0) & (two.position == one.end)
        share = continues | ~last
        together = jnp.where(share, two.hi, one.hi) - one.lo
        skip = jnp.where(share, two.lo - one.lo, together)
        steps = jnp.where(share, together, together + two.hi - two.lo)
        return _Unit(others, heads, (one, two), skip, together, jnp.where(share, two.end, one.end), steps)

    def kernel(q_ref, kv_ref, meta, out_ref, *scratch):
        q_smem, k_smem, v_smem, q_full, k_full, v_full, v_raw, k_free, v_free, turn, *p_smem = scratch
        head = lax.axis_index("kv_head")
        warpgroup = lax.axis_index("warpgroup")
        H = q_ref.shape[-1]

        def produce():
            plgpu.set_max_registers(40, action="decrease")
            unit = describe_unit(meta, lax.axis_index("unit"))
            one, two = unit.walks

            @pl.loop(0, unit.steps)
            def _(step):
                stage = remainder(step, stages)
                second = step >= unit.together
                slot = jnp.where(second, two.slot, one.slot)
                first = jnp.where(second, two.first, one.first)
                end = jnp.where(second, two.end, unit.end)
                start = (step + jnp.where(second, two.lo - unit.together, one.lo)) * block_k
                keys, values = (kv_ref.at[slot, head, pl.ds(start, block_k), pl.ds(lane, H)] for lane in (0, H))

                pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, k_free.at[stage]))
                plgpu.copy_gmem_to_smem(keys, k_smem.at[stage], k_full.at[stage])

                pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, v_free.at[stage]))
                whole = (start >= first) & (start + block_k <= end)
                pl.when(whole)(functools.partial(plgpu.copy_gmem_to_smem, values, v_smem.at[stage], v_full.at[stage]))

                @pl.when(~whole)
                def _():
                    # Stale rows may hold NaN, and 0 * NaN is NaN: a weight of zero is not enough.
                    plgpu.copy_gmem_to_smem(values, v_smem.at[stage], v_raw)
                    plgpu.barrier_wait(v_raw)
                    _zero_rows_outside(v_smem.at[stage], first - start, end - start, plgpu.find_swizzle(H * 16) // 2)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(v_full.at[stage])

            # See every barrier through to its end, as the interpreter of 0.11 demands.
            @pl.loop(jnp.maximum(unit.steps - stages, 0), unit.steps)
            def _(step):
                stage = remainder(step, stages)
                plgpu.barrier_wait(k_free.at[stage])
                plgpu.barrier_wait(v_free.at[stage])

        def consume():
            plgpu.set_max_registers(232, action="increase")
            unit = describe_unit(meta, lax.axis_index("unit"))
            mine = warpgroup == 0
            one, two = unit.walks
            position, live, lo, hi = (
                jnp.where(mine, getattr(one, name), getattr(two, name)) for name in ("position", "live", "lo", "hi")
            )
            skip = jnp.where(mine, 0, unit.skip)
            block = jnp.where(mine, *unit.blocks)
            rows = pl.ds(block * BLOCK_Q, BLOCK_Q)
            q_head = head * G + jnp.where(mine, *unit.heads)
            queries = q_smem.at[warpgroup]

            def take_turns():
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            def wait_for_keys(step):
                @pl.when(step < unit.steps)
                def _():
                    plgpu.barrier_wait(k_full.at[remainder(step, stages)])

            def pass_over(step, _):
                stage = remainder(step, stages)
                plgpu.barrier_arrive(k_free.at[stage])
                take_turns()
                plgpu.barrier_wait(v_full.at[stage])
                plgpu.barrier_arrive(v_free.at[stage])
                take_turns()
                wait_for_keys(step + 1)

            @pl.when(live > 0)
            def _():
                plgpu.copy_gmem_to_smem(q_ref.at[rows, q_head], queries, q_full.at[warpgroup])
                plgpu.barrier_wait(q_full.at[warpgroup])

            wait_for_keys(jnp.asarray(0, jnp.int32))
            pl.when(warpgroup == 1)(take_turns)

            full_lo, full_hi = lo, jnp.clip(divide(position + 1, block_k), lo, hi)
            if windowed:
                full_lo = jnp.clip(divide(position + live - meta[3 * padded] + block_k, block_k), lo, hi)
                full_hi = jnp.maximum(full_hi, full_lo)

            def attend(step, carry, *, edge):
                out, top, total = carry
                stage = remainder(step, stages)

                def multiply_keys(scores_ref):
                    plgpu.wgmma(scores_ref, queries, k_smem.at[stage].transpose((1, 0)))
                    take_turns()
                    return scores_ref[...]

                scores = pl.run_scoped(multiply_keys, accumulator((BLOCK_Q, block_k), jnp.float32))
                plgpu.barrier_arrive(k_free.at[stage])
                factor = scale * LOG2_E
                if soft_cap is not None:
                    # cap * tanh(x), to float32's precision: the hardware's tanh has 11 bits.
                    power = jnp.exp2(scores * (2 * scale * LOG2_E / soft_cap))
                    scores, factor = soft_cap - (2 * soft_cap) / (1 + power), LOG2_E
                if edge:
                    # The last visible column of every row; a limit a row takes fewer registers than one a score.
                    last = position - (step - skip + lo) * block_k
                    last = last + plgpu.broadcasted_iota(jnp.int32, (BLOCK_Q,), 0, layout=WGMMA_ROW)
                    columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
                    visible = columns <= lax.broadcast_in_dim(last, scores.shape, [0])
                    if windowed:
                        visible &= columns > lax.broadcast_in_dim(last - meta[3 * padded], scores.shape, [0])
                    scores = jnp.where(visible, scores, -jnp.inf)
                # In powers of two, and `top` scaled already: one multiply-add and one exp2 a score.
                new_top = jnp.maximum(top, scores.max(axis=1) * factor)
                keep = jnp.exp2(top - new_top)
                weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
                out = out * lax.broadcast_in_dim(keep, out.shape, [0])
                total = total * keep + weights.sum(axis=1)
                weights = weights.astype(q_ref.dtype)
                out, new_top, total, weights = lax.optimization_barrier((out, new_top, total, weights))
                # The wait's branch keeps ptxas from moving the end of the turn before the softmax.
                plgpu.barrier_wait(v_full.at[stage])
                take_turns()

                def multiply_values(out_ref):
                    left = weights
                    if p_smem:
                        p_smem[0][warpgroup] = weights
                        plgpu.commit_smem()
                        left = p_smem[0].at[warpgroup]
                    plgpu.wgmma(out_ref, left, v_smem.at[stage])
                    wait_for_keys(step + 1)
                    return out_ref[...] if p_smem else None

                if p_smem:
                    out += pl.run_scoped(multiply_values, accumulator(out.shape, jnp.float32))
                else:
                    out = pl.run_state(multiply_values)(accumulator.init(out))
                plgpu.barrier_arrive(v_free.at[stage])
                return out, new_top, total

            def run(a, b, carry, *, edge):
                return lax.fori_loop(a - lo + skip, b - lo + skip, functools.partial(attend, edge=edge), carry)

            carry = (
                plgpu.layout_cast(jnp.zeros((BLOCK_Q, H), jnp.float32), WGMMA),
                plgpu.layout_cast(jnp.full((BLOCK_Q,), LOWEST, jnp.float32), WGMMA_ROW),
                plgpu.layout_cast(jnp.zeros((BLOCK_Q,), jnp.float32), WGMMA_ROW),
            )
            lax.fori_loop(0, skip, pass_over, None)
            if windowed:
                carry = run(lo, full_lo, carry, edge=True)
            carry = run(full_lo, full_hi, carry, edge=False)
            carry = run(full_hi, hi, carry, edge=True)
            lax.fori_loop(skip + hi - lo, unit.steps, pass_over, None)
            pl.when(warpgroup == 0)(take_turns)

            out, _, total = carry
            # Also rows that pad a block end here as NaN, if what they read was: their own lanes only, and dropped.
            rows_of = plgpu.broadcasted_iota(jnp.int32, (BLOCK_Q, H), 0, layout=WGMMA)
            out = jnp.where(rows_of < live, out * lax.broadcast_in_dim(1 / total, out.shape, [0]), 0.0)
            queries[...] = out.astype(q_ref.dtype)
            plgpu.commit_smem()

            @pl.when(block < blocks)
            def _():
                plgpu.copy_smem_to_gmem(queries, out_ref.at[rows, q_head])
                plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == 2)(produce)
        pl.when(warpgroup < 2)(consume)

    return kernel


def _zero_rows_outside(tile, first, end, width):
    """Zero rows before `first` and from `end` on, by squares that fit the producer's few registers."""
    rows, lanes = tile.shape
    for row in range(0, rows, 64):
        for lane in range(0, lanes, width):
            part = tile.at[pl.ds(row, 64), pl.ds(lane, width)]
            index = plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=WGMMA) + row
            values = plgpu.load(part, layout=WGMMA)
            part[...] = jnp.where((index >= first) & (index < end), values, jnp.zeros_like(values))
