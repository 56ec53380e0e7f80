"""Slots, queue and turns: plain Python and NumPy, no device.

`plan` says which rows the next turn computes, `commit` is the only place that interprets sampled tokens. Turns may be
planned before earlier ones are committed: what a row needs is on the device by then, and a turn knows whose its rows
are.
"""

import bisect
import math
import time
from collections.abc import Callable, Sequence

from batching.params import check_lengths
from batching.plan import FROM_DEVICE, NOT_FINITE, Chunk, PlanShapes, Sampled, build_plan
from batching.policies import Decision, Policy, View, check_facts
from batching.prefix import Prefixes
from batching.request import FinishReason, QueueFull
from batching.sequence import SequenceState
from batching.turn import Progress, Scored, Turn


class Scheduler:
    """Holds `slots` slots of `max_len` positions and a queue of `max_queue`. Not thread-safe."""

    def __init__(
        self,
        *,
        shapes: PlanShapes,
        max_len: int,
        policy: Policy,
        max_queue: int,
        prefix_reuse: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shapes, self.max_len, self.policy, self.max_queue, self.clock = shapes, max_len, policy, max_queue, clock
        self.waiting: list[SequenceState] = []  # in order of arrival, those that lost their slots among them
        self.running: list[SequenceState] = []  # in order of admission
        self.free: list[int] = list(range(shapes.slots))
        self.prefixes = Prefixes(shapes.slots, reuse=prefix_reuse)
        self._live: dict[str, list[SequenceState]] = {}  # the samples of each request
        self._ended: list[SequenceState] = []  # ended between turns, not yet reported
        self._admitted: list[SequenceState] = []  # since the last turn
        self._arrived = 0

    def check(self, sequence: SequenceState) -> None:
        """Raises ValueError if no slot can ever hold the request, or its id is that of a live one."""
        if any(other.group is not sequence.group for other in self._live.get(sequence.id, ())):
            raise ValueError(f"a request with id {sequence.id!r} is still running")
        check_lengths(len(sequence.prompt), sequence.params, max_len=self.max_len, max_queue=self.max_queue)
        check_facts(sequence, self.policy)

    def submit(self, sequence: SequenceState) -> None:
        """Queue a request.

        Raises:
            ValueError: as `check`.
            QueueFull: `max_queue` requests are waiting.
        """
        self.check(sequence)
        if self.queue_room < 1:
            raise QueueFull(f"{len(self.waiting)} requests are waiting, max_queue is {self.max_queue}")
        # The last token needs no row of its own: it is never attended to.
        room = self.max_len - len(sequence.prompt) + 1
        sequence.max_tokens = room if sequence.params.max_tokens is None else sequence.params.max_tokens
        self._arrived += 1
        sequence.arrived = self._arrived
        self._live.setdefault(sequence.id, []).append(sequence)
        self.waiting.append(sequence)

    def cancel(self, request_id: str, *, report: bool = True) -> bool:
        """End a request, all its samples, with what it has, wherever it is. False if the id is unknown or has ended.

        `report`: the next `commit` tells of it.
        """
        samples = list(self._live.get(request_id, ()))
        for sequence in samples:
            self._end(sequence, "cancelled")
            if report:
                self._ended.append(sequence)
        return bool(samples)

    def stop(self, sequence: SequenceState, reason: str) -> None:
        """End a request, if it has not ended, at a stop string that the token it was given last brought."""
        if sequence.finish_reason is None:
            self._end(sequence, "stop")
        sequence.finish_reason, sequence.stop_reason = "stop", reason

    def fail(self, sequence: SequenceState, error: str, *, report: bool = False) -> None:
        """End a request, even one that ended otherwise but was not told so yet, with an error.

        `report`: the next `commit` tells of it.
        """
        if sequence.finish_reason is None:
            self._end(sequence, "error")
        sequence.finish_reason, sequence.stop_reason = "error", None
        sequence.error, sequence.unservable = error, False
        if report:
            self._ended.append(sequence)

    def fail_running(self, error: str) -> None:
        """End every request that has a slot with an error: its rows are lost, and so are the turns in flight. Those in
        the queue are not concerned."""
        for sequence in list(self.running):
            self.fail(sequence, error, report=True)
        for sequence in self.waiting:
            sequence.in_flight = 0
        self.prefixes.forget()

    @property
    def queue_room(self) -> int:
        return self.max_queue - len(self.waiting)

    @property
    def unfinished(self) -> bool:
        """Whether anything is still to be computed or reported."""
        return bool(self._live or self._ended)

    def plan(self) -> Turn | None:
        """The next turn, or None if there is nothing to compute before a turn in flight is committed, or at all."""
        if not self._live:
            return None
        decision = self.policy.decide(self._view())
        for sequence in decision.preempt:
            self._preempt(sequence)
        self.prefixes.follow()
        self._admitted += self._admit(decision)
        decode = self._decoding() if decision.decode else []
        budget = min(self.shapes.budget(max(len(decode), decision.decode_rows)), decision.prefill_rows)
        chunks = self._chunks(decision, math.ceil(budget * decision.prefill_share))
        if not decode and not chunks:
            if not any(one.in_flight for samples in self._live.values() for one in samples):
                raise RuntimeError(f"{type(self.policy).__name__} scheduled nothing for {len(self._live)} requests")
            return None
        return self._turn(decision, decode, chunks, budget)

    def _decoding(self) -> list[SequenceState]:
        """Who can advance. Those with a grammar do so together, the few with the many: else their turns are halved."""
        ready = [one for one in self.running if one.decoding]
        bound = [one for one in self.running if one.grammar is not None]
        if bound and sum(one.grammar is not None for one in ready) <= sum(one.in_flight > 0 for one in bound):
            return [one for one in ready if one.grammar is None]
        return ready

    def _view(self) -> View:
        return View(
            waiting=[one for one in self.waiting if not one.in_flight],  # else what it goes on from is not known yet
            prefilling=[one for one in self.running if one.prefilling],
            decoding=self._decoding(),
            running=tuple(self.running),
            slots=self.shapes.slots,
            free=len(self.free),
            now=self.clock(),
        )

    def _turn(
        self,
        decision: Decision,
        decode: list[SequenceState],
        chunks: list[tuple[SequenceState, int]],
        budget: int,
    ) -> Turn:
        """Rows for these: they are on their way from here on."""
        decode_rows = [self._advance(sequence, (FROM_DEVICE,)) for sequence in decode]
        prompt_rows = [self._advance(one, one.tokens[one.computed : one.computed + count]) for one, count in chunks]
        plan = build_plan(
            self.shapes,
            decode_rows,
            prompt_rows,
            min_decode=decision.decode_rows,
            min_chunk=min(budget, int(sum(count for _, count in chunks) / decision.prefill_share)),
        )
        sampled = (*decode, *(sequence for sequence, _ in chunks if not sequence.prefilling))
        for sequence in sampled:
            sequence.in_flight += 1
        admitted, self._admitted = dict.fromkeys(self._admitted), []
        starts = zip(chunks, plan.first_rows[len(decode) :], prompt_rows, strict=True)
        return Turn(
            plan,
            sampled,
            busy=len(self.running),
            copies=self.prefixes.take_copies(),
            admitted=tuple(one for one in admitted if one in self.running),
            scored=tuple(Scored(one, row, chunk.start, count) for (one, count), row, chunk in starts if chunk.targets),
        )

    def commit(self, turn: Turn | None, sampled: Sampled) -> list[Progress]:
        """Give a turn's tokens and logprobs to their requests; free the slots of those that end."""
        progress = [Progress(sequence, None) for sequence in self._ended]
        self._ended = []
        try:
            if turn is not None:
                self._commit(turn, sampled, progress)
        except BaseException:  # who has ended is told with the next turn; the others can still be failed
            self._ended = [one.sequence for one in progress if one.sequence.finish_reason is not None]
            raise
        return progress

    def _commit(self, turn: Turn, sampled: Sampled, progress: list[Progress]) -> None:
        for one in turn.scored:
            if one.sequence.finish_reason is None and not one.sequence.keep_prompt_logprobs(sampled, *one[1:]):
                progress.append(self._failed(one.sequence, "the logits of the prompt are not finite"))
        now = self.clock()
        for row, (sequence, token) in enumerate(zip(turn.sampled, sampled.tokens.tolist(), strict=False)):
            sequence.in_flight -= 1
            if sequence.finish_reason is not None:  # ended since the turn was planned: its row was wasted
                continue
            if token < 0:
                finite = token != NOT_FINITE
                progress.append(self._failed(sequence, sequence.without_token(finite), unservable=finite))
                continue
            try:
                progress.append(Progress(sequence, self._take(sequence, token, sampled, row, now)))
            except Exception as error:  # of this request, and nobody else's
                progress.append(self._failed(sequence, f"{type(error).__name__}: {error}"))

    def _take(self, sequence: SequenceState, token: int, sampled: Sampled, row: int, now: float) -> int | None:
        """A token for a sequence, which may end it. None if it wanted none: its prompt is scored, that is all."""
        if sequence.max_tokens == 0:
            self._end(sequence, "length")
            return None
        sequence.output.append(token)
        sequence.keep_logprobs(token, sampled, row)
        sequence.metrics.tokens.append(now)
        grammar = sequence.grammar
        if token in sequence.stop_ids:
            sequence.stop_reason = token
            self._end(sequence, "stop")
        elif grammar is not None and (reason := grammar.advance(token)) is not None:
            sequence.error, sequence.unservable = grammar.error, reason == "error"
            self._end(sequence, reason)
        elif len(sequence.output) == sequence.max_tokens:
            self._end(sequence, "length")
        return token

    def _failed(self, sequence: SequenceState, error: str, *, unservable: bool = False) -> Progress:
        self.fail(sequence, error)
        sequence.unservable = unservable
        return Progress(sequence, None)

    def _admit(self, decision: Decision) -> Sequence[SequenceState]:
        assert len(decision.admit) <= len(self.free), "a policy admitted more requests than there are free slots"
        for sequence in list(decision.admit):
            self.waiting.remove(sequence)
            sequence.resumed = len(sequence.output)
            self.free.remove(self.prefixes.place(sequence, self.free))
            if sequence.metrics.admission is None:
                sequence.metrics.admission = self.clock()
            self.running.append(sequence)
        return decision.admit

    def _preempt(self, sequence: SequenceState) -> None:
        """Back into the queue, where it was: it keeps its tokens, and its slot their rows until somebody takes it."""
        self._leave(sequence)
        sequence.reached = max(sequence.reached, sequence.computed)
        sequence.slot, sequence.computed = None, 0
        sequence.metrics.preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda one: one.arrived)

    def _leave(self, sequence: SequenceState) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.prefixes.release(sequence)
        bisect.insort(self.free, sequence.slot)

    def _chunks(self, decision: Decision, budget: int) -> list[tuple[SequenceState, int]]:
        """How many prompt tokens of whom, in at most `budget` rows."""
        chunks, moving = [], set()
        for sequence in decision.prefill:
            if budget <= 0:
                break
            waits = self.prefixes.waits(sequence, moving)
            moving.add(sequence)
            if waits:
                continue
            count = min(sequence.prefill_end - sequence.computed, budget)
            budget -= self.shapes.padded(count)
            chunks.append((sequence, count))
        return chunks

    def _advance(self, sequence: SequenceState, tokens: Sequence[int]) -> Chunk:
        start = sequence.computed
        sequence.computed += len(tokens)
        sequence.metrics.turns += 1
        assert sequence.slot is not None
        assert sequence.computed <= self.max_len
        sampled = not sequence.prefilling
        targets = () if tokens[0] == FROM_DEVICE else sequence.targets(start, len(tokens))
        return Chunk(sequence.slot, start, tokens, sampled, sequence.draw, targets)

    def _end(self, sequence: SequenceState, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        sequence.metrics.end = self.clock()
        self._live[sequence.id].remove(sequence)
        if not self._live[sequence.id]:
            del self._live[sequence.id]
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
