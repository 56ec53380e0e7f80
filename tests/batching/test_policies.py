"""What each policy does to the rows that are computed, on the fake device."""

import pytest

from tests.batching.fake import FakeDevice, make_scheduler, run_turn, sequence


@pytest.mark.parametrize("block_q", [1, 16])
@pytest.mark.parametrize(("policy", "rows"), [("continuous", 64 + 3 * 16), ("static", 4 * 64)])
def test_static_pads_prompts_to_the_longest(policy, rows, block_q):
    scheduler = make_scheduler(slots=4, policy=policy, block_q=block_q, chunk_sizes=(16, 64))
    device, computed = FakeDevice(4, 64), 0
    for index, length in enumerate((16, 64, 16, 16)):
        scheduler.submit(sequence(f"{index}", range(1, length + 1), max_tokens=1))
    while scheduler.unfinished:
        turn, _ = run_turn(scheduler, device)
        computed += turn.plan.shape[1]
    # Programs come in a few sizes, so a turn may compute a little more.
    assert rows <= computed < rows + 64
