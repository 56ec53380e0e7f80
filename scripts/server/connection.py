"""One request's side of a connection: its body within limits, answers to who reads them, and who goes away."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from scripts.server.errors import ApiError, Gone, overloaded

JSON = b"application/json"
EVENTS = b"text/event-stream"
PIECE = 2**16  # bytes


@dataclass
class Memory:
    """What bodies may take together, in bytes: those that are not understood yet, or answers that are not read yet."""

    what: str  # the server does with them
    most: int
    held: int = 0

    @contextlib.contextmanager
    def share(self) -> Iterator["Share"]:
        share = Share(self)
        try:
            yield share
        finally:
            self.held -= share.held


@dataclass
class Share:
    """One body's part of it."""

    memory: Memory
    held: int = 0

    def take(self, count: int) -> None:
        """Raises ApiError where there is no room for so many more bytes."""
        if self.memory.held + count > self.memory.most:
            raise overloaded(f"the server {self.memory.what} too much at once")
        self.held += count
        self.memory.held += count


async def read_body(scope: Scope, receive: Receive, share: Share, most: int) -> bytes:
    """The body, which must be JSON by its type. Raises ApiError, and Gone if the client does not send all of it."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != JSON and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        # A page of another site can make a browser send a body without asking first, but not one of this type.
        raise ApiError(415, f"the content type must be application/json, not {kind.decode('latin-1')!r:.100}")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > 18 or int(length) > most):
        raise _too_large(most)
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        piece = message.get("body", b"")
        size += len(piece)
        if size > most:
            raise _too_large(most)
        share.take(len(piece))
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes, the limit of this server")


async def while_connected[T](work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What some work returns; it is cancelled when the client goes away, and Gone raised. The body must be read."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Sender:
    """Sends an answer. A client that takes nothing of it for too long is Gone."""

    def __init__(self, send: Send, within_s: float) -> None:
        self._send, self._within_s = send, within_s
        self.status: int | None = None  # of the answer that was begun

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        try:
            async with asyncio.timeout(self._within_s):
                await self._send(message)
        except TimeoutError:
            raise Gone from None

    async def begin(self, status: int, kind: bytes, headers: dict[str, str] | None = None) -> None:
        pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        await self({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *pairs]})

    async def more(self, body: bytes) -> None:
        await self({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Of a large body no more is handed on than the client reads."""
        await self.begin(status, JSON, {"Content-Length": str(len(body))} | (headers or {}))
        for start in range(0, len(body) - PIECE, PIECE):
            await self.more(body[start : start + PIECE])
        await self.end(body[(len(body) - 1) // PIECE * PIECE :])


Handler = Callable[[Scope, Receive, Sender], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application for a route. (Starlette takes a function for one of Requests and Responses.)"""

    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(send, Sender)
        await self.handler(scope, receive, send)
