"""Slots, queue and turns: plain Python and NumPy, no device.

`plan` says which rows the next turn computes, `commit` is the only place that interprets sampled tokens.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from batching.plan import FROM_DEVICE, BatchPlan, Chunk, PlanShapes, build_plan
from batching.policies import Decision, Policy, View
from batching.request import FinishReason, Metrics, Output, QueueFull, SamplingParams


@dataclass(eq=False)
class SequenceState:
    """A live request: its tokens, its slot, and how many of its rows are in the cache or on their way there."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    metrics: Metrics
    max_tokens: int = 0  # what params and the slot's length allow, set on submission
    slot: int | None = None
    computed: int = 0
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.prompt)

    def end(self, text: str | None) -> Output:
        """The Output of a request that has ended."""
        assert self.finish_reason is not None
        return Output(
            id=self.id,
            token_ids=self.output,
            text=text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.output),
            seed=self.seed,
            error=self.error,
            metrics=self.metrics,
        )


class Turn(NamedTuple):
    """A plan and who its sampled rows belong to, captured when it is made and used when its tokens are read."""

    plan: BatchPlan
    sampled: tuple[SequenceState, ...]  # whose the first of the M sampled rows are
    busy: int  # slots that somebody has in this turn


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shapes, self.max_len, self.policy, self.max_queue, self.clock = shapes, max_len, policy, max_queue, clock
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []  # in order of admission
        self.free: list[int] = list(range(shapes.slots))
        self._live: dict[str, SequenceState] = {}
        self._ended: list[SequenceState] = []  # ended between turns, not yet reported

    def check(self, sequence: SequenceState) -> None:
        """Raises ValueError if no slot can ever hold the request, or its id is that of a live one."""
        if sequence.id in self._live:
            raise ValueError(f"a request with id {sequence.id!r} is still running")
        prompt, wanted = len(sequence.prompt), sequence.params.max_tokens
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
        self._live[sequence.id] = sequence
        self.waiting.append(sequence)

    def cancel(self, request_id: str, *, report: bool = True) -> bool:
        """End a request with what it has, wherever it is. False if the id is unknown or has ended.

        `report`: the next `commit` tells of it.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, "cancelled")
        if report:
            self._ended.append(sequence)
        return True

    def fail_running(self, reason: str) -> None:
        """End every request that has a slot with an error: its rows are lost. Those in the queue are not concerned."""
        for sequence in list(self.running):
            sequence.error = reason
            self._end(sequence, "error")
            self._ended.append(sequence)

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
        return Turn(plan, sampled, len(self.running))

    def commit(self, turn: Turn | None, tokens: np.ndarray) -> list[Progress]:
        """Give sampled tokens (int32 [M], -1: not finite) to their requests; free the slots of those that end."""
        progress = [Progress(sequence, None) for sequence in self._ended]
        self._ended = []
        now = self.clock()
        for sequence, token in zip(turn.sampled, tokens.tolist(), strict=False) if turn else ():
            if sequence.finish_reason is not None:  # ended since the turn was planned: its row was wasted
                continue
            if token < 0:
                sequence.error = f"the logits after {len(sequence.prompt) + len(sequence.output)} tokens are not finite"
                self._end(sequence, "error")
                progress.append(Progress(sequence, None))
                continue
            sequence.output.append(token)
            sequence.metrics.tokens.append(now)
            if token in sequence.stop_ids:
                sequence.stop_reason = token
                self._end(sequence, "stop")
            elif len(sequence.output) == sequence.max_tokens:
                self._end(sequence, "length")
            progress.append(Progress(sequence, token))
        return progress

    def _admit(self, decision: Decision) -> None:
        assert len(decision.admit) <= len(self.free), "a policy admitted more requests than there are free slots"
        for sequence in list(decision.admit):
            self.waiting.remove(sequence)
            sequence.slot = self.free.pop(0)
            sequence.metrics.admission = self.clock()
            self.running.append(sequence)

    def _chunks(self, decision: Decision, budget: int) -> list[tuple[SequenceState, int]]:
        """How many prompt tokens of whom, in at most `budget` rows."""
        chunks = []
        for sequence in decision.prefill:
            if budget <= 0:
                break
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
        return Chunk(sequence.slot, start, tokens, sampled, sequence.params.temperature, sequence.seed)

    def _end(self, sequence: SequenceState, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        sequence.metrics.end = self.clock()
        del self._live[sequence.id]
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.free.append(sequence.slot)
            self.free.sort()
