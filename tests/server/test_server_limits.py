"""The limits that hold for everybody: keys, the queue, bodies, memory and patience; and failures of the engine."""

import contextlib
import json
import math
import threading

import httpx2
import pytest

from scripts.server.app import Limits
from tests.batching.fake_engine import fake_engine, letters
from tests.model.test_tokenizer import smollm
from tests.server.servers import LIMIT, Running, Steps, check, post, read_all

PROMPT = {"prompt": "abc", "max_tokens": 2}
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0, 1e-9])
def test_limits_are_sensible(value):
    with pytest.raises(ValueError, match=f"stall_s must be at least 0.1 and finite, not {value}"):
        Limits(stall_s=value)


def test_large_bodies(server):
    with server.connect() as sock:  # told of by its length, before it is sent
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: 99999999999\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")
    with server.connect() as sock:  # in pieces of unknown number
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            sock.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_keys():
    engine = fake_engine(tokenizer=letters())
    with Running(engine, key="s\u00e9same") as server, httpx2.Client(base_url=server.url) as http:
        for path in ("/v1/models", "/metrics", "/", "/tokenize", "/nothing"):
            error = check(http.get(path), 401)
            assert error["code"] == "invalid_api_key"
        assert http.get("/health").json() == {"status": "ok"}
        for wrong in (b"Bearer sesame", b"s\xc3\xa9same", b"Basic !!", b"Basic OnNlc2FtZQ=="):
            check(http.get("/v1/models", headers={b"Authorization": wrong}), 401)
        assert http.get("/v1/models", headers={b"Authorization": "Bearer s\u00e9same".encode()}).status_code == 200
        assert http.get("/metrics", auth=("", "s\u00e9same")).status_code == 200
        assert http.get("/", headers={}).headers["www-authenticate"].startswith("Basic")


def test_a_full_queue():
    """One request has the slot, one waits, and there is no room for a third."""
    engine = fake_engine(slots=1, tokenizer=letters(), max_queue=1)
    steps, body = Steps(engine), post("/v1/completions", {"prompt": [5], "max_tokens": 40}, "Connection: close")
    with Running(engine) as server, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(3)]
        socks[0].sendall(body)
        assert steps.waiting.wait(LIMIT)
        for sock in socks[1:]:
            sock.sendall(body)
        server.wait(lambda: len(server.app.engine._calls) == 2)
        steps.go_on()
        replies = sorted(read_all(sock) for sock in socks)
        assert [reply[9:12] for reply in replies] == [b"200", b"200", b"429"]
        assert b"retry-after: 1\r\n" in replies[-1]
        assert b'"code": "queue_full"' in replies[-1]


def test_failures_in_the_engine_are_told_and_not_explained(caplog):
    """Before the first token with a status, afterwards in the stream; the next request is served."""
    engine = fake_engine(slots=2, tokenizer=letters())
    run, failing = engine.run, [True]

    def failing_run(turn):
        if failing:
            failing.clear()
            raise ZeroDivisionError("a secret")
        return run(turn)

    engine.run = failing_run
    steps, asked = Steps(engine), {"prompt": [5], "max_tokens": 40}
    with Running(engine) as server, httpx2.Client(base_url=server.url, timeout=60) as http:
        steps.allowed.release()
        error = check(http.post("/v1/completions", json=asked), 500)
        assert error["type"] == "server_error"
        assert "secret" not in error["message"]
        assert "secret" in caplog.text
        steps.allowed.release(3)
        with http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()
            assert "choices" in next(lines)
            failing.append(True)
            steps.go_on()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(events[-2])["error"] == error | {"message": json.loads(events[-2])["error"]["message"]}
        assert events[-1] == "[DONE]"
        assert http.post("/v1/completions", json=asked).status_code == 200


def test_stalled_bodies_and_connections():
    with Running(fake_engine(), limits=Limits(stall_s=0.3)) as server:
        with server.connect() as silent, server.connect() as half, server.connect() as late:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
            late.sendall(post("/v1/completions", {"prompt": [5]})[:-3])
            assert read_all(late).startswith(b"HTTP/1.1 408 ")
            for sock in (silent, half):
                with contextlib.suppress(ConnectionResetError):  # or closed in order, which will do
                    assert read_all(sock) == b""
        server.wait(lambda: not server.http.server_state.connections)


def test_bodies_share_memory():
    with Running(fake_engine(), limits=Limits(body_bytes=1000)) as server:
        socks = [server.connect() for _ in range(17)]
        for sock in socks:
            sock.sendall(post("/v1/completions", b" " * 1000)[:-1])
        server.wait(lambda: server.app._bodies.held > 15_000 and len(server.http.server_state.connections) >= 17)
        statuses = []
        for sock in socks:
            sock.sendall(b" ")
            statuses.append(sock.recv(20).split()[1])
            sock.close()
        assert sorted(set(statuses)) == [b"400", b"503"]
        assert statuses.count(b"503") == 1
        server.wait(lambda: server.app._bodies.held == 0)


def test_answers_that_nobody_reads_share_memory():
    """Who takes none of a large answer keeps others from theirs, not from small ones, and until it is gone."""
    fields = {"prompt": [5], "temperature": 0, "n": 128, "max_tokens": 400, "return_token_ids": True}
    with Running(fake_engine(slots=2, max_len=1024, tokenizer=letters())) as server:
        with server.connect_narrowly() as silent, httpx2.Client(base_url=server.url, timeout=60) as http:
            size = len(http.post("/v1/completions", json=fields).content)
            server.app._answers.most = int(1.5 * size)
            silent.sendall(post("/v1/completions", fields | {"n": 100}))
            server.wait(lambda: server.app._answers.held > size / 2)
            error = check(http.post("/v1/completions", json=fields), 503)
            assert error["code"] == "overloaded"
            assert http.post("/v1/completions", json={"prompt": [5]}).status_code == 200
        server.wait(lambda: server.app._answers.held == 0)


def test_no_tokenizer():
    with Running(fake_engine()) as server, httpx2.Client(base_url=server.url, timeout=60) as http:
        reply = http.post("/v1/completions", json={"prompt": [5], "logprobs": None, "return_token_ids": True})
        assert reply.json()["choices"][0]["text"] == ""
        assert len(reply.json()["choices"][0]["token_ids"]) == 16
        for path, fields in (
            ("/v1/completions", PROMPT),
            ("/v1/chat/completions", HELLO),
            ("/tokenize", {"prompt": "a"}),
        ):
            assert "no tokenizer" in check(http.post(path, json=fields), 400)["message"]
        check(http.post("/v1/completions", json={"prompt": [5], "stop": "a"}), 400)


def test_the_loop_waits_for_nobody():
    """While a step takes its time, whatever needs no step is answered."""
    engine = fake_engine(slots=1, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine) as server, httpx2.Client(base_url=server.url, timeout=60) as http, server.connect() as sock:
        sock.sendall(post("/v1/completions", {"prompt": [5], "max_tokens": 3}, "Connection: close"))
        assert steps.waiting.wait(LIMIT)
        assert http.get("/health").status_code == 200
        assert http.post("/tokenize", json={"prompt": "\u4e00"}).json()["tokens"] == [0]
        check(http.post("/v1/completions", json={"prompt": [5000]}), 400, "prompt")
        assert http.get("/metrics").status_code == 200
        assert len(steps.slots) == 1  # the step is not over
        steps.go_on()
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_threads_go_on_while_a_long_text_is_tokenised():
    tokenizer, counted, ended = smollm(), [0], threading.Event()

    def count() -> None:
        while not ended.wait(0.001):
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    tokenizer.encode("on the sun it is hot " * 20_000)  # some tenths of a second
    after = counted[0]
    ended.set()
    thread.join()
    assert after - before > 10  # none or one if the library kept them waiting
