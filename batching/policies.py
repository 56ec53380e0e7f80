"""Who gets the next turn: scheduling policies, small classes chosen by name.

A policy sees host state alone and decides; the scheduler carries out. To add one, write a class with `decide` and
register it in `POLICIES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from batching.scheduler import SequenceState


@dataclass(frozen=True)
class View:
    """What a policy may look at before a turn."""

    waiting: Sequence["SequenceState"]  # in order of arrival
    prefilling: Sequence["SequenceState"]  # have a slot and prompt tokens still to compute, in order of admission
    decoding: Sequence["SequenceState"]  # can advance; not those whose last token is still on its way
    running: Sequence["SequenceState"]  # all that have a slot, in order of admission
    slots: int
    free: int  # slots that nobody has


@dataclass(frozen=True)
class Decision:
    """What the turn shall do.

    The prompt chunks of `prefill` share the turn's chunk budget in the order given: the first takes what it can, and
    so on until the budget is used up. One whose prompt begins like that of one before it may wait and take none.
    """

    preempt: Sequence["SequenceState"] = ()  # lose their slots now, to go on later where they were
    admit: Sequence["SequenceState"] = ()  # get a slot now; at most as many as are free and `preempt` frees
    prefill: Sequence["SequenceState"] = ()  # may include those just admitted
    decode: bool = True  # every decoding sequence advances by one token
    decode_rows: int = 0  # at least so many decode rows are computed, as padding if need be
    prefill_share: float = 1.0  # of the turn's prompt rows that hold tokens; the others are padding


class Policy(Protocol):
    uses_priority: bool  # whether it looks at `SequenceState.priority`; where not, requests that set it are refused

    def decide(self, view: View) -> Decision: ...


class Continuous:
    """Chunked prefill beside decode, first come first served: a slot that is freed is taken in the very next turn.

    Orca (OSDI '22) iteration-level scheduling with the chunked prefill of Sarathi-Serve (arXiv 2403.02310).
    """

    uses_priority = False

    def decide(self, view: View) -> Decision:
        admit = view.waiting[: view.free]
        return Decision(admit=admit, prefill=[*view.prefilling, *admit])


class Priority:
    """The most urgent first, of equally urgent ones the first come. A more urgent request takes a slot of the least
    urgent one, which waits again, keeps its tokens and goes on where it was.
    """

    uses_priority = True

    def decide(self, view: View) -> Decision:
        waiting = sorted(view.waiting, key=urgency)
        admit, preempt = waiting[: view.free], []
        for urgent, victim in zip(waiting[view.free :], sorted(view.running, key=urgency, reverse=True), strict=False):
            if urgent.priority >= victim.priority:
                break
            admit.append(urgent)
            preempt.append(victim)
        prefill = [one for one in (*view.prefilling, *admit) if one not in preempt]
        return Decision(preempt, admit, sorted(prefill, key=urgency))


def urgency(sequence: "SequenceState") -> tuple[int, int]:
    return sequence.priority, sequence.arrived


class Static:
    """The control of every experiment: a batch is formed when all slots are free, prefilled, then decoded.

    It is a rectangle, as in a library's `generate` on a list of prompts: every prompt is padded to the longest, until
    the longest member ends nobody else is admitted, and the rows of members that ended are still computed.
    """

    uses_priority = False

    def __init__(self) -> None:
        self.batch, self.share = 0, 1.0

    def decide(self, view: View) -> Decision:
        if view.free == view.slots:
            admit = view.waiting[: view.free]
            lengths = [len(sequence.prompt) for sequence in admit]
            self.batch, self.share = len(admit), sum(lengths) / (max(lengths) * len(admit))
            return Decision(admit=admit, prefill=admit, prefill_share=self.share)
        if view.prefilling:
            return Decision(prefill=view.prefilling, decode=False, prefill_share=self.share)
        return Decision(decode_rows=self.batch)


POLICIES: dict[str, type[Policy]] = {"continuous": Continuous, "static": Static, "priority": Priority}


def make_policy(name: str) -> Policy:
    """Raises ValueError for a name that is not registered."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not one of {sorted(POLICIES)}")
    return POLICIES[name]()
