"""Logprobs as OpenAI tells them, and what a token is called there."""

import functools
from collections.abc import Sequence
from typing import Any

from batching.request import Logprobs
from model.token_bytes import TokenBytes
from model.tokenizer import Detokenizer, Tokenizer

LEAST = -9999.0  # as in vLLM: JSON has no infinity


class TokenNames:
    """What tokens are called, and their bytes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self._bytes = tokenizer, list[bytes]()
        if tokenizer is not None:
            try:
                self._bytes = TokenBytes(tokenizer).of
            except ValueError:  # its tokens have texts of their own only by themselves
                self._bytes = [b""] * tokenizer.vocab_size
        self.of = functools.lru_cache(2**16)(self._of)

    def _of(self, token: int) -> tuple[str, list[int]]:
        """A token's text and its bytes. Bytes that are no whole characters are spelt out."""
        content = self._bytes[token] if token < len(self._bytes) else b""
        if not content and self._tokenizer is not None:
            content = self._tokenizer.decode([token], skip_special_tokens=False).encode()
        try:
            return content.decode(), list(content)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), list(content)


class Teller:
    """Tells the logprobs of one choice, piece after piece."""

    def __init__(self, names: TokenNames, tokenizer: Tokenizer | None, *, ids: bool) -> None:
        """`ids`: tokens are called token_id:5."""
        self._names, self._ids, self._tokenizer = names, ids or tokenizer is None, tokenizer
        self._offset = 0
        self._text = None if tokenizer is None else Detokenizer(tokenizer)

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._ids else self._names.of(token)[0]

    def completion(self, ids: Sequence[int], told: Sequence[Logprobs | None]) -> dict[str, list[Any]]:
        """`told`: of each of the ids, None where there is none."""
        return {
            "text_offset": [self._place(token) for token in ids],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in told],
            "tokens": [self._name(token) for token in ids],
            "top_logprobs": [None if one is None else self._top(one) for one in told],
        }

    def goes_on_at(self, offset: int) -> None:
        """The text so far has so many characters: what follows is detokenised by itself."""
        self._offset = offset
        self._text = None if self._tokenizer is None else Detokenizer(self._tokenizer)

    def _top(self, one: Logprobs) -> dict[str, float]:
        """The most probable ones, falling, and the token that is there."""
        pairs = [*zip(one.top_ids, one.top_logprobs, strict=True), (one.token_id, one.logprob)]
        found: dict[str, float] = {}
        for token, logprob in pairs:
            found.setdefault(self._name(token), finite(logprob))  # of two with one name the more probable
        return found

    def _place(self, token: int) -> int:
        """Where a token's text begins, in characters that are certain by then."""
        start = self._offset
        self._offset += 0 if self._text is None else len(self._text.push(token))
        return start

    def chat(self, told: Sequence[Logprobs]) -> dict[str, Any]:
        content = []
        for one in told:
            top = zip(one.top_ids, one.top_logprobs, strict=True)
            entry = self._entry(one.token_id, one.logprob)
            content.append(entry | {"top_logprobs": [self._entry(*pair) for pair in top]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": finite(logprob), "bytes": self._names.of(token)[1]}

    def prompt(self, told: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
        """As vLLM does: of each token of the prompt, token ids and what is known of them."""
        return [None if one is None else self._ranked(one) for one in told]

    def _ranked(self, one: Logprobs) -> dict[str, Any]:
        found: dict[str, Any] = {}
        pairs = zip(one.top_ids, one.top_logprobs, strict=True)
        for rank, (token, logprob) in enumerate(pairs, start=1):
            found[str(token)] = {"logprob": finite(logprob), "rank": rank, "decoded_token": self._names.of(token)[0]}
        own = {"logprob": finite(one.logprob), "rank": None, "decoded_token": self._names.of(one.token_id)[0]}
        found.setdefault(str(one.token_id), own)
        return found


def finite(logprob: float) -> float:
    return max(logprob, LEAST)
