"""From documents to token ids, and to a tokenizer of one's own: byte-level BPE, trained on the text."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from rich.console import Console
from tokenizers import decoders, models, pre_tokenizers, trainers

from model.tokenizer import Tokenizer
from scripts.display import tracked

EOS = "<|endoftext|>"
BYTES = 256


class Document(NamedTuple):
    """`content`: a text, a pair of a prompt and its completion, or the messages of a chat, with the last an answer.

    `where` names it in messages. `whole`: it ends here, and is not the first part of a longer text.
    """

    where: str
    content: Any
    whole: bool = True


@dataclass(frozen=True)
class Corpus:
    """Documents' tokens one after the other; `counts`: whether a token is to be predicted."""

    ids: np.ndarray  # int32 [T]
    counts: np.ndarray  # bool [T]; a document's first token never counts
    starts: np.ndarray  # int64 [documents + 1]: where each begins, and the end
    where: tuple[str, ...]  # by document
    text_bytes: int  # of UTF-8 that the tokens that count stand for

    @property
    def targets(self) -> int:
        return int(self.counts.sum())

    def fingerprint(self) -> str:
        """The same for the same tokens, documents and targets."""
        digest = hashlib.sha256()
        for array in (self.ids, self.counts, self.starts):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]


def train_tokenizer(documents: Iterable[Document], vocab_size: int, folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, as HF has them. `EOS` is id 0.

    Raises ValueError for a vocabulary without room for all bytes.
    """
    if vocab_size <= BYTES:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {BYTES} bytes and {EOS}")
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((text for document in documents for text in _texts(document)), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _texts(document: Document) -> list[str]:
    if isinstance(document.content, str):
        return [document.content]
    if isinstance(document.content, tuple):
        return list(document.content)
    raise ValueError(f"{document.where}: messages need a tokenizer with a chat template: --tokenizer or --from")


def tokenise(
    documents: Sequence[Document], tokenizer: Tokenizer, eos_ids: Iterable[int], vocab_size: int, console: Console
) -> Corpus:
    """Texts with EOS behind them; of prompts and chats only completions and answers count, with the EOS behind them.

    A text, a completion or a message that holds the text of an EOS token is refused: it would be learnt as an end. In
    a prompt, of which nothing is learnt, such a text is the token, as in one that is served. `eos_ids` end a generation
    of the model, `vocab_size` is its own. Raises ValueError naming the document.
    """
    eos_ids = frozenset(eos_ids)
    own = sorted(tokenizer.eos_ids or eos_ids)
    if not own:
        raise ValueError("neither tokenizer nor model name an EOS token, with which documents end")
    ends = [tokenizer.decode([one], skip_special_tokens=False) for one in sorted(eos_ids | set(own))]
    ends = [end for end in ends if end]
    every, every_counts, starts, text_bytes = [np.zeros(0, np.int32)], [np.zeros(0, bool)], [0], 0
    for document in tracked(documents, "tokenising", console):
        try:
            parts = _encode(document, tokenizer, own[0], ends)
        except ValueError as error:
            raise ValueError(f"{document.where}: {error}") from error
        ids = np.concatenate([np.array(part, np.int32) for part, _, _ in parts])
        counts = np.concatenate([np.full(len(part), counted) for part, counted, _ in parts])
        text_bytes += sum(len(text.encode()) for _, counted, text in parts if counted)
        if counts[:1].any():  # nothing is before it
            counts[0] = False
            text_bytes -= len(tokenizer.decode([int(ids[0])]).encode())
        every.append(ids)
        every_counts.append(counts)
        starts.append(starts[-1] + len(ids))
    ids, counts = np.concatenate(every), np.concatenate(every_counts)
    if ids.size and ids.max() >= vocab_size:
        raise ValueError(f"the tokenizer gives token {ids.max()}, but the model's vocabulary is of {vocab_size}")
    where = tuple(document.where for document in documents)
    return Corpus(ids, counts, np.array(starts), where, text_bytes)


_Part = tuple[list[int], bool, str]  # token ids, whether they count, their text without EOS


def _encode(document: Document, tokenizer: Tokenizer, eos: int, ends: Sequence[str]) -> list[_Part]:
    """`ends`: the texts of all EOS tokens."""
    content = document.content
    if isinstance(content, str):
        _refuse_ends("the text", content, ends)
        ids = tokenizer.encode(content)
        ended = not document.whole or ids[-1:] == [eos]
        return [(ids if ended else [*ids, eos], True, content)]
    if isinstance(content, tuple):
        prompt, completion = content
        _refuse_ends("the completion", completion, ends)
        answer = [*tokenizer.encode(completion, add_special_tokens=False), eos]
        return [(tokenizer.encode(prompt), False, prompt), (answer, True, completion)]
    return _encode_chat(content, tokenizer, ends)


def _encode_chat(messages: Any, tokenizer: Tokenizer, ends: Sequence[str]) -> list[_Part]:
    """The chat as the model sees it when it answers: each prompt as the template gives it, then what it is to say,
    with the EOS that the template puts behind it."""
    if not isinstance(messages, list) or not messages or not _is_answer(messages[-1]):
        raise ValueError(f"messages must be a list that ends with the assistant's, not {messages!r}"[:200])
    for number, message in enumerate(messages):
        _refuse_ends(f"message {number}", message, ends)
    parts, done = [], ""
    for number, message in enumerate(messages):
        if not _is_answer(message):
            continue
        prompt = tokenizer.render(messages[:number]) if number else _refuse_first()
        whole = tokenizer.render(messages[: number + 1])
        if not prompt.startswith(done) or not whole.startswith(prompt):
            raise ValueError(f"message {number}: the chat template changes what came before it")
        rest = whole[len(prompt) :]
        found = [(rest.find(end), end) for end in ends if end in rest]
        if not found:
            raise ValueError(f"message {number}: the chat template ends it with none of the EOS tokens {ends}")
        at, end = min(found)
        parts.append((tokenizer.encode(prompt[len(done) :], add_special_tokens=False), False, ""))
        parts.append((tokenizer.encode(rest[: at + len(end)], add_special_tokens=False), True, rest[:at]))
        done = prompt + rest[: at + len(end)]
    return parts


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _refuse_ends(name: str, value: Any, ends: Sequence[str]) -> None:
    """In all strings of it: a template may use any field of a message."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (dict, list)):
            waiting += one.values() if isinstance(one, dict) else one
        found = [end for end in ends if isinstance(one, str) and end in one]
        if found:
            raise ValueError(f"{name} holds {found[0]!r}, which would be an EOS token there, not text")


def _refuse_first() -> str:
    raise ValueError("message 0: a chat cannot begin with the assistant's")
