"""Documents from files, and their tokens packed into rows: any order of them is a seed, any place in it two numbers."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.files import unique_keys
from scripts.training.step import Batch
from scripts.training.tokens import Corpus, Document

TEXTS, LINES = (".txt", ".md", ".rst", ".py"), ".jsonl"
PART = 8192  # characters; a longer text is cut at the end of a line
FORMS = ({"text"}, {"prompt", "completion"}, {"messages"})  # of a line


def read_documents(path: Path) -> list[Document]:
    """Those of a file, or of all files below a folder, in the order of their names.

    A text file is a document, of several parts if it is long; a line of JSON is one. A text is that of its file to
    the character, with the ends of lines as they are, but without a byte order mark. Folders and files below `path`
    whose names begin with a dot are left out. Raises ValueError, naming file and line, and OSError.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _wanted(file, path))
        if not files:
            raise ValueError(f"{path}: no file that ends in one of {', '.join((*TEXTS, LINES))}")
    elif path.suffix not in (*TEXTS, LINES):
        raise ValueError(f"{path}: must end in one of {', '.join((*TEXTS, LINES))}")
    else:
        files = [path]
    documents = []
    for file in files:
        try:
            content = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8: {error}") from error
        documents += _lines(file, content) if file.suffix == LINES else _parts(file, content)
    if not documents:
        raise ValueError(f"{path}: holds no text")
    return documents


def _wanted(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and file.suffix in (*TEXTS, LINES) and file.is_file()


def _parts(file: Path, content: str) -> list[Document]:
    """Of at most PART characters. Only the last one ends as a document does."""
    parts, part = [], ""
    for line in content.splitlines(keepends=True):
        if part and len(part) + len(line) > PART:
            parts.append(part)
            part = ""
        *full, rest = (line[at : at + PART] for at in range(0, len(line), PART))
        parts += full
        part += rest
    parts += [part] if part else []
    where = f"{file}" if len(parts) == 1 else f"{file} part {{}}"
    return [Document(where.format(n), text, whole=n == len(parts)) for n, text in enumerate(parts, start=1)]


def _lines(file: Path, content: str) -> list[Document]:
    documents = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        try:
            value = json.loads(line, object_pairs_hook=unique_keys)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        keys = set(value) if isinstance(value, dict) else None
        if keys not in FORMS:
            forms = " or ".join("{" + ", ".join(sorted(form, reverse=True)) + "}" for form in FORMS)
            raise ValueError(f"{where}: must be an object with {forms}, not {line.strip()[:80]}")
        documents.append(Document(where, _content(where, value)))
    return documents


def _content(where: str, value: Mapping[str, Any]) -> Any:
    """A text, a pair of texts, or the messages of a chat, which the tokenizer looks at."""
    if "messages" in value:
        if not isinstance(value["messages"], list):
            raise ValueError(f"{where}: messages must be a list, not {value['messages']!r}"[:200])
        return value["messages"]
    texts = tuple(value[name] for name in ("text", "prompt", "completion") if name in value)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: must hold strings, not {dict(value)!r}"[:200])
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: has a lone surrogate: {error.object[error.start]!r}") from error
    return texts if len(texts) == 2 else texts[0]


def held_out(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Those to train on, and those that are kept for evaluation: always the same ones, at least one unless none is
    asked for. Raises ValueError where nothing would be left."""
    count = max(1, round(share * len(documents))) if share else 0
    if count >= len(documents):
        raise ValueError(f"{len(documents)} documents cannot be divided: a share of {share} leaves none to train on")
    kept = set(np.random.default_rng(0).permutation(len(documents))[:count].tolist())
    parts = ([], [])
    for number, document in enumerate(documents):
        parts[number in kept].append(document)
    return parts


class Position(NamedTuple):
    """The place in the data: how many pieces of which epoch's order have been taken."""

    epoch: int = 0
    index: int = 0


class Packed(NamedTuple):
    batch: Batch
    after: Position
    pieces: tuple[int, ...]  # of the packer, in the batch


class Packer:
    """Batches of `rows` rows of `length` tokens.

    A document is cut into pieces of at most `length` pairs of a token and the one that follows it, so that every pair
    is in one piece. Where more than the first token does not count, in a prompt or a chat, a document is its first
    piece alone, or nothing if nothing counts there: so an answer is learnt from all that is before it. `shortened` is
    the number of documents that lose tokens that count to this.

    In each epoch all pieces are taken once, in an order of its own; a piece goes into the first row with room for it,
    and a batch is full when the next piece fits nowhere. Raises ValueError where no token counts.
    """

    def __init__(self, corpus: Corpus, rows: int, length: int, seed: int = 0) -> None:
        self.corpus, self.rows, self.length, self.seed = corpus, rows, length, seed
        self.shortened = 0
        starts, sizes = [], []
        for start, end in itertools.pairwise(corpus.starts.tolist()):
            if not corpus.counts[start + 1 : end].all():
                self.shortened += bool(corpus.counts[start + 1 + length : end].any())
                end = min(end, start + 1 + length)
            for first in range(start, end - 1, length):
                size = min(length, end - 1 - first)
                if corpus.counts[first + 1 : first + 1 + size].any():
                    starts.append(first)
                    sizes.append(size)
        if not starts:
            raise ValueError(f"no token counts: all documents are of one token at most, or prompts of over {length}")
        self.starts, self.sizes = np.array(starts), np.array(sizes)
        self._order: tuple[int, np.ndarray] = (-1, np.array([]))

    def order(self, epoch: int) -> np.ndarray:
        """The pieces as that epoch takes them."""
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.starts))
        return self._order[1]

    def batch(self, position: Position) -> Packed:
        """The one from there on; an epoch's last one is filled with pieces of the next."""

        def pieces() -> Iterator[int]:
            epoch, index = position
            while True:
                yield from self.order(epoch)[index:].tolist()
                epoch, index = epoch + 1, 0

        batch, taken = self._pack(pieces())
        epochs, index = divmod(position.index + len(taken), len(self.starts))
        return Packed(batch, Position(position.epoch + epochs, index), taken)

    def once(self, most: int | None = None) -> Iterator[Batch]:
        """All pieces, each once, or those of the first batches, in the documents' order; the last batch is padded."""
        done = 0
        while done < len(self.starts) and most != 0:
            batch, taken = self._pack(iter(range(done, len(self.starts))))
            done += len(taken)
            most = None if most is None else most - 1
            yield batch

    def where(self, pieces: Iterable[int]) -> list[str]:
        """The documents that pieces are of, each once."""
        documents = np.searchsorted(self.corpus.starts, self.starts[list(pieces)], side="right") - 1
        return [self.corpus.where[document] for document in dict.fromkeys(documents.tolist())]

    def _pack(self, pieces: Iterator[int]) -> tuple[Batch, tuple[int, ...]]:
        """A batch of the first of them, and which they were."""
        shape = self.rows, self.length
        tokens, positions, targets = (np.zeros(shape, np.int32) for _ in range(3))
        segments, weights = np.full(shape, self.length, np.int32), np.zeros(shape, np.float32)
        used, count, taken = [0] * self.rows, [0] * self.rows, []
        for piece in pieces:
            start, size = int(self.starts[piece]), int(self.sizes[piece])
            row = next((row for row, end in enumerate(used) if end + size <= self.length), None)
            if row is None:
                break
            place, end = slice(used[row], used[row] + size), start + size
            tokens[row, place], targets[row, place] = self.corpus.ids[start:end], self.corpus.ids[start + 1 : end + 1]
            segments[row, place], positions[row, place] = count[row], np.arange(size)
            weights[row, place] = self.corpus.counts[start + 1 : end + 1]
            used[row] += size
            count[row] += 1
            taken.append(piece)
        return Batch(tokens, segments, positions, targets, weights), tuple(taken)
