"""Attention problems by name: at the shapes of known models for benchmarks, small and awkward ones for conformance."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import numpy as np

from scripts.limits import Work

ROWS_MULTIPLE = 128  # a slot's rows in an engine's cache are rounded up to it
Size = Literal["quick", "main", "full"]


class Rows(NamedTuple):
    """The flat token rows of a case, as `slot_attention` takes them."""

    slots: np.ndarray
    positions: np.ndarray
    num_decode: int


@dataclass(frozen=True)
class Case:
    """`decode`: positions of the decode rows, None for padding. `chunks`: (first position, tokens) of prompt chunks.

    Each row and each chunk has a slot of its own, in this order.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    decode: tuple[int | None, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    rows: int = 0  # of a slot; 0: as the longest needs

    @property
    def kind(self) -> str:
        return "mixed" if self.decode and self.chunks else "decode" if self.decode else "prefill"

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(first position, tokens) of each slot; no tokens for padding."""
        return [(0, 0) if at is None else (at, 1) for at in self.decode] + list(self.chunks)

    @property
    def slot_rows(self) -> int:
        """S: a multiple of 128."""
        return -(-max(self.rows, *(start + count for start, count in self.segments)) // ROWS_MULTIPLE) * ROWS_MULTIPLE

    @property
    def head_sizes(self) -> dict[str, int]:
        """As `choose_implementation` takes them."""
        return {"head_dim": self.head_dim, "heads": self.heads, "kv_heads": self.kv_heads}

    def cache_bytes(self, itemsize: int) -> int:
        """Of one layer's cache."""
        return 2 * len(self.segments) * self.kv_heads * self.slot_rows * self.head_dim * itemsize

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """Per slot the first position that some row may read, and one past the last."""
        reach = self.window or self.slot_rows
        ends = np.array([start + count for start, count in self.segments])
        firsts = np.array([max(0, start - reach + 1) if count else 0 for start, count in self.segments])
        return firsts, ends

    def work(self, itemsize: int) -> Work:
        """Every row against the keys it sees; live keys and values read once; queries read and results written once."""
        firsts, ends = self.readable()
        read = 2 * self.kv_heads * self.head_dim * itemsize * int((ends - firsts).sum())
        tokens = sum(count for _, count in self.segments)
        reach = self.window or self.slot_rows
        seen = sum(int(np.minimum(np.arange(at + 1, at + count + 1), reach).sum()) for at, count in self.segments)
        moved = read + 2 * tokens * self.heads * self.head_dim * itemsize
        return Work(4.0 * self.heads * self.head_dim * seen, float(moved))

    def lay_out(self, block_q: int, order: np.ndarray | None = None) -> Rows:
        """Decode rows, then each chunk padded to blocks. `order`: the slot of each segment, if not its own place."""
        B, decode = len(self.segments), len(self.decode)
        order = np.arange(B) if order is None else order
        takes = [1] * decode + [max(1, -(-count // block_q)) * block_q for _, count in self.chunks]
        slots, positions = np.full(sum(takes), B, np.int32), np.zeros(sum(takes), np.int32)
        starts = np.cumsum([0, *takes[:-1]])
        for slot, (first, count), row in zip(order, self.segments, starts, strict=True):
            slots[row : row + count] = slot
            positions[row : row + count] = np.arange(first, first + count)
        return Rows(slots, positions, decode)


MODELS = {  # query heads, KV heads, head dim
    "smollm2_135m": (9, 3, 64),
    "llama3_8b": (32, 8, 128),
    "qwen3_32b": (64, 8, 128),
    "gemma3_27b": (32, 16, 128),
    "gemma3_4b": (8, 4, 256),
}
GEMMA_WINDOW = 1024  # of five layers in six


def decode(model: str, slots: int, length: int, *, ragged: bool = False, window: int | None = None) -> Case:
    """One row a slot. `ragged`: lengths drawn evenly from 1 .. length, always the same ones."""
    lengths = np.random.default_rng(slots).integers(1, length + 1, slots) if ragged else np.full(slots, length)
    name = f"{model}/decode_{slots}x{'1..' if ragged else ''}{length}" + (f"_window_{window}" if window else "")
    return Case(name, *MODELS[model], decode=tuple(int(n) - 1 for n in lengths), window=window)


def prefill(model: str, tokens: int, behind: int = 0, *, chunks: int = 1, window: int | None = None) -> Case:
    """Prompt chunks of so many tokens, behind so many that are in the cache already."""
    name = f"{model}/prefill_{f'{chunks}x' if chunks > 1 else ''}{tokens}" + (f"_behind_{behind}" if behind else "")
    name += f"_window_{window}" if window else ""
    return Case(name, *MODELS[model], chunks=((behind, tokens),) * chunks, window=window)


def mixed(model: str, slots: int, length: int, tokens: int, behind: int = 0) -> Case:
    """Decode rows and a prompt chunk in one turn."""
    one, other = decode(model, slots, length), prefill(model, tokens, behind)
    name = f"{model}/mixed_{slots}x{length}_and_{tokens}" + (f"_behind_{behind}" if behind else "")
    return Case(name, *MODELS[model], decode=one.decode, chunks=other.chunks)


# What a CPU does in seconds.
QUICK = [
    decode("smollm2_135m", 16, 512),
    decode("smollm2_135m", 16, 1024, ragged=True),
    prefill("smollm2_135m", 128),
    prefill("smollm2_135m", 128, 512),
    mixed("smollm2_135m", 8, 512, 64),
    decode("llama3_8b", 4, 1024),
    prefill("llama3_8b", 128, 256),
    decode("gemma3_4b", 4, 2048, window=GEMMA_WINDOW),
]
# The most telling first: a run may be cut off.
MAIN = [
    decode("llama3_8b", 64, 4096),
    decode("llama3_8b", 64, 8192, ragged=True),
    decode("smollm2_135m", 256, 1024),
    decode("llama3_8b", 64, 1024),
    decode("llama3_8b", 1, 32768),
    decode("qwen3_32b", 64, 4096),
    decode("gemma3_27b", 64, 4096, window=GEMMA_WINDOW),
    decode("gemma3_4b", 64, 4096),
    decode("llama3_8b", 16, 32768),
    decode("smollm2_135m", 64, 1024),
    decode("llama3_8b", 16, 1024),
    decode("llama3_8b", 256, 512),
    prefill("llama3_8b", 2048),
    prefill("llama3_8b", 2048, 8192),
    prefill("llama3_8b", 512),
    prefill("smollm2_135m", 2048),
    prefill("gemma3_4b", 2048),
    prefill("gemma3_27b", 2048, 4096, window=GEMMA_WINDOW),
    prefill("qwen3_32b", 2048),
    prefill("llama3_8b", 512, 8192),
    prefill("llama3_8b", 128, 1024, chunks=4),
    mixed("llama3_8b", 64, 2048, 512),
    mixed("llama3_8b", 64, 2048, 2048, 4096),
]


def full() -> list[Case]:
    """Every model over a grid of shapes, after the main cases."""
    cases = list(MAIN)
    for model in MODELS:
        windows = (None, GEMMA_WINDOW) if model.startswith("gemma3") else (None,)
        for window in windows:
            for slots, lengths in ((1, (128, 2048, 32768)), (16, (1024, 8192, 32768)), (64, (128, 1024, 4096))):
                cases += [decode(model, slots, length, window=window) for length in lengths]
            cases += [decode(model, 256, length, window=window) for length in (512, 2048)]
            cases += [decode(model, slots, 8192, ragged=True, window=window) for slots in (16, 64)]
            cases += [prefill(model, tokens, window=window) for tokens in (128, 256, 512, 1024, 2048)]
            cases += [prefill(model, tokens, 8192, window=window) for tokens in (128, 512, 2048)]
            cases += [prefill(model, 128, 1024, chunks=8, window=window)]
        cases += [mixed(model, 64, 2048, 512), mixed(model, 64, 2048, 2048, 4096)]
    return list({case.name: case for case in cases}.values())


def cases_of(size: str, patterns: Iterable[str] = ("*",)) -> list[Case]:
    """Those of a size whose name fits a pattern of the shell's kind. Raises ValueError for one that fits none."""
    known, wanted = {"quick": QUICK, "main": MAIN, "full": full()}[size], list(patterns)
    for pattern in wanted:
        if not any(fnmatchcase(case.name, pattern) for case in known):
            raise ValueError(f"no case of size {size} is like {pattern}; there are {', '.join(c.name for c in known)}")
    return [case for case in known if any(fnmatchcase(case.name, pattern) for pattern in wanted)]


HEAD_DIMS = (64, 80, 96, 128, 256)


def conformance() -> list[Case]:
    """Small cases that look for what goes wrong: block edges, tails, padding, windows, soft caps, sizes of groups."""
    S = 1024
    edges = (0, 62, 63, 64, 126, 127, 128, 129, 511, S - 2, S - 1)
    decode_rows = (*edges[:5], None, *edges[5:], None)
    chunks = ((0, 200), (0, 1), (127, 1), (S - 1, 1), (100, 31), (0, 0), (128, 65), (S - 64, 64), (300, 64))
    options = {  # query heads, KV heads and what else
        "group_1": (4, 4, {}),
        "group_3_window": (9, 3, {"window": 100}),
        "group_4_soft_cap": (8, 2, {"soft_cap": 3.0, "window": 129}),
        "group_8_scale": (16, 2, {"scale": 0.2}),
    }
    cases = []
    for H in HEAD_DIMS:
        for name, (heads, kv_heads, how) in options.items():
            cases.append(Case(f"decode/h{H}_{name}", heads, kv_heads, H, decode=decode_rows, rows=S, **how))
            cases.append(Case(f"prefill/h{H}_{name}", heads, kv_heads, H, chunks=chunks, rows=S, **how))
        cases.append(Case(f"mixed/h{H}", 4, 2, H, decode=decode_rows[:6], chunks=chunks[:4], rows=S))
    return cases
