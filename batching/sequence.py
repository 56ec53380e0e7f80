"""`SequenceState`: what the scheduler knows of one sample of a live request."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from batching.params import SamplingParams
from batching.plan import NUMBERS, Draw, Flag, Sampled
from batching.request import FinishReason, Logprobs, Metrics, Output

MOST_TOP_K = 2**31 - 1  # an int32; any vocabulary is smaller


class Grammar(Protocol):
    """What the text of a sequence must follow, and how far it is."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on."""
        ...

    def advance(self, token: int) -> FinishReason | None:
        """Follow a token. "stop" if the text is complete and no token ends it, "error" if the grammar cannot go on."""
        ...


@dataclass(eq=False)
class SequenceState:
    """One sample of a live request: its tokens, its slot, and how many of its rows are in the cache or on their way."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    metrics: Metrics
    index: int = 0  # which of the request's samples; they share the id
    group: object = field(default_factory=object)  # the same for all samples of a request
    early_ids: frozenset[int] = frozenset()  # what min_tokens forbids
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: "Grammar | None" = None  # its slot's mask says what may be drawn
    priority: int = 0  # this and the next four: as in Request, for policies to look at
    user: str | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    predicted_tokens: int | None = None
    arrived: int = 0  # its place in the order of arrival, set on submission
    max_tokens: int = 0  # what params and the slot's length allow, set on submission
    slot: int | None = None
    computed: int = 0  # rows that are in its slot once all turns planned so far are computed
    reached: int = 0  # rows that it had when it lost its slot, if it did
    in_flight: int = 0  # tokens of turns that are planned and not committed
    resumed: int = 0  # tokens of its output that it had when it got its slot: they are prefilled like the prompt
    cached: int = 0  # of these, positions that nobody computed for it: their rows were there
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    unservable: bool = False

    def __post_init__(self) -> None:
        params, flags = self.params, Flag(0)
        if params.logit_bias or params.allowed_token_ids is not None or any(len(word) == 1 for word in self.bad_words):
            flags |= Flag.BIAS
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            flags |= Flag.PENALTIES
        if any(len(word) > 1 for word in self.bad_words):
            flags |= Flag.BAD_WORDS
        if params.logprobs is not None:
            flags |= Flag.LOGPROBS
        numbers = tuple(getattr(params, name) for name in NUMBERS)
        self._draw = Draw(numbers, min(max(params.top_k, 0), MOST_TOP_K), self.seed, flags)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output, as far as they are known."""
        return self.prompt + tuple(self.output) if self.output else self.prompt

    @property
    def prefill_end(self) -> int:
        return len(self.prompt) + self.resumed

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_end

    @property
    def coming(self) -> int:
        """Tokens of its output that it has, or that are on their way."""
        return len(self.output) + self.in_flight

    @property
    def decoding(self) -> bool:
        """Whether its next row can be planned: a token is on the device, and another one is wanted after it.

        A grammar must have seen that token, so its request is never ahead of the device.
        """
        if self.slot is None or self.prefilling or (self.grammar is not None and self.in_flight):
            return False
        return self.coming < self.max_tokens

    @property
    def draw(self) -> Draw:
        """How the successor of the last computed row is drawn."""
        flags = self._draw.flags
        if self.computed - len(self.prompt) < self.params.min_tokens:
            flags |= Flag.STOPS
        if self.grammar is not None:
            flags |= Flag.MASK
        return self._draw._replace(flags=flags)

    @property
    def uses_slot_rows(self) -> bool:
        """Whether its draws look at rows of the device's sampling state that are written when it takes its slot."""
        return bool(self._draw.flags & (Flag.BIAS | Flag.PENALTIES | Flag.BAD_WORDS)) or self.params.min_tokens > 0

    def targets(self, start: int, count: int) -> tuple[int, ...]:
        """The prompt's tokens after `count` rows from `start` on whose logprobs are asked for."""
        told = self.params.prompt_logprobs is None or self.output
        return () if told else self.prompt[start + 1 : start + 1 + count]

    def keep_logprobs(self, token: int, sampled: Sampled, row: int) -> None:
        """Of a token that was drawn."""
        if self.params.logprobs is not None:
            self.logprobs.append(logprobs_at(token, sampled.logprobs[row], sampled.top_ids[row], self.params.logprobs))

    def keep_prompt_logprobs(self, sampled: Sampled, first_row: int, start: int, count: int) -> bool:
        """Of the targets of these rows. Whether they are finite."""
        most, targets = self.params.prompt_logprobs or 0, self.targets(start, count)
        values = sampled.prompt_logprobs[first_row : first_row + len(targets)]
        for row, token in enumerate(targets, start=first_row):
            one = logprobs_at(token, sampled.prompt_logprobs[row], sampled.prompt_top_ids[row], most)
            position = start + 1 + row - first_row
            self.prompt_logprobs[position : position + 1] = [one]  # again, if it lost its slot and came back
        return bool(np.isfinite(values).all())

    def without_token(self, finite: bool) -> str:
        """Why none could be sampled."""
        reason = "leave no token that is allowed" if finite else "are not finite"
        if finite and self.grammar is not None and self.grammar.error is not None:
            reason = f"leave no token that the grammar allows: {self.grammar.error}"
        return f"the logits after {len(self.prompt) + len(self.output)} tokens {reason}"

    def end(self, text: str | None) -> Output:
        """The Output of a sequence that has ended."""
        assert self.finish_reason is not None
        return Output(
            id=self.id,
            token_ids=self.output,
            text=text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.output),
            cached_tokens=self.cached,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            index=self.index,
            seed=self.seed,
            error=self.error,
            unservable=self.unservable,
            metrics=self.metrics,
        )


def logprobs_at(token: int, values: np.ndarray, top_ids: np.ndarray, most: int) -> Logprobs:
    """`values`: of the token, then of the most probable ones, of which `most` are told."""
    return Logprobs(token, float(values[0]), top_ids[:most].tolist(), values[1 : 1 + most].tolist())
