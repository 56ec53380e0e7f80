"""The loop around plan, step and commit, and the text on either side of it."""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from batching.plan import PlanShapes
from batching.policies import make_policy
from batching.programs import compile_programs
from batching.request import Delta, Metrics, Output, Request, SamplingParams, as_int, as_requests
from batching.scheduler import Scheduler, SequenceState, Turn
from batching.step import init_state
from model.checkpoint import load
from model.kv_cache import cache_bytes
from model.tokenizer import Detokenizer, Tokenizer
from model.transformer import Transformer
from pallas_kernels.attention import IMPLEMENTATIONS, choose_implementation

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class EngineConfig:
    """How requests are served. Raises ValueError at construction for a value that cannot be."""

    slots: int = 16
    max_len: int = 1024  # positions in a slot: prompt and generated tokens
    chunk_sizes: tuple[int, ...] = (128,)  # most prompt tokens a turn, in a few sizes that are compiled
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: as dtype
    policy: str = "continuous"
    max_queue: int = 1024
    attention: str | None = None  # an implementation of `slot_attention`; None: the first that runs here

    def __post_init__(self) -> None:
        for name in ("slots", "max_len", "max_queue"):
            if as_int(getattr(self, name), name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("dtype", "cache_dtype"):
            if getattr(self, name) not in (*DTYPES, *((None,) if name == "cache_dtype" else ())):
                raise ValueError(f"{name} must be one of {sorted(DTYPES)}, not {getattr(self, name)!r}")
        if self.attention not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"attention must be one of {list(IMPLEMENTATIONS)}, not {self.attention!r}")
        make_policy(self.policy)
        PlanShapes.choose(self.slots, self.chunk_sizes, block_q=1)


@dataclass
class EngineStats:
    """Counts since the engine was made or `reset_stats`; shares are of slots or rows, not of time."""

    turns: int = 0
    slots: int = 0  # of the engine
    busy_slots: int = 0  # summed over turns
    rows: int = 0  # computed, padding included
    live_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    @property
    def busy_share(self) -> float:
        """Mean share of slots that hold a request, over turns."""
        return self.busy_slots / (self.turns * self.slots) if self.turns else 0.0

    @property
    def padding_share(self) -> float:
        """Share of computed rows that were padding."""
        return 1 - self.live_rows / self.rows if self.rows else 0.0


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
        self.config, self.model_config = config, model.config
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.attention = choose_implementation(config.attention)
        block_q = IMPLEMENTATIONS[self.attention].block_q
        self.scheduler = Scheduler(
            shapes=PlanShapes.choose(config.slots, config.chunk_sizes, block_q),
            max_len=config.max_len,
            policy=make_policy(config.policy),
            max_queue=config.max_queue,
        )
        self.stats = EngineStats(slots=config.slots)
        self._texts: dict[str, tuple[Detokenizer, list[str]]] = {}  # request id -> its pieces so far
        self._outbox: deque[Delta] = deque()
        self._streams: dict[str, deque[Delta]] = {}  # request id -> the stream that waits for it
        cache_dtype = DTYPES[config.cache_dtype or config.dtype]
        self._state = init_state(model.config, slots=config.slots, max_len=config.max_len, cache_dtype=cache_dtype)
        self.graph, self._params = nnx.split(model)
        self.programs = compile_programs(
            self.graph, self._params, self._state, self.scheduler.shapes, self.attention, on_compile
        )
        self.cache_bytes = cache_bytes(self._state.cache)
        self.weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))

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
        return self._stream(deque(self._check_all(as_requests(requests))))

    def _stream(self, sequences: deque[SequenceState]) -> Iterator[Delta]:
        left = {sequence.id for sequence in sequences}
        inbox: deque[Delta] = deque()
        try:
            while left:
                while sequences and self.scheduler.queue_room:
                    self._submit(sequences[0])
                    self._streams[sequences.popleft().id] = inbox
                self._turn()
                while inbox:
                    delta = inbox.popleft()
                    if delta.output is not None:
                        left.discard(delta.id)
                    yield delta
        finally:
            for request_id in left:
                self._streams.pop(request_id, None)
                self.cancel(request_id)

    def submit(self, request: Request) -> str:
        """Queue a request and return its id; its Output comes from a later `step`.

        Raises ValueError for a request that cannot be served, QueueFull when `max_queue` are waiting.
        """
        self._submit(self._sequence(request))
        return request.id

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is, with what it has. False if the id is unknown or has ended."""
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Output]:
        """One turn; the Outputs of the submitted requests that ended."""
        self._turn()
        outputs = [delta.output for delta in self._outbox if delta.output is not None]
        self._outbox.clear()
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
        """Plan, compute, commit, and put the pieces where they are waited for."""
        turn = self.scheduler.plan()
        self.finish(turn, self.run(turn))

    def run(self, turn: Turn | None) -> np.ndarray:
        """Compute a turn of the scheduler's; its sampled tokens. The parts of `step`, for those who time them."""
        if turn is None:
            return np.empty(0, np.int32)
        self._state, sampled = self.programs[turn.plan.shape](self._params, self._state, turn.plan.rows)
        self.stats.turns += 1
        self.stats.busy_slots += turn.busy
        self.stats.rows += len(turn.plan.rows.tokens)
        self.stats.live_rows += turn.plan.live_rows
        return np.asarray(sampled)

    def finish(self, turn: Turn | None, tokens: np.ndarray) -> None:
        """Interpret a turn's tokens."""
        for sequence, token in self.scheduler.commit(turn, tokens):
            self._deliver(self._delta(sequence, token))

    def _deliver(self, delta: Delta) -> None:
        inbox = self._streams.get(delta.id, self._outbox)
        if delta.output is not None:
            self._streams.pop(delta.id, None)
        inbox.append(delta)

    def _delta(self, sequence: SequenceState, token: int | None) -> Delta:
        """The piece for a token, and the Output if it was the last."""
        text, ended = None, sequence.finish_reason is not None
        if self.tokenizer is not None:
            detokenizer, pieces = self._texts[sequence.id]
            # The token that stops a request has no text.
            text = "" if token is None or sequence.finish_reason == "stop" else detokenizer.push(token)
            text += detokenizer.flush() if ended else ""
            pieces.append(text)
        self.stats.generated_tokens += token is not None
        output = self._output(sequence) if ended else None
        return Delta(sequence.id, [] if token is None else [token], text, output)

    def _output(self, sequence: SequenceState) -> Output:
        assert sequence.finish_reason is not None
        self.stats.prompt_tokens += min(sequence.computed, len(sequence.prompt))
        text = None if self.tokenizer is None else "".join(self._texts.pop(sequence.id)[1])
        return Output(
            id=sequence.id,
            token_ids=sequence.output,
            text=text,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            prompt_tokens=len(sequence.prompt),
            completion_tokens=len(sequence.output),
            seed=sequence.seed,
            error=sequence.error,
            metrics=sequence.metrics,
        )

    def _submit(self, sequence: SequenceState) -> None:
        self.scheduler.submit(sequence)
        if self.tokenizer is not None:
            self._texts[sequence.id] = Detokenizer(self.tokenizer), []

    def _check_all(self, requests: Sequence[Request]) -> list[SequenceState]:
        sequences, ids = [], set()
        for index, request in enumerate(requests):
            try:
                if request.id in ids:
                    raise ValueError(f"the id {request.id!r} is given twice")
                ids.add(request.id)
                sequences.append(self._sequence(request))
                self.scheduler.check(sequences[-1])
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return sequences

    def _sequence(self, request: Request) -> SequenceState:
        """Tokenise and check everything that does not depend on other requests."""
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
            return tuple(self.tokenizer.encode_chat([dict(message) for message in request.messages]))
        assert request.prompt is not None
        ids = tuple(self.tokenizer.encode(request.prompt))
        if not ids:
            raise ValueError("the prompt is empty")
        return ids
