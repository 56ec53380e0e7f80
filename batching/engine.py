"""The loop around plan, step and commit, and the text on either side of it."""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from batching.config import DTYPES, EngineConfig, EngineStats
from batching.plan import PlanShapes
from batching.policies import make_policy
from batching.programs import compile_programs
from batching.request import Delta, Metrics, Output, Request, SamplingParams, as_requests
from batching.scheduler import Scheduler, SequenceState, Turn
from batching.step import EngineState, init_state, split_model
from model.checkpoint import load
from model.kv_cache import cache_bytes
from model.tokenizer import Detokenizer, Tokenizer
from model.transformer import Transformer
from pallas_kernels.attention import IMPLEMENTATIONS, choose_implementation


@dataclass
class _Ticket:
    """What the engine holds of a request besides its state: who waits for it, and its text so far."""

    inbox: deque[Delta] | None  # of a stream; None: its Output goes to `step`
    detokenizer: Detokenizer | None
    pieces: list[str] = field(default_factory=list)


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
        )
        block_q = IMPLEMENTATIONS[self.attention].block_q
        self.scheduler = Scheduler(
            shapes=PlanShapes.choose(config.slots, config.chunk_sizes, block_q),
            max_len=config.max_len,
            policy=make_policy(config.policy),
            max_queue=config.max_queue,
        )
        self.stats = EngineStats(slots=config.slots)
        self._tickets: dict[SequenceState, _Ticket] = {}
        self._unqueued: dict[str, SequenceState] = {}  # of streams, by id, while the queue is full
        self._outbox: list[Output] = []  # of submitted requests, for the next `step`
        self._state = self._fresh_state()
        self.graph, self._weights = split_model(model)
        self.programs = compile_programs(
            self.graph, self._weights, self._state, self.scheduler.shapes, self.attention, on_compile
        )
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
        """Outputs in input order. All requests are checked before any is queued.

        Raises ValueError for a request that cannot be served, naming its index.
        """
        requests = as_requests(prompts, params)
        outputs = {delta.id: delta.output for delta in self.stream(requests) if delta.output is not None}
        return [outputs[request.id] for request in requests]

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
        left, queued = {sequence.id: sequence for sequence in sequences}, deque(sequences)
        self._unqueued |= left
        try:
            while left:
                while queued and (queued[0].finish_reason is not None or self.scheduler.queue_room):
                    self._enter(queued.popleft(), inbox)
                if not inbox:
                    self._turn()
                while inbox:
                    delta = inbox.popleft()
                    if delta.output is not None:
                        del left[delta.id]
                    yield delta
        finally:
            for sequence in left.values():  # nobody waits for what these still bring
                if self._tickets.pop(sequence, None) is not None and sequence.finish_reason is None:
                    self.scheduler.cancel(sequence.id, report=False)
                elif self._unqueued.get(sequence.id) is sequence:
                    del self._unqueued[sequence.id]

    def submit(self, request: Request) -> str:
        """Queue a request and return its id; its Output comes from a later `step`.

        Raises ValueError for a request that cannot be served, QueueFull when `max_queue` are waiting.
        """
        sequence = self._sequence(request)
        self._check_id(sequence)
        self._enter(sequence, None)
        return sequence.id

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is, with what it has. False if the id is unknown or has ended."""
        sequence = self._unqueued.pop(request_id, None)
        if sequence is None:
            return self.scheduler.cancel(request_id)
        sequence.finish_reason, sequence.metrics.end = "cancelled", time.monotonic()
        return True

    def step(self) -> list[Output]:
        """One turn; the Outputs of the submitted requests that ended."""
        self._turn()
        outputs, self._outbox = self._outbox, []
        return outputs

    @property
    def unfinished(self) -> bool:
        """Whether a further `step` has anything to do or to report."""
        return self.scheduler.unfinished or bool(self._outbox)

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

    def run(self, turn: Turn | None) -> np.ndarray:
        """Compute a turn of the scheduler's; its sampled tokens. The parts of `step`, for those who time them."""
        if turn is None:
            return np.empty(0, np.int32)
        self._state, sampled = self.programs[turn.plan.shape](self._weights, self._state, turn.plan.rows)
        self.stats.turns += 1
        self.stats.busy_slots += turn.busy
        self.stats.rows += len(turn.plan.rows.tokens)
        self.stats.live_rows += turn.plan.live_rows
        return np.asarray(sampled)

    def finish(self, turn: Turn | None, tokens: np.ndarray) -> None:
        """Interpret a turn's tokens, and put what they bring where it is waited for."""
        for sequence, token in self.scheduler.commit(turn, tokens):
            self.stats.generated_tokens += token is not None
            self._deliver(sequence, token)

    def _deliver(self, sequence: SequenceState, token: int | None) -> None:
        """A token, the end, or both."""
        ended = sequence.finish_reason is not None
        if ended:
            self.stats.prompt_tokens += min(sequence.computed, len(sequence.prompt))
        ticket = self._tickets.get(sequence)
        if ticket is None:  # of a stream that was closed
            return
        text = None
        if ticket.detokenizer is not None:
            # The token that stops a request has no text.
            text = "" if token is None or sequence.finish_reason == "stop" else ticket.detokenizer.push(token)
            text += ticket.detokenizer.flush() if ended else ""
            ticket.pieces.append(text)
        output = None
        if ended:
            del self._tickets[sequence]
            output = sequence.end(None if text is None else "".join(ticket.pieces))
        if ticket.inbox is not None:
            ticket.inbox.append(Delta(sequence.id, [] if token is None else [token], text, output))
        elif output is not None:
            self._outbox.append(output)

    def _enter(self, sequence: SequenceState, inbox: deque[Delta] | None) -> None:
        """Into the queue; or straight to its end, if it was cancelled before there was room."""
        cancelled = sequence.finish_reason is not None
        if not cancelled:  # else its id may be another's by now
            self.scheduler.submit(sequence)
            self._unqueued.pop(sequence.id, None)
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer)
        self._tickets[sequence] = _Ticket(inbox, detokenizer)
        if cancelled:
            self._deliver(sequence, None)

    def _check_id(self, sequence: SequenceState) -> None:
        self.scheduler.check(sequence)
        if sequence.id in self._unqueued:
            raise ValueError(f"a request with id {sequence.id!r} is still running")

    def _fresh_state(self) -> EngineState:
        dtype = DTYPES[self.config.cache_dtype or self.config.dtype]
        slots, max_len = self.config.slots, self.config.max_len
        return init_state(
            self.model_config, slots=slots, max_len=max_len, cache_dtype=dtype, implementation=self.attention
        )

    def _check_all(self, requests: Sequence[Request]) -> list[SequenceState]:
        sequences, ids = [], set()
        for index, request in enumerate(requests):
            try:
                if request.id in ids:
                    raise ValueError(f"the id {request.id!r} is given twice")
                ids.add(request.id)
                sequences.append(self._sequence(request))
                self._check_id(sequences[-1])
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return sequences

    def _sequence(self, request: Request) -> SequenceState:
        """Tokenise and check everything that does not depend on other requests."""
        if not isinstance(request, Request):
            raise ValueError(f"expected a Request, not {type(request).__name__}")
        params, vocabulary = request.params, self.model_config.vocab_size
        prompt = self._prompt_ids(request)
        for name, ids in (("prompt_ids", prompt), ("stop_token_ids", params.stop_token_ids)):
            bad = next((token for token in ids if not 0 <= token < vocabulary), None)
            if bad is not None:
                raise ValueError(f"{name} holds {bad}; the vocabulary is 0 .. {vocabulary - 1}")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        return SequenceState(request.id, prompt, params, seed, stop_ids, Metrics(arrival=time.monotonic()))

    def _prompt_ids(self, request: Request) -> tuple[int, ...]:
        if request.prompt_ids is not None:
            return tuple(request.prompt_ids)
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompt_ids")
        if request.messages is not None:
            return tuple(self.tokenizer.encode_chat(request.messages))
        assert request.prompt is not None
        ids = tuple(self.tokenizer.encode(request.prompt))
        if not ids:
            raise ValueError("the prompt is empty")
        return ids
