"""The benchmark's client against a server that does as it is told, well and badly."""

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace

from scripts import bench_server, benchmark, http_client
from scripts.bench_server import Answer, Client, ask
from scripts.http_client import Server
from scripts.traces import Item, token_hash
from tests.batching.fake_engine import letters

CHECKPOINT = Path(__file__).parent.parent / "data/llama_tied_gqa4"
STALL = object()  # nothing more is sent


class Scripted:
    """`answer` is told a request's body and gives the status, and the events of its stream."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.bodies, self.heads = [], []
        self.open = self.most_open = 0

    async def handle(self, reader, writer) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("Content-Length"))
            body = json.loads(await reader.readexactly(length) or "null")
            self.heads.append(head)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            if head.startswith("GET /v1/models "):
                await self.reply(writer, 200, [{"data": [{"id": "the-model"}]}], events=False)
            else:
                assert head.startswith("POST /v1/completions ")
                self.bodies.append(body)
                await asyncio.sleep(0)
                await self.reply(writer, *self.answer(body))
        self.open -= 1
        writer.close()

    async def reply(self, writer, status: int, parts: list, events: bool = True) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for part in parts:
            if part is STALL:
                await self.stopped.wait()
                return
            text = part if isinstance(part, str) else json.dumps(part)
            data = (f"data: {text}\n\n" if events else text).encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    @contextlib.contextmanager
    def running(self):
        """Gives the address."""
        loop, started, stop = asyncio.new_event_loop(), threading.Event(), None

        async def serve() -> None:
            nonlocal stop
            self.stopped, stop = asyncio.Event(), asyncio.Event()
            server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await stop.wait()
            self.stopped.set()
            server.close()
            await asyncio.sleep(0.05)  # for the handlers that stalled

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        try:
            assert started.wait(10)
            yield f"http://127.0.0.1:{self.port}"
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


def event(text: str = "", ids: list[int] | None = None, **more) -> dict:
    return {"choices": [{"text": text, "index": 0} | ({} if ids is None else {"token_ids": ids})]} | more


def used(tokens: int, prompt: int = 3) -> dict:
    return {"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": prompt}}


def good(body) -> tuple[int, list]:
    """Every token is the prompt's length; two of them in the first event with text."""
    count, length = body["max_tokens"], len(body["prompt"])
    ids = [length] * count
    first, *rest = [ids[:2], *([one] for one in ids[2:])]
    events = [event(), event("two", first), *(event("one", one) for one in rest)]
    return 200, [*events, used(count, length), "[DONE]"]


def workload(tmp_path: Path, items: list[Item]) -> str:
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(item.to_json()) + "\n" for item in items))
    return str(path)


def run(tmp_path, address: str, items: list[Item], *options: str) -> tuple[int, dict]:
    target = tmp_path / "figures.json"
    how = ["--model", str(CHECKPOINT), "--server", address, "--workload", workload(tmp_path, items), "--repeat", "1"]
    status = benchmark.main([*how, "--json", str(target), *options])
    return status, json.loads(target.read_text()) if target.exists() else {}


def test_a_request_has_vllms_fields_and_its_figures_come_from_usage(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BENCH_KEY", "secret-key")
    server = Scripted(good)
    items = [Item("a", 5, prompt_ids=(7, 8, 9)), Item("b", 1, prompt_tokens=4, ignore_eos=False)]
    with server.running() as address:
        status, figures = run(tmp_path, address + "/v1/", items, "--api-key-env", "BENCH_KEY", "--repeat", "2")
    assert status == 0
    assert server.bodies[0] == {  # the first is the warm-up's
        "model": "the-model",
        "prompt": [7, 8, 9],
        "max_tokens": bench_server.PROBE_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }
    assert len(server.bodies) == 1 + 2 * 2
    assert "ignore_eos" not in next(body for body in server.bodies if body["max_tokens"] == 1)
    assert all("Authorization: Bearer secret-key" in head for head in server.heads)
    assert "secret-key" not in json.dumps(figures) + capsys.readouterr().err
    first = figures["runs"][0]["figures"]
    assert (first["completed"], first["failed"], first["prompt_tokens"], first["generated_tokens"]) == (2, 0, 7, 6)
    assert figures["runs"][1]["different"] == []
    assert figures["runs"][1]["compared"] == 2
    assert figures["configurations"][0]["label"] == "the-model"
    assert first["ttft_s"]["p50"] > 0


def test_the_clock_starts_at_the_send_and_stops_at_the_first_text(monkeypatch):
    ticks = iter(range(101, 200))
    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: 100))
    monkeypatch.setattr(bench_server, "time", SimpleNamespace(monotonic=lambda: next(ticks)))

    def answered(events: list, tokens: int) -> Answer:
        server, answer, item = Scripted(lambda _: (200, events)), Answer(), Item("a", tokens, prompt_ids=(1,))
        with server.running() as address:
            client = Client(Server(address, "m"), 10, None)
            asyncio.run(ask(client.server, client.request(item, (1,)), item, answer))
        return answer

    spread = answered([event(), event("three tokens"), event("and one"), used(4), "[DONE]"], 4)
    assert spread.sent == 100
    assert spread.times == [102, 102, 103, 103]  # by number alone: the first and the last are where they came
    assert spread.end == 105
    ticks = iter(range(101, 200))
    exact = answered([event("", [5]), event("x", [6, 7]), event("y", [8]), event("", [9]), used(5), "[DONE]"], 5)
    assert exact.times == [102, 102, 102, 103, 103]
    assert exact.ids == [5, 6, 7, 8, 9]


def broken(body) -> tuple[int, list]:
    """By the first token of the prompt."""
    text = event("x", [1, 1])
    match body["prompt"][0]:
        case 1:
            return 503, ["overloaded"]
        case 2:
            return 200, [text, {"error": {"message": "out of blocks"}}]
        case 3:
            return 200, [text, used(2), "[DONE]"]
        case 4:
            return 200, [text, STALL]
        case 5:
            return 200, [text, event("x", [1, 1]), "[DONE]"]
        case 6:
            return 200, [text, used(2)]  # and the connection ends
        case 7:
            return 200, ["[1, 2"]
        case 8:
            return 200, ['[{"choices": 3}]']
        case 9:
            return 200, [text, used(9), "[DONE]"]
        case 10:
            return 200, [used(4), "[DONE]"]
    return good(body)


REASONS = {
    "r1": ("error", "status 503"),
    "r2": ("error", "in the stream: {'message': 'out of blocks'}"),
    "r3": ("early end", "2 tokens, 4 were asked for"),
    "r4": ("timeout", "no end within 1 s"),
    "r5": ("no usage", "did not say"),
    "r6": ("error", "the stream broke off"),
    "r7": ("error", "the reply broke"),
    "r8": ("error", "no event"),
    "r9": ("error", "9 tokens, 4 were asked for"),
    "r10": ("error", "4 tokens and no text"),
}


def test_what_goes_wrong_is_counted_apart_and_enters_no_figure(tmp_path, capsys):
    items = [Item("ok", 4, prompt_ids=(0, 0, 0)), *(Item(f"r{one}", 4, prompt_ids=(one, 0, 0)) for one in range(1, 11))]
    with Scripted(broken).running() as address:
        status, figures = run(tmp_path, address, items, "--timeout-s", "1")
    assert status == 1
    only = figures["runs"][0]
    assert only["figures"]["failures"] == {"error": 7, "early end": 1, "timeout": 1, "no usage": 1}
    assert only["failed_because"].keys() == REASONS.keys()
    shown = capsys.readouterr().err
    for name, (kind, reason) in REASONS.items():
        assert reason in only["failed_because"][name]
        assert f"{name}: {kind}: " in shown
    assert (only["figures"]["completed"], only["figures"]["failed"]) == (1, 10)
    assert (only["figures"]["generated_tokens"], only["figures"]["prompt_tokens"]) == (4, 3)
    assert figures["failed_requests"] == 10


def test_an_answer_may_end_early_where_eos_is_not_ignored(tmp_path):
    items = [Item("ok", 4, prompt_ids=(0,)), Item("short", 4, prompt_ids=(3,), ignore_eos=False)]
    with Scripted(broken).running() as address:
        status, figures = run(tmp_path, address, items)
    assert status == 0
    assert figures["runs"][0]["figures"]["generated_tokens"] == 6


def test_tokens_that_the_workload_does_not_expect(tmp_path, capsys):
    right, wrong = token_hash([3] * 4), "0" * 16
    items = [Item("a", 4, prompt_ids=(0, 0, 0), expected=right), Item("b", 4, prompt_ids=(0, 0, 1), expected=wrong)]
    with Scripted(good).running() as address:
        status, figures = run(tmp_path, address, items)
    assert status == 1
    assert figures["runs"][0]["unexpected"] == ["b"]
    assert "other tokens than the workload expects: b" in capsys.readouterr().err


def test_what_a_server_refuses_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_server, "load_vocabulary", lambda _: (97, letters()))

    def text_only(body):
        if "return_token_ids" in body or not isinstance(body["prompt"], str):
            return 400, ["prompt must be a string, and nothing else is known"]
        return 200, [event("y"), event("z"), used(body["max_tokens"], len(body["prompt"])), "[DONE]"]

    server = Scripted(text_only)
    with server.running() as address:
        status, figures = run(tmp_path, address, [Item("a", 3, prompt_ids=(1, 2))])
    assert status == 0
    asked = [(type(one["prompt"]), "return_token_ids" in one) for one in server.bodies]
    assert asked == [(list, True), (list, False), (str, True), (str, False), (str, False)]
    assert server.bodies[-1]["prompt"] == letters().decode((1, 2))
    assert (figures["prompt_ids"], figures["token_ids"]) == (False, False)
    assert figures["runs"][0]["compared"] == 0
    shown = capsys.readouterr().err
    assert "prompts are sent as text" in shown
    assert "does not tell the ids" in shown
    assert "not known" in shown


def test_a_conversation_goes_on_with_what_the_server_said(tmp_path):
    items = [Item("a", 2, prompt_ids=(1, 2)), Item("b", 2, prompt_ids=(3,), after="a", continues=True, arrival_s=0.01)]
    server = Scripted(good)
    with server.running() as address:
        status, _ = run(tmp_path, address, items)
    assert status == 0
    assert server.bodies[-1]["prompt"] == [1, 2, 2, 2, 3]


def test_no_more_connections_than_are_allowed(tmp_path):
    server = Scripted(good)
    items = [Item(f"r{n}", 3, prompt_ids=(n,)) for n in range(20)]
    with server.running() as address:
        status, figures = run(tmp_path, address, items, "--connections", "2")
    assert status == 0
    assert server.most_open <= 2
    assert figures["runs"][0]["figures"]["completed"] == 20


def test_a_server_that_does_not_serve(tmp_path, monkeypatch, capsys):
    items = [Item("a", 3, prompt_ids=(1, 2))]
    with Scripted(good).running() as address:
        for options, reason in (
            (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE holds no key"),
            (["--model", "no/such/model"], "no/such/model"),
        ):
            assert run(tmp_path, address, items, *options)[0] == 2
            assert reason in capsys.readouterr().err.splitlines()[-1]
    assert run(tmp_path, address, items)[0] == 2  # nobody listens there any more
    assert "does not tell its models" in capsys.readouterr().err.splitlines()[-1]
    with Scripted(lambda _: (404, ["no such model"])).running() as address:
        assert run(tmp_path, address, items)[0] == 2
        assert "status 404" in capsys.readouterr().err.splitlines()[-1]
