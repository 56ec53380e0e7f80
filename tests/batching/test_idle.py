"""What is left when everybody has gone: nothing in flight, no time on the books; and cancels that are waited for."""

import asyncio

import numpy as np
import pytest

from batching import AsyncEngine, Request
from tests.batching.async_tools import Steps, run
from tests.batching.fake_engine import fake_engine, finish, prompt_of, request_of


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_idle_time_is_nobodys(how):
    now = [0.0]
    engine = fake_engine(slots=1)
    engine.scheduler.clock = lambda: now[0]
    stream = engine.stream([request_of("a", prompt_of(5), max_tokens=30)])
    next(stream)
    if how == "close":
        stream.close()
    else:
        engine.cancel("a")
        assert [delta.output.finish_reason for delta in stream if delta.output] == ["cancelled"]
    assert not engine._in_flight
    now[0] = 100.0
    engine.submit(request_of("b", prompt_of(5), max_tokens=3))
    finish(engine)
    assert (engine.stats.gap_s, engine.stats.wall_s) == (0, 0)


def test_a_cancelled_request_of_a_stream_ends_at_once_wherever_it_waits():
    engine = fake_engine(slots=1, max_queue=1)
    requests = [request_of(str(index), prompt_of(9, index), max_tokens=5) for index in range(6)]
    seen = []
    for delta in engine.stream(requests):
        seen.append((delta.id, delta.output is not None))
        if len(seen) == 2:
            assert engine.cancel("5")
    assert seen[2] == ("5", True)
    assert sum(ended for _, ended in seen) == 6


def test_a_cancel_that_nobody_waits_for_any_longer_happens():
    engine = fake_engine(slots=1)

    async def main():
        steps = Steps(engine)
        async with AsyncEngine(engine) as served:
            task = asyncio.create_task(served.generate([request_of("a", prompt_of(5), max_tokens=40)]))
            await steps.reached()
            cancelling = asyncio.ensure_future(served.cancel("a"))
            await asyncio.sleep(0)
            cancelling.cancel()
            steps.go_on()
            (output,) = await task
            assert output.finish_reason == "cancelled"

    run(main())


@pytest.mark.parametrize("name", ["ttft_slo_s", "tpot_slo_s"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 10**400, "1", True])
def test_objectives_that_mean_nothing(name, value):
    with pytest.raises(ValueError, match=name):
        Request(prompt_ids=[1], **{name: value})


def test_objectives_are_plain_numbers():
    request = Request(prompt_ids=[1], ttft_slo_s=np.float32(0.5), tpot_slo_s=1, predicted_tokens=np.int64(3))
    assert [type(one) for one in (request.ttft_slo_s, request.tpot_slo_s, request.predicted_tokens)] == [
        float,
        float,
        int,
    ]
