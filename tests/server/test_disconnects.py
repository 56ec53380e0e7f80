"""Clients that go away, at every phase, and those that do not read: nobody keeps a slot, and the others go on."""

import asyncio
import contextlib
import json
import socket
import struct
import time

import pytest

from scripts.server.app import Limits
from tests.batching.async_tools import Encoding
from tests.batching.fake import alone
from tests.batching.fake_engine import fake_engine, letters, text_of
from tests.server.servers import LIMIT, Running, Steps, post, read_all

TURNS = 2  # after which the slot of a client that went away must be free
LONG = {"prompt": [5], "max_tokens": 60}


def reset(sock: socket.socket) -> None:
    """Closes a connection as a process does that is killed with data unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def served(server, steps) -> None:
    """The next request is served right."""
    steps.go_on()
    with server.connect() as sock:
        fields = {"prompt": [7], "max_tokens": 5, "return_token_ids": True}
        sock.sendall(post("/v1/completions", fields, "Connection: close"))
        body = json.loads(read_all(sock).partition(b"\r\n\r\n")[2])
        assert body["choices"][0]["token_ids"] == alone([7], 5)
    server.wait(server.idle)


@pytest.mark.parametrize(
    ("more", "headers"),
    [(b"", ()), (b"X", ()), (post("/v1/completions", LONG), ()), (b"X", ("Connection: Upgrade", "Upgrade: h2c"))],
    ids=["", "a byte", "the next request", "an upgrade"],
)
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [False, True])
def test_while_it_runs(stream, leave, more, headers):
    """Also if it had sent what is no part of the request, or the next one."""
    engine = fake_engine(slots=2, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine) as server:
        sock = server.connect()
        sock.sendall(post("/v1/completions", LONG | {"stream": stream}, *headers) + more)
        steps.allowed.release(3)
        if stream:
            assert sock.recv(12) == b"HTTP/1.1 200"
        server.wait(lambda: len(steps.slots) == 4)  # inside a step
        leave(sock)
        server.wait(lambda: server.app.engine._calls)  # it was noticed
        turns = len(steps.slots)
        steps.go_on()
        server.wait(server.idle)
        assert len(steps.slots) - turns <= TURNS
        served(server, steps)


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_waits_for_a_slot(stream):
    engine = fake_engine(slots=1, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine) as server:
        first, second = server.connect(), server.connect()
        first.sendall(post("/v1/completions", LONG, "Connection: close"))
        assert steps.waiting.wait(LIMIT)
        second.sendall(post("/v1/completions", LONG | {"stream": stream}))
        server.wait(lambda: server.app.engine._calls)
        steps.allowed.release(2)
        server.wait(lambda: len(engine.scheduler.waiting) == 1 and len(steps.slots) == 3)
        second.close()
        server.wait(lambda: server.app.engine._calls)
        steps.allowed.release(2)
        server.wait(lambda: not engine.scheduler.waiting)
        steps.go_on()
        assert read_all(first).startswith(b"HTTP/1.1 200")
        first.close()
        assert {name for names in steps.slots for name in names} == set(steps.slots[0])  # the other never had it
        served(server, steps)


def test_while_its_prompt_is_tokenised(monkeypatch):
    engine = fake_engine(slots=1, tokenizer=letters())
    steps, encoding = Steps(engine), Encoding(monkeypatch, letters())
    with Running(engine) as server:
        sock = server.connect()
        sock.sendall(post("/v1/completions", LONG | {"prompt": text_of([5])}))
        assert encoding.entered.wait(LIMIT)
        sock.close()
        server.wait(lambda: not server.http.server_state.tasks)
        assert server.app._bodies.held == 0
        encoding.allowed.set()
        served(server, steps)
        assert len({name for names in steps.slots for name in names}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_at_each_byte_of_the_request(stream):
    """However much of it was sent, nothing is left of it."""
    engine = fake_engine(slots=2, tokenizer=letters())
    steps, request = Steps(engine), post("/v1/completions", LONG | {"stream": stream})
    steps.go_on()
    with Running(engine) as server:
        for length in range(0, len(request) + 1, 3):
            sock = server.connect()
            sock.sendall(request[:length])
            (reset if length % 2 else socket.socket.close)(sock)
        server.wait(lambda: not server.http.server_state.connections and not server.http.server_state.tasks)
        assert server.app._bodies.held == 0
        served(server, steps)


def test_several_samples_leave_together():
    engine = fake_engine(slots=4, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine) as server:
        sock = server.connect()
        sock.sendall(post("/v1/completions", LONG | {"prompt": [[5], [6]], "n": 2, "stream": True}))
        steps.allowed.release(4)
        server.wait(lambda: len(steps.slots) == 5)
        sock.close()
        server.wait(lambda: server.app.engine._calls)
        steps.go_on()
        server.wait(server.idle)
        assert len(steps.slots) <= 5 + TURNS
        served(server, steps)


def test_who_does_not_read_is_cut_off():
    """The engine goes on meanwhile, and in the end the connection is closed: while the answer comes, and afterwards."""
    engine = fake_engine(slots=2, max_len=1024, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine, limits=Limits(stall_s=2)) as server, contextlib.ExitStack() as stack:
        for stream in (True, False):
            sock = stack.enter_context(server.connect_narrowly())
            fields = {"prompt": [5], "temperature": 0, "n": 128, "max_tokens": 400, "stream": stream}
            sock.sendall(post("/v1/completions", fields | {"return_token_ids": True}))

        def unsent() -> list[int]:
            return sorted(one.transport.get_write_buffer_size() for one in server.http.server_state.connections)

        while max(unsent(), default=0) < 2**16:  # a piece a turn, until no more of the stream is taken
            before, turn_ends = unsent(), time.monotonic() + 0.1
            steps.allowed.release()
            while unsent() == before and time.monotonic() < turn_ends:
                time.sleep(0.002)
        steps.go_on()
        server.wait(lambda: server.engine.stats.generated_tokens == 800)

        def stuck() -> bool:
            """Both are, and no more is handed on of the one or the other: their texts have a megabyte."""
            return len(both := unsent()) == 2 and 10_000 < both[0] <= both[1] < 200_000

        server.wait(stuck)
        with server.connect() as other:
            other.sendall(post("/v1/completions", {"prompt": [7], "max_tokens": 5}, "Connection: close"))
            assert read_all(other).startswith(b"HTTP/1.1 200")
        server.wait(lambda: not server.http.server_state.connections)
        server.wait(server.idle)


def test_stopping_lets_requests_end():
    engine = fake_engine(slots=1, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine, grace_s=30) as server, contextlib.ExitStack() as stack:
        running, idle, waiting = (stack.enter_context(server.connect()) for _ in range(3))
        for sock in (running, waiting):
            sock.sendall(post("/v1/completions", LONG))
        assert steps.waiting.wait(LIMIT)
        server.wait(lambda: len(server.http.server_state.tasks) == 2)
        server.stop()
        assert read_all(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        steps.go_on()
        for sock in (running, waiting):
            assert read_all(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_ends_what_does_not_end(stream):
    engine = fake_engine(slots=1, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine, grace_s=0.1) as server, server.connect() as running, server.connect() as waiting:
        for sock in (running, waiting):
            sock.sendall(post("/v1/completions", LONG | {"stream": stream}))
            assert steps.waiting.wait(LIMIT)
        steps.allowed.release(3)
        server.wait(lambda: len(steps.slots) == 4)
        server.stop()
        server.wait(lambda: server.app.engine._closing)
        steps.go_on()
        first, second = read_all(running), read_all(waiting)
        assert b"shutting down" in first
        assert first.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
        assert (b"data: [DONE]" in first) is stream
        assert second.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in second


def test_stopping_does_not_wait_for_bodies():
    with Running(fake_engine(), grace_s=30) as server, server.connect() as sock:
        sock.sendall(post("/v1/completions", LONG)[:-3])
        server.wait(lambda: server.app._bodies.held)
        server.stop()
        reply = read_all(sock)
        assert reply.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in reply


async def crowd(port: int, count: int) -> list[bytes]:
    """So many connections at once, a request on each; the statuses, and 200 only with all of the answer."""

    async def ask(number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        fields = {"prompt": [number % 90], "max_tokens": 4, "stream": number % 2 == 0, "return_token_ids": True}
        writer.write(post("/v1/completions", fields, "Connection: close"))
        reply = await reader.read()
        writer.close()
        await writer.wait_closed()
        status = reply[9:12]
        if status == b"200" and number % 2:
            body = json.loads(reply.partition(b"\r\n\r\n")[2])
            assert body["choices"][0]["token_ids"] == alone([number % 90], 4)
        elif status == b"200":
            assert b"data: [DONE]" in reply
        return status

    return await asyncio.gather(*map(ask, range(count)))


@pytest.mark.parametrize("max_queue", [1024, 32])
def test_many_connections_at_once(max_queue):
    engine = fake_engine(slots=16, tokenizer=letters(), max_queue=max_queue)
    with Running(engine) as server:
        statuses = asyncio.run(asyncio.wait_for(crowd(server.port, 400), LIMIT))
        assert set(statuses) <= {b"200", b"429"}
        assert statuses.count(b"200") >= min(max_queue, 400)
        server.wait(server.idle)
