"""What the live page shows: who sits in which slot, and what the last turns did there, while somebody looks.

The page is scripts/server/page.html, one file without anything from elsewhere. It is sent as it is; what it shows comes
as server-sent events of `/live`, each a JSON object as `Live.snapshot` makes it.
"""

import asyncio
import bisect
import json
import threading
from base64 import b64encode
from collections import deque
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope

from batching import Engine
from batching.plan import FROM_DEVICE
from batching.sequence import SequenceState
from batching.turn import Turn, TurnTimes
from scripts.server.connection import EVENTS, Sender, while_connected
from scripts.server.errors import ApiError

TURNS = 100  # that the page has beside one another
PERIOD_S = 0.2  # between two events
SPEED_S = 2.0  # tokens per second are of the last so many seconds
MOST_PAGES = 8  # at once
PAGE_S = 600.0  # then a page asks anew: one that went away unseen holds no place for ever
PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")


class Strip(NamedTuple):
    """A turn that was committed."""

    number: int
    slots: str  # a letter each: prefill, decode, wait, or . for nobody; who follows another has the other case
    rows: int  # computed, padding included
    live_rows: int
    tokens: int  # generated
    committed: float
    wall_s: float


class Live:
    """The last turns of an engine. `launched` and `committed` run in the engine's thread, the rest in the event loop's.

    While nobody looks nothing is kept and nothing is made.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._clock = engine, engine.scheduler.clock
        self._pages = 0
        self._closing = False
        self._lock = threading.Lock()
        self._turns: deque[Strip] = deque(maxlen=TURNS)
        self._number = 0
        self._until = 0.0  # when the last turn was committed
        self._flights: deque[tuple[Turn, str]] = deque()  # launched while somebody looked
        self._owners: list[SequenceState | None] = [None] * engine.config.slots
        self._upper = [False] * engine.config.slots

    def launched(self, turn: Turn) -> None:
        """Whose a slot is must be seen now: when the turn is committed it may be another's."""
        if self._pages:
            self._flights.append((turn, self._letters(turn)))

    def _letters(self, turn: Turn) -> str:
        rows, first = turn.plan.rows, list(turn.plan.first_rows)
        tokens = dict(zip(rows.slots[first].tolist(), rows.tokens[first].tolist(), strict=True))
        letters = ["."] * len(self._owners)
        for sequence in self._engine.scheduler.running:
            slot = sequence.slot
            assert slot is not None
            if self._owners[slot] is not sequence:
                self._owners[slot], self._upper[slot] = sequence, not self._upper[slot]
            token = tokens.get(slot)
            letter = "w" if token is None else "d" if token == FROM_DEVICE else "p"
            letters[slot] = letter.upper() if self._upper[slot] else letter
        return "".join(letters)

    def committed(self, turn: Turn, times: TurnTimes, tokens: int) -> None:
        """`tokens`: that it brought."""
        wall_s, self._until = times.committed - max(times.plan, self._until), times.committed
        self._number += 1
        if not any(one is turn for one, _ in self._flights):  # launched while nobody looked
            return
        seen, letters = self._flights.popleft()
        while seen is not turn:  # those before it were never committed
            seen, letters = self._flights.popleft()
        plan = turn.plan
        strip = Strip(self._number, letters, len(plan.rows.tokens), plan.live_rows, tokens, times.committed, wall_s)
        with self._lock:
            if self._pages:
                self._turns.append(strip)

    def snapshot(self, after: int = 0) -> dict[str, Any]:
        """What an event tells: of the turns, those that follow number `after`."""
        engine, now = self._engine, self._clock()
        with self._lock:
            turns = list(self._turns)
        since = max(now - SPEED_S, turns[0].committed - turns[0].wall_s if turns else now)
        tokens = sum(one.tokens for one in turns if one.committed > since)
        slots: list[dict[str, Any] | None] = [None] * engine.config.slots
        for sequence in list(engine.scheduler.running):
            if (slot := sequence.slot) is not None:
                slots[slot] = _seat(sequence, now)
        return {
            "slots": slots,
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "tokens_per_s": tokens / (now - since) if now > since else 0.0,
            "generated": engine.stats.generated_tokens,
            "turns": [[*one[:5], round(one.wall_s * 1e3, 2)] for one in turns if one.number > after],
        }

    def close(self) -> None:
        """Ends what is sent to the pages, so that nothing waits for them."""
        self._closing = True

    async def page(self, _: Request) -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)

    async def events(self, scope: Scope, receive: Receive, sender: Sender) -> None:
        """For an `Endpoint`: snapshots until the page goes away. Raises ApiError if there are too many pages."""
        if self._pages >= MOST_PAGES:
            raise ApiError(503, f"{self._pages} pages look on, at most {MOST_PAGES} may", code="overloaded")
        self._pages += 1
        try:
            await sender.begin(200, EVENTS, {"Cache-Control": "no-store"})
            if scope["method"] == "GET":
                await while_connected(self._tell(sender), receive)
            await sender.end()
        finally:
            self._pages -= 1
            if not self._pages:
                with self._lock:
                    self._turns.clear()
                    self._owners = [None] * len(self._owners)

    async def _tell(self, sender: Sender) -> None:
        told, now = 0, asyncio.get_running_loop().time
        end = now() + PAGE_S
        while not self._closing and now() < end:
            event = self.snapshot(told)
            told = max([told, *(turn[0] for turn in event["turns"][-1:])])
            await sender.more(b"data: %s\n\n" % json.dumps(event, separators=(",", ":")).encode())
            await asyncio.sleep(PERIOD_S)


def _seat(sequence: SequenceState, now: float) -> dict[str, Any]:
    """Who has a slot, and how far it is."""
    times = sequence.metrics.tokens
    since = max(now - SPEED_S, sequence.metrics.admission or now)
    recent = len(times) - bisect.bisect_left(times, since)
    prefilling = sequence.prefilling
    return {
        "id": sequence.id if sequence.params.n == 1 else f"{sequence.id}#{sequence.index}",
        "phase": "prefill" if prefilling else "decode",
        "prompt": len(sequence.prompt),
        "computed": min(sequence.computed, len(sequence.prompt)),
        "cached": sequence.cached,
        "generated": len(sequence.output),
        "max_tokens": sequence.max_tokens,
        "tokens_per_s": recent / (now - since) if now > since else 0.0,
        "age_s": now - sequence.metrics.arrival,
    }


def _inline(tag: str) -> str:
    """The hash by which a browser knows the page's own script or style, and nothing that came into it."""
    text = PAGE.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_inline('script')}; style-src {_inline('style')}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
