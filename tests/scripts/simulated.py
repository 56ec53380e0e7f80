"""Simulated replicas whose times can be computed by hand."""

from batching.plan import PlanShapes
from batching.policies import Decision, make_policy
from scripts.fleet import Fleet, RoundRobin
from scripts.replica import Replica, Setup
from scripts.step_cost import HostCost, Line
from scripts.traces import Item


class LastComeFirst:
    """A policy that nobody registered."""

    def decide(self, view):
        admit = [*view.waiting][::-1][: view.free]
        return Decision(admit=admit, prefill=[*view.prefilling, *admit])


class SteadyLast(LastComeFirst):
    steady = True


class Constant:
    """Every turn takes a second, half a second for each row that is copied, and so much for each position read."""

    def __init__(self, host=None, per_token=0.0):
        self.host, self.about, self._line = host or HostCost(), {}, Line(1.0, per_token)

    def line(self, load):
        return Line(self._line.constant + 0.5 * load.copied, self._line.slope)


def item(name, prompt, answer, at=0.0, **more):
    return Item(name, answer, at, prompt_tokens=prompt, **more)


def setup(slots=2, chunks=(16,), block_q=1, max_len=64, max_queue=100, run_ahead=0, reuse=False):
    return Setup(PlanShapes.choose(slots, chunks, block_q), max_len, max_queue, run_ahead, reuse)


def fleet(items, cost=None, policy="continuous", router=None, replicas=1, leaps=True, **how):
    def make(name):
        return make_policy(name) if isinstance(name, str) else name()

    made = [Replica(setup(**how), cost or Constant(), make(policy), leaps=leaps) for _ in range(replicas)]
    return Fleet(items, made, router or RoundRobin(), vocabulary=50 if how.get("reuse") else None)
