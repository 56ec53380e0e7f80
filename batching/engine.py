"""The loop around plan, step and commit, and the text on either side of it."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from batching.checks import CheckedScheduler, IntegrityError
from batching.config import DTYPES, EngineConfig, EngineStats
from batching.delivery import Delivery
from batching.grammar import GrammarCompiler
from batching.intake import Intake
from batching.plan import Sampled
from batching.policies import make_policy
from batching.request import Delta, Output, QueueFull, Request, SamplingParams, as_requests
from batching.runner import Runner, ready
from batching.scheduler import Scheduler
from batching.sequence import SequenceState
from batching.turn import NOTHING, Flight, Progress, Turn, TurnTimes
from model.checkpoint import load
from model.tokenizer import Tokenizer
from model.transformer import Transformer


class Engine:
    """Serves requests on one model. Not thread-safe: one thread submits, steps and reads."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Iterable[int] = (),
        on_compile: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """Allocates the cache and compiles every program, as `Runner` does: nothing compiles afterwards.

        Raises ValueError where the model and the configuration do not go together.
        """
        self.config, self.model_config = config, model.config
        vocabulary = model.config.vocab_size
        # What is not in the vocabulary is never sampled.
        self.tokenizer, self.eos_ids = tokenizer, frozenset(one for one in eos_ids if 0 <= one < vocabulary)
        self.runner = Runner(model, config, on_compile)
        self.scheduler = (CheckedScheduler if config.checks else Scheduler)(
            shapes=self.runner.shapes,
            max_len=config.max_len,
            policy=make_policy(config.policy),
            max_queue=config.max_queue,
            prefix_reuse=config.prefix_reuse,
        )
        grammars = GrammarCompiler(tokenizer, vocabulary, self.eos_ids)
        self._intake = Intake(vocabulary, self.eos_ids, tokenizer, grammars, config.max_len, config.max_queue)
        self.delivery = Delivery(tokenizer, self.scheduler, lambda one: self.stats.count_end(one))
        self.stats = EngineStats(slots=config.slots)
        self.on_turn: Callable[[Turn, TurnTimes], None] | None = None  # called when a turn is committed
        self.broken: IntegrityError | None = None  # with its report; nothing is computed any more
        self._in_flight: deque[Flight] = deque()  # launched and not committed, the oldest first
        self._last: float | None = None  # when a turn was ready or launched last, while there is work
        # Of streams, while the queue is full, and who waits for them.
        self._unqueued: dict[SequenceState, Callable[[Delta], None]] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        config: EngineConfig | None = None,
        *,
        progress: bool = False,
        on_compile: Callable[[int, int, float], None] | None = None,
    ) -> "Engine":
        """From a known name, a folder, a .gguf file or a hub id. `progress` shows a bar on stderr while loading."""
        config = config or EngineConfig()
        loaded = load(name, dtype=DTYPES[config.dtype], progress=progress)
        return cls(loaded.model, config, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, on_compile=on_compile)

    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Outputs in input order, of several samples one after the other. All are checked before any is queued.

        Raises ValueError for a request that cannot be served, naming its index.
        """
        requests = as_requests(prompts, params)
        outputs = {(one.id, one.index): one.output for one in self.stream(requests) if one.output is not None}
        return [outputs[request.id, index] for request in requests for index in range(request.params.n)]

    def stream(self, requests: Iterable[str | Sequence[int] | Request]) -> Iterator[Delta]:
        """Pieces of all requests, interleaved as they come; the last piece of each carries its Output.

        More requests than the queue holds are queued as it empties. Closing the iterator cancels what is left.
        Raises ValueError at once, before any is queued, for a request that cannot be served.
        """
        sequences = self.prepare(as_requests(requests))
        self._check(sequences)
        return self._stream(sequences)

    def _stream(self, sequences: list[SequenceState]) -> Iterator[Delta]:
        self._check(sequences)  # again: others may have come since
        inbox: deque[Delta] = deque()
        left, queued = {(sequence.id, sequence.index): sequence for sequence in sequences}, deque(sequences)
        self._unqueued |= dict.fromkeys(sequences, inbox.append)
        try:
            while left:
                while queued and (queued[0] not in self._unqueued or self.scheduler.queue_room > 0):
                    if (sequence := queued.popleft()) in self._unqueued:  # else it was cancelled
                        self._enter(sequence, inbox.append)
                if not inbox:
                    self._turn()
                while inbox:
                    delta = inbox.popleft()
                    if delta.output is not None:
                        del left[delta.id, delta.index]
                    yield delta
        finally:
            self._abandon(left.values())

    def submit(self, request: Request) -> str:
        """Queue a request and return its id; its Output, or those of its samples, come from later `step`s.

        Raises ValueError for a request that cannot be served, QueueFull when `max_queue` are waiting.
        """
        samples = self._intake.sequences(request)
        self._check_id(samples[0])
        self._enter_all(samples, None)
        return request.id

    def prepare(self, requests: Sequence[Request]) -> list[SequenceState]:
        """The requests' samples, tokenised and checked as far as that does not depend on others: for any thread.

        Raises ValueError, naming its index, for a request that cannot be served or has an id that one before it has.
        """
        return self._intake.all_sequences(requests)

    def subscribe(self, sequences: Sequence[SequenceState], deliver: Callable[[Delta], None]) -> Callable[[], None]:
        """Queue what `prepare` returned, all or none; as steps bring their Deltas, `deliver` is called with each.

        Returns a function that gives up those that have not ended: nothing more of them is delivered.
        Raises ValueError for an id that is in use, QueueFull when there is no room for all.
        """
        self._check(sequences)
        self._enter_all(sequences, deliver)
        return partial(self._abandon, sequences)

    def _abandon(self, sequences: Iterable[SequenceState]) -> None:
        """Nobody waits for what these still bring."""
        for sequence in sequences:
            self._unqueued.pop(sequence, None)
            if self.delivery.abandon(sequence) and sequence.finish_reason is None:
                self.scheduler.cancel(sequence.id, report=False)
        self._rest()

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is, with what it has. False if the id is unknown or has ended."""
        unqueued = [sequence for sequence in self._unqueued if sequence.id == request_id]
        for sequence in unqueued:
            sequence.finish_reason, sequence.metrics.end = "cancelled", self.scheduler.clock()
            self.delivery.expect(sequence, self._unqueued.pop(sequence))
            self.delivery.put([Progress(sequence, None)])
        return self.scheduler.cancel(request_id) or bool(unqueued)

    def step(self) -> list[Output]:
        """One turn; the Outputs of the submitted requests that ended."""
        self._turn()
        return self.delivery.take()

    @property
    def unfinished(self) -> bool:
        """Whether a further `step` has anything to do or to report."""
        return self.scheduler.unfinished or self.delivery.unfinished

    def reconfigure(self, **changes: Any) -> None:
        """Change fields of the configuration for which nothing need be compiled: policy, run_ahead, prefix_reuse.

        Raises RuntimeError while requests are unfinished, ValueError for what cannot be.
        """
        if self.unfinished:
            raise RuntimeError("the configuration can change only while no request is unfinished")
        if fixed := sorted(set(changes) - {"policy", "run_ahead", "prefix_reuse"}):
            raise ValueError(f"{fixed} cannot change after the programs are compiled")
        config = replace(self.config, **changes)
        self.runner.check(config)
        self.config, self.scheduler.policy = config, make_policy(config.policy)
        self.scheduler.prefixes.reuse = config.prefix_reuse

    def reset_stats(self) -> None:
        self.stats = EngineStats(slots=self.config.slots)

    def _turn(self) -> None:
        """Launch a turn, then commit the oldest one in flight, unless the device may be left further behind.

        After an exception the rows on the device are in doubt: who has a slot ends with an error, the queue goes on;
        not after an IntegrityError.
        """
        if self.broken is not None:
            for sequence in list(self.scheduler.waiting):
                self.scheduler.fail(sequence, f"the engine stopped: {self.broken}", report=True)
            return self.finish()
        launched = None
        try:
            launched = self._launch()
            wait = not launched or len(self._in_flight) > self.config.run_ahead
            self._commit(self._in_flight.popleft() if wait and self._in_flight else None)
            self._rest()
        except BaseException as error:
            self.broken = error if isinstance(error, IntegrityError) else None
            self._in_flight.clear()
            reason, nobody = f"the step failed: {type(error).__name__}: {error}", not self.scheduler.running
            self.scheduler.fail_running(reason)
            for sequence in list(self.scheduler.waiting) if nobody and launched is None else ():  # none can be planned
                self.scheduler.fail(sequence, reason, report=True)
            self.runner.reset()
            raise

    def _rest(self) -> None:
        """When everybody has ended nobody waits for what is in flight, and the device does not wait for the host."""
        if not self.scheduler.unfinished:
            self.stats.wasted_rows += sum(len(flight.turn.sampled) for flight in self._in_flight)
            self._in_flight.clear()
            self._last = None

    def _launch(self) -> bool:
        """Plan a turn and tell the device of it, if there is one."""
        clock = self.scheduler.clock
        start = clock()
        turn = self.scheduler.plan()
        if turn is None:
            return False
        planned = clock()
        sampled = self.run(turn)
        idle = all(ready(flight.sampled) for flight in self._in_flight)
        launched = clock()
        self._in_flight.append(Flight(turn, sampled, start, planned, launched))
        waited_since = start if self._last is None else self._last
        self.stats.count_launch(turn, gap_s=launched - waited_since if idle else 0.0)
        self._last = launched
        return True

    def run(self, turn: Turn) -> Sampled:
        """What will come of a turn of the scheduler's. The parts of `step`, for those who time them."""
        return self.runner.launch(turn, partial(self.scheduler.fail, report=True))

    def _commit(self, flight: "Flight | None") -> None:
        if flight is None:
            return self.finish()
        turn, clock = flight.turn, self.scheduler.clock
        wait = clock()
        sampled = turn.fetch(flight.sampled)
        self._last = arrived = clock()
        self.finish(turn, sampled)
        times = TurnTimes(flight.plan, flight.launch, flight.launched, wait, arrived, clock())
        self.stats.count_times(times)
        if self.on_turn is not None:
            self.on_turn(turn, times)

    def finish(self, turn: Turn | None = None, sampled: Sampled = NOTHING) -> None:
        """Interpret what came of a turn, and put what it brings where it is waited for."""
        if turn is not None:
            self.stats.wasted_rows += sum(one.finish_reason is not None for one in turn.sampled)
        progress = self.scheduler.commit(turn, sampled)
        self.stats.count_commit(progress)
        self.delivery.put(progress)

    def _enter(self, sequence: SequenceState, deliver: Callable[[Delta], None] | None) -> None:
        self.scheduler.submit(sequence)
        self._unqueued.pop(sequence, None)
        self.delivery.expect(sequence, deliver)

    def _enter_all(self, sequences: Sequence[SequenceState], deliver: Callable[[Delta], None] | None) -> None:
        room = self.scheduler.queue_room
        if len(sequences) > room:
            raise QueueFull(f"the queue has room for {room} more requests, not for {len(sequences)}")
        for sequence in sequences:
            self._enter(sequence, deliver)

    def _check(self, sequences: Iterable[SequenceState]) -> None:
        """As `_check_id`, of several requests' samples, naming the request's index."""
        for index, (_, samples) in enumerate(itertools.groupby(sequences, key=lambda one: id(one.group))):
            try:
                self._check_id(next(samples))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None

    def _check_id(self, sequence: SequenceState) -> None:
        if self.broken is not None:
            raise RuntimeError(f"the engine stopped: {self.broken}")
        self.scheduler.check(sequence)
        if any(other.id == sequence.id and other.group is not sequence.group for other in self._unqueued):
            raise ValueError(f"a request with id {sequence.id!r} is still running")
