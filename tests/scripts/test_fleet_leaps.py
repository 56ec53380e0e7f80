"""Shortcuts of the simulation that change nothing, and what holds of every run: for any workload and settings."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batching.plan import PlanShapes, Sampled
from batching.policies import POLICIES, Continuous, make_policy
from batching.request import Metrics
from batching.scheduler import Scheduler
from batching.sequence import SequenceState
from scripts.fleet import ROUTERS, facts, params_of
from scripts.replica import CountingScheduler, LengthsOnly
from scripts.step_cost import HostCost, Line, load_of
from tests.scripts.simulated import Constant, LastComeFirst, SteadyLast, fleet, item, setup

lengths = st.tuples(st.integers(1, 20), st.integers(1, 12))
workloads = st.lists(
    st.tuples(lengths, st.floats(0, 20), st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=14
)
settings_of = st.fixed_dictionaries(
    {
        "slots": st.sampled_from([1, 2, 3, 9]),
        "block_q": st.sampled_from([1, 16]),
        "run_ahead": st.integers(0, 2),
        "reuse": st.booleans(),
        "max_queue": st.sampled_from([2, 100]),
        "policy": st.sampled_from([*POLICIES, LastComeFirst, SteadyLast]),
        "replicas": st.integers(1, 3),
    }
)
hosts = st.builds(
    lambda *parts: HostCost(*(Line(*part) for part in parts)),
    *[st.tuples(st.sampled_from([0.0, 0.1, 0.7, 1.3]), st.sampled_from([0.0, 0.01])) for _ in range(3)],
)


def built(drawn):
    items = []
    for place, ((prompt, answer), at, priority, before, continues) in enumerate(drawn):
        more = {"after": str(place - before), "continues": continues} if 0 < before <= place else {}
        more |= {"prefix_tokens": min(prompt, 17), "prefix_seed": before, "seed": place}
        # What policies look at, each as it is drawn and without meaning.
        more |= {"priority": priority, "user": f"u{before}", "predicted_tokens": 1 + 3 * priority}
        more |= {"ttft_slo_s": 2.0 + 5 * priority, "tpot_slo_s": 0.5 + before}
        items.append(item(str(place), prompt, answer, at, **more))
    return items


def outcome(run):
    served = sorted(run.run(), key=lambda one: one.id)
    requests = [(one.id, one.arrival, list(one.tokens), one.end, one.prompt_tokens, one.outcome) for one in served]
    return requests, [replica.stats for replica in run.replicas], run.refused, run.preemptions, run.cached_tokens


# A request comes at the very time at which another replica's turn begins, by an end at that time.
TIE = [((1, 3), 0.0, 0, 0, False), ((1, 2), 0.0, 0, 0, False), ((1, 1), 0.0, 0, 0, False), ((1, 1), 0.0, 0, 2, False)]
TIED = {"slots": 2, "block_q": 1, "run_ahead": 1, "reuse": False, "max_queue": 2, "policy": "continuous", "replicas": 3}

# A batch keeps its rows when most of its members have ended.
BATCH = [((1, answer), 0.0, 0, 0, False) for answer in (1, 1, 1, 1, 1, 12)]
BATCHED = TIED | {"slots": 9, "max_queue": 100, "policy": "static", "replicas": 1}


@settings(max_examples=300, deadline=None)
@given(workloads, settings_of, hosts, st.sampled_from([*ROUTERS]), st.sampled_from([0.0, 0.013]))
@example(TIE, TIED, HostCost(commit=Line(1.3)), "round-robin", 0.0)
@example(BATCH, BATCHED, HostCost(), "load", 0.0)
def test_leaps_change_nothing(drawn, how, host, router, per_token):
    """To the last bit, for every request, router, policy and kind of host."""
    runs = [
        fleet(built(drawn), Constant(host, per_token), router=ROUTERS[router](), leaps=leaps, **how)
        for leaps in (True, False)
    ]
    assert outcome(runs[0]) == outcome(runs[1])


@settings(max_examples=100, deadline=None)
@given(workloads, settings_of, hosts)
def test_every_request_ends_once(drawn, how, host):
    items, run = built(drawn), fleet(built(drawn), Constant(host), **how)
    served = {one.id: one for one in run.run()}
    assert len(run.served) == len(served) == len(items)
    for one in items:
        there = served[one.id]
        assert (there.outcome == "failed") == (one.id in run.refused)
        if there.outcome == "completed":
            assert len(there.tokens) == one.max_tokens
            assert (np.diff(there.tokens) >= 0).all()  # equal where the host is behind the device by turns
            assert there.arrival < there.tokens[0] <= there.tokens[-1] == there.end
        if one.after is not None:
            assert there.arrival == served[one.after].end + one.arrival_s
    done = [one for one in served.values() if one.outcome == "completed"]
    assert sum(len(one.tokens) for one in done) == sum(one.max_tokens for one in items if one.id not in run.refused)
    assert not any(replica.busy or replica.tokens(1e9) for replica in run.replicas)


@settings(max_examples=100, deadline=None)
@given(workloads, settings_of)
def test_rows_are_counted_as_they_are_laid_out(drawn, how):
    """Beside the real scheduler, on the same requests, turn by turn."""
    policy, items = how["policy"], built([(one, 0.0, priority, 0, False) for one, _, priority, _, _ in drawn])
    shapes = PlanShapes.choose(how["slots"], (16, 32), how["block_q"])
    schedulers = []
    for kind in (Scheduler, CountingScheduler):
        made = make_policy(policy) if isinstance(policy, str) else policy()
        one = kind(shapes=shapes, max_len=64, policy=made, max_queue=100, prefix_reuse=how["reuse"], clock=lambda: 0.0)
        for request in items:
            known = request.id, request.prompt(9), params_of(request.max_tokens), 0, frozenset(), Metrics(0.0)
            one.submit(SequenceState(*known, **facts(request, made)))
        schedulers.append(one)
    real, counting = schedulers
    while real.unfinished:
        turns = [one.plan() for one in schedulers]
        assert counting.load == load_of(turns[0], how["slots"])
        names = [[one.id for one in turn.sampled] for turn in turns]
        assert names[0] == names[1]
        assert turns[0].busy == turns[1].busy
        for one, turn in zip(schedulers, turns, strict=True):
            one.commit(turn, Sampled(np.zeros(len(turn.sampled), np.int32)))
    assert not counting.unfinished


def test_only_steady_policies_leap():
    found = {}
    for policy in (LastComeFirst, SteadyLast, Continuous):
        scheduler = CountingScheduler(
            shapes=setup().shapes, max_len=64, policy=policy(), max_queue=9, clock=lambda: 0.0
        )
        scheduler.submit(LengthsOnly("a", range(4), params_of(12), 0, frozenset(), Metrics(0.0)))
        scheduler.commit(scheduler.plan(), Sampled(np.zeros(1, np.int32)))
        found[policy] = scheduler.steady([])
    assert found == {LastComeFirst: 0, SteadyLast: 10, Continuous: 10}  # the 12th token ends it, the first is there
