"""A server from its socket to its end: signals, a grace time, and connections on which nothing happens any more."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from scripts.server.app import App
from scripts.server.wire import Wire

BACKLOG = 2048
KEEP_ALIVE_S = 30  # of a connection without a request
LOOK_S = 1.0  # how often connections are looked at
CUT_S = 3.0  # after the grace time, for answers to leave and for what is stuck to be cut off


def bound(host: str, port: int) -> socket.socket:
    """A socket that connections can be accepted on, port 0 for any that is free. Raises OSError if there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {host!r}") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted ones have it too: hosts may vanish
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{error.strerror}: {host} port {port}") from error
    return sock


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Uvicorn's, with these ends: the engine closes when the grace time is over, and stuck connections are cut off."""

    def __init__(self, app: App, *, grace_s: float, most_connections: int) -> None:
        config = uvicorn.Config(
            app,
            http=Wire,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            limit_concurrency=most_connections,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(grace_s + CUT_S),
        )
        # What it logs is of broken clients, or was logged by the application.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().__init__(config)
        self._app, self._grace_s = app, grace_s
        self._idle: dict[Any, _Idle] = {}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not uvicorn's way, which ends the process by the signal in the end: see `run`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process listens there since it was looked at
            addresses = ", ".join(address_of(sock) for sock in sockets or ())
            raise OSError(error.errno, f"{error.strerror}: {addresses}") from error
        self._sweeper = asyncio.create_task(self._sweep())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop()
        ending = asyncio.create_task(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            for task in (ending, self._sweeper):
                task.cancel()
            await asyncio.gather(ending, self._sweeper, return_exceptions=True)
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await self._app.close()

    async def _end(self) -> None:
        await asyncio.sleep(self._grace_s)
        await self._app.close()

    async def _sweep(self) -> None:
        """Cut off connections that have no request to be answered, and on which nothing has happened for a while.

        Those are what never send a request, or only the start of one, and those that do not read the rest of an answer.
        """
        stall_s, now = self._app.limits.stall_s, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(LOOK_S, stall_s / 4))
            before, self._idle = self._idle, {}
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                cycle, transport = connection.cycle, connection.transport
                if cycle is not None and not cycle.response_complete and not transport.is_closing():
                    continue  # the application sees to it
                unsent = transport.get_write_buffer_size()
                idle = before.get(connection)
                if idle is None or unsent < idle.unsent or cycle is not idle.cycle:
                    idle = _Idle(now(), unsent, cycle)
                self._idle[connection] = idle
                if now() - idle.since > stall_s:
                    transport.abort()


@dataclass(frozen=True)
class _Idle:
    """Since when a connection is, and with what."""

    since: float
    unsent: int  # bytes
    cycle: Any  # the request that was answered last


async def run(server: HttpServer, sock: socket.socket, on_ready: Callable[[], None]) -> int | None:
    """Serve until a signal: the one that came. The first lets requests end within the grace time, a second ends all."""
    loop, came = asyncio.get_running_loop(), list[int]()

    def stop(number: int) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    serving = asyncio.create_task(server.serve([sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        on_ready()
    await serving
    return came[0] if came else None
