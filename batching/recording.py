"""`RecordedScheduler`: a scheduler that tells all that happened as JSON, and `repeat`, which does it again.

What was sampled is kept, and of grammars when they ended their requests: neither a device nor a tokenizer is needed.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batching.params import MOST_LOGPROBS, SamplingParams
from batching.plan import PlanShapes, Sampled, build_plan
from batching.policies import FACTS, POLICIES, Policy, make_policy
from batching.request import FinishReason, Metrics
from batching.scheduler import Scheduler
from batching.sequence import SequenceState
from batching.turn import NOTHING, Progress, Turn


class RecordedScheduler(Scheduler):
    """Keeps what it is told, in order, and what the clock said meanwhile; nothing of what it tells itself."""

    def __init__(self, **how: Any) -> None:
        self._events: list[list[Any]] = []  # kind, details, times
        self._times: list[float] | None = None  # of the event that is happening
        super().__init__(**how)
        self._numbers: dict[SequenceState, int] = {}  # in the order of submission
        self._ends: dict[SequenceState, tuple[int, FinishReason]] = {}  # after which token a grammar ended it, and how
        self._planned: deque[Turn] = deque()  # and not committed
        self._reuse = False  # as it was at the last plan

    @contextmanager
    def _event(self, kind: str, *details: Any) -> Iterator[None]:
        outer = self._times
        if outer is None:
            self._times = []
            self._events.append([kind, [*details], self._times])
        try:
            yield
        finally:
            self._times = outer

    @property
    def clock(self) -> Callable[[], float]:
        return self._now

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def _now(self) -> float:
        now = self._clock()
        if self._times is not None:
            self._times.append(now)
        return now

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        with self._event("policy", next((name for name, one in POLICIES.items() if type(policy) is one), None)):
            self._policy = policy

    def submit(self, sequence: SequenceState) -> None:
        super().submit(sequence)
        self._numbers[sequence] = len(self._numbers)
        with self._event("submit", sequence):
            pass

    def cancel(self, request_id: str, *, report: bool = True) -> bool:
        with self._event("cancel", request_id, report):
            return super().cancel(request_id, report=report)

    def stop(self, sequence: SequenceState, reason: str) -> None:
        with self._event("stop", self._numbers[sequence], reason):
            super().stop(sequence, reason)

    def fail(self, sequence: SequenceState, error: str, *, report: bool = False) -> None:
        known = sequence in self._numbers  # else it was cancelled before there was room for it in the queue
        with self._event("fail", self._numbers[sequence], error, report) if known else nullcontext():
            super().fail(sequence, error, report=report)

    def fail_running(self, error: str) -> None:
        with self._event("fail running", error):
            super().fail_running(error)
        self._planned.clear()

    def plan(self) -> Turn | None:
        if self._reuse is not self.prefixes.reuse:
            self._reuse = self.prefixes.reuse
            self._events.append(["prefix reuse", [self._reuse], []])
        with self._event("plan", None):
            event = self._events[-1]
            try:
                turn = super().plan()
            except Exception as error:
                event[1] = [repr(error)]
                raise
        if turn is not None:
            self._planned.append(turn)
        return turn

    def commit(self, turn: Turn | None, sampled: Sampled) -> list[Progress]:
        place, drawn = self._place(turn), () if turn is None else turn.sampled
        who = [self._numbers[one] for one in drawn]
        before = [len(one.output) for one in drawn]
        told = [] if turn is None else [place, who, sampled.tokens.tolist(), _finite(turn, sampled)]
        with self._event("commit", *told):
            progress = super().commit(turn, sampled)
        for one, count in zip(drawn, before, strict=True):
            if one.grammar is not None and len(one.output) > count and one.finish_reason in ("stop", "error"):
                self._ends[one] = len(one.output), one.finish_reason
        for _ in range(place + 1):
            self._planned.popleft()
        return progress

    def _place(self, turn: Turn | None) -> int:
        """Among the turns that were planned and not committed; -1 if it is none of them."""
        return next((at for at, one in enumerate(self._planned) if one is turn), -1)

    def report(self, error: str) -> dict[str, Any]:
        """All that happened so far, as JSON."""
        how = {"max_len": self.max_len, "max_queue": self.max_queue}
        events = [
            [kind, [self._as_json(one) if isinstance(one, SequenceState) else one for one in details], times]
            for kind, details, times in self._events
        ]
        return json.loads(json.dumps({"error": error, "how": how, "shapes": asdict(self.shapes), "events": events}))

    def _as_json(self, one: SequenceState) -> dict[str, Any]:
        # Logprobs change nothing, and are not kept.
        params = {name: value for name, value in asdict(one.params).items() if value is not None and name != "logprobs"}
        fields = {name: getattr(one, name) for name in ("id", "prompt", "seed", "index", *FACTS)}
        grammar = None if one.grammar is None else self._ends.get(one, (0, None))
        others = {
            "params": params,
            "stop_ids": sorted(one.stop_ids),
            "arrival": one.metrics.arrival,
            "grammar": grammar,
        }
        return fields | others


def repeat[S: RecordedScheduler](report: Mapping[str, Any], kind: type[S], policy: Policy | None) -> S:
    """Do again what a report tells of; the scheduler as it is then.

    `policy`: in the place of one that has no name. Raises ValueError where it is missing.
    """
    sizes: dict[str, Any] = {name: tuple(one) for name, one in report["shapes"].items() if isinstance(one, list)}
    shapes = PlanShapes(**report["shapes"] | sizes)
    scheduler = kind(shapes=shapes, policy=policy or make_policy("continuous"), **report["how"])
    sequences: list[SequenceState] = []
    for event, details, times in report["events"]:
        scheduler.clock = itertools.chain(times, itertools.repeat(times[-1] if times else 0.0)).__next__
        if event == "policy":
            scheduler.policy = _policy(details[0], policy)
        elif event == "prefix reuse":
            scheduler.prefixes.reuse = details[0]
        elif event == "submit":
            sequences.append(_sequence(sequences, **details[0]))
            scheduler.submit(sequences[-1])
        elif event == "cancel":
            scheduler.cancel(details[0], report=details[1])
        elif event == "stop":
            scheduler.stop(sequences[details[0]], details[1])
        elif event == "fail":
            scheduler.fail(sequences[details[0]], details[1], report=details[2])
        elif event == "fail running":
            scheduler.fail_running(details[0])
        elif event == "plan":
            with nullcontext() if details[0] is None else suppress(Exception):
                scheduler.plan()
        elif event == "commit":
            _commit(scheduler, sequences, *details)
    return scheduler


def _policy(name: str | None, given: Policy | None) -> Policy:
    if name is not None:
        return make_policy(name)
    if given is None:
        raise ValueError("the report is of a policy that has no name: give it")
    return given


def _commit(scheduler: RecordedScheduler, sequences: Sequence[SequenceState], *told: Any) -> None:
    """`told`: the turn's place, whose tokens it has, the tokens, and which scored stretches have finite logprobs."""
    if not told:
        scheduler.commit(None, NOTHING)
        return
    place, who, tokens, finite = told
    unknown = Turn(build_plan(scheduler.shapes, (), ()), tuple(sequences[one] for one in who), busy=0)
    turn = unknown if place < 0 else scheduler._planned[place]
    values = np.zeros((len(turn.plan.rows.tokens), 1 + MOST_LOGPROBS), np.float32)
    for one, fine in zip(turn.scored, finite, strict=False):
        values[one.first_row : one.first_row + one.count] = 0 if fine else np.nan
    ids = np.zeros((len(values), MOST_LOGPROBS), np.int32)
    scheduler.commit(turn, Sampled(np.array(tokens, np.int32), prompt_logprobs=values, prompt_top_ids=ids))


def _sequence(
    before: Sequence[SequenceState],
    params: Mapping[str, Any],
    prompt: list[int],
    stop_ids: list[int],
    grammar: tuple[int, FinishReason | None] | None,
    arrival: float,
    **fields: Any,
) -> SequenceState:
    """`before`: those submitted before it, the other samples of its request among them."""
    first = next((one for one in reversed(before) if one.id == fields["id"]), None) if fields["index"] else None
    return SequenceState(
        prompt=tuple(prompt),
        params=SamplingParams(**params),
        stop_ids=frozenset(stop_ids),
        metrics=Metrics(arrival),
        group=object() if first is None else first.group,
        grammar=None if grammar is None else _Told(*grammar),
        **fields,
    )


@dataclass
class _Told:
    """A grammar of which only its end is known."""

    left: int  # tokens
    reason: FinishReason | None
    error: str | None = None

    def advance(self, token: int) -> FinishReason | None:
        self.left -= 1
        return self.reason if self.left == 0 else None


def _finite(turn: Turn, sampled: Sampled) -> list[bool]:
    """Of each stretch of scored rows, whether its targets' logprobs are."""
    ends = [(one.first_row, one.first_row + len(one.sequence.targets(one.start, one.count))) for one in turn.scored]
    return [bool(np.isfinite(sampled.prompt_logprobs[a:b]).all()) for a, b in ends]
