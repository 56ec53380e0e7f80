"""Replicas behind a router, and the requests of a workload, as events in virtual time."""

import heapq
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from batching.params import SamplingParams
from batching.policies import FACTS, Policy
from batching.prefix import WORTHWHILE, common
from batching.request import Metrics, Request
from batching.sequence import SequenceState
from scripts.metrics import Outcome, Served
from scripts.replica import LengthsOnly, Replica
from scripts.traces import Item


class Router(Protocol):
    def choose(self, prompt: Sequence[int], replicas: Sequence[Replica], at: float) -> int:
        """Which replica gets a request that arrives at a time."""
        ...


class RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: Sequence[int], replicas: Sequence[Replica], at: float) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """That whose waiting and running requests have the fewest tokens, answers counted as long as they may become."""

    def choose(self, prompt: Sequence[int], replicas: Sequence[Replica], at: float) -> int:
        loads = [replica.tokens(at) for replica in replicas]
        return loads.index(min(loads))


class PrefixAware:
    """That in one of whose slots the most of the prompt's first rows are, if those are enough to be reused; else, and
    among equals, the least loaded."""

    def choose(self, prompt: Sequence[int], replicas: Sequence[Replica], at: float) -> int:
        shared = [longest_shared(replica, tuple(prompt)) for replica in replicas]
        most = max(shared)
        among = [index for index, count in enumerate(shared) if count == most or most < WORTHWHILE]
        return min(among, key=lambda index: replicas[index].tokens(at))


def longest_shared(replica: Replica, prompt: tuple[int, ...]) -> int:
    """Rows of a prompt that some slot holds. Of a running request those of its prompt count: the others are new."""
    scheduler, best = replica.scheduler, 0
    for one in scheduler.running:
        best = max(best, common(prompt, one.prompt, min(one.computed, len(prompt))))
    for slot in scheduler.free:
        best = max(best, common(prompt, scheduler.prefixes.held(slot), len(prompt)))
    return best


ROUTERS: dict[str, Callable[[], Router]] = {"round-robin": RoundRobin, "load": LeastLoaded, "prefix": PrefixAware}


class Arrival(NamedTuple):
    """Sorted by time, then by place in the workload."""

    at: float
    place: int
    item: Item
    before: Sequence[int] = ()  # the tokens that its prompt continues


class Arrivals:
    """The requests of a workload that are still to come, as far as it is known when."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._places = {item.id: place for place, item in enumerate(items)}
        self._followers: dict[str, list[Item]] = {}
        for item in items:
            if item.after is not None:
                self._followers.setdefault(item.after, []).append(item)
        self._known = [Arrival(one.arrival_s, place, one) for place, one in enumerate(items) if one.after is None]
        heapq.heapify(self._known)

    @property
    def next_at(self) -> float | None:
        return self._known[0].at if self._known else None

    def pop(self) -> Arrival:
        return heapq.heappop(self._known)

    def ended(self, name: str, at: float, tokens: Callable[[], Sequence[int]]) -> None:
        """A request ended with these tokens, prompt and answer: those that wait for it will come."""
        for item in self._followers.pop(name, ()):
            before = tokens() if item.continues else ()
            heapq.heappush(self._known, Arrival(at + item.arrival_s, self._places[item.id], item, before))


class Fleet:
    """Serves one workload, once. `items` are as `read_workload` checks them: each `after` names an earlier one."""

    def __init__(
        self, items: Sequence[Item], replicas: Sequence[Replica], router: Router, vocabulary: int | None = None
    ) -> None:
        """`vocabulary`: prompts are made of tokens below it; None where their lengths alone matter."""
        self.replicas, self._router, self._vocabulary = replicas, router, vocabulary
        self.served: list[Served] = []  # in the order in which it is known
        self.refused: dict[str, str] = {}  # why, by id
        self.preemptions, self.cached_tokens = 0, 0
        self._items = {item.id: item for item in items}
        self._arrivals = Arrivals(items)
        self._turns: list[tuple[float, int]] = []  # when each busy replica begins its next turn; some are out of date
        self._last = (-1.0, 0)  # of these, the last one that was looked at

    def run(self, on_progress: Callable[[int, float], None] = lambda ended, at: None) -> list[Served]:
        """How every request ended. `on_progress` is told how many have, and the time."""
        while (arrival := self._arrivals.next_at) is not None or self._turns:
            if arrival is not None and (not self._turns or arrival <= self._turns[0][0]):
                self._arrive(self._arrivals.pop())
            else:
                self._last = heapq.heappop(self._turns)
                self._turn(*self._last)
                on_progress(len(self.served), self._last[0])
        return self.served

    def _arrive(self, arrival: Arrival) -> None:
        sequence = self._sequence(arrival)
        index = self._router.choose(sequence.prompt, self.replicas, arrival.at)
        replica = self.replicas[index]
        known = replica.host if replica.busy else None
        # Of turns at the very time of an arrival that an end at this time brought about, some have begun.
        reason = replica.accept(sequence, arrival.at, late=(arrival.at, index) < self._last)
        if reason is not None:
            self.refused[sequence.id] = reason
            self._report(sequence, arrival.at, "failed")
        if replica.busy and replica.host != known:
            heapq.heappush(self._turns, (replica.host, index))

    def _turn(self, at: float, index: int) -> None:
        replica = self.replicas[index]
        if at != replica.host or not replica.busy:  # another entry tells when
            return
        for sequence in replica.step():
            assert sequence.metrics.end is not None
            self.preemptions += sequence.metrics.preemptions
            self.cached_tokens += sequence.cached
            self._report(sequence, sequence.metrics.end, "completed")
        if replica.busy:
            heapq.heappush(self._turns, (replica.host, index))

    def _sequence(self, arrival: Arrival) -> SequenceState:
        item, kind = arrival.item, SequenceState
        if self._vocabulary is not None:
            prompt = item.prompt(self._vocabulary, arrival.before)
        else:
            kind, prompt = LengthsOnly, cast(tuple[int, ...], range(len(arrival.before) + item.length))
        told = facts(item, self.replicas[0].scheduler.policy)
        return kind(item.id, prompt, params_of(item.max_tokens), 0, frozenset(), Metrics(arrival.at), **told)

    def _report(self, sequence: SequenceState, end: float, outcome: Outcome) -> None:
        item, metrics = self._items[sequence.id], sequence.metrics
        self._arrivals.ended(item.id, end, lambda: sequence.tokens)
        times, count = np.array(metrics.tokens), len(sequence.prompt)
        slos = item.ttft_slo_s, item.tpot_slo_s
        self.served.append(Served(item.id, metrics.arrival, times, end, count, outcome, *slos))


def facts(item: Item | Request, policy: Policy) -> dict[str, Any]:
    """Of what a request tells policies, what this one looks at: the rest is refused where it is handed on."""
    return {name: getattr(item, name) for name in FACTS if name in getattr(policy, "uses", ())}


@cache
def params_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
