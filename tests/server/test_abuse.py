"""Clients of every kind at once, most of them bad: each comes to an end, nothing is left of any, the next is served.

What a bad client does alone, and turn by turn, is in test_disconnects.py; what is wrong with a request in
test_errors.py.
"""

import asyncio
import contextlib
import json
import os
import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batching import Engine, Request, SamplingParams
from scripts.server.app import BODIES, Limits
from tests.batching.fake import alone
from tests.batching.fake_engine import fake_engine, letters
from tests.server.servers import CONFIG, LIMIT, Running, engine_of, post, read_all

TOKENS = 5  # of an answer
PROMPTS = [[40 + 3 * index + place for place in range(5 + 4 * index)] for index in range(8)]


def body(prompt, **fields) -> dict:
    fields = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True} | fields
    return {"prompt": prompt, **fields}


class Storm:
    """Many connections at once; `outcomes` counts how each kind of client ended."""

    def __init__(self, port: int, expected) -> None:
        self.port, self.expected, self.outcomes = port, expected, Counter()

    async def run(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        kinds = [draw.choice(list(KINDS)) for _ in range(count)]
        await asyncio.gather(*(self._client(kind, draw.choice(PROMPTS), draw.random()) for kind in kinds))

    async def _client(self, kind: str, prompt: list[int], share: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            self.outcomes[kind, await KINDS[kind](self, reader, writer, prompt, share)] += 1
        finally:
            writer.transport.abort() if share < 0.5 else writer.close()

    async def whole(self, reader, writer, prompt, share):
        writer.write(post("/v1/completions", body(prompt), "Connection: close"))
        told = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        assert told["choices"][0]["token_ids"] == self.expected[tuple(prompt)]
        return "answered"

    async def streamed(self, reader, writer, prompt, share):
        writer.write(post("/v1/completions", body(prompt, stream=True), "Connection: close"))
        return self._stream(prompt, await reader.read())

    async def reads_slowly(self, reader, writer, prompt, share):
        writer.write(post("/v1/completions", body(prompt, stream=True), "Connection: close"))
        pieces = []
        while piece := await reader.read(1 + int(400 * share)):
            pieces.append(piece)
            await asyncio.sleep(0.01)
        return self._stream(prompt, b"".join(pieces))

    def _stream(self, prompt, reply: bytes) -> str:
        events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith(b"data: {")]
        ids = [token for event in events for token in event["choices"][0]["token_ids"]]
        assert ids == self.expected[tuple(prompt)]
        assert b"data: [DONE]" in reply
        return "answered"

    async def leaves_while_it_sends(self, reader, writer, prompt, share):
        request = post("/v1/completions", body(prompt))
        writer.write(request[: int(share * len(request))])
        return "left"

    async def leaves_at_once(self, reader, writer, prompt, share):
        writer.write(post("/v1/completions", body(prompt, stream=share < 0.3)))
        await writer.drain()
        return "left"

    async def leaves_in_a_while(self, reader, writer, prompt, share):
        """While it waits for a slot, during its prompt, or later."""
        writer.write(post("/v1/completions", body(prompt, stream=share < 0.3, max_tokens=20)))
        await asyncio.sleep(share)
        return "left"

    async def leaves_while_it_reads(self, reader, writer, prompt, share):
        writer.write(post("/v1/completions", body(prompt, stream=True, max_tokens=20), "Connection: close"))
        with contextlib.suppress(EOFError):  # what it does not take at once is joined: there may be fewer events
            for _ in range(1 + int(8 * share)):
                await reader.readuntil(b"\n\n")
        return "left"

    async def sends_no_json(self, reader, writer, prompt, share):
        data = json.dumps(body(prompt)).encode()
        writer.write(post("/v1/completions", data[: int(share * (len(data) - 1))], "Connection: close"))
        return await self._status(reader)

    async def sends_wrong_types(self, reader, writer, prompt, share):
        field = ["prompt", "temperature", "max_tokens", "stop", "n", "stream"][int(6 * share)]
        writer.write(post("/v1/completions", body(prompt) | {field: {"a": [None]}}, "Connection: close"))
        return await self._status(reader)

    async def sends_too_much(self, reader, writer, prompt, share):
        writer.write(post("/v1/completions", b"", "Content-Length: 99999999999").replace(b"Content-Length: 0\r\n", b""))
        return await self._status(reader)

    async def sends_no_end(self, reader, writer, prompt, share):
        """A body, or a head, that does not come to its end: it is told so, or cut off."""
        request = post("/v1/completions", body(prompt))
        writer.write(request[: 40 if share < 0.5 else -3])
        reply = await reader.read()
        return "cut off" if not reply else reply[9:12].decode()

    async def sends_nothing(self, reader, writer, prompt, share):
        try:
            return "cut off" if await reader.read() == b"" else "told"
        except ConnectionResetError:
            return "cut off"

    async def _status(self, reader) -> str:
        return (await reader.read())[9:12].decode()


KINDS = {name: function for name, function in vars(Storm).items() if not name.startswith("_") and name != "run"}
ENDS = {
    "sends_no_json": {"400"}, "sends_wrong_types": {"400"}, "sends_too_much": {"413"},
    "sends_no_end": {"408", "cut off"}, "sends_nothing": {"cut off"},
} | {name: {"answered"} for name in ("whole", "streamed", "reads_slowly")}  # fmt: skip
ENDS |= {name: {"left"} for name in KINDS if name.startswith("leaves")}


def left_over(server: Running) -> dict[str, int]:
    """What may be left of clients."""
    app, engine = server.app, server.engine
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "asyncio tasks": len(asyncio.all_tasks(server.loop)),
        "connections": len(server.http.server_state.connections),
        "running": len(server.http.server_state.tasks),
        "bytes of bodies": app._bodies.held + app._answers.held,
        "calls": len(app.engine._calls),
        "samples that are open": len(app.watch._open),
        "tickets": engine.delivery.waiting,
        "samples": len(engine.scheduler._live) + len(engine._unqueued),
        "slots": engine.config.slots - len(engine.scheduler.free),
        "idle connections": len(server.http._idle),
    }


def sixteen_slots(folder) -> tuple[Engine, dict[tuple[int, ...], list[int]]]:
    """An engine for crowds, and what it answers to PROMPTS."""
    engine = engine_of(
        folder, replace(CONFIG, slots=16, max_queue=2048, checks=False)
    )  # they would take most of the time
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = engine.generate([Request(prompt_ids=prompt, params=params) for prompt in PROMPTS])
    return engine, {tuple(prompt): output.token_ids for prompt, output in zip(PROMPTS, outputs, strict=True)}


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_hundreds_of_connections(folder, count):
    """On sixteen slots. All that is left of them is what was there before."""
    engine, expected = sixteen_slots(folder)
    with Running(engine, limits=Limits(stall_s=4.0 if count < 1000 else 8.0)) as server:
        before = left_over(server)
        storm = Storm(server.port, expected)
        asyncio.run(asyncio.wait_for(storm.run(count, seed=0), 3 * LIMIT))
        assert {kind for kind, _ in storm.outcomes} == set(KINDS)
        for (kind, outcome), count in storm.outcomes.items():
            assert outcome in ENDS[kind], (kind, outcome, count)
        server.wait(server.idle)
        server.wait(lambda: left_over(server) == before)
        again = Storm(server.port, expected)
        asyncio.run(asyncio.wait_for(again._client("whole", PROMPTS[3], 0.7), LIMIT))
        assert again.outcomes["whole", "answered"] == 1
        server.wait(lambda: left_over(server) == before)


def test_bodies_that_do_not_end_take_little_memory():
    """A hundred clients send 2 MB each, in pieces that say no length, where 100 kB are allowed."""
    size, count = 2_000_000, 100
    limits = Limits(body_bytes=100_000)
    head = post("/v1/completions", b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    piece = b"%x\r\n%s\r\n" % (2**16, b" " * 2**16)

    async def send(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        try:
            for _ in range(size // 2**16):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        try:
            return (await reader.readuntil(b"\r\n\r\n"))[9:12]
        except (ConnectionResetError, EOFError):  # it was told while it was still sending
            return b"cut"
        finally:
            writer.transport.abort()

    async def all_of_them(port: int) -> Counter:
        return Counter(await asyncio.gather(*(send(port) for _ in range(count))))

    engine = fake_engine(slots=2, tokenizer=letters())
    with Running(engine, limits=limits) as server:
        tracemalloc.start()
        try:
            statuses = asyncio.run(asyncio.wait_for(all_of_them(server.port), LIMIT))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert statuses.keys() <= {b"413", b"503", b"cut"}
        assert statuses[b"413"] > 0
        # What is understood at once, and for each connection what its two ends have read or not sent yet.
        assert peak < 2 * BODIES * limits.body_bytes + count * 4 * 2**16 < size * count / 5
        assert server.app._bodies.held == 0
        with server.connect() as sock:
            sock.sendall(post("/v1/completions", {"prompt": [7], "max_tokens": 5}, "Connection: close"))
            assert read_all(sock).startswith(b"HTTP/1.1 200")


@pytest.fixture(scope="module")
def impatient():
    with Running(fake_engine(slots=2, tokenizer=letters()), limits=Limits(stall_s=0.2)) as server:
        yield server


GOOD = post("/v1/completions", {"prompt": [7], "max_tokens": 5, "return_token_ids": True}, "Connection: close")
EDITS = st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 4), st.binary(max_size=4)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EDITS)
@example([(0, 4, b"")])
@example([(GOOD.index(b"completions"), 11, b"\xff\xfe")])
@example([(GOOD.index(b" HTTP"), 0, b"\x00")])
@example([(GOOD.index(b"Content-Length"), 0, b"Transfer-Encoding: chunked\r\n")])
@example([(GOOD.index(b"Content-Length"), 0, b"Content-Length: -1\r\n")])
@example([(len(GOOD), 0, GOOD)])
@example([(0, len(GOOD), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9)])
def test_requests_with_bytes_changed(impatient, edits):
    """Whatever they are then, they are answered, or the connection ends; and the server's own fault is never seen."""
    data = GOOD
    for at, count, bytes_ in edits:
        data = data[:at] + bytes_ + data[at + count :]
    with impatient.connect() as sock:
        sock.sendall(data)
        try:
            reply = read_all(sock)
        except ConnectionResetError:
            reply = b""
    assert reply == b"" or reply.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 5" not in reply
    with impatient.connect() as sock:
        sock.sendall(GOOD)
        told = json.loads(read_all(sock).partition(b"\r\n\r\n")[2])
        assert told["choices"][0]["token_ids"] == alone([7], 5)


def test_who_vanishes_is_forgotten(impatient):
    """Neither end of the connection ever hears of the other again: as when a machine is switched off."""
    socks = []
    for _ in range(20):
        socks.append(impatient.connect())
        socks[-1].sendall(GOOD.replace(b"Connection: close\r\n", b""))
        assert socks[-1].recv(12) == b"HTTP/1.1 200"
    impatient.wait(lambda: not impatient.http.server_state.connections)  # it was kept for a next request, for a while
    for sock in socks:
        sock.close()
