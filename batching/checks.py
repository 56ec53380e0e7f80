"""`CheckedScheduler`: a scheduler that verifies every turn, and on the first that is wrong stops with a report.

It keeps its own account of what each slot's rows hold, from the rows of the plans alone, and compares: who owns a slot,
that positions follow one another, that every row below belongs to the request whose row is computed, lengths, budgets,
what is drawn and whose tokens a turn brings. The report holds all that happened, and `replay` does it again, without a
device.

Everything that happens is kept in memory: for tests and for finding faults, not for weeks of service.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from batching.plan import FROM_DEVICE, Chunk, Sampled
from batching.policies import Decision, Policy
from batching.prefix import Copy
from batching.recording import RecordedScheduler, repeat
from batching.request import FinishReason
from batching.sequence import SequenceState
from batching.turn import Progress, Turn

# What a slot holds at a position: a token, or a place in a request's output, of which it may still be on its way.
Row = int | tuple[SequenceState, int]


class IntegrityError(RuntimeError):
    """An invariant does not hold. `report`: JSON from which `replay` comes to the same point."""

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


class CheckedScheduler(RecordedScheduler):
    """Raises IntegrityError in `plan` and `commit`; otherwise as `Scheduler`."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._open: list[SequenceState] = []  # those whose ends no commit has told
        self._stopped = False  # by an IntegrityError
        self._forget()

    def _forget(self) -> None:
        """Nothing is on the device."""
        self._rows: list[list[Row]] = [[] for _ in range(self.shapes.slots)]
        self._drawn: dict[int, Row] = {}  # by slot, the last
        self._seats: dict[int, tuple[SequenceState, int]] = {}  # by slot: who had it last, and for which time
        self._pending: set[Copy] = set()  # that were decided on when there was no turn to make them in

    def submit(self, sequence: SequenceState) -> None:
        super().submit(sequence)
        self._open.append(sequence)

    def fail_running(self, error: str) -> None:
        """After an IntegrityError that is everybody, by this account, and who has ended and was not told of it."""
        if self._stopped:
            for one in self._open:
                if one not in self._ended:
                    super().fail(one, error, report=True)
            self.running, self.waiting, self._live = [], [], {}
        super().fail_running(error)
        self._forget()

    def _end(self, sequence: SequenceState, reason: FinishReason) -> None:
        if not self._stopped:
            super()._end(sequence, reason)
            return
        # The scheduler's account is of no use any more: it need not have the sequence where it should be.
        sequence.finish_reason, sequence.metrics.end = reason, self.clock()
        self.waiting = [one for one in self.waiting if one is not sequence]
        self._live.pop(sequence.id, None)

    def plan(self) -> Turn | None:
        turn = super().plan()
        self._check(turn)
        return turn

    def _chunks(self, decision: Decision, budget: int) -> list[tuple[SequenceState, int]]:
        chunks = super()._chunks(decision, budget)
        none = [_who(one) for one, count in chunks if count < 1]
        self._expect(not none, f"{none} get prompt rows and have all of them")
        rows = sum(self.shapes.padded(count) for _, count in chunks)
        room = self.shapes.budget(len(self._decoding()) if decision.decode else 0)
        self._expect(rows <= room, f"{rows} prompt rows for {[one.id for one, _ in chunks]}; there is room for {room}")
        return chunks

    def _advance(self, sequence: SequenceState, tokens: Sequence[int]) -> Chunk:
        end, where = sequence.computed + len(tokens), f"slot {sequence.slot}, {_who(sequence)},"
        self._expect(end <= self.max_len, f"position {end - 1} of {where} is past its end, {self.max_len}")
        return super()._advance(sequence, tokens)

    def commit(self, turn: Turn | None, sampled: Sampled) -> list[Progress]:
        progress = super().commit(turn, sampled)
        self._check(None)
        self._open = [one for one in self._open if one.finish_reason is None]
        return progress

    def _commit(self, turn: Turn, sampled: Sampled, progress: list[Progress]) -> None:
        self._check_order(turn)
        before = {one: len(one.output) for one in (*self._open, *turn.sampled)}
        pairs = zip(turn.sampled, sampled.tokens.tolist(), strict=False)
        owed = {one: [token] for one, token in pairs if token >= 0 and one.max_tokens and one.finish_reason is None}
        super()._commit(turn, sampled, progress)
        for one, count in before.items():
            new, wanted = one.output[count:], owed.get(one, [])
            fits = new == wanted or (one.finish_reason == "error" and not new)
            self._expect(fits, f"{_who(one)} is given the tokens {new}, not {wanted}")

    def _check(self, planned: Turn | None) -> None:
        if self._stopped:
            return
        self._check_places()
        if planned is not None:
            self._check_turn(planned)
        self._check_rows()
        self._pending = set(self.prefixes._copies)

    def _expect(self, holds: bool, message: str) -> None:
        if not holds:
            self._stopped = True
            raise IntegrityError(message, self.report(message))

    def _check_places(self) -> None:
        """Every slot has one owner or none, everybody who has not ended is in one place."""
        held = [one.slot for one in self.running]
        fits = Counter([*held, *self.free]) == Counter(range(self.shapes.slots))
        self._expect(fits, f"slots {held} are held and {self.free} are free")
        live, waiting = Counter(one for samples in self._live.values() for one in samples), Counter(self.waiting)
        places, coming = Counter(self.running) + waiting, Counter(one for turn in self._planned for one in turn.sampled)
        for one in dict.fromkeys([*self._open, *live, *places]):
            who, found = _who(one), (live[one], places[one])
            if one.finish_reason is not None:
                self._expect(found == (0, 0), f"{who} has ended ({one.finish_reason}) and is live")
                continue
            self._expect(found == (1, 1), f"{who} is live {found[0]} times, and in {found[1]} places")
            waits, total = one in waiting, len(one.output) + one.in_flight
            self._expect((one.slot is None) == waits, f"{who} waits: {waits}, and has slot {one.slot}")
            self._expect(one.in_flight == coming[one], f"{who} awaits {one.in_flight} tokens, and {coming[one]} come")
            self._expect(total <= max(one.max_tokens, 1), f"{who} gets {total} tokens of {one.max_tokens}")
            self._expect(one.grammar is None or one.in_flight < 2, f"{who} is drawn for ahead of its grammar")

    def _check_rows(self) -> None:
        """Every slot holds what it is thought to hold: that of somebody's, its tokens and what it is given next."""
        owners = {one.slot: one for one in self.running}
        pending = {copy.target for copy in self.prefixes._copies}  # they come before the next turn
        for slot, rows in enumerate(self._rows):
            if slot in pending:
                continue
            one, wanted = owners.get(slot), list[Row](self.prefixes.held(slot))
            if one is not None:
                wanted += [(one, at - len(one.prompt)) for at in range(len(one.tokens), one.computed)]
                self._expect(len(wanted) == one.computed, f"{_who(one)} is not thought to have slot {slot}")
            there = [_known(row) for row in rows[: len(wanted)]]
            if there != wanted:
                at = next(at for at, (row, want) in enumerate(zip_longest(there, wanted)) if row != want)
                who = "nobody" if one is None else _who(one)
                self._expect(False, f"position {at} of slot {slot}, which {who} has, is not what it is thought to be")

    def _check_turn(self, turn: Turn) -> None:
        rows, shape = turn.plan.rows, turn.plan.shape
        live = np.flatnonzero(rows.slots < self.shapes.slots).tolist()
        self._expect(shape in self.shapes.all(), f"no program has the shape {shape}")
        self._expect(
            turn.plan.live_rows == len(live), f"{turn.plan.live_rows} rows are said to be live, not {len(live)}"
        )
        owners, counts = {one.slot: one for one in self.running}, Counter(rows.slots[live].tolist())
        self._check_seats(turn, {slot: one.computed - counts[slot] for slot, one in owners.items() if slot is not None})
        last: dict[int | None, int] = {}  # row of the turn by slot
        for row in live:
            slot = int(rows.slots[row])
            self._expect(slot in owners, f"row {row} is in slot {slot}, which nobody has")
            self._write(owners[slot], slot, int(rows.positions[row]), int(rows.tokens[row]))
            last[slot] = row
        self._check_draws(turn, last)
        self._check_scored(turn)

    def _check_seats(self, turn: Turn, starts: Mapping[int, int]) -> None:
        """Who takes a slot is told of, and goes on behind the rows of its own that are there. `starts`: by slot."""
        for copy in turn.copies:
            rows = self._rows[copy.source][: copy.length]
            fits = starts.get(copy.target) == copy.length or copy in self._pending  # who asked for these may be gone
            self._expect(len(rows) == copy.length and fits, f"{copy}: not all are there, or not all are asked for")
            self._rows[copy.target] = rows
        seats = {one.slot: (one, one.metrics.preemptions) for one in self.running if one.slot is not None}
        new = {slot: one for slot, (one, time) in seats.items() if self._seats.get(slot) != (one, time)}
        differ = sorted(_who(one) for one in {*new.values()} ^ {*turn.admitted})
        self._expect(not differ, f"of {differ} it is not told that they have slots now, or they had them before")
        for slot in new:
            del self._rows[slot][starts[slot] :]
        self._seats = seats

    def _write(self, one: SequenceState, slot: int, position: int, token: int) -> None:
        rows, known, where = self._rows[slot], one.tokens, f"position {position} of slot {slot}, {_who(one)},"
        self._expect(position == len(rows), f"{where} follows {len(rows)} rows")
        if token == FROM_DEVICE:
            rows.append((one, position - len(one.prompt)))
            self._expect(self._drawn.get(slot) == rows[-1], f"{where} is given a token that was not drawn for it")
        else:
            rows.append(token)
            self._expect(known[position : position + 1] == (token,), f"{where} is given token {token}")

    def _check_draws(self, turn: Turn, last: dict[int | None, int]) -> None:
        """A draw, as asked for, for everybody who has all rows of its prompt, and nobody else. `last`: row by slot."""
        rows = turn.plan.rows
        each = zip(rows.sample_rows.tolist(), rows.sample_slots.tolist(), rows.numbers, rows.words, strict=True)
        drawn = [(row, slot, numbers.tolist(), words.tolist()) for row, slot, numbers, words in each]
        for there, one in zip(drawn, turn.sampled, strict=False):
            draw = one.draw
            words = [draw.flags, draw.top_k, *divmod(one.seed, 2**32)]
            numbers = np.array(draw.numbers, np.float32).tolist()
            wanted = last.pop(one.slot, None), one.slot, numbers, words
            self._expect(there == wanted, f"{_who(one)} is drawn by (row, slot, numbers, words) {there}, not {wanted}")
            number, coming = one.computed - len(one.prompt), len(one.output) + one.in_flight - 1
            self._expect(number == coming, f"{_who(one)} gets its token {coming} by the rows up to its token {number}")
            self._drawn[there[1]] = (one, number)
        rest = {slot for _, slot, *_ in drawn[len(turn.sampled) :]} - {self.shapes.slots}
        self._expect(not rest, f"it is drawn for slots {sorted(rest)}, and nobody is told")
        left = [_who(one) for one in self.running if one.slot in last and not one.prefilling]
        self._expect(not left, f"it is not drawn for {left}")

    def _check_scored(self, turn: Turn) -> None:
        rows, targets = turn.plan.rows, np.full(len(turn.plan.rows.targets), -1)
        for one, first, start, count in turn.scored:
            there = int(rows.slots[first]), int(rows.positions[first])
            self._expect(there == (one.slot, start), f"{_who(one)} is scored by slot and position {there}")
            asked = one.targets(start, count)
            targets[first : first + len(asked)] = asked
        wrong = np.flatnonzero(rows.targets != targets).tolist()
        self._expect(not wrong, f"rows {wrong}, in slots {rows.slots[wrong].tolist()}, are scored for other tokens")

    def _check_order(self, turn: Turn) -> None:
        who, place = [one.id for one in turn.sampled], self._place(turn)
        self._expect(place >= 0, f"the turn with tokens for {who} was never planned, or is committed twice")
        for older in list(self._planned)[:place]:
            concerned = *older.sampled, *(one.sequence for one in older.scored)
            waiting = [one.id for one in concerned if one.finish_reason is None]
            self._expect(not waiting, f"the turn with tokens for {who} is committed before one for {waiting}")


def replay(report: Mapping[str, Any], policy: Policy | None = None) -> CheckedScheduler:
    """Do again what a report tells of; the scheduler as it is then.

    Raises the IntegrityError that the report ends with, if the fault is still there. `policy`: in the place of one
    that has no name.
    """
    return repeat(report, CheckedScheduler, policy)


def _known(row: Row) -> Row:
    """The token, if it is known."""
    if isinstance(row, int):
        return row
    sequence, number = row
    return sequence.output[number] if number < len(sequence.output) else row


def _who(one: SequenceState) -> str:
    return f"sample {one.index} of request {one.id!r}"
