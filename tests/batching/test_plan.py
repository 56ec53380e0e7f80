"""How a turn's rows are laid out, and in which shapes."""

import numpy as np
import pytest

from batching.plan import FROM_DEVICE, NEUTRAL, Chunk, Draw, Flag, PlanShapes, build_plan


@pytest.mark.parametrize("sizes", [(), (0,), (8,), (24,), (16, 20)])
def test_chunk_sizes_are_whole_blocks(sizes):
    with pytest.raises(ValueError, match="positive multiples of 16"):
        PlanShapes.choose(4, sizes, 16)


def test_shapes_follow_the_busy_slots():
    shapes = PlanShapes.choose(64, (512, 128), 16)
    assert shapes.all() == [(d, c) for c in (0, 128, 512) for d in (4, 16, 64)]
    assert shapes.fit(0, 1) == (4, 128)
    assert shapes.fit(17, 129) == (64, 512)
    assert PlanShapes.choose(3, (16,), 16).decode_rows == (3,)


def test_without_blocks_rows_are_counted_together():
    shapes = PlanShapes.choose(16, (128,), 1)
    assert shapes.all() == [(0, n) for n in (4, 8, 16, 32, 48, 64, 128, 144)]
    assert shapes.fit(5, 0) == (0, 8)
    assert shapes.fit(5, 4) == (0, 16)
    assert shapes.budget(5) == 139
    plan = build_plan(
        shapes,
        [Chunk(2, 30, (FROM_DEVICE,), True)],
        [Chunk(0, 16, (1, 2, 3), True), Chunk(3, 0, (9, 8), False)],
    )
    assert plan.shape == (0, 8)
    assert plan.rows.slots.tolist() == [2, 0, 0, 0, 3, 3, 16, 16]
    assert plan.rows.positions.tolist() == [30, 16, 17, 18, 0, 1, 0, 0]
    assert plan.rows.sample_rows.tolist() == [0, 3, 0, 0, 0, 0, 0, 0]
    assert plan.rows.sample_slots.tolist() == [2, 0, 16, 16, 16, 16, 16, 16]


def test_plan_layout():
    shapes = PlanShapes.choose(4, (64,), 16)
    drawn = Draw((0.5, 0.9, 0.1, 1.2, 0.25, -1.5), top_k=7, seed=2**40 + 5, flags=Flag.PENALTIES)
    decode = [Chunk(2, 30, (FROM_DEVICE,), True, drawn)]
    prefill = [Chunk(0, 16, tuple(range(20)), True, targets=range(1, 20)), Chunk(3, 0, (9, 8), False)]
    plan = build_plan(shapes, decode, prefill)
    rows = plan.rows
    assert plan.shape == (4, 64)
    assert plan.live_rows == 23
    assert rows.slots.tolist() == [2, 4, 4, 4] + [0] * 20 + [4] * 12 + [3] * 2 + [4] * 30
    assert rows.positions[4:24].tolist() == list(range(16, 36))
    assert rows.sample_rows.tolist() == [0, 23, 0, 0]
    assert rows.sample_slots.tolist() == [2, 0, 4, 4]
    assert rows.numbers[0].tolist() == np.float32(drawn.numbers).tolist()
    assert rows.words[0].tolist() == [Flag.PENALTIES, 7, 256, 5]
    assert rows.numbers[1:].tolist() == [list(NEUTRAL)] * 3
    assert not rows.words[1:].any()
    assert rows.targets.tolist() == [-1] * 4 + list(range(1, 20)) + [-1] * 45
    assert plan.first_rows == (0, 4, 36)
