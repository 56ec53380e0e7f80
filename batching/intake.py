"""From a `Request` to the sequences that serve it: tokenised, checked against the model, with its seeds."""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from batching.grammar import GrammarCompiler, pack
from batching.params import SamplingParams, check_lengths
from batching.policies import FACTS
from batching.request import Metrics, Request
from batching.sequence import SequenceState
from model.logits import ANY, BAD_WORD_TOKENS, BAD_WORDS, NOTHING, SlotRows
from model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Intake:
    """What requests are checked against. It keeps nothing: threads may share it."""

    vocabulary: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler
    max_len: int
    max_queue: int

    def sequences(self, request: Request) -> list[SequenceState]:
        """One for each of the request's samples.

        Raises ValueError for what cannot be served, as far as it does not depend on other requests.
        """
        if not isinstance(request, Request):
            raise ValueError(f"expected a Request, not {type(request).__name__}")
        params, prompt = request.params, self._prompt_ids(request)
        check_lengths(len(prompt), params, self.max_len, self.max_queue)
        self._check_ids("prompt_ids", prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        if params.stop and self.tokenizer is None:
            raise ValueError("the model has no tokenizer: stop strings cannot be looked for")
        early_ids = frozenset(params.stop_token_ids) | self.eos_ids
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        bad_words = self._bad_words(params)
        self._check_allowed(params, bad_words, early_ids)
        seed, group = secrets.randbits(32) if params.seed is None else params.seed, object()
        return [
            SequenceState(
                request.id,
                prompt,
                params,
                sample_seed(seed, index),
                stop_ids,
                Metrics(arrival=time.monotonic()),
                index=index,
                group=group,
                early_ids=early_ids,
                bad_words=bad_words,
                grammar=self.grammars.matcher(params, stop_ids),
                **{name: getattr(request, name) for name in FACTS},
            )
            for index in range(params.n)
        ]

    def all_sequences(self, requests: Sequence[Request]) -> list[SequenceState]:
        """Of several requests. Raises ValueError naming the index of one that cannot be served, or whose id one before
        it has."""
        sequences: list[SequenceState] = []
        ids = set()
        for index, request in enumerate(requests):
            try:
                sequences += self.sequences(request)
                if request.id in ids:
                    raise ValueError(f"the id {request.id!r} is given twice")
                ids.add(request.id)
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return sequences

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

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        bad = next((token for token in ids if not 0 <= token < self.vocabulary), None)
        if bad is not None:
            raise ValueError(f"{name} holds {bad}; the vocabulary is 0 .. {self.vocabulary - 1}")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word at the start of a text, and after a space where these do not end with the same ones.

        vLLM leaves out the latter where they are more or fewer. What is forbidden are these tokens: the same letters
        in others are not.
        """
        if params.bad_words and self.tokenizer is None:
            raise ValueError("the model has no tokenizer: bad_words cannot be looked for")
        found: list[tuple[int, ...]] = []
        for word in params.bad_words:
            assert self.tokenizer is not None
            texts = word.lstrip(), f" {word.lstrip()}"
            try:
                first, spaced = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
            except ValueError as error:
                raise ValueError(f"bad_words holds {word!r}: {error}") from error
            if not first:
                raise ValueError(f"bad_words holds {word!r}, for which there is no token")
            forms = [first] if spaced[-len(first) :] == first else [first, spaced]
            for ids in forms:
                self._check_ids("bad_words", ids)
                if len(ids) > BAD_WORD_TOKENS:
                    raise ValueError(f"bad_words holds {word!r}, {len(ids)} tokens; at most {BAD_WORD_TOKENS} can be")
            found += forms
        several = sum(len(word) > 1 for word in set(found))
        if several > BAD_WORDS:
            raise ValueError(
                f"bad_words come to {several} sequences of several tokens, with and without a space before them; "
                f"at most {BAD_WORDS} are looked for"
            )
        return tuple(dict.fromkeys(found))

    def _check_allowed(
        self, params: SamplingParams, bad_words: Iterable[tuple[int, ...]], early_ids: frozenset[int]
    ) -> None:
        """Raises ValueError where it can be seen that nothing could be sampled."""
        bad = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens > 0:
            bad |= early_ids
        allowed = range(self.vocabulary) if params.allowed_token_ids is None else params.allowed_token_ids
        if (params.allowed_token_ids is not None or len(bad) >= self.vocabulary) and bad.issuperset(allowed):
            raise ValueError("allowed_token_ids, bad_words and min_tokens together leave no token that may be sampled")


def sample_seed(seed: int, index: int) -> int:
    """Of one of the samples, the first of which has the request's own; distinct, and unlike those of nearby seeds."""
    high, low = divmod(seed, 2**32)
    return high * 2**32 + (low + index * 0x9E3779B9) % 2**32


def slot_rows(sequence: SequenceState, vocabulary: int) -> SlotRows:
    """What a sequence's slot holds on the device for its draws."""
    params = sequence.params
    bias = np.zeros(vocabulary, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    for token, value in (params.logit_bias or {}).items():
        bias[token] += value
    words, several = np.full((BAD_WORDS, BAD_WORD_TOKENS), ANY, np.int32), 0
    for word in sequence.bad_words:
        if len(word) == 1:
            bias[word[0]] = -np.inf
        else:
            words[several, -len(word) :] = word
            several += 1
    return SlotRows(
        bias,
        pack(sequence.prompt, vocabulary),
        pack(sequence.early_ids, vocabulary),
        words,
        counts=np.bincount(np.array(sequence.output, np.int64), minlength=vocabulary).astype(np.int32),
        recent=np.array([*[NOTHING] * (BAD_WORD_TOKENS - 1), *sequence.output][1 - BAD_WORD_TOKENS :], np.int32),
    )
