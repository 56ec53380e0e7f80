"""Output that follows a JSON schema, a regular expression or a list of choices, by the library llguidance.

A grammar says after each token which ones may follow. Its language is that of the request's text: whole texts match,
up to the token that ends it. Special tokens and ids without a token are never allowed, those that end the request
where the text is complete. A constraint that the library does not support is refused, never ignored.

Beside other parameters: `allowed_token_ids`, `bad_words`, `logit_bias` and `min_tokens` apply as well, and a request
that is left without a token ends with an error, alone. `max_tokens`, stop strings and stop tokens that have a text cut
the text where they would. With `ignore_eos`, or in a model without end tokens, a request ends with "stop" as soon as
nothing can follow. Masks are computed before the turn that draws by them, and depend on the token drawn before.

Departures from JSON Schema (github.com/guidance-ai/llguidance, docs/json_schema.md): properties come in the schema's
order; names under `additionalProperties` and `patternProperties` may repeat; a `format` is enforced, as a pattern (a
date may be a 30th of February). Between JSON's tokens there are at most 24 characters of whitespace, since a model may
never stop writing it. The key `x-guidance` at the top of a schema changes that (`params.SCHEMA_OPTIONS`): it may set
separators, whitespace and escapes, but not have the library ignore what it does not support.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from batching.params import SamplingParams
from batching.sequence import SequenceState
from model.token_bytes import TokenBytes
from model.tokenizer import Tokenizer

CACHED = 64  # grammars
DEAD_END = "no token continues the text"
WHITESPACE = r"[ \n\r\t]{1,24}"


class GrammarCompiler:
    """Makes matchers for one model. The compiled grammars that were used last are kept.

    Several threads may make matchers while another one uses those made before: a matcher is a copy of a compiled
    grammar that nobody advances, and what copies share the library locks.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """`vocab_size` is the model's: ids that the tokenizer lacks are never allowed."""
        self.vocab_size = vocab_size
        self.refusal: str | None = None  # why this model has no constraints
        self._compiled = functools.lru_cache(CACHED)(self._compile)
        self.cache_info = self._compiled.cache_info
        if tokenizer is None:
            self.refusal = "the model has no tokenizer"
            return
        try:
            self._tokens = TokenBytes(tokenizer)
        except ValueError as error:
            self.refusal = str(error)
            return
        self._texts = texts = (self._tokens.of + [b""] * vocab_size)[:vocab_size]
        for token in eos_ids:
            texts[token] = b""
        self.without_text = frozenset(token for token, text in enumerate(texts) if not text)
        # The library's own end is one past the vocabulary: its bit in a mask says that the text may end.
        self._tokenizer = LLTokenizer(_Vocabulary(self._tokens, [*texts, b""], end=vocab_size))  # pyright: ignore
        self._limits = LLParserLimits(verbose_errors=False)

    def matcher(self, params: SamplingParams, stop_ids: Iterable[int]) -> "Matcher | None":
        """At the start of the constraint in `params`, or None if there is none.

        `stop_ids`: the tokens that end the request. Those that have no text may come where the text is complete.
        Raises ValueError naming what is wrong or not supported.
        """
        for name in ("json_schema", "regex", "choice"):
            constraint = getattr(params, name)
            if constraint is not None:
                if self.refusal is not None:
                    raise ValueError(f"{name} cannot constrain the text: {self.refusal}")
                ends = self.without_text.intersection(stop_ids)
                # What the grammar leaves no choice in comes in the usual tokens; not if these may be forbidden.
                forced = params.allowed_token_ids is None and not params.logit_bias and not params.bad_words
                matcher = Matcher(self, self._compiled(name, constraint, forced), pack(ends, self.vocab_size))
                if not ends and not matcher.mask().any():
                    raise ValueError(f"{name} allows no token: only the empty text, and nothing that ends it")
                return matcher
        return None

    def masks(self, matchers: Sequence["Matcher"]) -> np.ndarray:
        """uint32 [matchers, ceil(vocab_size / 32)]: bit i of word w is set if token 32 w + i may come next.

        A row without a bit: nothing may follow, or the library gave up (`Matcher.error`).
        """
        word, bit = divmod(self.vocab_size, 32)
        raw = np.zeros((len(matchers), word + 1), np.uint32)
        wanted = [(matcher.state, row) for row, matcher in enumerate(matchers)]
        if wanted:
            _executor().unsafe_compute_mask_ptr(wanted, raw.ctypes.data, raw[0].nbytes, len(wanted))
        complete = raw[:, word] >> bit & 1 != 0
        raw[:, word] &= (1 << bit) - 1
        masks = raw[:, : -(-self.vocab_size // 32)]
        for row, matcher in enumerate(matchers):
            if matcher.error is not None:
                masks[row] = 0
                self._compiled.cache_clear()  # copies share what the library found out so far, up to a limit
            elif complete[row]:
                masks[row] |= matcher.ends
        return masks

    def _compile(self, name: str, constraint: str | tuple[str, ...], forced: bool) -> LLMatcher:
        try:
            grammar = self._source(name, constraint)
        except ValueError as error:  # not Unicode
            raise ValueError(f"{name}: {error}") from error
        grammar = grammar if forced else _unforced(grammar)
        state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if state.is_error():
            raise ValueError(f"{name}: {_reason(state)}")
        if (limit := self._limit_at_the_start(state)) is not None:
            raise ValueError(f"{name} is past the library's limits: {limit}")
        return state

    @functools.cached_property
    def _shortest_first(self) -> np.ndarray:
        """The ids of all tokens, made when the first grammar is compiled."""
        return np.array(sorted(range(self.vocab_size), key=lambda token: len(self._texts[token])))

    def _limit_at_the_start(self, state: LLMatcher) -> str | None:
        """The limit of the library that no text gets past, since already its first byte breaks it; None if one does.

        A longer token that starts with one that breaks a limit is no way out, though it may be the whole text.
        """
        limit, broken, start = None, list[bytes](), state.deep_copy()
        allowed = np.unpackbits(np.frombuffer(start.compute_bitmask(), np.uint8), bitorder="little")
        if start.is_error():
            return None if (reason := _reason(start)) == DEAD_END else reason
        for token in self._shortest_first[allowed[self._shortest_first] != 0].tolist():
            if self._texts[token].startswith(tuple(broken)):
                continue
            copy = state.deep_copy()
            if copy.consume_token(token):
                return None
            limit = _reason(copy)
            broken.append(self._texts[token])
        return limit

    def _source(self, name: str, constraint: str | tuple[str, ...]) -> str:
        """The constraint in the library's language."""
        if name == "json_schema":
            assert isinstance(constraint, str)
            options = json.loads(constraint).get("x-guidance", {})
            if options.get("whitespace_flexible") is False:  # the pattern, though a default, would count for more
                return LLMatcher.grammar_from_json_schema(constraint)
            return LLMatcher.grammar_from_json_schema(constraint, defaults={"whitespace_pattern": WHITESPACE})
        if isinstance(constraint, str):
            grammar = LLMatcher.grammar_from_regex(constraint)
            return _with_a_space_to_lose(grammar) if self._tokens.strips_space else grammar
        texts = [f" {text}" if self._strips(text) else text for text in constraint]
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)

    def _strips(self, text: str) -> bool:
        return self._tokens.strips_space and text.startswith(" ")


class Matcher:
    """How far one request is in its grammar. `ends` are the bits of the tokens that end it."""

    def __init__(self, compiler: GrammarCompiler, start: LLMatcher, ends: np.ndarray) -> None:
        self.compiler, self.ends, self._start = compiler, ends, start
        self._state: LLMatcher | None = None  # a copy for this request, made when it is needed
        self._refused: str | None = None

    @property
    def state(self) -> LLMatcher:
        if self._state is None:
            self._state = self._start.deep_copy()
        return self._state

    def mask(self) -> np.ndarray:
        """uint32 [ceil(vocab_size / 32)]: the tokens that may come next."""
        return self.compiler.masks([self])[0]

    def advance(self, token: int) -> Literal["stop", "error"] | None:
        """Follow a token. "stop" if the text is complete and no token ends it, "error" if the grammar cannot go on."""
        if token in self.compiler.without_text or not self.state.consume_token(token):
            self._refused = f"token {token} does not follow in the grammar"
            return "error"
        return "stop" if not self.ends.any() and self.finished else None

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but its end may follow."""
        if self.error is not None or not self.state.is_accepting():
            return False
        return self.state.is_stopped() or not (self.mask() & ~self.ends).any()

    @property
    def error(self) -> str | None:
        """Why it could go no further: a grammar past the library's limits, or a token that does not follow."""
        return _reason(self.state) if self.state.is_error() else self._refused


@functools.cache
def _executor() -> LLExecutor:
    """Threads that compute the masks of several requests at once."""
    return LLExecutor(min(32, os.cpu_count() or 1))


class _Vocabulary:
    """The tokenizer as the library wants it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: TokenBytes, texts: list[bytes], end: int) -> None:
        self._encode, self.tokens, self.eos_token_id = tokens.encode, texts, end

    def __call__(self, text: str) -> list[int]:
        """Asked for what the grammar leaves no choice in."""
        return self._encode(text)


def _with_a_space_to_lose(grammar: str) -> str:
    """Of a regular expression: a text that starts with a space gets another one, which the tokenizer strips."""
    rule = json.loads(grammar)["grammars"][0]["lark_grammar"].removeprefix("start:")
    return f'start: TEXT\nTEXT: " " (ALL & / (.|\\n)*/) | (ALL & /([^ ](.|\\n)*)?/)\nALL:{rule}'


def _unforced(grammar: str) -> str:
    """The same texts, in whatever tokens."""
    if grammar.startswith("{"):
        (rule,) = json.loads(grammar)["grammars"]
        grammar = rule.get("lark_grammar") or f"start: %json {json.dumps(rule['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{grammar}'


def _reason(state: LLMatcher) -> str:
    """The library's message, without the picture of the place."""
    message = state.get_error().partition("\n<state>")[0]
    message = re.sub(r"^(at \d+\(\d+\): (failed to compile JSON schema: )?|Parser Error: )", "", message)
    before, found, after = message.partition("\nerror: ")
    text = after.partition("\n")[0] if found else before.partition("\n")[0]
    return DEAD_END if text.startswith("NoExtension") else text.strip()


def slot_masks(sequences: Sequence[SequenceState], slots: int) -> tuple[np.ndarray, np.ndarray]:
    """For the sequences' slots, and none (`slots`) in the rows that are left: int32 [B] and masks, uint32 [B, W]."""
    matchers = [one.grammar for one in sequences if isinstance(one.grammar, Matcher)]
    found = matchers[0].compiler.masks(matchers)
    numbers, masks = np.full(slots, slots, np.int32), np.zeros((slots, found.shape[1]), np.uint32)
    for row, (sequence, mask) in enumerate(zip(sequences, found, strict=True)):
        assert sequence.slot is not None
        numbers[row], masks[row] = sequence.slot, mask
    return numbers, masks


def pack(ids: Iterable[int], vocabulary: int) -> np.ndarray:
    """Bits of a set of tokens: uint32, token `t` is bit `t % 32` of word `t // 32`."""
    bits = np.zeros(-(-vocabulary // 32) * 32, bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
