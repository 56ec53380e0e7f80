"""What each token adds to a text, as bytes: what a constraint on the text needs to know of a tokenizer."""

from collections.abc import Callable

import tokenizers

from model.tokenizer import Tokenizer, _rule, _token_bytes


class TokenBytes:
    """The bytes of every token of a tokenizer.

    `of[id]` is empty where a token has no text (special tokens, ids without a token). `strips_space`: the text of a
    whole generation lacks the first space of its tokens' bytes, as SentencePiece's does.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Raises ValueError where a token's text is not a matter of the token alone."""
        self._core = tokenizer._core
        rule = _rule(self._core.decoder)
        if rule == "whole":
            raise ValueError("a token of this tokenizer has no text of its own, as its decoder works on whole texts")
        tokens = {index: token for token, index in self._core.get_vocab(with_added_tokens=True).items()}
        self.of: list[bytes] = [b""] * (max(tokens, default=-1) + 1)
        bytes_of = _token_bytes if rule == "bytes" else _behind_context(self._core, list(tokens.values()))
        for index, token in tokens.items():
            if token not in tokenizer._special_texts:
                self.of[index] = bytes_of(token)
        spaced = [index for index, content in enumerate(self.of) if content[:1] == b" " and content[1:]][:1]
        self.strips_space = rule != "bytes" and any(self._decode(index) == self.of[index][1:] for index in spaced)
        self._by_bytes = {content: index for index, content in reversed([*enumerate(self.of)]) if content}
        self._longest = max(map(len, self._by_bytes), default=0)

    def encode(self, text: str) -> list[int]:
        """Tokens whose bytes are those of the text, as the tokenizer would choose them if it can.

        Ends early at a byte that no token has.
        """
        wanted = text.encode()
        ids = self._core.encode(text, add_special_tokens=False).ids
        content = b"".join(self.of[index] for index in ids)
        if content == wanted:
            return ids
        if content == b" " + wanted and self.of[ids[0]]:  # a tokenizer that puts a space before every text
            first = self.of[ids[0]][1:]
            if not first:
                return ids[1:]
            if first in self._by_bytes:
                return [self._by_bytes[first], *ids[1:]]
        return self._greedy(wanted)

    def _decode(self, index: int) -> bytes:
        return self._core.decode([index], skip_special_tokens=False).encode()

    def _greedy(self, wanted: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(wanted):
            lengths = range(min(self._longest, len(wanted) - at), 0, -1)
            length = next((n for n in lengths if wanted[at : at + n] in self._by_bytes), 0)
            if not length:
                break
            ids.append(self._by_bytes[wanted[at : at + length]])
            at += length
        return ids


def _behind_context(core: tokenizers.Tokenizer, tokens: list[str]) -> Callable[[str], bytes]:
    """A token's bytes where it is not the first: what it adds to the text of another."""
    decode = " ".join if core.decoder is None else core.decoder.decode
    bytes_are_spelt = decode(["<0x41>"]) == "A"
    context = next((token for token in tokens if not _byte(token) and decode([token]).strip()), None)
    if context is None:
        raise ValueError("no token of this tokenizer has a text")
    length = len(decode([context]))

    def bytes_of(token: str) -> bytes:
        byte = _byte(token) if bytes_are_spelt else None
        return decode([context, token])[length:].encode() if byte is None else byte

    return bytes_of


def _byte(token: str) -> bytes | None:
    """What SentencePiece's `<0x0A>` stands for."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None
