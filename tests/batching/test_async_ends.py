"""Consumers that go away, steps that fail, requests that are refused, and the end of an `AsyncEngine`."""

import asyncio
import gc
import threading

import pytest

from batching import AsyncEngine, QueueFull, Request, SamplingParams
from tests.batching.async_tools import Encoding, Steps, happened, posted, requests_of, run, serving
from tests.batching.fake import alone
from tests.batching.fake_engine import check_slots, expected_of, fake_engine, letters, request_of, text_of


async def closed(streams):
    await streams.pop().aclose()


async def dropped(streams):
    streams.pop()
    gc.collect()


async def task_cancelled(streams):
    task = asyncio.create_task(anext(streams[0]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [closed, dropped, task_cancelled])
def test_the_slot_of_a_consumer_that_goes_away_is_free_within_two_turns(leave):
    engine = fake_engine(slots=1)
    steps = Steps(engine)

    async def main():
        async with serving(engine) as served:
            streams = [served.stream(request_of("gone", [5], max_tokens=50))]
            turns = 1 + engine.config.run_ahead  # until the first token is there
            steps.allowed.release(turns)
            await anext(streams[0])
            following = asyncio.create_task(served.generate(requests_of(1)))
            while len(steps.slots) <= turns:
                await asyncio.sleep(0.001)
            before = len(steps.slots)
            await leave(streams)
            for _ in range(10):
                await asyncio.sleep(0)
            steps.go_on()
            assert (await following)[0].token_ids == expected_of(requests_of(1)[0])
            assert steps.slots[:before] == [["gone"]] * before
            assert ["gone"] not in steps.slots[before:]

    run(main())


def test_a_consumer_that_goes_away_before_its_request_is_queued():
    engine = fake_engine(slots=1)
    steps = Steps(engine)

    async def main():
        async with serving(engine) as served:
            first = asyncio.create_task(served.generate(requests_of(1)))
            await steps.reached()
            gone = asyncio.create_task(served.generate([request_of("gone", [5], max_tokens=50)]))
            await posted(served, 1)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            steps.go_on()
            await first
            assert not any("gone" in slots for slots in steps.slots)

    run(main())


def test_a_consumer_that_goes_away_while_its_prompt_is_tokenised(monkeypatch):
    engine, encoding = fake_engine(tokenizer=letters()), Encoding(monkeypatch, letters())
    steps = Steps(engine)
    steps.go_on()

    async def main():
        async with serving(engine) as served:
            request = Request(prompt=text_of([5]), params=SamplingParams(max_tokens=3), id="gone")
            gone = asyncio.create_task(served.generate([request]))
            await happened(encoding.entered)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            encoding.allowed.set()
            await happened(encoding.left)
            assert (await served.generate(requests_of(1)))[0].token_ids == expected_of(requests_of(1)[0])
            assert not any("gone" in slots for slots in steps.slots)
            assert (await served.generate([request]))[0].token_ids == alone([5], 3), "the id is free"

    run(main())


def test_close_while_a_prompt_is_tokenised(monkeypatch):
    engine, encoding = fake_engine(tokenizer=letters()), Encoding(monkeypatch, letters())

    async def main():
        served = AsyncEngine(engine)
        late = asyncio.create_task(served.generate([text_of([5])]))
        await happened(encoding.entered)
        await served.close()
        encoding.allowed.set()
        with pytest.raises(RuntimeError, match="closed"):
            await late
        assert not engine.unfinished

    run(main())


def test_a_step_that_fails_ends_who_has_a_slot_and_the_thread_goes_on(caplog):
    engine = fake_engine(slots=2)
    step, failures = engine.run, iter([False, False, True, True])

    def failing(turn):
        if next(failures, False):
            raise ZeroDivisionError("broken")
        return step(turn)

    engine.run = failing

    async def main():
        async with serving(engine) as served:
            outputs = await served.generate(requests_of(6))
            assert [output.finish_reason for output in outputs] == ["error"] * 4 + ["length"] * 2
            assert outputs[0].error == "the step failed: ZeroDivisionError: broken"
            assert outputs[0].token_ids == expected_of(requests_of(6)[0])[: len(outputs[0].token_ids)]
            assert [output.token_ids for output in outputs[4:]] == [expected_of(one) for one in requests_of(6)[4:]]
            assert (await served.generate(requests_of(1)))[0].finish_reason == "length"

    run(main())
    assert [record.message for record in caplog.records] == ["a step failed"] * 2


def test_a_policy_that_fails_ends_the_queue(caplog):
    engine = fake_engine()
    engine.scheduler.policy.decide = lambda view: 1 / 0

    async def main():
        async with serving(engine) as served:
            outputs = await served.generate(requests_of(3))
            assert [output.finish_reason for output in outputs] == ["error"] * 3

    run(main())
    assert caplog.records


def test_who_is_refused_is_told_and_nobody_else_is_harmed():
    engine = fake_engine(slots=1, max_queue=2)
    steps = Steps(engine)

    async def main():
        async with serving(engine) as served:
            first = asyncio.create_task(served.generate(requests_of(1)))
            await steps.reached()
            others = [asyncio.create_task(served.generate([request])) for request in requests_of(3)[1:]]
            await posted(served, 2)
            full = asyncio.create_task(served.generate([request_of("x", [5]), request_of("y", [5])]))
            alone = asyncio.create_task(anext(served.stream(request_of("z", [5]))))
            again = asyncio.create_task(anext(served.stream(requests_of(1)[0])))
            with pytest.raises(ValueError, match="request 0: the prompt has 65 tokens; a slot holds 1 to 64"):
                await served.generate([[5] * 65])
            with pytest.raises(ValueError, match="request 1: the id 'x' is given twice"):
                await served.generate([request_of("x", [5]), request_of("x", [5])])
            await posted(served, 5)
            await steps.allow(1)
            await steps.reached()
            with pytest.raises(QueueFull, match="room for 0 more requests"):
                await full
            with pytest.raises(QueueFull):
                await alone
            with pytest.raises(ValueError, match="'0' is still running"):
                await again
            with pytest.raises(ValueError, match="give a list of prompts"):
                await served.generate("text")
            steps.go_on()
            for task, request in zip([first, *others], requests_of(3), strict=True):
                assert (await task)[0].token_ids == expected_of(request)

    run(main())


def test_close_ends_what_is_left():
    engine = fake_engine(slots=1)
    steps = Steps(engine)

    async def main():
        served = AsyncEngine(engine)
        tasks = [asyncio.create_task(served.generate([request])) for request in requests_of(1)]
        await steps.reached()
        tasks += [asyncio.create_task(served.generate([request])) for request in requests_of(3)[1:]]
        await posted(served, 2)
        await steps.allow(2)
        await steps.reached()
        closing = [asyncio.create_task(served.close()) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="closed"):
            await served.generate(requests_of(1))
        with pytest.raises(RuntimeError, match="closed"):
            await served.cancel("0")
        steps.go_on()
        outputs = [(await task)[0] for task in tasks]
        assert [output.finish_reason for output in outputs] == ["cancelled"] * 3
        await asyncio.gather(*closing)
        await served.close()
        assert not engine.unfinished
        check_slots(engine)
        assert not [thread for thread in threading.enumerate() if thread.name == "carousel-engine"]
        assert engine.generate(requests_of(1))[0].token_ids == expected_of(requests_of(1)[0])

    run(main())
