"""Simulated replicas: scenarios done by hand, and routers."""

import pytest

from scripts.fleet import LeastLoaded, PrefixAware, RoundRobin
from scripts.metrics import request_metrics, summary
from scripts.step_cost import HostCost, Line
from tests.scripts.simulated import Constant, fleet, item


def times(served):
    return {one.id: list(one.tokens) for one in served}


THREE = [item("a", 4, 3), item("b", 4, 2), item("c", 4, 2, 0.5)]


@pytest.mark.parametrize("leaps", [True, False])
def test_three_requests_by_hand(leaps):
    """c waits for the slot that b frees at 2 s; the turn that begins then brings its first token."""
    run = fleet(THREE, leaps=leaps)
    served = run.run()
    assert times(served) == {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0], "c": [3.0, 4.0]}
    figures = {one.id: request_metrics(one) for one in served}
    assert [figures[name].ttft_s for name in "abc"] == [1.0, 1.0, 2.5]
    assert [figures[name].tpot_s for name in "abc"] == [1.0, 1.0, 1.0]
    assert [figures[name].latency_s for name in "abc"] == [3.0, 2.0, 3.5]
    stats = run.replicas[0].stats
    assert (stats.turns, stats.busy_slots) == (4, 7)
    assert (stats.rows, stats.live_rows) == (8 + 2 + 8 + 2, 8 + 2 + 5 + 1)
    assert summary(served)["generated_tokens_per_s"] == 7 / 4


def test_the_cache_is_paid_for():
    """Four prompt rows read 1 + 2 + 3 + 4 positions, then one row reads 5, then 6."""
    assert times(fleet([item("a", 4, 3)], Constant(per_token=1.0)).run()) == {"a": [11.0, 17.0, 24.0]}


HOST = HostCost(plan=Line(0.25), launch=Line(0.0), commit=Line(0.5))


def test_in_lock_step_the_host_adds_up():
    assert times(fleet([item("a", 4, 3)], Constant(HOST)).run()) == {"a": [1.25, 3.0, 4.75]}


def test_one_turn_ahead_the_host_is_hidden():
    """Turns are launched at 0.25, 0.5, then after the commits of the first, at 2.0, and of the second."""
    served = fleet([item("a", 4, 4)], Constant(HOST), run_ahead=1).run()
    assert times(served) == {"a": [1.25, 2.25, 3.25, 4.25]}


def test_one_turn_ahead_on_the_hosts_own_cores():
    """A turn's second has a quarter for its launch, which the device cannot hide where it is the host's cores.

    The second turn is launched while the first is computed, the third at its end, and so on: a device of its own
    computes for 0.75 s, one after the other; this one waits for each launch.
    """
    run, times_of = [item("a", 4, 4)], {}
    for shared in (False, True):
        host = HostCost(launch=Line(0.25), shared=shared)
        times_of[shared] = times(fleet(run, Constant(host), run_ahead=1).run())["a"]
    assert times_of == {False: [1.0, 1.75, 2.5, 3.25], True: [1.0, 2.0, 3.0, 4.0]}


def test_one_turn_ahead_a_slow_host_decides():
    host = HostCost(plan=Line(2.0), launch=Line(0.0), commit=Line(1.0))
    served = fleet([item("a", 4, 4)], Constant(host), run_ahead=1).run()
    # launched at 2 and 4; committed there (4), then launched at 7, 10 and so on, each committed after the next launch
    assert times(served) == {"a": [4.0, 7.0, 10.0, 11.0]}


def test_a_launch_is_part_of_the_turn():
    host = HostCost(launch=Line(0.25))
    assert times(fleet([item("a", 4, 2)], Constant(host)).run()) == {"a": [1.0, 2.0]}
    slow = HostCost(launch=Line(3.0))  # all is computed by the time that the launch returns
    assert times(fleet([item("a", 4, 2)], Constant(slow)).run()) == {"a": [3.0, 6.0]}


def test_requests_that_follow_others():
    chain = [item("a", 4, 2), item("b", 4, 1, 10.0, after="a"), item("c", 4, 1, 0.5, after="a", continues=True)]
    run = fleet(chain)
    served = {one.id: one for one in run.run()}
    assert [served[name].arrival for name in "abc"] == [0.0, 12.0, 2.5]
    assert served["c"].prompt_tokens == 4 + 2 + 4
    assert list(served["c"].tokens) == [3.5]


def test_what_cannot_be_served_has_failed():
    run = fleet([item("long", 60, 10), item("a", 4, 2), *(item(f"q{n}", 4, 2) for n in range(5))], slots=1, max_queue=2)
    served = {one.id: one for one in run.run()}
    assert {name for name, one in served.items() if one.outcome == "failed"} == {"long", "q1", "q2", "q3", "q4"}
    assert "a slot holds 64" in run.refused["long"]
    assert "max_queue is 2" in run.refused["q1"]
    assert summary(served.values())["generated_tokens"] == 4


def test_a_follower_of_what_was_refused_comes_all_the_same():
    served = fleet([item("long", 60, 10, 1.0), item("b", 10, 1, 2.0, after="long", continues=True)]).run()
    assert [(one.id, one.arrival, one.outcome) for one in served] == [("long", 1.0, "failed"), ("b", 3.0, "failed")]


def test_prefixes_are_found():
    """With 20 of 24 rows there, the second prompt is a chunk of 4 rows."""
    pair = [item("a", 24, 1, seed=1, prefix_tokens=20), item("b", 24, 1, 9.0, seed=2, prefix_tokens=20)]
    run = fleet(pair, Constant(per_token=1.0), reuse=True, chunks=(32,))
    served = {one.id: one for one in run.run()}
    assert list(served["a"].tokens) == [1 + sum(range(1, 25))]
    run = fleet([pair[0], item("b", 24, 1, 1000.0, seed=2, prefix_tokens=20)], Constant(), reuse=True, chunks=(32,))
    run.run()
    assert (run.cached_tokens, run.replicas[0].stats.live_rows) == (20, 28)


def test_round_robin():
    run = fleet([item(str(n), 4, 1) for n in range(5)], router=RoundRobin(), replicas=2, slots=4)
    run.run()
    assert [replica.stats.live_rows for replica in run.replicas] == [12, 8]


def test_least_loaded():
    """By all tokens that its requests may come to have, until they have ended."""
    router, chosen = LeastLoaded(), {}
    items = [item("a", 10, 10), item("b", 4, 2), item("c", 4, 9, 0.25), item("d", 30, 1, 0.5), item("e", 4, 1, 2.0)]
    run = fleet(items, replicas=2, slots=4)

    class Spy:
        def choose(self, prompt, replicas, at):
            chosen[at] = [replica.tokens(at) for replica in replicas], router.choose(prompt, replicas, at)
            return chosen[at][1]

    run._router = Spy()
    run.run()
    assert chosen[0.25] == ([20, 6], 1)
    assert chosen[0.5] == ([20, 19], 1)
    assert chosen[2.0] == ([20, 44], 0)  # b, of 6 tokens, has just ended


def test_the_replica_that_holds_the_prefix():
    shared = {"prefix_tokens": 20, "prefix_seed": 5}
    items = [
        item("a", 24, 20, seed=1),
        item("b", 24, 2, 0.5, seed=2, **shared),
        item("c", 24, 2, 20.0, seed=3, **shared),  # the other replica is idle, but this one held its prefix
        item("d", 24, 2, 20.5, seed=4, **shared),  # and still does, beside c
        item("e", 24, 2, 20.75, seed=9),  # nobody holds anything of it
    ]
    router, chosen = PrefixAware(), []
    run = fleet(items, replicas=2, slots=4, reuse=True)

    class Spy:
        def choose(self, prompt, replicas, at):
            chosen.append(router.choose(prompt, replicas, at))
            return chosen[-1]

    run._router = Spy()
    run.run()
    assert chosen == [0, 1, 1, 1, 0]
