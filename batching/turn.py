"""`Turn`: a plan on its way through the device, and what it brings to whom."""

from typing import NamedTuple

import numpy as np

from batching.plan import BatchPlan, Sampled
from batching.prefix import Copy
from batching.sequence import SequenceState

NOTHING = Sampled(np.empty(0, np.int32))  # what comes of no turn


class Turn(NamedTuple):
    """A plan and who its sampled rows belong to, captured when it is made and used when its tokens are read."""

    plan: BatchPlan
    sampled: tuple[SequenceState, ...]  # whose the first of the M sampled rows are
    busy: int  # slots that somebody has in this turn
    copies: tuple[Copy, ...] = ()  # of rows, to be made before the plan is computed
    admitted: tuple[SequenceState, ...] = ()  # got their slots for this turn
    scored: tuple["Scored", ...] = ()

    def fetch(self, sampled: Sampled) -> Sampled:
        """What a step returned, as NumPy arrays, without what nobody asked for. Waits for the step."""
        told = any(sequence.params.logprobs is not None for sequence in self.sampled)
        wanted = (True, told, told, bool(self.scored), bool(self.scored))
        return Sampled(*(np.asarray(one) if want else None for one, want in zip(sampled, wanted, strict=True)))


class Flight(NamedTuple):
    """A turn that the device has, and when that came about."""

    turn: Turn
    sampled: Sampled  # perhaps still being computed
    plan: float
    launch: float
    launched: float


class TurnTimes(NamedTuple):
    """When things happened to a turn, in seconds on the engine's clock."""

    plan: float  # the host begins to plan it
    launch: float  # it is planned
    launched: float  # the device has been told
    wait: float  # the host has nothing else to do
    ready: float  # the tokens are here
    committed: float


class Scored(NamedTuple):
    """Prompt rows of a turn whose targets' logprobs are asked for."""

    sequence: SequenceState
    first_row: int  # of the turn's
    start: int  # position of that row
    count: int


class Progress(NamedTuple):
    """What a turn brought to one request: a token, its end, or both."""

    sequence: SequenceState
    token: int | None
