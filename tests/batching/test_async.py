"""The asyncio side: streams and lists, the loop that nobody blocks, slow readers, several loops, a crowd."""

import asyncio
import contextlib
import random

from batching import Delta, SamplingParams
from batching.async_engine import joined
from batching.request import Logprobs
from tests.batching.async_tools import Encoding, Steps, happened, requests_of, run, serving
from tests.batching.fake import alone
from tests.batching.fake_engine import expected_of, fake_engine, letters, prompt_of, request_of, text_of


async def collect(stream):
    return [delta async for delta in stream]


def test_streams_and_lists():
    async def main():
        async with serving(fake_engine(tokenizer=letters())) as served:
            requests = requests_of(5)
            streams = [collect(served.stream(request)) for request in requests[:3]]
            *streamed, outputs = await asyncio.gather(*streams, served.generate(requests[3:]))
            for request, deltas in zip(requests, streamed, strict=False):
                tokens = [token for delta in deltas for token in delta.token_ids]
                assert tokens == deltas[-1].output.token_ids == expected_of(request)
                assert "".join(delta.text for delta in deltas) == deltas[-1].output.text == text_of(tokens)
                assert [delta.output for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert [output.id for output in outputs] == ["3", "4"]
            assert [output.token_ids for output in outputs] == [expected_of(request) for request in requests[3:]]
            assert await served.generate([]) == []

    run(main())


def test_the_loop_goes_on_while_a_step_takes_its_time():
    engine = fake_engine()
    steps = Steps(engine)

    async def main():
        async with serving(engine) as served:
            first = asyncio.create_task(served.generate(requests_of(1)))
            await steps.reached()
            second = asyncio.create_task(served.generate([request_of("late", [5], max_tokens=2)]))
            cancelled = served.cancel("0")
            for _ in range(100):  # the loop turns, and nothing more happens
                await asyncio.sleep(0)
            assert [one.done() for one in (first, second, cancelled)] == [False] * 3
            steps.go_on()
            assert await cancelled is True
            assert (await first)[0].finish_reason == "cancelled"
            assert (await second)[0].token_ids == expected_of(request_of("late", [5], max_tokens=2))
            assert await served.cancel("0") is False

    run(main())


def test_a_slow_reader_gets_what_it_missed_as_one_piece():
    engine = fake_engine(tokenizer=letters())
    steps = Steps(engine)

    async def main():
        async with serving(engine) as served:
            request = request_of("a", [5], max_tokens=60)
            stream = served.stream(request)
            steps.allowed.release(1 + engine.config.run_ahead)
            first = await anext(stream)
            steps.go_on()
            while await served.call(lambda engine: engine.unfinished):
                await asyncio.sleep(0.001)
            rest = await collect(stream)
            assert len(rest) == 1
            assert first.token_ids + rest[0].token_ids == expected_of(request) == rest[0].output.token_ids
            assert first.text + rest[0].text == text_of(expected_of(request))

    run(main())


def test_pieces_that_are_joined_keep_their_logprobs():
    one, two = Logprobs(1, -1.0, [1], [-1.0]), Logprobs(2, -2.0, [3], [-0.5])
    told = joined(Delta("a", [1], "x", logprobs=[one]), Delta("a", [2], "y", logprobs=[two]))
    assert told == Delta("a", [1, 2], "xy", logprobs=[one, two])
    assert joined(told, Delta("a", [], "", logprobs=[])).logprobs == [one, two]
    assert joined(Delta("a", [1], "x"), Delta("a", [2], "y")).logprobs is None


def test_steps_go_on_while_a_prompt_is_tokenised(monkeypatch):
    engine, encoding = fake_engine(tokenizer=letters()), Encoding(monkeypatch, letters())

    async def main():
        async with serving(engine) as served:
            slow = asyncio.create_task(served.generate([text_of([5])], SamplingParams(max_tokens=6)))
            await happened(encoding.entered)
            outputs = await served.generate(requests_of(3))
            assert [output.token_ids for output in outputs] == [expected_of(request) for request in requests_of(3)]
            assert not encoding.left.is_set()
            assert not slow.done()
            encoding.allowed.set()
            assert (await slow)[0].token_ids == alone([5], 6)

    run(main())


def test_two_loops_share_an_engine():
    async def main(served, names):
        requests = [request_of(name, prompt_of(9, ord(name)), max_tokens=9) for name in names]
        return await served.generate(requests) + [(await collect(served.stream(requests[0])))[-1].output]

    async def both():
        async with serving(fake_engine()) as served:
            other = asyncio.to_thread(asyncio.run, main(served, "abc"))
            for outputs in await asyncio.gather(other, main(served, "def")):
                for output in outputs:
                    request = request_of(output.id, prompt_of(9, ord(output.id)), max_tokens=9)
                    assert output.token_ids == expected_of(request)

    run(both())


def test_a_crowd_that_comes_and_goes():
    """300 consumers: some read to the end, some leave, some are cancelled by others, steps fail now and then."""
    generator = random.Random(0)
    engine = fake_engine(slots=4, tokenizer=letters())
    step = engine.run

    def failing(turn):
        if generator.random() < 0.01:
            raise ZeroDivisionError
        return step(turn)

    async def consume(served, index):
        length, tokens = generator.randint(1, 40), generator.randint(1, 20)
        request = request_of(str(index), prompt_of(length, index), max_tokens=tokens)
        patience = generator.choice([0, 1, 3, 10**6, 10**6])
        await asyncio.sleep(generator.random() / 10)
        if generator.random() < 0.1:
            served.cancel(str(generator.randint(0, 299)))
        tokens, output = [], None
        async with contextlib.aclosing(served.stream(request)) as stream:
            async for delta in stream:
                tokens, output = tokens + delta.token_ids, delta.output
                patience -= 1
                if patience < 0:
                    break
                await asyncio.sleep(0)
        assert tokens == expected_of(request)[: len(tokens)]
        assert output is not None or patience < 0
        if output is not None and output.finish_reason == "length":
            assert tokens == expected_of(request)

    async def main():
        engine.run = failing
        async with serving(engine) as served:
            await asyncio.gather(*(consume(served, index) for index in range(300)))

    run(main())
