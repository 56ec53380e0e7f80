"""Who gets the next turn: scheduling policies, small classes chosen by name.

A policy sees host state alone and decides; the scheduler carries out. To add one, write a class with `decide` in a file
of its own and name it `path.py:Name`, or register it in `POLICIES`.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from batching.sequence import SequenceState


@dataclass(frozen=True)
class View:
    """What a policy may look at before a turn."""

    waiting: Sequence["SequenceState"]  # in order of arrival; not those whose tokens are still on their way
    prefilling: Sequence["SequenceState"]  # have a slot and prompt tokens still to compute, in order of admission
    decoding: Sequence["SequenceState"]  # can advance; not those whose last token is still on its way
    running: Sequence["SequenceState"]  # all that have a slot, in order of admission
    slots: int
    free: int  # slots that nobody has
    now: float  # on the clock of `SequenceState.metrics`


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
    prefill_rows: int = 2**31  # at most so many prompt rows, if that is less than the turn has room for
    prefill_share: float = 1.0  # of the turn's prompt rows that hold tokens; the others are padding


class Policy(Protocol):
    """A class with `decide`; the rest may be left out.

    `uses`: which of FACTS it looks at, none if left out; requests that set others are refused.
    `preempts`: whether it ever takes a slot away; assumed if left out.
    """

    def decide(self, view: View) -> Decision: ...


BESIDE = 32  # prompt rows in a turn that shall be short
# What a request may tell policies, and what it is when it does not.
FACTS: dict[str, Any] = dict(priority=0, user=None, ttft_slo_s=None, tpot_slo_s=None, predicted_tokens=None)


def check_facts(sequence: "SequenceState", policy: Policy) -> None:
    """Raises ValueError where a request tells what the policy does not look at."""
    for name, default in FACTS.items():
        value, uses = getattr(sequence, name), getattr(policy, "uses", ())
        if value != default and name not in uses:
            raise ValueError(f"{name} is {value!r}, but the policy {type(policy).__name__} does not look at it")


class Continuous:
    """Chunked prefill beside decode, first come first served: a slot that is freed is taken in the very next turn.

    Orca (OSDI '22) iteration-level scheduling with the chunked prefill of Sarathi-Serve (arXiv 2403.02310).
    """

    preempts = False

    def decide(self, view: View) -> Decision:
        admit = view.waiting[: view.free]
        return Decision(admit=admit, prefill=[*view.prefilling, *admit])


class Priority:
    """The most urgent first, of equally urgent ones the first come. A more urgent request takes a slot of the least
    urgent one, which waits again, keeps its tokens and goes on where it was.
    """

    uses = ("priority",)

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

    preempts = False

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


class PrefillFirst:
    """Prompts before all else, and nobody decodes meanwhile: the default of vLLM's first engine (arXiv 2309.06180)."""

    preempts = False

    def decide(self, view: View) -> Decision:
        admit = view.waiting[: view.free]
        prefill = [*view.prefilling, *admit]
        return Decision(admit=admit, prefill=prefill, decode=not prefill)


class Dynamic:
    """A batch is formed whenever slots are free and no prompt is being computed: its members are prefilled together,
    apart from decoding, and each leaves when it ends. Who comes during a prefill waits for the next batch.
    """

    preempts = False

    def decide(self, view: View) -> Decision:
        if view.prefilling:
            return Decision(prefill=view.prefilling, decode=False)
        admit = view.waiting[: view.free]
        return Decision(admit=admit, prefill=admit, decode=not admit)


class DecodeFirst:
    """Who decodes is held up least: beside decode rows a turn has few prompt rows, all its room where nobody decodes.

    The stall-free batching of Sarathi-Serve (arXiv 2403.02310) with a small token budget.
    """

    preempts = False

    def decide(self, view: View) -> Decision:
        admit = view.waiting[: view.free]
        rows = BESIDE if view.decoding else Decision.prefill_rows
        return Decision(admit=admit, prefill=[*view.prefilling, *admit], prefill_rows=rows)


class ShortestFirst:
    """The shortest job first: prompt and answer, predicted or else the most it may generate. Long ones may starve."""

    uses = ("predicted_tokens",)
    preempts = False

    def decide(self, view: View) -> Decision:
        admit = sorted(view.waiting, key=work)[: view.free]
        return Decision(admit=admit, prefill=sorted([*view.prefilling, *admit], key=work))


def work(sequence: "SequenceState") -> int:
    """Tokens that are still to be computed."""
    answer = sequence.max_tokens if sequence.predicted_tokens is None else sequence.predicted_tokens
    return sequence.prefill_end - sequence.computed + max(answer - sequence.coming, 0)


class Fair:
    """Every user gets the same service: the virtual token counter of Sheng et al. (arXiv 2401.00588).

    A user's counter grows with tokens computed for it; a free slot goes to the user who waits and has the least. Who
    was away comes back with no less than the least of those who are there: absence earns nothing.
    """

    uses = ("user",)
    preempts = False
    prompt_weight, answer_weight = 1.0, 2.0  # an answer's token costs more, as in the paper

    def __init__(self) -> None:
        self.counters: dict[str | None, float] = {}
        self._charged: dict[SequenceState, float] = {}  # who had a slot in the last turn, and what it has paid
        self._here: set[str | None] = set()
        self._left = 0.0  # the counter of whoever left last

    def decide(self, view: View) -> Decision:
        self._charge(view.running)
        self._lift({one.user for one in (*view.running, *view.waiting)})
        waiting, admit = list(view.waiting), []
        counters = dict(self.counters)
        while waiting and len(admit) < view.free:
            least = min(waiting, key=lambda one: (counters[one.user], one.arrived))
            waiting.remove(least)
            admit.append(least)
            counters[least.user] += self.prompt_weight * len(least.prompt)
        self._charged |= dict.fromkeys(admit, 0.0)
        return Decision(admit=admit, prefill=[*view.prefilling, *admit])

    def _charge(self, running: Sequence["SequenceState"]) -> None:
        """For what was computed since the last turn, of those too that have ended by now."""
        for one, paid in self._charged.items():
            computed = min(one.computed, len(one.prompt)) - one.cached
            owed = self.prompt_weight * computed + self.answer_weight * one.coming
            self.counters[one.user] += owed - paid
            self._charged[one] = owed
        self._charged = {one: self._charged.get(one, 0.0) for one in running}

    def _lift(self, users: set[str | None]) -> None:
        for user in self._here - users:
            self._left = self.counters[user]
        least = min((self.counters[user] for user in users & self._here), default=self._left)
        for user in users - self._here:
            self.counters[user] = max(self.counters.get(user, 0.0), least)
        # Those who are away and would come back with the least need not be remembered.
        self.counters = {user: count for user, count in self.counters.items() if user in users or count > least}
        self._here = users


class Deadlines:
    """`slo`: the earliest deadline of a first token goes first; and while somebody's next token is late, prompts get
    few rows, so that turns are short.

    A request's own objectives count: `ttft_slo_s` from its arrival, by default `patience_s`, so that nobody starves;
    `tpot_slo_s` from its last token.
    """

    uses = ("ttft_slo_s", "tpot_slo_s")
    preempts = False
    patience_s = 30.0

    def decide(self, view: View) -> Decision:
        admit = sorted(view.waiting, key=self.deadline)[: view.free]
        late = any(self.late(one, view.now) for one in view.decoding)
        prefill = sorted([*view.prefilling, *admit], key=self.deadline)
        return Decision(admit=admit, prefill=prefill, prefill_rows=BESIDE if late else Decision.prefill_rows)

    def deadline(self, sequence: "SequenceState") -> tuple[float, int]:
        """Of its first token; then the order of arrival."""
        wanted = self.patience_s if sequence.ttft_slo_s is None else sequence.ttft_slo_s
        return sequence.metrics.arrival + wanted, sequence.arrived

    def late(self, sequence: "SequenceState", now: float) -> bool:
        tokens, wanted = sequence.metrics.tokens, sequence.tpot_slo_s
        return bool(tokens) and wanted is not None and now > tokens[-1] + wanted


POLICIES: dict[str, type[Policy]] = {
    "continuous": Continuous,
    "static": Static,
    "dynamic": Dynamic,
    "prefill_first": PrefillFirst,
    "decode_first": DecodeFirst,
    "shortest_first": ShortestFirst,
    "priority": Priority,
    "fair": Fair,
    "slo": Deadlines,
}


def make_policy(name: str) -> Policy:
    """By its name, or from a user's own file: `path.py:Name`. Raises ValueError for what is neither."""
    path, colon, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    if colon and path.endswith(".py"):
        return _from_file(path, attribute)
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not one of {sorted(POLICIES)}, nor a file with a class, path.py:Name")
    return POLICIES[name]()


def _from_file(path: str, attribute: str) -> Policy:
    spec = importlib.util.spec_from_file_location(f"policy_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"policy {path}:{attribute}: there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
        policy = getattr(module, attribute)()
    except Exception as error:
        raise ValueError(f"policy {path}:{attribute}: {type(error).__name__}: {error}") from error
    if not callable(getattr(policy, "decide", None)):
        raise ValueError(f"policy {path}:{attribute} has no method decide")
    return policy
