"""One engine of a simulation: the real scheduler and policies in virtual time, a cost in place of the device.

What the host does is modelled after `Engine._turn`: launch a turn, then commit the oldest one in flight unless the
device may be left further behind. Two things make it fast and change no figure: a turn's rows are counted, not laid
out; and while nobody comes, goes or is still at its prompt, all turns are alike but for the length of the cache, and
only their times are computed (a `Leap`), until somebody asks.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np

from batching.plan import BatchPlan, PlanShapes, Sampled
from batching.policies import (
    Continuous,
    Deadlines,
    Decision,
    DecodeFirst,
    Dynamic,
    Fair,
    Policy,
    PrefillFirst,
    Priority,
    ShortestFirst,
    Static,
)
from batching.request import QueueFull
from batching.scheduler import Scheduler
from batching.sequence import SequenceState
from batching.turn import NOTHING, Turn
from scripts.step_cost import StepCost, TurnLoad

MADE_UP = 0  # every token that is generated
LONGEST_LEAP = 64  # turns; more would often be computed in vain
# These decide alike in turns where nobody comes, goes or has a prompt to prefill, and count what they miss in between;
# a policy of one's own says so by `steady = True`. They may be asked twice before a turn.
STEADY = (Continuous, Static, Dynamic, PrefillFirst, DecodeFirst, ShortestFirst, Priority, Fair, Deadlines)


class LengthsOnly(SequenceState):
    """For a prompt of which the length alone matters: a range."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return cast(tuple[int, ...], range(len(self.prompt) + len(self.output)))


class CountingScheduler(Scheduler):
    """The scheduler, but that a turn's rows are counted and not laid out. `load`: of the turn planned last."""

    load: TurnLoad

    def _turn(
        self,
        decision: Decision,
        decode: list[SequenceState],
        chunks: list[tuple[SequenceState, int]],
        budget: int,
    ) -> Turn:
        shapes, seen, read, chunk_rows = self.shapes, 0, 0, 0
        for one in decode:
            one.computed += 1
            one.in_flight += 1
            one.metrics.turns += 1
            seen += one.computed
        read, sampled = seen, decode.copy()
        for one, count in chunks:
            start = one.computed
            one.computed += count
            one.metrics.turns += 1
            seen += count * (start + one.computed + 1) // 2
            read += one.computed
            chunk_rows += shapes.padded(count)
            if not one.prefilling:
                one.in_flight += 1
                sampled.append(one)
        tokens = sum(count for _, count in chunks)
        chunk_rows = max(chunk_rows, min(budget, int(tokens / decision.prefill_share)))
        shape = program(shapes, max(len(decode), decision.decode_rows), chunk_rows)
        copies, live = self.prefixes.take_copies(), len(decode) + tokens
        self.load = TurnLoad(*shape, live, seen, read, len(sampled), sum(copy.length for copy in copies))
        plan = BatchPlan(shape[0], cast(Any, None), live, ())
        self._admitted = []  # nobody looks at who they are
        return Turn(plan, tuple(sampled), busy=len(self.running), copies=copies)

    def steady(self, flights: Sequence[Turn]) -> int:
        """So many turns from now on are decode turns of the same requests, with nobody ending, as things stand.

        In each of them one is committed for one that is planned.
        """
        running, ahead, most = self.running, len(flights), LONGEST_LEAP
        if not running or not (type(self.policy) in STEADY or getattr(self.policy, "steady", False)):
            return 0
        if any(len(turn.sampled) != len(running) for turn in flights):
            return 0
        for one in running:
            # The last of the turns may bring nobody's last token, and a row is planned for everybody in each.
            left = one.max_tokens - len(one.output) - (ahead or 1)
            if left < 1 or one.in_flight != ahead or (not ahead and one.prefilling):
                return 0
            if left < most:
                most = left
        decision = self.policy.decide(self._view())
        if decision.admit or decision.preempt or not decision.decode:
            return 0
        shape = program(self.shapes, max(len(running), decision.decode_rows), 0)
        seen = sum(one.computed for one in running) + len(running)
        self.load = TurnLoad(*shape, len(running), seen, seen, len(running))
        return most

    def advance(self, times: Sequence[float]) -> None:
        """As so many turns of `steady`, whose tokens come at these times."""
        count = len(times)
        for one in self.running:
            one.computed += count
            one.metrics.turns += count
            one.metrics.tokens += times
            one.output += [MADE_UP] * count


@cache
def program(shapes: PlanShapes, decode: int, chunk: int) -> tuple[int, int, int]:
    """Decode rows, chunk rows and rows of the head of the smallest program with room for so many."""
    decode, chunk = shapes.fit(decode, chunk)
    return decode, chunk, min(shapes.slots, decode + chunk // shapes.block_q)


@dataclass(frozen=True)
class Setup:
    """How an engine is set, as far as it matters to a simulation; names as in EngineConfig."""

    shapes: PlanShapes
    max_len: int
    max_queue: int
    run_ahead: int
    prefix_reuse: bool


@dataclass
class ReplicaStats:
    """As EngineStats: shares are of slots or rows, not of time."""

    slots: int
    turns: int = 0
    busy_slots: int = 0
    rows: int = 0
    live_rows: int = 0

    def count(self, load: TurnLoad, busy: int, turns: int) -> None:
        self.turns += turns
        self.busy_slots += turns * busy
        self.rows += turns * (load.decode_rows + load.chunk_rows)
        self.live_rows += turns * load.live_rows


@dataclass
class Leap:
    """Turns to come that are alike."""

    load: TurnLoad  # of the first
    ready: list[float]  # when the device has each turn: first those in flight, then these
    starts: list[float] = field(default_factory=list)  # when the host begins each
    tokens: list[float] = field(default_factory=list)  # when each one's commit begins


class Replica:
    """An engine. `host`: when its next turn begins, if it has anything to do."""

    def __init__(self, setup: Setup, cost: StepCost, policy: Policy, *, leaps: bool = True) -> None:
        self._run_ahead, self._cost, self._leaps = setup.run_ahead, cost, leaps
        self._now = 0.0
        self.scheduler = CountingScheduler(
            shapes=setup.shapes,
            max_len=setup.max_len,
            policy=policy,
            max_queue=setup.max_queue,
            prefix_reuse=setup.prefix_reuse,
            clock=lambda: self._now,
        )
        self.stats = ReplicaStats(setup.shapes.slots)
        self.host = 0.0
        self._device = 0.0  # when it has done all it was given
        self._flights: deque[tuple[Turn, float]] = deque()  # and when each is done, the oldest first
        self._leap: Leap | None = None  # turns to come that are alike, not yet taken
        self._tokens = 0
        self._leaving: deque[tuple[float, int]] = deque()  # tokens of those that end, when they do

    @property
    def busy(self) -> bool:
        return self.scheduler.unfinished

    def tokens(self, at: float) -> int:
        """Of prompts and answers that are waiting or running at a time, to their last one."""
        while self._leaving and self._leaving[0][0] <= at:
            self._tokens -= self._leaving.popleft()[1]
        return self._tokens

    def accept(self, sequence: SequenceState, at: float, late: bool = False) -> str | None:
        """Queue a request; why not, if it is refused. No turn that begins later may have been taken.

        `late`: one that begins at the same time has been.
        """
        self._settle(at, late)
        if not self.busy:
            self.host = max(self.host, at)
        try:
            self.scheduler.submit(sequence)
        except (ValueError, QueueFull) as error:
            return str(error)
        self._tokens += total(sequence)
        return None

    def step(self) -> list[SequenceState]:
        """Take the next turn, or those next ones that are alike; who ended in it. `host` is then that of the next."""
        self._settle(float("inf"))
        self._now = self.host
        if self._leaps and len(self._flights) == self._run_ahead:
            count = self.scheduler.steady([turn for turn, _ in self._flights])
            if count > 1:
                self._plan_leap(count)
                return []
        turn = self.scheduler.plan()
        if turn is not None:
            load = self.scheduler.load
            self.host, self._device = self._launch(load, self._cost.line(load).at(load.cache_tokens))
            self._flights.append((turn, self._device))
            self.stats.count(load, turn.busy, 1)
        return self._commit(turn is not None)

    def _launch(self, load: TurnLoad, seconds: float) -> tuple[float, float]:
        """When the host has told the device of a turn, and when that is computed."""
        host = self._cost.host
        launch_s = host.launch.at(load.sampled)
        launched = self.host + (host.plan.at(load.sampled) + launch_s)
        computing = max(seconds - launch_s, 0.0)
        if host.shared and self._device > self.host:
            computing += launch_s
        return launched, max(launched, self._device) + computing

    def _commit(self, launched: bool) -> list[SequenceState]:
        """The oldest turn in flight, unless the device may be left further behind."""
        ended = []
        if self._flights and (not launched or len(self._flights) > self._run_ahead):
            turn, ready = self._flights.popleft()
            self._now = max(self.host, ready)
            count = len(turn.sampled)
            for sequence, _ in self.scheduler.commit(turn, Sampled(_made_up(count))):
                if sequence.finish_reason is not None:
                    ended.append(sequence)
                    self._leaving.append((self._now, total(sequence)))
            self.host = self._now + self._cost.host.commit.at(count)
        else:
            self.scheduler.commit(None, NOTHING)
        if not self.scheduler.unfinished:  # nobody waits for what is left
            self._flights.clear()
        return ended

    def _plan_leap(self, count: int) -> None:
        """Compute the times of so many turns, as `step` would. `host` is from now on that after the last of them."""
        load, line, commit = self.scheduler.load, self._cost.line(self.scheduler.load), self._cost.host.commit
        commit_s, leap = commit.at(load.sampled), Leap(load, [ready for _, ready in self._flights])
        for turn in range(count):
            leap.starts.append(self.host)
            launched, self._device = self._launch(load, line.at(load.cache_tokens + turn * load.live_rows))
            leap.ready.append(self._device)
            leap.tokens.append(max(launched, leap.ready[turn]))
            self.host = leap.tokens[-1] + commit_s
        self._leap = leap

    def _settle(self, until: float, late: bool = False) -> None:
        """Take those turns of a leap that begin before a time, or, if `late`, at it, and give up the others."""
        if (leap := self._leap) is None:
            return
        self._leap = None
        count = (bisect_right if late else bisect_left)(leap.starts, until)
        assert count, "a leap is planned when its first turn begins"
        if count < len(leap.starts):
            self.host, self._device = leap.starts[count], leap.ready[count + self._run_ahead - 1]
        ready = leap.ready[count : count + self._run_ahead]
        self._flights = deque((turn, at) for (turn, _), at in zip(self._flights, ready, strict=True))
        self.scheduler.advance(leap.tokens[:count])
        self.stats.count(leap.load, leap.load.live_rows, count)


def total(sequence: SequenceState) -> int:
    return len(sequence.prompt) + sequence.max_tokens


def _made_up(count: int) -> np.ndarray:
    return np.full(count, MADE_UP, np.int32)
