"""`BatchPlan`: the flat list of token rows that one turn computes. There is no other batch type and no phase."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

FROM_DEVICE = -1  # as a row's token: the last token sampled in the row's slot, which may still be on the device
NOT_FINITE = -1  # as a sampled token, as in model/sampling.py

# Columns of `Rows.numbers`, and of `Rows.words` the first ones; the others are a seed's high and low word.
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WORDS = ("flags", "top_k")
NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)  # numbers of a greedy row


class Flag(enum.IntFlag):
    """What a draw reads of its slot's sampling state, and what is reported of it; the rest is not looked at."""

    BIAS = 1  # logit_bias, tokens outside allowed_token_ids, bad words of one token
    PENALTIES = 2
    STOPS = 4  # min_tokens is not reached
    MASK = 8  # a grammar's
    BAD_WORDS = 16  # those of several tokens
    LOGPROBS = 32


class Rows(NamedTuple):
    """What the step is given: NumPy arrays outside, traced ones inside. T token rows, of which M are sampled.

    The first `num_decode` rows are decode rows, at most one a slot; then come the prompt chunks, each padded to a
    multiple of `block_q` rows. Padding rows, and padding among the sampled rows, carry slot B: one past the last.
    Few arrays, since each costs time in a launch.
    """

    tokens: Any  # int32 [T]; FROM_DEVICE: take the slot's last token
    slots: Any  # int32 [T]
    positions: Any  # int32 [T]
    targets: Any  # int32 [T]: the prompt's next token, where its logprob is asked for; else -1
    sample_rows: Any  # int32 [M]: which rows
    sample_slots: Any  # int32 [M]: whose last token each becomes
    numbers: Any  # float32 [M, 6]: NUMBERS
    words: Any  # uint32 [M, 4]: WORDS and the seed


@dataclass(frozen=True)
class PlanShapes:
    """The few shapes that plans may have, so that every program can be compiled before the first request.

    Where attention wants blocks (`block_q` > 1) a shape is a number of decode rows and a chunk size. Where it does
    not, a decode row is a chunk of one token: shapes are numbers of rows alone, and no row between them is padding.
    """

    slots: int
    decode_rows: tuple[int, ...]  # rising, the last one is `slots`; (0,) where decode rows are chunks
    chunk_sizes: tuple[int, ...]  # rising multiples of `block_q`
    block_q: int
    chunks_only: bool = False  # no shape is without chunk rows

    @classmethod
    def choose(cls, slots: int, chunk_sizes: Sequence[int], block_q: int, *, one: bool = False) -> "PlanShapes":
        """Rows follow the work in a few steps: rows that are padding cost time, programs cost compilation.

        With blocks, decode rows are 4, 16, 64 and `slots`; without, rows are 4, 8, 16, 32, 48, 64, 128 and so on,
        `slots`, and `slots` with each chunk size. With `one` there is the largest shape alone, so that every row is
        computed by the same program whatever is beside it.
        """
        sizes = sorted(set(chunk_sizes))
        block = max(16, block_q)
        if not sizes or any(size < block or size % block for size in sizes):
            raise ValueError(f"chunk_sizes must be positive multiples of {block}, not {tuple(chunk_sizes)}")
        if one:
            decode, chunk = (slots, sizes[-1]) if block_q > 1 else (0, -(-(slots + sizes[-1]) // block) * block)
            return cls(slots, (decode,), (chunk,), block_q, chunks_only=True)
        if block_q > 1:
            return cls(slots, (*(rows for rows in (4, 16, 64) if rows < slots), slots), tuple(sizes), block_q)
        most = slots + sizes[-1]
        ladder = {48, *(4 << step for step in range(most.bit_length()))}
        wanted = {slots, *(slots + size for size in sizes)} | {rows for rows in ladder if rows < most}
        return cls(slots, (0,), tuple(sorted(wanted)), block_q)

    def all(self) -> list[tuple[int, int]]:
        """Every (decode rows, chunk rows) that a plan can have."""
        return [(decode, chunk) for chunk in self._sizes for decode in self.decode_rows if decode + chunk]

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.chunk_sizes if self.chunks_only else (0, *self.chunk_sizes)

    def fit(self, decode: int, chunk: int) -> tuple[int, int]:
        """The smallest shape with room for so many rows."""
        if self.block_q == 1:
            decode, chunk = 0, decode + chunk
        return next(n for n in self.decode_rows if n >= decode), next(n for n in self._sizes if n >= chunk)

    def budget(self, decode: int) -> int:
        """Prompt rows that a turn has room for beside so many decode rows."""
        return self.chunk_sizes[-1] - (decode if self.block_q == 1 else 0)

    def padded(self, tokens: int) -> int:
        """Rows that a chunk of so many tokens takes."""
        return -(-tokens // self.block_q) * self.block_q

    def empty(self, num_decode: int, chunk: int) -> Rows:
        """Rows of padding alone. A slot has at most one sampled row, and so has a block."""
        T = num_decode + chunk
        M = min(self.slots, num_decode + chunk // self.block_q)
        return Rows(
            tokens=np.zeros(T, np.int32),
            slots=np.full(T, self.slots, np.int32),
            positions=np.zeros(T, np.int32),
            targets=np.full(T, -1, np.int32),
            sample_rows=np.zeros(M, np.int32),
            sample_slots=np.full(M, self.slots, np.int32),
            numbers=np.tile(np.array(NEUTRAL, np.float32), (M, 1)),
            words=np.zeros((M, 4), np.uint32),
        )


class Draw(NamedTuple):
    """How a row's successor is drawn; by default it is the most probable one."""

    numbers: Sequence[float] = NEUTRAL
    top_k: int = 0
    seed: int = 0
    flags: int = 0


class Chunk(NamedTuple):
    """Consecutive tokens of one slot. `sampled`: the last one's successor is drawn."""

    slot: int
    start: int  # position of the first
    tokens: Sequence[int]  # (FROM_DEVICE,) for a decode row
    sampled: bool
    draw: Draw = Draw()
    targets: Sequence[int] = ()  # what follows each token, as far as its logprob is asked for


class Sampled(NamedTuple):
    """What comes of a turn: a token a sampled row, -1 where the logits are not finite, -2 where nothing is allowed.

    The others are None where nobody asked: the logprob of the token and of the 20 most probable ones, falling, and
    the ids of those; for M sampled rows, and for T rows' targets.
    """

    tokens: Any  # int32 [M]
    logprobs: Any = None  # float32 [M, 21]
    top_ids: Any = None  # int32 [M, 20]
    prompt_logprobs: Any = None  # float32 [T, 21]
    prompt_top_ids: Any = None  # int32 [T, 20]


@dataclass(frozen=True)
class BatchPlan:
    """One turn. `num_decode` and the length of `rows.tokens` choose the compiled program."""

    num_decode: int
    rows: Rows
    live_rows: int  # rows that are not padding
    first_rows: tuple[int, ...]  # of each chunk

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_decode, len(self.rows.tokens) - self.num_decode


def build_plan(
    shapes: PlanShapes, decode: Sequence[Chunk], prefill: Sequence[Chunk], *, min_decode: int = 0, min_chunk: int = 0
) -> BatchPlan:
    """Lay decode rows and prompt chunks out flat, with room for at least so many of each.

    The sampled chunks, in the order (decode, prefill), are the first of the M sampled rows.
    """
    chunk_rows = max(min_chunk, sum(shapes.padded(len(chunk.tokens)) for chunk in prefill))
    num_decode, chunk_size = shapes.fit(max(len(decode), min_decode), chunk_rows)
    rows = shapes.empty(num_decode, chunk_size)
    row, sampled, first_rows = 0, 0, []
    for index, chunk in enumerate((*decode, *prefill)):
        if index == len(decode):
            row = max(row, num_decode)
        count = len(chunk.tokens)
        at = slice(row, row + count)
        rows.tokens[at] = chunk.tokens
        rows.slots[at] = chunk.slot
        rows.positions[at] = np.arange(chunk.start, chunk.start + count)
        rows.targets[row : row + len(chunk.targets)] = chunk.targets
        first_rows.append(row)
        if chunk.sampled:
            rows.sample_rows[sampled] = row + count - 1
            rows.sample_slots[sampled] = chunk.slot
            rows.numbers[sampled] = chunk.draw.numbers
            rows.words[sampled] = (chunk.draw.flags, chunk.draw.top_k, *divmod(chunk.draw.seed, 2**32))
            sampled += 1
        row += count if index < len(decode) else shapes.padded(count)
    live_rows = sum(len(chunk.tokens) for chunk in (*decode, *prefill))
    return BatchPlan(num_decode, rows, live_rows, tuple(first_rows))
