"""The timeline of a run: whose each slot was in every turn, what it did there, and what host and device did meanwhile.

    with Timeline("continuous").recording(engine) as timeline:
        engine.generate(prompts)
    write_trace("run.json", [timeline])  # for ui.perfetto.dev; this, and pictures, are in scripts/timeline_picture.py

Times are in seconds on the engine's clock. What the device does between a launch and the moment its tokens are read is
not seen by the host: its time, and the time it waits for the host, are both told as "at most so long".
"""

import contextlib
import enum
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from batching import Engine
from batching.plan import FROM_DEVICE, Sampled
from batching.prefix import Copy
from batching.sequence import SequenceState
from batching.turn import Turn, TurnTimes

COMPILED = "/jax/core/compile/backend_compile_duration"


class Kind(enum.StrEnum):
    """What somebody does in a slot in a turn. A slot that nobody has is idle."""

    PREFILL = "prefill"
    DECODE = "decode"
    WAIT = "wait"  # no row: its turn has no room, or what it needs is still being computed


class Cell(NamedTuple):
    """Somebody's slot in one turn."""

    slot: int
    request: int  # index into `Timeline.requests`
    kind: Kind
    start: int = 0  # position of its first row
    rows: int = 0


class Record(NamedTuple):
    """A turn that was committed."""

    times: TurnTimes
    begin: float  # the device has been told, and has done the turn before: it is busy until `times.ready`
    gap_s: float  # until `times.launched`, at most so long it waited for the host
    wall_s: float  # until `times.committed`, the turn's share of `EngineStats.wall_s`
    cells: tuple[Cell, ...]  # by slot
    copies: tuple[Copy, ...]
    rows: int  # computed, padding included
    live_rows: int
    waiting: int  # requests in the queue
    tokens: int  # generated


class Span(NamedTuple):
    """Consecutive turns of one kind for one request in one slot; of prefill, one turn."""

    slot: int
    request: int
    kind: Kind
    first: int  # turn, counted from 0
    last: int
    start: int  # position of the first row
    rows: int
    begin: float
    end: float


class _Launch(NamedTuple):
    """A turn that the device has."""

    turn: Turn
    owners: list[tuple[int, int]]  # (slot, request) of all that have a slot in it
    waiting: int
    gap_s: float  # of the run so far, without this turn's


class Timeline:
    """Records what an engine does. `requests` are those that were queued or had a slot when some turn was launched."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.slots = self.chunk = 0  # of the engine, and its largest chunk
        self.turns: list[Record] = []
        self.requests: list[SequenceState] = []
        self.dropped, self.dropped_gap_s = 0, 0.0  # turns that were launched and never committed
        self._indices: dict[SequenceState, int] = {}
        self._launches: deque[_Launch] = deque()
        self._arrived = 0  # of those that were seen in the queue, the last one's place in the order of arrival
        self._tokens = 0

    @contextlib.contextmanager
    def recording(self, engine: Engine) -> Iterator["Timeline"]:
        """Of all turns from here on. The engine's stats may be reset before the first of them, but not between."""
        self.slots, self.chunk = engine.config.slots, max(engine.config.chunk_sizes)

        def launched(turn: Turn) -> None:
            if not self.turns and not self._launches:
                self._tokens = engine.stats.generated_tokens
            self._launched(engine, turn)

        def committed(turn: Turn, times: TurnTimes) -> None:
            if any(one.turn is turn for one in self._launches):  # else it was launched before
                self._committed(engine, turn, times)

        with watching(engine, launched, committed):
            yield self
        while self._launches:
            self._drop(engine)

    def _launched(self, engine: Engine, turn: Turn) -> None:
        """Whose a slot is must be seen now: when the turn is committed, later ones have been planned, and who had it
        then may have lost it, or have another."""
        scheduler = engine.scheduler
        for sequence in reversed(scheduler.waiting):
            if sequence.arrived <= self._arrived:
                break
            self._index(sequence)
        self._arrived = max(self._arrived, scheduler.waiting[-1].arrived if scheduler.waiting else 0)
        owners = sorted((one.slot, self._index(one)) for one in scheduler.running if one.slot is not None)
        self._launches.append(_Launch(turn, owners, len(scheduler.waiting), engine.stats.gap_s))

    def _index(self, sequence: SequenceState) -> int:
        index = self._indices.setdefault(sequence, len(self.requests))
        if index == len(self.requests):
            self.requests.append(sequence)
        return index

    def _committed(self, engine: Engine, turn: Turn, times: TurnTimes) -> None:
        while self._launches[0].turn is not turn:
            self._drop(engine)
        launch, gap_s = self._take(engine)
        before = self.turns[-1].times if self.turns else None
        tokens, self._tokens = engine.stats.generated_tokens - self._tokens, engine.stats.generated_tokens
        record = Record(
            times,
            begin=times.launched if before is None else max(times.launched, before.ready),
            gap_s=gap_s,
            wall_s=times.committed - (times.plan if before is None else max(times.plan, before.committed)),
            cells=_cells(turn, launch.owners),
            copies=turn.copies,
            rows=len(turn.plan.rows.tokens),
            live_rows=turn.plan.live_rows,
            waiting=launch.waiting,
            tokens=tokens,
        )
        self.turns.append(record)

    def _take(self, engine: Engine) -> tuple[_Launch, float]:
        """The oldest turn in flight, and for how long the device waited for it."""
        launch = self._launches.popleft()
        return launch, (self._launches[0].gap_s if self._launches else engine.stats.gap_s) - launch.gap_s

    def _drop(self, engine: Engine) -> None:
        self.dropped_gap_s += self._take(engine)[1]
        self.dropped += 1

    def spans(self) -> list[Span]:
        """What was done in the slots, by slot and time."""
        spans: list[list[Span]] = [[] for _ in range(self.slots)]
        for turn, record in enumerate(self.turns):
            end = record.times.ready
            for cell in record.cells:
                last, before = spans[cell.slot][-1:], (cell.request, cell.kind, turn - 1)
                if cell.kind != Kind.PREFILL and [(one.request, one.kind, one.last) for one in last] == [before]:
                    spans[cell.slot][-1] = last[0]._replace(last=turn, rows=last[0].rows + cell.rows, end=end)
                else:
                    spans[cell.slot].append(Span(*cell[:3], turn, turn, *cell[3:], record.begin, end))
        return list(itertools.chain(*spans))

    def summary(self) -> dict[str, Any]:
        """Seconds and shares of the time with turns, as in EngineStats; `busy_share` is of the slots, over turns."""
        wall_s = sum(one.wall_s for one in self.turns)
        seconds = {
            "device": sum(one.times.ready - one.begin for one in self.turns),
            "host": sum(t.launched - t.plan + t.committed - t.ready for t in (one.times for one in self.turns)),
            "gap": sum(one.gap_s for one in self.turns) + self.dropped_gap_s,
        }
        held = sum(len(one.cells) for one in self.turns)
        counts = {"turns": len(self.turns), "dropped_turns": self.dropped, "tokens": sum(t.tokens for t in self.turns)}
        shares = {f"{name}_share": value / wall_s if wall_s else 0.0 for name, value in seconds.items()}
        busy_share = held / (len(self.turns) * self.slots) if self.turns else 0.0
        times = {"wall_s": wall_s} | {f"{name}_s": value for name, value in seconds.items()}
        return {"name": self.name, **counts, **times, **shares, "busy_share": busy_share}


class Compilations:
    """What JAX compiles while it is entered: (program, begin, end), on the clock of engines."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, float]] = []

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            now = time.monotonic()
            self.events.append((str(kwargs["fun_name"]), now - duration_secs, now))


@contextlib.contextmanager
def watching(
    engine: Engine, launched: Callable[[Turn], None], committed: Callable[[Turn, TurnTimes], None]
) -> Iterator[None]:
    """`launched` is told of every turn before the device is, `committed` once it is committed."""
    run, on_turn = engine.run, engine.on_turn

    def tell_and_run(turn: Turn) -> Sampled:
        launched(turn)
        return run(turn)

    def tell(turn: Turn, times: TurnTimes) -> None:
        if on_turn is not None:
            on_turn(turn, times)
        committed(turn, times)

    engine.run, engine.on_turn = tell_and_run, tell
    try:
        yield
    finally:
        engine.run, engine.on_turn = run, on_turn


def _cells(turn: Turn, owners: Sequence[tuple[int, int]]) -> tuple[Cell, ...]:
    rows, first = turn.plan.rows, list(turn.plan.first_rows)
    slots, starts, tokens = (array[first].tolist() for array in (rows.slots, rows.positions, rows.tokens))
    chunks = {slot: (start, token) for slot, start, token in zip(slots, starts, tokens, strict=True)}
    counts = np.bincount(rows.slots).tolist()
    cells = []
    for slot, request in owners:
        if slot in chunks:
            start, token = chunks[slot]
            kind = Kind.DECODE if token == FROM_DEVICE else Kind.PREFILL
            cells.append(Cell(slot, request, kind, start, counts[slot]))
        else:
            cells.append(Cell(slot, request, Kind.WAIT))
    return tuple(cells)


class TurnProfile:
    """JAX's profile of some turns of a run, in a folder."""

    def __init__(self, folder: str, turns: str) -> None:
        """`turns`: the first and the last, counted from 1, as in 10:20. Raises ValueError for what is no such range."""
        first, _, last = turns.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError(f"profile_turns must be the first and the last turn, such as 10:20, not {turns!r}")
        self.folder, self.first, self.last = folder, int(first), int(last)
        self.launched = 0
        self.done = False  # the profile is there, of as many of the turns as there were

    @contextlib.contextmanager
    def of(self, engine: Engine) -> Iterator[None]:
        """From before the first turn's launch until the last one's commit."""
        running, final = False, None

        def launched(turn: Turn) -> None:
            nonlocal running, final
            self.launched += 1
            if self.launched == self.first:
                jax.profiler.start_trace(self.folder)
                running = True
            if self.launched == self.last:
                final = turn

        def stop() -> None:
            nonlocal running
            if running:
                jax.profiler.stop_trace()
                running, self.done = False, True

        def committed(turn: Turn, _: TurnTimes) -> None:
            if turn is final:
                stop()

        try:
            with watching(engine, launched, committed):
                yield
        finally:
            stop()
