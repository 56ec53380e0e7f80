"""How a request's tokens are chosen and when they end: `SamplingParams` and its validation."""

import json
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 3.4e38  # a float32
GREEDY_BELOW = 1e-5  # as in model/sampling.py: a temperature below it means greedy
MOST_LOGPROBS = 20
MOST_STOP_STRINGS = 16

# Field, least, most, and how a message says that.
INTEGERS = (
    ("max_tokens", 0, math.inf, "at least 1"),
    ("min_tokens", 0, math.inf, "at least 0"),
    ("top_k", -1, math.inf, "at least 1, or 0 or -1 for all tokens"),
    ("seed", 0, 2**64 - 1, "in 0 .. 2**64 - 1"),
    ("n", 1, math.inf, "at least 1"),
    ("logprobs", 0, MOST_LOGPROBS, f"in 0 .. {MOST_LOGPROBS}"),
    ("prompt_logprobs", 0, MOST_LOGPROBS, f"in 0 .. {MOST_LOGPROBS}"),
)
NUMBERS = (
    ("temperature", 0, LARGEST, "finite and at least 0"),
    ("top_p", math.ulp(0.0), 1, "above 0 and at most 1"),
    ("min_p", 0, 1, "in 0 .. 1"),
    ("repetition_penalty", 1e-5, 1e5, "in 1e-5 .. 1e5"),
    ("presence_penalty", -2, 2, "in -2 .. 2"),
    ("frequency_penalty", -2, 2, "in -2 .. 2"),
)
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")  # integers that may be None
# What the key "x-guidance" of a schema may hold: llguidance's options for how the JSON is written. With its others,
# `lenient` and `coerce_one_of`, it leaves out of the schema what it does not support.
SCHEMA_OPTIONS = (
    "item_separator",
    "key_separator",
    "whitespace_flexible",
    "whitespace_pattern",
    "json_allowed_escapes",
    "json_allow_general_unicode_escapes",
)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names follow vLLM's.

    Raises ValueError at construction for a value that has no meaning; no value is clipped.
    """

    max_tokens: int | None = None  # None: until a stop token or a full slot; 0: only score the prompt
    min_tokens: int = 0  # so many before an end or stop token may be sampled
    temperature: float = 1.0  # below 1e-5: greedy
    top_k: int = 0  # the so many most probable tokens, and those as probable as the last of them; 0 or -1: all
    top_p: float = 1.0  # then the fewest most probable ones that have this share of the probability
    min_p: float = 0.0  # then those with at least this share of the most probable one's probability
    repetition_penalty: float = 1.0  # divides positive logits of tokens of prompt and output, multiplies negative ones
    presence_penalty: float = 0.0  # off the logits of tokens of the output
    frequency_penalty: float = 0.0  # so often as they occur there
    logit_bias: dict[int, float] | None = None  # token id -> what is added to its logit, -100 .. 100
    allowed_token_ids: tuple[int, ...] | None = None  # no others are sampled; kept as a tuple
    bad_words: tuple[str, ...] = ()  # never generated: the token that would complete one is not sampled
    seed: int | None = None  # None: the engine draws one and reports it
    n: int = 1  # samples, each with a seed derived from the request's and an Output of its own
    logprobs: int | None = None  # of each sampled token and of so many most probable ones; at most 20
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    stop_token_ids: tuple[int, ...] = ()
    stop: str | tuple[str, ...] = ()  # ends the text where the first of these begins; kept as a tuple
    ignore_eos: bool = False  # ignores the model's own end tokens, not `stop_token_ids`
    json_schema: str | Mapping[str, Any] | None = None  # the text is JSON that is valid by it; kept as JSON
    regex: str | None = None  # the text matches it as a whole
    choice: Sequence[str] | None = None  # the text is one of these; kept as a tuple

    def __post_init__(self) -> None:
        for name, least, most, wanted in INTEGERS:
            if getattr(self, name) is not None or name not in OPTIONAL:
                self._set(name, within(as_int(getattr(self, name), name), least, most, name, wanted))
        for name, least, most, wanted in NUMBERS:
            self._set(name, float(within(as_number(getattr(self, name), name), least, most, name, wanted)))
        stop_token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._set("stop_token_ids", as_token_ids(stop_token_ids, "stop_token_ids"))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", as_token_ids(self.allowed_token_ids, "allowed_token_ids"))
        if self.logit_bias is not None:
            self._set("logit_bias", as_bias(self.logit_bias))
        self._set("stop", as_stop_strings(self.stop))
        self._set("bad_words", as_bad_words(self.bad_words))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        if self.json_schema is not None:
            self._set("json_schema", as_schema(self.json_schema))
        if self.regex is not None and not isinstance(self.regex, str):
            raise ValueError(f"regex must be a string, not {self.regex!r}")
        if self.choice is not None:
            self._set("choice", as_choice(self.choice))
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        """What fields mean beside each other."""
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens must be at least 1, not 0, unless prompt_logprobs asks for the prompt's score")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids holds no token: nothing could be sampled")
        if self.n > 1 and (self.greedy or self.max_tokens == 0):
            raise ValueError(f"n must be 1 where nothing is drawn, not {self.n}: all samples would be the same")
        constraints = [name for name in ("json_schema", "regex", "choice") if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise ValueError(f"give at most one of json_schema, regex and choice, not {constraints}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def check_lengths(prompt: int, params: SamplingParams, max_len: int, max_queue: int) -> None:
    """Raises ValueError where a request with so many prompt tokens never fits a slot, or its samples the queue."""
    if params.n > max_queue:
        raise ValueError(f"n is {params.n}, but the queue holds {max_queue}")
    if not 1 <= prompt <= max_len:
        raise ValueError(f"the prompt has {prompt} tokens; a slot holds 1 to {max_len}")
    wanted = params.max_tokens
    if wanted is not None and prompt + wanted - 1 > max_len:
        raise ValueError(
            f"the prompt's {prompt} tokens and max_tokens {wanted} need {prompt + wanted - 1} positions; "
            f"a slot holds {max_len}"
        )


def within(value: Any, least: float, most: float, name: str, wanted: str) -> Any:
    """The value. Raises ValueError unless it lies between the two, as NaN does not."""
    if not least <= value <= most:
        raise ValueError(f"{name} must be {wanted}, not {value}")
    return value


def as_int(value: Any, name: str) -> int:
    """An integer of any kind (NumPy's included), never a bool or a float."""
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {value!r}") from None


def as_number(value: Any, name: str) -> Any:
    """A real number of any kind, never a bool. It may be too large for a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return value


def as_token_ids(values: Any, name: str) -> tuple[int, ...]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} must be a list of integers, not {values!r}")
    return tuple(as_int(value, f"each of {name}") for value in values)


def as_stop_strings(value: Any) -> tuple[str, ...]:
    """One string or a list of them; None is none."""
    strings = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(one, str) and one for one in strings):
        raise ValueError(f"stop must be a string or a list of strings, none of them empty, not {value!r}")
    if len(strings) > MOST_STOP_STRINGS:
        raise ValueError(f"stop holds {len(strings)} strings; at most {MOST_STOP_STRINGS} are looked for")
    return tuple(strings)


def as_bad_words(value: Any) -> tuple[str, ...]:
    """A list of words; None is none."""
    words = () if value is None else value
    if not isinstance(words, list | tuple) or not all(isinstance(one, str) and one.strip() for one in words):
        raise ValueError(f"bad_words must be a list of strings that are more than spaces, not {value!r}")
    return tuple(words)


def as_bias(value: Any) -> dict[int, float]:
    """Token id -> bias. An id may be a string of digits, as JSON has it."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be an object of token ids and numbers, not {value!r}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit()
        token = as_int(int(key) if digits else key, "each token id of logit_bias")
        if token in bias:
            raise ValueError(f"logit_bias names token {token} twice")
        name = f"logit_bias of token {token}"
        bias[token] = float(within(as_number(number, name), -100, 100, name, "in -100 .. 100"))
    return bias


def as_schema(value: Any) -> str:
    """A JSON schema, given as an object or as its JSON, as JSON. The order of its keys counts and is kept."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            raise ValueError("it must be an object")
        text = json.dumps(dict(schema), allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema {value!r:.200} is not a JSON schema: {error}") from None
    options = schema.get("x-guidance", {})
    if not isinstance(options, Mapping) or not options.keys() <= set(SCHEMA_OPTIONS):
        raise ValueError(f"json_schema: x-guidance may hold {', '.join(SCHEMA_OPTIONS)}, not be {options!r:.200}")
    return text


def as_choice(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list | tuple) else ()
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise ValueError(f"choice must be a list of strings, neither it nor any of them empty, not {value!r}")
    return tuple(texts)
