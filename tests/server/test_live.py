"""The live page: what is in it, who sits where by its events, and who may look."""

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser

import httpx2

from scripts.server import live
from scripts.timeline import Timeline
from tests.batching.fake_engine import fake_engine, letters, prompt_of, request_of
from tests.server.servers import LIMIT, Running, Steps, post
from tests.server.test_watch import Script, ask


def test_the_page_needs_nothing_from_elsewhere():
    found = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append((tag, dict(attrs)))

    Tags().feed(live.PAGE)
    assert all(not {"src", "href", "style"} & attrs.keys() for _, attrs in found)
    assert not any(name.startswith("on") for _, attrs in found for name in attrs)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|innerHTML|insertAdjacent|document\.write|eval", live.PAGE)
    assert {tag for tag, _ in found} >= {"html", "style", "script", "table"}
    policy = live.HEADERS["Content-Security-Policy"]
    for tag in ("script", "style"):
        text = re.fullmatch(rf".*<{tag}>(.*)</{tag}>.*", live.PAGE, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'")


class Looking:
    """A page's connection: the events, as they come."""

    def __init__(self, server):
        self.sock = server.connect()
        self.sock.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        self.file = self.sock.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        self.headers = dict(line.strip().split(b": ", 1) for line in iter(self.file.readline, b"\r\n"))

    def event(self):
        while not (line := self.file.readline()).startswith(b"data: "):
            assert line, "the stream ended"
        return json.loads(line[6:])

    def close(self):
        self.file.close()
        self.sock.close()


def test_who_sits_where(monkeypatch):
    monkeypatch.setattr(live, "PERIOD_S", 0.01)
    engine = fake_engine(slots=3, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine) as server:
        page = Looking(server)
        assert page.status == 200
        assert page.headers[b"content-type"] == b"text/event-stream"
        assert page.event() == {"slots": [None] * 3, "running": 0, "waiting": 0, "tokens_per_s": 0.0, "generated": 0,
                                "turns": []}  # fmt: skip
        socks = [server.connect() for _ in range(2)]
        socks[0].sendall(post("/v1/completions", {"prompt": [3] * 40, "max_tokens": 5}))
        assert steps.waiting.wait(LIMIT)
        server.wait(lambda: page.event()["running"] == 1)
        seat = page.event()["slots"][0]
        assert re.fullmatch("cmpl-[0-9a-f]{32}-0", seat.pop("id"))
        assert seat.pop("age_s") > 0
        assert seat == {"phase": "prefill", "prompt": 40, "computed": 19, "cached": 0, "generated": 0, "max_tokens": 5,
                        "tokens_per_s": 0.0}  # fmt: skip
        socks[1].sendall(post("/v1/completions", {"prompt": [4], "max_tokens": 3, "n": 3, "temperature": 1}))
        server.wait(lambda: server.app.engine._calls)
        steps.allowed.release(2)
        server.wait(lambda: page.event()["waiting"] == 1)
        event = page.event()
        assert event["running"] == 3
        assert [seat["id"][-4:] for seat in event["slots"]][1:] == ["-0#0", "-0#1"]
        steps.go_on()
        server.wait(server.idle)
        event, turns = page.event(), [*event["turns"]]
        while event["running"] or event["generated"] < 14:
            turns += event["turns"]
            event = page.event()
        assert event["generated"] == 5 + 3 * 3
        for one in [*socks, page]:
            one.close()
        server.wait(lambda: not server.app.watch.live._pages)
        assert not server.app.watch.live._turns
        assert not server.http.server_state.tasks


def test_the_strip_is_the_timelines(monkeypatch):
    """Slot by slot and turn by turn, who did what: as scripts/timeline.py has it, which watches the same engine."""
    script = Script(monkeypatch, slots=3, policy="priority")
    script.watch.live._pages = 1
    strips = script.watch.live._turns
    kept: list[live.Strip] = []
    with Timeline("").recording(script.engine) as timeline:
        for index in range(12):
            script.send(request_of(str(index), prompt_of(3 + 5 * index, index), max_tokens=1 + index % 5))
        while script.engine.unfinished:
            script.engine.step()
            kept += [one for one in strips if not kept or one.number > kept[-1].number]
    assert len(kept) == len(timeline.turns) > 20
    for strip, record in zip(kept, timeline.turns, strict=True):
        expected = ["."] * 3
        for cell in record.cells:
            expected[cell.slot] = cell.kind[0]
        assert strip.slots.lower() == "".join(expected)
        assert (strip.rows, strip.live_rows, strip.tokens) == (record.rows, record.live_rows, record.tokens)
        assert strip.wall_s == record.wall_s
    for (earlier, before), (later, after) in itertools.pairwise(zip(kept, timeline.turns, strict=True)):
        owners = [{cell.slot: cell.request for cell in one.cells} for one in (before, after)]
        for slot in owners[0].keys() & owners[1].keys():  # another one's letters have the other case
            same = earlier.slots[slot].isupper() == later.slots[slot].isupper()
            assert same is (owners[0][slot] == owners[1][slot])


def test_the_speed_is_of_whole_turns(monkeypatch):
    """However few there are: 2 tokens in a turn of 5 ticks, of which 4 ticks later somebody asks."""
    script = Script(monkeypatch)
    script.watch.live._pages = 1
    for name in "ab":
        script.send(request_of(name, prompt_of(3, ord(name)), max_tokens=1))
    script.finish()
    (turn,) = script.watch.live._turns
    monkeypatch.setattr(script.watch.live, "_clock", lambda: turn.committed + 4)
    monkeypatch.setattr(live, "SPEED_S", 1e9)
    assert turn.wall_s > 1
    assert script.watch.live.snapshot()["tokens_per_s"] == 2 / (turn.wall_s + 4)


def test_nothing_is_kept_when_nobody_looks(monkeypatch):
    script = Script(monkeypatch)
    shown = script.watch.live
    shown._pages = 1
    script.send(request_of("a", prompt_of(3), max_tokens=9))
    script.engine.step()
    shown._pages = 0  # while a turn is on its way
    script.finish()
    assert not shown._turns
    assert not shown._flights


def test_pages_are_few_and_go(monkeypatch):
    monkeypatch.setattr(live, "PERIOD_S", 0.01)
    engine = fake_engine(slots=2, tokenizer=letters())
    with Running(engine) as server, httpx2.Client(base_url=server.url, timeout=LIMIT) as http:
        ask(server)
        assert not server.app.watch.live._turns  # nobody looked
        pages = [Looking(server) for _ in range(live.MOST_PAGES)]
        assert [page.event()["running"] for page in pages] == [0] * live.MOST_PAGES
        refused = http.get("/live")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        pages.pop().close()
        server.wait(lambda: server.app.watch.live._pages == live.MOST_PAGES - 1)
        assert http.head("/live").status_code == 200
        assert http.post("/live").status_code == 405
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.text == live.PAGE
        assert "sha256" in page.headers["content-security-policy"]
        monkeypatch.setattr(live, "PAGE_S", 0.0)
        again = Looking(server)
        assert again.status == 200
        assert again.file.read(5) == b"0\r\n\r\n"  # it is to ask anew
        again.close()
        ask(server)
        server.wait(lambda: len(server.app.watch.live._turns) == 3)
        for page in pages[1:]:
            page.close()
        server.stop()  # the last one does not hold it up
        assert pages[0].file.read().endswith(b"0\r\n\r\n")
        pages[0].close()
