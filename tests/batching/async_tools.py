"""What the tests of `AsyncEngine` share."""

import asyncio
import contextlib
import threading

from batching import AsyncEngine
from tests.batching.fake_engine import prompt_of, request_of

LIMIT = 60  # seconds, for a test that hangs


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT))


def requests_of(count, tokens=6):
    return [request_of(str(seed), prompt_of(5 + seed, seed), max_tokens=tokens) for seed in range(count)]


class Steps:
    """Lets an engine's steps happen one by one, and records who had a slot in each."""

    def __init__(self, engine):
        self.allowed, self.waiting, self.slots = threading.Semaphore(0), threading.Event(), []
        step = engine.run

        def stepped(turn):
            self.slots.append([one.id for one in engine.scheduler.running])
            self.waiting.set()
            assert self.allowed.acquire(timeout=LIMIT)
            return step(turn)

        engine.run = stepped

    async def reached(self):
        """The thread is inside a step."""
        await happened(self.waiting)

    async def allow(self, count=1):
        for _ in range(count):
            await self.reached()
            self.waiting.clear()
            self.allowed.release()

    def go_on(self):
        self.allowed.release(10**6)


class Encoding:
    """Holds up whoever has a text turned into tokens."""

    def __init__(self, monkeypatch, tokenizer):
        self.entered, self.allowed, self.left = threading.Event(), threading.Event(), threading.Event()
        encode = tokenizer.encode

        def encoded(*args, **kwargs):
            self.entered.set()
            assert self.allowed.wait(LIMIT)
            self.left.set()
            return encode(*args, **kwargs)

        monkeypatch.setattr(tokenizer, "encode", encoded)


async def happened(event):
    while not event.is_set():
        await asyncio.sleep(0.001)


async def posted(served, count):
    """So many calls wait for the engine's thread, which is inside a step."""
    while len(served._calls) < count:
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serving(engine):
    """An AsyncEngine that is idle in the end, with every slot free."""
    served = AsyncEngine(engine)
    try:
        yield served
        while await served.call(lambda engine: engine.unfinished):
            await asyncio.sleep(0.001)
        assert not engine.delivery.waiting
        assert len(engine.scheduler.free) == engine.config.slots
    finally:
        await served.close()
