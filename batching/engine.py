"""The loop around plan, step and commit, and the text on either side of it."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from batching.config import DTYPES, EngineConfig, EngineStats
from batching.delivery import Delivery
from batching.grammar import GrammarCompiler, slot_masks
from batching.intake import Intake, slot_rows
from batching.plan import PlanShapes, Sampled
from batching.policies import make_policy
from batching.programs import compile_copy, compile_programs, compile_sampling
from batching.request import Delta, Output, QueueFull, Request, SamplingParams, as_requests
from batching.scheduler import Progress, Scheduler, SequenceState, Turn
from batching.step import EngineState, init_state, split_model
from model.checkpoint import load
from model.kv_cache import cache_bytes
from model.logits import SamplingState
from model.tokenizer import Tokenizer
from model.transformer import Transformer
from pallas_kernels.attention import IMPLEMENTATIONS, choose_implementation


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
        """Allocates the cache and compiles every program: nothing compiles afterwards.

        Args:
            on_compile: called with (programs compiled, programs in all, seconds of the last), first with none compiled.
        """
        if config.max_len > model.config.max_positions:
            raise ValueError(f"max_len {config.max_len} exceeds the model's {model.config.max_positions} positions")
        if model.embed.weight.dtype != DTYPES[config.dtype]:
            raise ValueError(f"dtype is {config.dtype}, but the model's weights are {model.embed.weight.dtype}")
        self.config, self.model_config = config, model.config
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.attention = choose_implementation(
            config.attention,
            dtype=DTYPES[config.dtype],
            cache_dtype=DTYPES[config.cache_dtype or config.dtype],
            head_dim=model.config.head_dim,
            heads=model.config.num_heads,
            kv_heads=model.config.num_kv_heads,
        )
        block_q = IMPLEMENTATIONS[self.attention].block_q
        self.scheduler = Scheduler(
            shapes=PlanShapes.choose(config.slots, config.chunk_sizes, block_q),
            max_len=config.max_len,
            policy=make_policy(config.policy),
            max_queue=config.max_queue,
            prefix_reuse=config.prefix_reuse,
        )
        self.stats = EngineStats(slots=config.slots)
        grammars = GrammarCompiler(tokenizer, model.config.vocab_size, self.eos_ids)
        self._intake = Intake(model.config.vocab_size, self.eos_ids, tokenizer, grammars)
        self.delivery = Delivery(tokenizer, self.scheduler.stop)
        self._unqueued: dict[str, list[SequenceState]] = {}  # of streams, by id, while the queue is full
        self._state = self._fresh_state()
        self.graph, self._weights = split_model(model)
        self.programs = compile_programs(
            self.graph, self._weights, self._state, self.scheduler.shapes, self.attention, on_compile
        )
        self.sampling_programs = compile_sampling(self._state.sampling)
        self._copy_prefix = compile_copy(self._state) if config.prefix_reuse else None
        self.cache_bytes = cache_bytes(self._state.cache)
        self.weight_bytes = sum(weight.nbytes for weight in self._weights)

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
        return self._stream(self._check_all(as_requests(requests)))

    def _stream(self, sequences: list[SequenceState]) -> Iterator[Delta]:
        for sequence in sequences:  # again: others may have come since
            self._check_id(sequence)
        inbox: deque[Delta] = deque()
        left, queued = {(sequence.id, sequence.index): sequence for sequence in sequences}, deque(sequences)
        for sequence in sequences:
            self._unqueued.setdefault(sequence.id, []).append(sequence)
        try:
            while left:
                while queued and (queued[0].finish_reason is not None or self.scheduler.queue_room):
                    self._enter(queued.popleft(), inbox.append)
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

    def subscribe(self, requests: Sequence[Request], deliver: Callable[[Delta], None]) -> Callable[[], None]:
        """Queue requests, all or none; as steps bring their Deltas, `deliver` is called with each.

        Returns a function that gives up those that have not ended: nothing more of them is delivered.
        Raises ValueError for a request that cannot be served, QueueFull when there is no room for all.
        """
        sequences = self._check_all(requests)
        self._enter_all(sequences, deliver)
        return partial(self._abandon, sequences)

    def _abandon(self, sequences: Iterable[SequenceState]) -> None:
        """Nobody waits for what these still bring."""
        for sequence in sequences:
            if self.delivery.abandon(sequence) and sequence.finish_reason is None:
                self.scheduler.cancel(sequence.id, report=False)
            else:
                self._forget_unqueued(sequence)

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is, with what it has. False if the id is unknown or has ended."""
        unqueued = self._unqueued.pop(request_id, [])
        for sequence in unqueued:
            sequence.finish_reason, sequence.metrics.end = "cancelled", time.monotonic()
        return self.scheduler.cancel(request_id) or bool(unqueued)

    def step(self) -> list[Output]:
        """One turn; the Outputs of the submitted requests that ended."""
        self._turn()
        return self.delivery.take()

    @property
    def unfinished(self) -> bool:
        """Whether a further `step` has anything to do or to report."""
        return self.scheduler.unfinished or self.delivery.unfinished

    def set_policy(self, name: str) -> None:
        """Schedule by another policy from now on. Raises RuntimeError while requests are unfinished."""
        if self.unfinished:
            raise RuntimeError("the policy can change only while no request is unfinished")
        self.scheduler.policy = make_policy(name)

    def reset_stats(self) -> None:
        self.stats = EngineStats(slots=self.config.slots)

    def _turn(self) -> None:
        """Plan, compute, commit. After an exception the rows on the device are in doubt: who has a slot ends with an
        error, the queue goes on."""
        try:
            turn = self.scheduler.plan()
            self.finish(turn, self.run(turn))
        except BaseException as error:
            self.scheduler.fail_running(f"the step failed: {type(error).__name__}: {error}")
            del self._state  # before a new one is allocated; it may have been donated already
            self._state = self._fresh_state()
            raise

    def run(self, turn: Turn | None) -> Sampled:
        """Compute a turn of the scheduler's; what comes of it. The parts of `step`, for those who time them."""
        if turn is None:
            return Sampled(np.empty(0, np.int32))
        for sequence in turn.admitted:
            if sequence.uses_slot_rows and sequence.slot is not None:
                rows = slot_rows(sequence, self.model_config.vocab_size)
                self._set_sampling(self.sampling_programs.set_slot, np.int32(sequence.slot), rows)
        for copy in turn.copies:
            assert self._copy_prefix is not None
            self._state = self._copy_prefix(self._state, *np.asarray(copy, np.int32))
        if bound := [sequence for sequence in turn.sampled if sequence.grammar is not None]:
            self._set_sampling(self.sampling_programs.set_masks, *slot_masks(bound, self.config.slots))
        self._state, sampled = self.programs[turn.plan.shape](self._weights, self._state, turn.plan.rows)
        self.stats.turns += 1
        self.stats.busy_slots += turn.busy
        self.stats.rows += len(turn.plan.rows.tokens)
        self.stats.live_rows += turn.plan.live_rows
        return turn.fetch(sampled)

    def _set_sampling(self, program: Callable[..., SamplingState], *arguments: Any) -> None:
        """Write the state that draws look at, by one of `sampling_programs`."""
        self._state = replace(self._state, sampling=program(self._state.sampling, *arguments))

    def finish(self, turn: Turn | None, sampled: Sampled) -> None:
        """Interpret what came of a turn, and put what it brings where it is waited for."""
        progress = self.scheduler.commit(turn, sampled)
        self.delivery.put(progress)
        for sequence, token in progress:
            self.stats.generated_tokens += token is not None
            if sequence.finish_reason is not None:
                self.stats.prompt_tokens += min(sequence.computed, len(sequence.prompt))
                self.stats.cached_tokens += sequence.cached

    def _enter(self, sequence: SequenceState, deliver: Callable[[Delta], None] | None) -> None:
        """Into the queue; or straight to its end, if it was cancelled before there was room."""
        cancelled = sequence.finish_reason is not None
        if not cancelled:  # else its id may be another's by now
            self.scheduler.submit(sequence)
            self._forget_unqueued(sequence)
        self.delivery.expect(sequence, deliver)
        if cancelled:
            self.delivery.put([Progress(sequence, None)])

    def _forget_unqueued(self, sequence: SequenceState) -> None:
        others = self._unqueued.get(sequence.id, [])
        if sequence in others:
            others.remove(sequence)
            if not others:
                del self._unqueued[sequence.id]

    def _enter_all(self, sequences: list[SequenceState], deliver: Callable[[Delta], None] | None) -> None:
        room = self.scheduler.queue_room
        if len(sequences) > room:
            raise QueueFull(f"the queue has room for {room} more requests, not for {len(sequences)}")
        for sequence in sequences:
            self._enter(sequence, deliver)

    def _check_id(self, sequence: SequenceState) -> None:
        self.scheduler.check(sequence)
        if any(other.group is not sequence.group for other in self._unqueued.get(sequence.id, ())):
            raise ValueError(f"a request with id {sequence.id!r} is still running")

    def _fresh_state(self) -> EngineState:
        dtype = DTYPES[self.config.cache_dtype or self.config.dtype]
        slots, max_len = self.config.slots, self.config.max_len
        return init_state(
            self.model_config, slots=slots, max_len=max_len, cache_dtype=dtype, implementation=self.attention
        )

    def _check_all(self, requests: Sequence[Request]) -> list[SequenceState]:
        """The requests' samples."""
        sequences: list[SequenceState] = []
        ids = set()
        for index, request in enumerate(requests):
            try:
                if request.id in ids:
                    raise ValueError(f"the id {request.id!r} is given twice")
                ids.add(request.id)
                samples = self._intake.sequences(request)
                self._check_id(samples[0])
                sequences += samples
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return sequences
