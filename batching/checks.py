"""`CheckedScheduler`: a scheduler that verifies every turn, and on the first that is wrong stops with a report.

It keeps its own account of what each slot's rows hold, from the rows of the plans alone, and compares: who owns a slot,
that positions follow one another, that every row below belongs to the request whose row is computed, lengths, budgets,
and whose tokens a turn brings. The report holds all that happened, and `replay` does it again, without a device.

Everything that happens is kept in memory: for tests and for finding faults, not for weeks of service.
"""

import dataclasses
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from batching.params import SamplingParams
from batching.plan import FROM_DEVICE, PlanShapes, Sampled
from batching.policies import POLICIES, Policy, make_policy
from batching.request import FinishReason, Metrics
from batching.scheduler import Scheduler
from batching.sequence import SequenceState
from batching.turn import Progress, Turn

MOST_TOP = 20  # columns of a step's logprobs, besides the first


class IntegrityError(RuntimeError):
    """An invariant does not hold. `report`: JSON from which `replay` comes to the same point."""

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


class CheckedScheduler(Scheduler):
    """Raises IntegrityError in `plan` and `commit`; otherwise as `Scheduler`."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._rows: list[list[Row]] = [[] for _ in range(self.shapes.slots)]
        self._planned: deque[Turn] = deque()
        self._events: list[tuple[Any, ...]] = []
        self._numbers: dict[SequenceState, int] = {}  # in the order of submission

    # What is recorded.

    def submit(self, sequence: SequenceState) -> None:
        super().submit(sequence)
        self._numbers[sequence] = len(self._numbers)
        self._events.append(("submit", sequence))

    def cancel(self, request_id: str, *, report: bool = True) -> bool:
        self._events.append(("cancel", request_id, report))
        return super().cancel(request_id, report=report)

    def stop(self, sequence: SequenceState, reason: str) -> None:
        self._record("stop", sequence, reason)
        super().stop(sequence, reason)

    def fail(self, sequence: SequenceState, error: str, *, report: bool = False) -> None:
        self._record("fail", sequence, error, report)
        super().fail(sequence, error, report=report)

    def fail_running(self, error: str) -> None:
        start = len(self._events)
        super().fail_running(error)
        self._events[start:] = [("fail running", error)]
        self._planned.clear()
        self._rows = [[] for _ in self._rows]

    def plan(self) -> Turn | None:
        self._events.append(("plan",))
        turn = super().plan()
        if turn is not None:
            self._planned.append(turn)
            self._check_turn(turn)
        self._check_slots()
        return turn

    def commit(self, turn: Turn | None, sampled: Sampled) -> list[Progress]:
        self._events.append(("commit", turn is not None, *self._told(turn, sampled)))
        while turn is not None and (oldest := self._next_planned()) is not turn:
            dropped = all(one.finish_reason is not None for one in oldest.sampled)
            self._expect(dropped, "a turn is committed before an older one that somebody waits for")
        start = len(self._events)
        progress = super().commit(turn, sampled)
        del self._events[start:]  # what a commit fails it fails again
        self._check_slots()
        return progress

    def _next_planned(self) -> Turn:
        self._expect(bool(self._planned), "a turn is committed that was never planned, or twice")
        return self._planned.popleft()

    def _record(self, kind: str, sequence: SequenceState, *details: Any) -> None:
        if sequence in self._numbers:  # else it ended before there was room for it in the queue
            self._events.append((kind, self._numbers[sequence], *details))

    def _told(self, turn: Turn | None, sampled: Sampled) -> tuple[list[int], list[bool]]:
        """The tokens, and which of the scored rows were finite."""
        scored = () if turn is None else turn.scored
        ends = [(one.first_row, one.first_row + len(one.sequence.targets(one.start, one.count))) for one in scored]
        return sampled.tokens.tolist(), [bool(np.isfinite(sampled.prompt_logprobs[a:b]).all()) for a, b in ends]

    # What is verified.

    def _expect(self, holds: bool, message: str) -> None:
        if not holds:
            raise IntegrityError(message, self.report(message))

    def _check_slots(self) -> None:
        """Every slot has one owner or none, every live request is in one place."""
        held = [one.slot for one in self.running]
        everyone = sorted([*(slot for slot in held if slot is not None), *self.free])
        self._expect(everyone == list(range(self.shapes.slots)), f"slots {held} are held and {self.free} are free")
        live = [one for samples in self._live.values() for one in samples]
        places = [*self.running, *self.waiting]
        self._expect(
            len(live) == len(places) and set(live) == set(places), "a live request is nowhere, or in two places"
        )
        for one in places:
            who = f"sample {one.index} of request {one.id!r}"
            self._expect(one.finish_reason is None, f"{who} has ended ({one.finish_reason}) and is live")
            self._expect((one.slot is None) == (one in self.waiting), f"{who} waits and has slot {one.slot}")
            self._expect(0 <= one.computed <= self.max_len, f"{who} has {one.computed} rows of {self.max_len}")
            coming = len(one.output) + one.in_flight
            self._expect(coming <= max(one.max_tokens, 1), f"{who} gets {coming} tokens of {one.max_tokens}")
        for slot, rows in enumerate(self._rows):
            held = self.prefixes.held(slot)
            there = [row.token() for row in rows[: len(held)]]
            self._expect(there == list(held), f"slot {slot} is thought to hold {held}, but holds {there}")

    def _check_turn(self, turn: Turn) -> None:
        rows, shape = turn.plan.rows, turn.plan.shape
        self._expect(shape in self.shapes.all(), f"no program has the shape {shape}")
        for copy in turn.copies:
            self._expect(copy.length <= len(self._rows[copy.source]), f"rows are copied that are not there: {copy}")
            self._rows[copy.target] = self._rows[copy.source][: copy.length]
        owners = {one.slot: one for one in self.running}
        last: dict[int, int] = {}  # row of the turn by slot
        for row in np.flatnonzero(rows.slots < self.shapes.slots).tolist():
            slot = int(rows.slots[row])
            self._expect(slot in owners, f"row {row} is in slot {slot}, which nobody has")
            if slot not in last:
                self._check_below(owners[slot], int(rows.positions[row]))
            self._write(owners[slot], int(rows.positions[row]), int(rows.tokens[row]))
            last[slot] = row
        self._expect(turn.plan.live_rows <= len(rows.tokens), "more rows are live than there are")
        for slot in last:
            self._expect(owners[slot].computed == len(self._rows[slot]), f"slot {slot}: other rows than were planned")
        owed = [(last.get(one.slot or 0), one.slot, one.seed) for one in turn.sampled]
        seeds = [int(high) << 32 | int(low) for high, low in rows.words[:, 2:]]
        drawn = list(zip(rows.sample_rows.tolist(), rows.sample_slots.tolist(), seeds, strict=True))
        self._expect(drawn[: len(owed)] == owed, f"rows, slots and seeds of {owed} are drawn from {drawn}")
        free = [slot for _, slot, _ in drawn[len(owed) :]]
        self._expect(set(free) <= {self.shapes.slots}, "a row is drawn that nobody asked for")

    def _check_below(self, sequence: SequenceState, position: int) -> None:
        """What lies below a sequence's first row of a turn is its own, as far as known; what lay above is lost."""
        assert sequence.slot is not None
        del self._rows[sequence.slot][position:]
        rows, tokens = self._rows[sequence.slot], sequence.tokens
        for at, (row, token) in enumerate(zip(rows, tokens, strict=False)):
            who = f"position {at} of slot {sequence.slot}, which request {sequence.id!r} reads,"
            self._expect(row.token() in (token, None), f"{who} holds the token {row.token()} of another")

    def _write(self, sequence: SequenceState, position: int, token: int) -> None:
        assert sequence.slot is not None
        rows, known = self._rows[sequence.slot], sequence.tokens
        where = f"position {position} of slot {sequence.slot}, request {sequence.id!r},"
        self._expect(position < self.max_len, f"{where} is past the end of the slot, {self.max_len}")
        self._expect(position == len(rows), f"{where} follows {len(rows)} rows")
        if token == FROM_DEVICE:
            row = Row(sequence, position - len(sequence.prompt))
        else:
            self._expect(position < len(known) and known[position] == token, f"{where} is given token {token}")
            row = Row(None, token)
        rows.append(row)

    # The report.

    def report(self, error: str) -> dict[str, Any]:
        """All that happened so far, as JSON."""
        events = [("submit", _as_json(event[1])) if event[0] == "submit" else event for event in self._events]
        shapes = dataclasses.asdict(self.shapes)
        policy = next((name for name, one in POLICIES.items() if type(self.policy) is one), None)
        how = {"max_len": self.max_len, "max_queue": self.max_queue, "policy": policy, "shapes": shapes}
        how["prefix_reuse"] = self.prefixes.reuse
        return json.loads(json.dumps({"error": error, "how": how, "events": events}))


@dataclasses.dataclass(frozen=True)
class Row:
    """What a slot holds at one position: a token, or one of a request's output, which may still be on its way."""

    sequence: SequenceState | None
    number: int  # the token, or its place in the output

    def token(self) -> int | None:
        if self.sequence is None:
            return self.number
        output = self.sequence.output
        return output[self.number] if self.number < len(output) else None


def replay(report: Mapping[str, Any], policy: Policy | None = None) -> None:
    """Do again what a report tells of. Raises the IntegrityError that it ends with, if the fault is still there.

    `policy`: if it was not one that has a name.
    """
    how, shapes = dict(report["how"]), report["how"]["shapes"]
    how["shapes"] = PlanShapes(
        shapes["slots"], tuple(shapes["decode_rows"]), tuple(shapes["chunk_sizes"]), shapes["block_q"]
    )
    scheduler = CheckedScheduler(**how | {"policy": policy or make_policy(how["policy"])})
    sequences: list[SequenceState] = []
    for kind, *details in report["events"]:
        if kind == "submit":
            sequences.append(_from_json(details[0], sequences))
            scheduler.submit(sequences[-1])
        elif kind == "cancel":
            scheduler.cancel(details[0], report=details[1])
        elif kind == "stop":
            scheduler.stop(sequences[details[0]], details[1])
        elif kind == "fail":
            scheduler.fail(sequences[details[0]], details[1], report=details[2])
        elif kind == "fail running":
            scheduler.fail_running(details[0])
        elif kind == "plan":
            scheduler.plan()
        elif kind == "commit":
            turn = scheduler._planned[0] if details[0] else None
            scheduler.commit(turn, _sampled(turn, details[1], details[2]))


def _sampled(turn: Turn | None, tokens: list[int], finite: list[bool]) -> Sampled:
    """A turn's tokens as they were; of logprobs, whether they were finite."""
    if turn is None:
        return Sampled(np.array(tokens, np.int32))
    values = np.zeros((len(turn.plan.rows.tokens), 1 + MOST_TOP), np.float32)
    for one, fine in zip(turn.scored, finite, strict=True):
        values[one.first_row : one.first_row + one.count] = 0 if fine else np.nan
    return Sampled(np.array(tokens, np.int32), None, None, values, np.zeros(values[:, 1:].shape, np.int32))


def _as_json(sequence: SequenceState) -> dict[str, Any]:
    params = {name: value for name, value in dataclasses.asdict(sequence.params).items() if name != "logprobs"}
    grammar = None if sequence.grammar is None else (len(sequence.output), sequence.finish_reason)
    return {
        "request_id": sequence.id,
        "prompt": sequence.prompt,
        "params": {name: value for name, value in params.items() if value is not None},
        "seed": sequence.seed,
        "stop_ids": sorted(sequence.stop_ids),
        "index": sequence.index,
        "priority": sequence.priority,
        "grammar": grammar,
    }


def _from_json(values: Mapping[str, Any], before: list[SequenceState]) -> SequenceState:
    """`before`: the sequences submitted before it, the samples of its request last."""
    group, end = before[-1].group if values["index"] else object(), values["grammar"]
    return SequenceState(
        values["request_id"],
        tuple(values["prompt"]),
        SamplingParams(**values["params"]),
        values["seed"],
        frozenset(values["stop_ids"]),
        Metrics(arrival=0.0),
        index=values["index"],
        group=group,
        priority=values["priority"],
        grammar=None if end is None else _Told(*end),
    )


class _Told:
    """A grammar of which only its end is known."""

    error = None

    def __init__(self, tokens: int, reason: FinishReason | None) -> None:
        self._left, self._reason = tokens, reason

    def advance(self, token: int) -> FinishReason | None:
        self._left -= 1
        return self._reason if self._left == 0 and self._reason in ("stop", "error") else None
