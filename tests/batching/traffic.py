"""Random requests, and random traffic for a scheduler and a device that are driven by hand, as an engine does it."""

import itertools
import json
import random
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from batching.checks import replay
from batching.plan import NOT_FINITE
from batching.policies import POLICIES, Continuous, Decision, make_policy
from batching.request import Metrics
from batching.sequence import SequenceState
from batching.turn import NOTHING
from tests.batching.fake import VOCABULARY, FakeDevice, alone, make_scheduler, sequence
from tests.batching.fake_engine import prompt_of, request_of, text_of

S = 40


@dataclass
class Counting:
    """A grammar that comes to an end after so many tokens, or raises then."""

    left: int
    reason: str | None
    error: str | None = None

    def advance(self, token):
        self.left -= 1
        if self.left == 0 and self.reason is None:
            raise ArithmeticError("no such state")
        return self.reason if self.left == 0 else None


class Hesitant:
    """Admits whom it likes, and sometimes computes nothing for them while tokens of others are on their way."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def decide(self, view):
        admit = view.waiting[: self.random.randint(0, view.free)]
        prefill = self.random.sample([*view.prefilling, *admit], len(view.prefilling) + len(admit))
        coming = any(one.in_flight for one in view.running)
        if coming and self.random.random() < 0.5:
            return Decision(admit=admit, decode=False)
        if not prefill and not view.decoding and not coming:
            return Continuous().decide(view)
        return Decision(admit=admit, prefill=prefill)


class Traffic:
    """A scheduler and a device, driven as an engine does it, by a random generator; everything that may happen does."""

    def __init__(self, seed, policy=None):
        self.random = random.Random(seed)
        slots, chunks = self.random.randint(1, 4), self.random.choice([(16,), (16, 32)])
        self.policies, self.ahead = [policy] if policy else sorted(POLICIES), seed % 4
        how = {"block_q": self.random.choice([1, 16]), "reuse": self.random.random() < 0.7}
        policy = self.random.choice(self.policies)
        self.scheduler = make_scheduler(slots, S, chunks, policy=policy, max_queue=6, **how)
        self.device, self.flights, self.count = FakeDevice(slots, S), deque(), itertools.count()

    def serve(self, steps=30):
        for _ in range(steps):
            self.arrive()
            self.disturb()
            self.turn()
        return self

    def finish(self):
        while self.scheduler.unfinished:
            self.turn()
        return self

    def chance(self, share):
        return self.random.random() < share

    def arrive(self):
        n = self.random.choice([1, 1, 1, 2, 3])
        if not self.chance(0.5) or self.scheduler.queue_room < n:
            return
        trunk, own = self.random.randint(0, 30), [self.random.randrange(VOCABULARY) for _ in range(9)]
        prompt = [*range(trunk), *own[: self.random.randint(1, 9)]]
        room = S - len(prompt) + 1
        params = {"max_tokens": self.random.choice([None, 1, *range(1, room)]), "n": n}
        if self.chance(0.2):
            params |= {"prompt_logprobs": 1} | ({"max_tokens": 0} if n == 1 and self.chance(0.5) else {})
        if self.chance(0.3):
            params["stop_token_ids"] = alone(prompt, 5)[-1:]
        if self.chance(0.3) and params["max_tokens"] != 0:
            params |= {"min_tokens": 1, "logit_bias": {5: 1.0}, "stop": ["x"]}
        first = sequence(str(next(self.count)), prompt, **params)
        facts = {name: self.random.randint(0, 3) for name in getattr(self.scheduler.policy, "uses", ())}
        for index in range(n):
            metrics, same = Metrics(self.scheduler.clock()), {"group": first.group, **facts}
            one = SequenceState(first.id, first.prompt, first.params, 7 + index, first.stop_ids, metrics, index, **same)
            if self.chance(0.2):
                one.grammar = Counting(self.random.randint(1, 9), self.random.choice(["stop", "error", None]))
            self.scheduler.submit(one)

    def disturb(self):
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        if everyone and self.chance(0.1):
            self.scheduler.cancel(self.random.choice(everyone).id, report=self.chance(0.7))
        elif everyone and self.chance(0.05):
            self.scheduler.fail(self.random.choice(everyone), "its consumer failed", report=self.chance(0.7))
        elif self.chance(0.03):
            self.scheduler.plan()
            self.scheduler.fail_running("it broke")
            self.flights.clear()
            self.device.cache[:], self.device.last_token[:] = -999, -999
        elif self.policies and not everyone and self.chance(0.5):
            self.scheduler.policy = make_policy(self.random.choice(self.policies))
            self.scheduler.prefixes.reuse = self.chance(0.7)

    def turn(self):
        turn = self.scheduler.plan()
        if turn is not None:
            self.flights.append((turn, self.compute(turn)))
        wait = self.flights and (turn is None or len(self.flights) > self.ahead)
        progress = self.scheduler.commit(*(self.flights.popleft() if wait else (None, NOTHING)))
        for one in progress:
            if one.token is not None and self.chance(0.05):
                self.scheduler.stop(one.sequence, "x")
        if not self.scheduler.unfinished:
            self.flights.clear()

    def compute(self, turn):
        for copy in turn.copies:
            self.device.copy(copy)
        sampled = self.device.step(turn.plan.rows)
        values = np.zeros((len(turn.plan.rows.tokens), 21), np.float32)
        for one in turn.scored:
            values[one.first_row] = np.nan if self.chance(0.05) else 0
        if self.chance(0.05):
            sampled.tokens[self.random.randrange(len(sampled.tokens))] = NOT_FINITE
        return sampled._replace(prompt_logprobs=values, prompt_top_ids=np.zeros((len(values), 20), np.int32))


def again(scheduler, policy=None):
    """What has the scheduler's report in hand, and nothing else, comes to."""
    return replay(json.loads(json.dumps(scheduler.report("x"))), policy)


def state(scheduler):
    number = scheduler._numbers
    return {
        "running": [(number[one], one.slot, one.computed, one.in_flight) for one in scheduler.running],
        "waiting": [(number[one], one.in_flight) for one in scheduler.waiting],
        "free": scheduler.free,
        "held": [scheduler.prefixes.held(slot) for slot in range(scheduler.shapes.slots)],
        "planned": [turn.plan.rows.positions.tolist() for turn in scheduler._planned],
        "ends": [(one.output, one.finish_reason, one.stop_reason, one.cached, one.metrics) for one in number],
    }


@st.composite
def requests(draw):
    """For a fake engine with letters as its tokens, of the length that it has by default."""
    made = []
    for index in range(draw(st.integers(1, 7))):
        prompt = prompt_of(draw(st.integers(1, 50)), draw(st.integers(0, 3)))
        most = draw(st.integers(1, 64 - len(prompt) + 1))
        likely = alone(prompt, most)
        params = {"max_tokens": most, "n": draw(st.sampled_from([1, 1, 2, 3]))}
        if draw(st.booleans()):
            params["stop_token_ids"] = [draw(st.sampled_from(likely))]
        if draw(st.booleans()):
            params["stop"] = [text_of(likely[-2:]), text_of([draw(st.integers(0, VOCABULARY - 1))])]
        if draw(st.booleans()):
            params["min_tokens"] = draw(st.integers(0, most))
        made.append(request_of(str(index), prompt, **params))
    return made


class Waste:
    """Counts the rows of each sequence that came when it had ended."""

    def __init__(self, engine):
        self.engine, self.rows, self.before = engine, Counter(), engine.stats.wasted_rows
        self.turns = []  # launched and not committed

    def __enter__(self):
        real, run = self.engine.finish, self.engine.run

        def launched(turn):
            self.turns.append(turn)
            return run(turn)

        def finish(*come):
            for turn in come[:1]:
                self.turns = [one for one in self.turns if one is not turn]
                drawn = () if turn is None else turn.sampled
                self.rows.update((one.id, one.index) for one in drawn if one.finish_reason is not None)
            real(*come)

        self.engine.finish, self.engine.run, self.run = finish, launched, run
        return self.rows

    def __exit__(self, *_):
        del self.engine.finish
        self.engine.run = self.run
        for turn in self.turns:  # nobody waited for it any more
            self.rows.update((one.id, one.index) for one in turn.sampled)
        assert self.rows.total() == self.engine.stats.wasted_rows - self.before
