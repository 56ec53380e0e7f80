"""What is no HTTP, connections beyond the limit, and bodies as other clients send them."""

import json
import os
import time

import httpx2
import pytest

from scripts.server.wire import PENDING, TURNED_AWAY
from tests.batching.fake_engine import fake_engine, letters
from tests.server.servers import LIMIT, Running, Steps, check, post, read_all


def told(reply: bytes) -> tuple[int, dict]:
    """The status of a whole answer and its error."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head[9:12]), json.loads(body)["error"]


def refusals(server: Running, status: int) -> float:
    value = server.app.watch.registry.get_sample_value(
        "carousel:http_refusals_total", {"model_name": "tiny", "status": str(status)}
    )
    return value or 0


@pytest.mark.parametrize(
    "data",
    [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /%s HTTP/1.1\r\n" % (b"a" * 2**18),
     b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 2**15,
     b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n"],
    ids=["no HTTP", "no host", "a long path", "a long head", "a wrong length"],
)  # fmt: skip
def test_what_is_no_http(data):
    with Running(fake_engine()) as server:
        with server.connect() as sock:
            try:
                sock.sendall(data)
                reply = read_all(sock)
            except ConnectionError:  # cut off with the rest unread
                reply = b""
            if len(data) < 1000:
                status, error = told(reply)
                assert (status, error["type"]) == (400, "invalid_request_error")
        server.wait(lambda: not server.http.server_state.connections)
        assert refusals(server, 400) == 1


def test_too_many_connections():
    """Those that were there first go on; one more is told, many more are cut off, and when one leaves there is room."""
    with Running(fake_engine(tokenizer=letters()), most_connections=2) as server:
        files = len(os.listdir("/proc/self/fd"))
        first, second = server.connect(), server.connect()
        server.wait(lambda: len(server.http.server_state.connections) == 2)
        for _ in range(3):
            with server.connect() as third:
                third.sendall(post("/v1/completions", {"prompt": "a"}))
                status, error = told(read_all(third))
                assert (status, error["code"]) == (503, "overloaded")
                assert "2 connections" in error["message"]
        silent = [server.connect() for _ in range(200)]
        assert sum(was_cut_off(sock) for sock in silent) == 200 - TURNED_AWAY
        assert len(server.http.server_state.connections) == 2 + TURNED_AWAY
        for sock in (first, second):
            sock.sendall(post("/v1/completions", {"prompt": "a"}, "Connection: close"))
            assert read_all(sock).startswith(b"HTTP/1.1 200")
            sock.close()
        for sock in silent:
            sock.close()
        server.wait(lambda: not server.http.server_state.connections)
        with httpx2.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
        server.wait(lambda: len(os.listdir("/proc/self/fd")) <= files)
        assert refusals(server, 503) == 3


def was_cut_off(sock) -> bool:
    """Before long, or not at all."""
    sock.settimeout(0.05)
    try:
        return not sock.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_not_too_much_may_be_sent_before_the_answer():
    engine = fake_engine(tokenizer=letters())
    steps = Steps(engine)
    with Running(engine) as server, server.connect() as sock:
        sock.sendall(post("/v1/completions", {"prompt": [5], "max_tokens": 60}) + b"X" * PENDING)
        assert steps.waiting.wait(LIMIT)
        server.wait(lambda: len(next(iter(server.http.server_state.connections)).conn.trailing_data[0]) == PENDING)
        sock.sendall(b"X")
        server.wait(lambda: server.app.engine._calls)  # it was cut off, and that was noticed
        steps.go_on()
        server.wait(server.idle)
        assert len(steps.slots) < 10


def test_lines_after_a_last_request_are_ignored():
    engine = fake_engine(tokenizer=letters())
    steps = Steps(engine)
    with Running(engine) as server, server.connect() as sock:
        sock.sendall(post("/v1/completions", {"prompt": [5], "max_tokens": 3}, "Connection: close"))
        assert steps.waiting.wait(LIMIT)
        sock.sendall(b"\r\n")
        time.sleep(0.05)
        steps.go_on()
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_the_next_request_may_be_sent_before_the_answer():
    ask = post("/v1/completions", {"prompt": [5], "max_tokens": 3})
    last = post("/v1/completions", {"prompt": [6], "max_tokens": 3}, "Connection: close")
    with Running(fake_engine(tokenizer=letters())) as server, server.connect() as sock:
        sock.sendall(ask * 3 + last)
        assert read_all(sock).count(b"HTTP/1.1 200") == 4


CLIENTS = {
    "GuideLLM": ("/v1/chat/completions", {
        "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "max_completion_tokens": 8,
        "stop": None, "ignore_eos": True,
    }),
    "GuideLLM, once": ("/v1/completions", {
        "model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 8, "max_completion_tokens": 8, "stop": None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True,
    }),
    "vLLM's benchmark": ("/v1/completions", {
        "model": "tiny", "prompt": "Hi", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0,
    }),
    "vLLM's, of chats": ("/v1/chat/completions", {
        "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stream": True,
        "max_completion_tokens": 8, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0,
    }),
    "lm-eval": ("/v1/completions", {
        "prompt": [[70, 71, 72], [73, 74]], "model": "tiny", "max_tokens": 1, "temperature": 0, "logprobs": 1,
        "seed": 1234, "echo": True,
    }),
    "lm-eval, generating": ("/v1/completions", {
        "prompt": [[70, 71, 72]], "model": "tiny", "max_tokens": 8, "temperature": 0, "stop": ["\n\n", "Question:"],
        "seed": 1234,
    }),
    "lm-eval, of chats": ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "Hi", "type": "text"}], "model": "tiny", "max_tokens": 8,
        "temperature": 0, "stop": ["\n\n"], "seed": 1234,
    }),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), CLIENTS.values(), ids=[*CLIENTS])
def test_what_clients_send(server, path, body):
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        if body.get("stream"):
            lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
            assert lines[-1] == "[DONE]"
            assert json.loads(lines[-2])["usage"]["completion_tokens"] == 8
        else:
            assert len(reply.json()["choices"]) == len(body.get("prompt", [0]))
        card = http.get("/v1/models").json()["data"][0]
        assert (card["id"], card["root"]) == ("tiny", "tiny")
        check(http.post(path, json=body | {"wat": 1}), 400, "wat")
