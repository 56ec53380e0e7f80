"""`AsyncEngine`: an engine behind a thread of its own, for asyncio."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from batching.engine import Engine
from batching.request import Delta, Output, Request, SamplingParams, as_requests

Prompt = str | Sequence[int] | Request


class AsyncEngine:
    """Serves requests from asyncio: one thread owns the engine and steps it while there is work.

    The event loop never waits for a step: it hands calls to the thread, which runs them between two steps, and is told
    of what they bring. Steps never wait for prompts to be tokenised and grammars to be compiled: threads of the event
    loop's do that, and requests may overtake each other there. A consumer that goes away takes its request with it: the
    slot is free by the next step. An exception in a step ends the requests that had a slot with "error" Outputs, and
    the thread goes on. Nobody else may use the engine until this is closed. Methods may be called from several event
    loops.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._calls: deque[tuple[concurrent.futures.Future, Callable[[], Any]]] = deque()
        self._closing = False
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._thread = threading.Thread(target=self._serve, name="carousel-engine", daemon=True)
        self._thread.start()

    def stream(self, *requests: Prompt) -> AsyncGenerator[Delta]:
        """Pieces of requests, as they come; those that a slow reader has not taken yet are joined. The last of each
        sample has its Output.

        The requests are queued, together or not at all, with the first `anext`, which raises ValueError if one cannot
        be served and QueueFull if there is no room for them. Closing the iterator, or cancelling the task that waits
        for it, cancels the requests.
        """
        return self._deltas(as_requests(requests))

    async def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """As `Engine.generate`. The requests are queued together or not at all; cancelling this cancels them.

        Raises:
            ValueError: a request cannot be served.
            QueueFull: there is no room for all of them.
        """
        requests = as_requests(prompts, params)
        outputs = {(one.id, one.index): one.output async for one in self._deltas(requests) if one.output is not None}
        return [outputs[request.id, index] for request in requests for index in range(request.params.n)]

    def cancel(self, request_id: str) -> "asyncio.Future[bool]":
        """End a request with what it has; its consumer gets the Output. Awaited: False if the id is unknown or ended.

        It happens before the next step whether the result is awaited or not. A request is known once it is queued.
        """
        return asyncio.shield(self.call(lambda engine: engine.cancel(request_id)))

    def call[T](self, function: Callable[[Engine], T]) -> "asyncio.Future[T]":
        """Run a function on the engine between two steps: read its counts, say. It must not block.

        Raises RuntimeError if this is closed.
        """
        return asyncio.wrap_future(self._post(lambda: function(self._engine)))

    async def close(self) -> None:
        """Cancel what has not ended and end the thread; the consumers get their Outputs. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.wrap_future(self._ended)
        self._thread.join()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _deltas(self, requests: list[Request]) -> AsyncGenerator[Delta]:
        mailbox = _Mailbox(asyncio.get_running_loop())
        sequences = await asyncio.to_thread(self._engine.prepare, requests)
        left = {(sequence.id, sequence.index) for sequence in sequences}
        subscribed = self._post(lambda: self._engine.subscribe(sequences, mailbox.put))
        try:
            await asyncio.wrap_future(subscribed)
            while left:
                for delta in await mailbox.take():
                    if delta.output is not None:
                        left.remove((delta.id, delta.index))
                    yield delta
        finally:
            if left:
                self._give_up(subscribed)

    def _give_up(self, subscribed: "concurrent.futures.Future[Callable[[], None]]") -> None:
        """Cancel what was queued, now or, if it is being queued at this moment, right afterwards."""

        def give_up() -> None:
            if not subscribed.cancelled() and subscribed.exception() is None:
                subscribed.result()()

        if not subscribed.cancel():
            with self._changed:
                if not self._closing:  # else all is cancelled anyway
                    self._calls.append((concurrent.futures.Future(), give_up))
                    self._changed.notify()

    def _post[T](self, call: Callable[[], T]) -> "concurrent.futures.Future[T]":
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            self._calls.append((future, call))
            self._changed.notify()
        return future

    # What follows runs in the engine's thread.

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing or self._engine.unfinished)
                calls, self._calls = self._calls, deque()
                closing = self._closing
            for future, call in calls:
                _run(future, call)
            for sequence in [*self._engine.scheduler.running, *self._engine.scheduler.waiting] if closing else ():
                self._engine.cancel(sequence.id)
            if self._engine.unfinished:
                self._step()
            elif closing:
                self._ended.set_result(None)
                return

    def _step(self) -> None:
        try:
            self._engine.step()
        except BaseException:  # the engine has ended those that it concerns, and serves the others
            logging.getLogger(__name__).exception("a step failed")


def _run[T](future: "concurrent.futures.Future[T]", call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class _Mailbox:
    """Deltas on their way from the engine's thread to one consumer: at most one a sample, however slow it reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._filled = loop, asyncio.Event()
        self._lock = threading.Lock()
        self._deltas: dict[tuple[str, int], Delta] = {}

    def put(self, delta: Delta) -> None:
        """In the engine's thread."""
        with self._lock:
            was_empty = not self._deltas
            earlier = self._deltas.get((delta.id, delta.index))
            self._deltas[delta.id, delta.index] = delta if earlier is None else joined(earlier, delta)
        if was_empty:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody will ever read this
                self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self) -> list[Delta]:
        """In the event loop: waits until there is something."""
        await self._filled.wait()
        self._filled.clear()
        with self._lock:
            deltas, self._deltas = self._deltas, {}
        return list(deltas.values())


def joined(earlier: Delta, later: Delta) -> Delta:
    """Two pieces of one sample as one."""
    text = None if later.text is None else (earlier.text or "") + later.text
    logprobs = None if later.logprobs is None else (earlier.logprobs or []) + later.logprobs
    return dataclasses.replace(later, token_ids=earlier.token_ids + later.token_ids, text=text, logprobs=logprobs)
