"""What a user asks and what comes back: `Request`, `Output`, `Delta`, and their validation."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from batching.params import SamplingParams, as_int, as_number, as_token_ids, within

FinishReason = Literal["stop", "length", "cancelled", "error"]


class QueueFull(RuntimeError):
    """The waiting queue holds `max_queue` requests already; nothing was accepted."""


@dataclass(frozen=True)
class Request:
    """One prompt, in exactly one of three forms, and its parameters.

    `messages`: a list of `{"role": ..., "content": ...}`, put through the model's chat template.
    """

    prompt: str | None = None
    prompt_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    # What policies look at; a field that is set and not looked at by the engine's policy is refused.
    priority: int = 0  # lower is more urgent
    user: str | None = None
    ttft_slo_s: float | None = None  # objectives: seconds to the first token, and a token after it
    tpot_slo_s: float | None = None
    predicted_tokens: int | None = None  # somebody's guess of how many will be generated

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "prompt_ids", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt, prompt_ids and messages, not {given or 'none'}")
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise ValueError(f"prompt must be a string, not {type(self.prompt).__name__}")
        if self.prompt_ids is not None:
            object.__setattr__(self, "prompt_ids", as_token_ids(self.prompt_ids, "prompt_ids"))
        if self.messages is not None:
            check_messages(self.messages)
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"id must be a string that is not empty, not {self.id!r}")
        object.__setattr__(self, "priority", as_int(self.priority, "priority"))
        if self.user is not None and not isinstance(self.user, str):
            raise ValueError(f"user must be a string, not {self.user!r}")
        for name in ("ttft_slo_s", "tpot_slo_s"):
            if getattr(self, name) is not None:
                value = as_number(getattr(self, name), name)
                object.__setattr__(self, name, float(within(value, 1e-9, 1e9, name, "in 1e-9 .. 1e9")))
        if self.predicted_tokens is not None:
            object.__setattr__(self, "predicted_tokens", as_int(self.predicted_tokens, "predicted_tokens"))
            if self.predicted_tokens < 0:
                raise ValueError(f"predicted_tokens must not be negative, not {self.predicted_tokens}")
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(self.params).__name__}")

    @classmethod
    def from_json(cls, line: Any, defaults: Mapping[str, Any] | None = None) -> "Request":
        """From one JSON object: the fields of Request, with those of SamplingParams beside them.

        `defaults`: sampling fields for what the object leaves out. Raises ValueError naming a field that is unknown.
        """
        if not isinstance(line, dict):
            raise ValueError(f"a request is a JSON object, not {type(line).__name__}")
        own = {f.name for f in fields(cls)} - {"params"}
        sampling = {f.name for f in fields(SamplingParams)}
        unknown = sorted(set(line) - own - sampling)
        if unknown:
            raise ValueError(f"fields that are not supported: {unknown}; supported are {sorted(own | sampling)}")
        chosen = dict(defaults or {}) | {name: line[name] for name in line if name in sampling}
        return cls(**{name: line[name] for name in line if name in own}, params=SamplingParams(**chosen))


@dataclass
class Metrics:
    """When things happened, in seconds on the monotonic clock, and in how many turns the request had rows."""

    arrival: float
    admission: float | None = None
    tokens: list[float] = field(default_factory=list)  # of each token, the first included
    end: float | None = None
    turns: int = 0
    preemptions: int = 0  # how often it lost its slot to a more urgent request

    @property
    def first_token(self) -> float | None:
        return self.tokens[0] if self.tokens else None


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities by the model's own logits: before temperature, penalties and masks."""

    token_id: int  # the token that is there
    logprob: float
    top_ids: list[int]  # the most probable ones, falling; of equal ones the lowest id first
    top_logprobs: list[float]


@dataclass(frozen=True)
class Output:
    """The end of a request; every accepted request has exactly one, and with `n` samples one each."""

    id: str
    token_ids: list[int]
    text: str | None  # None where the model has no tokenizer
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the token id or the stop string that matched
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # positions that were not computed for it: another request with the same prefix had been
    logprobs: list[Logprobs] | None = None  # one a token of `token_ids`, if asked for
    prompt_logprobs: list[Logprobs | None] | None = None  # one a token of the prompt, None for the first
    index: int = 0  # which of the request's `n` samples
    seed: int | None = None  # replays the request, or this sample alone with n=1
    error: str | None = None
    unservable: bool = False  # the error lies in what was asked for: nothing that it allows can follow
    metrics: Metrics | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of a stream. Joined, the pieces are exactly the Output's text, token ids and logprobs."""

    id: str
    token_ids: list[int]
    text: str | None
    output: Output | None = None  # with the last piece
    index: int = 0  # which of the request's `n` samples
    logprobs: list[Logprobs] | None = None  # of `token_ids`, if asked for


def check_messages(messages: Any) -> None:
    """Raises ValueError unless these are messages of a chat: a list of mappings with the texts "role" and "content"."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list that is not empty, not {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index} must have a role and a content, not be {message!r}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {index}: {key!r} must be a string, not {message.get(key)!r}")


def as_requests(
    prompts: Iterable[Any], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[Request]:
    """Texts, lists of token ids and Requests as Requests; `params` for the first two, one for all or one each."""
    if isinstance(prompts, str | Request):
        raise ValueError(f"give a list of prompts, not one {type(prompts).__name__}")
    prompts = list(prompts)
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(each)} params")
    requests = []
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        try:
            if isinstance(prompt, Request):
                if own is not None:
                    raise ValueError("a Request brings its own params")
                requests.append(prompt)
                continue
            own = SamplingParams() if own is None else own
            text = isinstance(prompt, str)
            requests.append(Request(prompt=prompt, params=own) if text else Request(prompt_ids=prompt, params=own))
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from None
    return requests
