"""Prefix reuse: a freed slot keeps its rows until somebody takes it, and nobody computes rows that are there already.

Rows are a function of the tokens up to them, so a request whose prompt begins with the tokens of some slot's rows takes
that slot and goes on from there, or has the rows copied into its own. While one admitted before it computes them, it
waits. The prompt's last token is always computed: its logits are needed.
"""

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from batching.scheduler import SequenceState

# Tokens that must be gained for a copy, a wait, or taking a slot out of turn. SmolLM2-135M on two CPU cores computes
# one row in the time of a copy of 128, about 2 ms; where rows are cheap, 16 of them are one block of a chunk.
WORTHWHILE = 16


class Copy(NamedTuple):
    """Rows `[0, length)` of slot `source`, to be copied to `target` before the turn's step."""

    source: int
    target: int
    length: int


class Prefixes:
    """What tokens' rows each slot holds once the turns planned so far are computed.

    With `reuse` off slots are given out lowest first, empty, and nobody waits.
    """

    def __init__(self, slots: int, *, reuse: bool) -> None:
        self.reuse = reuse
        self._owners: dict[int, SequenceState] = {}  # by slot, in order of admission
        self._left: list[tuple[int, ...]] = [()] * slots  # what a slot held when it was freed last
        self._freed = [0] * slots  # when: counts slots that were freed
        self._count = 0
        self._leaders: dict[SequenceState, tuple[SequenceState, int]] = {}  # who waits: for whom, for how many rows
        self._copies: list[Copy] = []

    def held(self, slot: int) -> tuple[int, ...]:
        """The tokens whose rows a slot holds, from position 0 on, as far as they are known."""
        owner = self._owners.get(slot)
        return self._left[slot] if owner is None else owner.tokens[: owner.computed]

    def place(self, sequence: "SequenceState", free: Sequence[int]) -> int:
        """Give a sequence one of the free slots, which is returned, and what rows of its prompt are there already.

        It takes the slot that shares most with its prompt; or, if that costs others much or gains little, the one
        that is missed least: an empty one, or the one that was freed first.
        """
        shared = self._shared(sequence)
        slot = free[0]
        if self.reuse:
            slot = min(free, key=lambda slot: (bool(self._left[slot]), self._freed[slot], slot))
            best = max(free, key=lambda slot: (shared[slot], -self._freed[slot], -slot))
            lost = len(self._left[best]) - shared[best]
            if shared[best] >= max(WORTHWHILE, max(shared) - WORTHWHILE + 1) and lost < WORTHWHILE:
                slot = best
        self._owners[slot] = sequence
        sequence.slot = slot
        self._skip_to(sequence, shared[slot])
        self._seek(sequence, shared)
        return slot

    def follow(self) -> None:
        """Before a turn's admissions: who waited for rows copies them, or goes on alone if they will not come."""
        for sequence, (leader, rows) in list(self._leaders.items()):
            coming = leader.slot is not None and leader.finish_reason is None and leader.computed < rows
            if not coming or rows - sequence.computed < _worthwhile(sequence):
                self._seek(sequence, self._shared(sequence))

    def waits(self, sequence: "SequenceState", moving: Set["SequenceState"]) -> bool:
        """Whether a sequence shall have no rows in this turn, since one of `moving` computes them or waits itself.

        `moving` are those that the policy put before it in this turn. The first is never held up, so somebody always
        advances, and nobody depends on one that does not.
        """
        return sequence in self._leaders and self._leaders[sequence][0] in moving

    def release(self, sequence: "SequenceState") -> None:
        """A sequence ended or lost its slot, which keeps the rows unless they are in doubt."""
        slot = sequence.slot
        assert slot is not None
        kept = self.held(slot) if self.reuse and sequence.finish_reason != "error" else ()
        del self._owners[slot]
        self._leaders.pop(sequence, None)
        self._count += 1
        self._left[slot], self._freed[slot] = kept, self._count

    def forget(self) -> None:
        """The cache is made afresh: what free slots held is gone, and so is what was to be copied."""
        self._left = [()] * len(self._left)
        self._copies = []

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies decided on since the last call, to be made in this order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def _seek(self, sequence: "SequenceState", shared: Sequence[int]) -> None:
        """Wait for rows that a sequence before it will compute, or copy rows that are there, if either gains enough."""
        self._leaders.pop(sequence, None)
        source = max(range(len(shared)), key=shared.__getitem__)
        have = max(sequence.computed, shared[source])
        leader, rows = self._promise(sequence)
        least = _worthwhile(sequence)
        if leader is not None and rows - have >= least:
            self._leaders[sequence] = leader, rows
        elif have - sequence.computed >= least:
            assert sequence.slot is not None
            self._copies.append(Copy(source, sequence.slot, have))
            self._skip_to(sequence, have)

    def _skip_to(self, sequence: "SequenceState", rows: int) -> None:
        """So many of its rows are there. Those that it had before were computed for it, or it was told of them."""
        sequence.cached += max(0, rows - max(sequence.computed, sequence.reached))
        sequence.computed = rows

    def _shared(self, sequence: "SequenceState") -> list[int]:
        """By slot, how many of the rows that the sequence needs it holds."""
        most, tokens = self._most(sequence), sequence.tokens
        return [common(tokens, self.held(slot), most) if most else 0 for slot in range(len(self._left))]

    def _promise(self, sequence: "SequenceState") -> tuple["SequenceState | None", int]:
        """Of those admitted before it and still at their prompt, the one that shares most with it, and how much."""
        most, tokens, best, rows = self._most(sequence), sequence.tokens, None, 0
        for other in self._owners.values() if most else ():
            if other is sequence:
                break
            count = common(tokens, other.tokens[: other.prefill_end], most) if other.prefilling else 0
            if count > rows:
                best, rows = other, count
        return best, rows

    def _most(self, sequence: "SequenceState") -> int:
        """Tokens to prefill that need not be computed."""
        every_logit = sequence.params.prompt_logprobs is not None and not sequence.output
        return sequence.prefill_end - 1 if self.reuse and not every_logit else 0


def _worthwhile(sequence: "SequenceState") -> int:
    """Rows that must be gained for a wait or a copy. Several samples of one request never compute its prompt twice."""
    return WORTHWHILE if sequence.params.n == 1 else 1


def common(one: tuple[int, ...], other: tuple[int, ...], most: int) -> int:
    """How many tokens both begin with, at most `most`."""
    most = min(most, len(one), len(other))
    count = 0
    while count < most and one[count : count + 64] == other[count : count + 64]:
        count += 64
    while count < most and one[count] == other[count]:
        count += 1
    return min(count, most)
