"""Slots, queue and turns: plain Python and NumPy, no device.

`plan` says which rows the next turn computes, `commit` is the only place that interprets sampled tokens.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from batching.plan import FROM_DEVICE, NOT_FINITE, BatchPlan, Chunk, PlanShapes, Sampled, build_plan
from batching.policies import Decision, Policy, View
from batching.prefix import Copy, Prefixes
from batching.request import FinishReason, QueueFull
from batching.sequence import SequenceState


class Turn(NamedTuple):
    """A plan and who its sampled rows belong to, captured when it is made and used when its tokens are read."""

    plan: BatchPlan
    sampled: tuple[SequenceState, ...]  # whose the first of the M sampled rows are
    busy: int  # slots that somebody has in this turn
    copies: tuple[Copy, ...] = ()  # of rows, to be made before the plan is computed
    admitted: tuple[SequenceState, ...] = ()  # got their slots for this turn
    scored: tuple["Scored", ...] = ()

    def fetch(self, sampled: Sampled) -> Sampled:
        """What a step returned, as NumPy arrays, without what nobody asked for. Waits for the step."""
        told = any(sequence.params.logprobs is not None for sequence in self.sampled)
        wanted = (True, told, told, bool(self.scored), bool(self.scored))
        return Sampled(*(np.asarray(one) if want else None for one, want in zip(sampled, wanted, strict=True)))


class Scored(NamedTuple):
    """Prompt rows of a turn whose targets' logprobs are asked for."""

    sequence: SequenceState
    first_row: int  # of the turn's
    start: int  # position of that row
    count: int


class Progress(NamedTuple):
    """What a turn brought to one request: a token, its end, or both."""

    sequence: SequenceState
    token: int | None


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
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []  # in order of admission
        self.free: list[int] = list(range(shapes.slots))
        self.prefixes = Prefixes(shapes.slots, reuse=prefix_reuse)
        self._live: dict[str, list[SequenceState]] = {}  # the samples of each request
        self._ended: list[SequenceState] = []  # ended between turns, not yet reported

    def check(self, sequence: SequenceState) -> None:
        """Raises ValueError if no slot can ever hold the request, or its id is that of a live one."""
        if any(other.group is not sequence.group for other in self._live.get(sequence.id, ())):
            raise ValueError(f"a request with id {sequence.id!r} is still running")
        prompt, wanted = len(sequence.prompt), sequence.params.max_tokens
        if sequence.params.n > self.max_queue:
            raise ValueError(f"n is {sequence.params.n}, but the queue holds {self.max_queue}")
        if not 1 <= prompt <= self.max_len:
            raise ValueError(f"the prompt has {prompt} tokens; a slot holds 1 to {self.max_len}")
        if wanted is not None and prompt + wanted - 1 > self.max_len:
            raise ValueError(
                f"the prompt's {prompt} tokens and max_tokens {wanted} need {prompt + wanted - 1} positions; "
                f"a slot holds {self.max_len}"
            )

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

    def fail_running(self, reason: str) -> None:
        """End every request that has a slot with an error: its rows are lost. Those in the queue are not concerned,
        unless nobody had a slot: then nothing can be planned for them."""
        for sequence in list(self.running or self.waiting):
            sequence.error = reason
            self._end(sequence, "error")
            self._ended.append(sequence)
        self.prefixes.forget()

    @property
    def queue_room(self) -> int:
        return self.max_queue - len(self.waiting)

    @property
    def unfinished(self) -> bool:
        """Whether anything is still to be computed or reported."""
        return bool(self._live or self._ended)

    def plan(self) -> Turn | None:
        """The next turn, or None if there is nothing to compute."""
        if not self._live:
            return None
        decoding = [sequence for sequence in self.running if not sequence.prefilling]
        prefilling = [sequence for sequence in self.running if sequence.prefilling]
        decision = self.policy.decide(View(self.waiting, prefilling, decoding, self.shapes.slots, len(self.free)))
        self.prefixes.follow()
        self._admit(decision)
        decode = decoding if decision.decode else []
        budget = self.shapes.budget(max(len(decode), decision.decode_rows))
        chunks = self._chunks(decision, math.ceil(budget * decision.prefill_share))
        if not decode and not chunks:
            raise RuntimeError(f"{type(self.policy).__name__} scheduled nothing for {len(self._live)} requests")
        decode_rows = [self._decode_row(sequence) for sequence in decode]
        prompt_rows = [self._prompt_rows(sequence, count) for sequence, count in chunks]
        plan = build_plan(
            self.shapes,
            decode_rows,
            prompt_rows,
            min_decode=decision.decode_rows,
            min_chunk=min(budget, int(sum(count for _, count in chunks) / decision.prefill_share)),
        )
        sampled = (*decode, *(sequence for sequence, _ in chunks if not sequence.prefilling))
        starts = zip(chunks, plan.first_rows[len(decode) :], prompt_rows, strict=True)
        return Turn(
            plan,
            sampled,
            busy=len(self.running),
            copies=self.prefixes.take_copies(),
            admitted=tuple(decision.admit),
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
                progress.append(self._fail(one.sequence, "the logits of the prompt are not finite"))
        now = self.clock()
        for row, (sequence, token) in enumerate(zip(turn.sampled, sampled.tokens.tolist(), strict=False)):
            if sequence.finish_reason is not None:  # ended since the turn was planned: its row was wasted
                continue
            if token < 0:
                tokens = len(sequence.prompt) + len(sequence.output)
                reason = "are not finite" if token == NOT_FINITE else "leave no token that is allowed"
                if sequence.grammar is not None and sequence.grammar.error is not None:
                    reason = f"leave no token that the grammar allows: {sequence.grammar.error}"
                progress.append(self._fail(sequence, f"the logits after {tokens} tokens {reason}"))
                continue
            try:
                progress.append(Progress(sequence, self._take(sequence, token, sampled, row, now)))
            except Exception as error:  # of this request, and nobody else's
                progress.append(self._fail(sequence, f"{type(error).__name__}: {error}"))

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
            sequence.error = grammar.error
            self._end(sequence, reason)
        elif len(sequence.output) == sequence.max_tokens:
            self._end(sequence, "length")
        return token

    def _fail(self, sequence: SequenceState, error: str) -> Progress:
        sequence.error = error
        self._end(sequence, "error")
        return Progress(sequence, None)

    def _admit(self, decision: Decision) -> None:
        assert len(decision.admit) <= len(self.free), "a policy admitted more requests than there are free slots"
        for sequence in list(decision.admit):
            self.waiting.remove(sequence)
            self.free.remove(self.prefixes.place(sequence, self.free))
            sequence.metrics.admission = self.clock()
            self.running.append(sequence)

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
            count = min(len(sequence.prompt) - sequence.computed, budget)
            budget -= self.shapes.padded(count)
            chunks.append((sequence, count))
        return chunks

    def _decode_row(self, sequence: SequenceState) -> Chunk:
        return self._advance(sequence, (FROM_DEVICE,))

    def _prompt_rows(self, sequence: SequenceState, count: int) -> Chunk:
        return self._advance(sequence, sequence.prompt[sequence.computed : sequence.computed + count])

    def _advance(self, sequence: SequenceState, tokens: tuple[int, ...]) -> Chunk:
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
            self.running.remove(sequence)
            self.prefixes.release(sequence)
            self.free.append(sequence.slot)
            self.free.sort()
