"""A client of HTTP/1.1 for measuring: asyncio alone, one request a connection, server-sent events as they come."""

import asyncio
import contextlib
import json
import re
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

Kind = Literal["error", "early end", "timeout", "no usage"]
OK = 200
PORTS = {"http": 80, "https": 443}
KEY = "CAROUSEL_API_KEY"  # in the environment: what clients of our own server must know


class Failed(Exception):
    """A request did not bring what it was asked for. `status`: that of the reply, OK where there was none."""

    def __init__(self, kind: Kind, reason: str, status: int = OK) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.status = status


def sendable(key: str) -> bool:
    """Whether every client sends an API key alike: printable ASCII without spaces, and some of it."""
    return re.fullmatch("[!-~]+", key) is not None


@dataclass(frozen=True)
class Server:
    """Where requests go. Raises ValueError for an address that is none."""

    url: str  # with or without /v1
    model: str
    key: str | None = field(default=None, repr=False)
    connections: int = 256  # at once
    timeout_s: float = 600.0  # of a whole request

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in PORTS or not parts.hostname or parts.query or parts.port == 0:
            raise ValueError(f"server must be such as http://localhost:8000, not {self.url!r}")
        if self.key is not None and not sendable(self.key):
            raise ValueError("the API key must be printable ASCII without spaces, not empty")

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """`path`: what follows /v1/."""
        parts = urlsplit(self.url)
        data = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {parts.path.rstrip('/').removesuffix('/v1')}/v1/{path} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        lines += [] if self.key is None else [f"Authorization: Bearer {self.key}"]
        return "\r\n".join([*lines, "", ""]).encode() + data


class Reply:
    """The answer to a request, as it comes. Reading raises Failed, ValueError or EOFError for what is no HTTP."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._pending = reader, b""
        self.status, self._chunked, self._left = 0, False, 2**63

    async def begin(self) -> None:
        """The status and the headers."""
        version, _, rest = (await self._line()).partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise Failed("error", "the reply is not HTTP/1.1")
        self.status = int(rest[:3])
        while line := await self._line():
            name, _, value = line.partition(":")
            if name.lower() == "transfer-encoding":
                self._chunked = "chunked" in value.lower()
            elif name.lower() == "content-length":
                self._left = int(value)

    async def rest(self) -> bytes:
        """The whole body."""
        pieces = []
        while piece := await self._piece():
            pieces.append(piece)
        return b"".join(pieces)

    async def event(self) -> str | None:
        """The data of the next server-sent event, each on one line; None when no more come."""
        while True:
            line, newline, rest = self._pending.partition(b"\n")
            if newline:
                self._pending = rest
                if line.startswith(b"data:"):
                    return line[5:].decode("utf-8", errors="replace").strip()
            elif piece := await self._piece():
                self._pending += piece
            else:
                return None

    async def _line(self) -> str:
        return (await self._reader.readuntil(b"\n")).decode("latin-1").strip()

    async def _piece(self) -> bytes:
        """What came next of the body; nothing at its end."""
        if not self._chunked:
            piece = await self._reader.read(min(self._left, 1 << 16))
            self._left -= len(piece)
            return piece
        size = int((await self._line()).partition(";")[0], 16)
        piece = await self._reader.readexactly(size)
        await self._line()
        return piece


@contextlib.asynccontextmanager
async def exchange(server: Server, request: bytes) -> AsyncIterator[tuple[float, Reply]]:
    """Send a request; when it was sent on its open connection, and the reply, whose status is OK.

    Raises Failed for any other status, and for what goes wrong until the context ends: in time, or in what is sent.
    """
    parts, writer = urlsplit(server.url), None
    assert parts.hostname is not None
    try:
        async with asyncio.timeout(server.timeout_s):
            secure = ssl.create_default_context() if parts.scheme == "https" else None
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or PORTS[parts.scheme], ssl=secure
            )
            sent = time.monotonic()
            writer.write(request)
            await writer.drain()
            reply = Reply(reader)
            await reply.begin()
            if reply.status != OK:
                reason = " ".join((await reply.rest()).decode("utf-8", errors="replace").split())
                raise Failed("error", f"status {reply.status}: {reason:.300}", reply.status)
            yield sent, reply
    except TimeoutError:
        raise Failed("timeout", f"no end within {server.timeout_s:g} s") from None
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise Failed("error", f"the connection or the reply broke: {error or type(error).__name__}") from error
    finally:
        if writer is not None:
            writer.transport.abort()
