"""What each policy, and losing a slot, does to the rows that are computed, on the fake device."""

from dataclasses import replace

import numpy as np
import pytest

from batching import Request
from batching.policies import POLICIES, Continuous, Decision
from tests.batching.fake import FakeDevice, make_scheduler, run_turn, sequence
from tests.batching.fake_engine import expected_of, fake_engine, finish, prompt_of, request_of
from tests.batching.test_cancel import LONG, TURNS, live


@pytest.mark.parametrize("block_q", [1, 16])
@pytest.mark.parametrize(("policy", "rows"), [("continuous", 64 + 3 * 16), ("static", 4 * 64)])
def test_static_pads_prompts_to_the_longest(policy, rows, block_q):
    scheduler = make_scheduler(slots=4, policy=policy, block_q=block_q, chunk_sizes=(16, 64))
    device, computed = FakeDevice(4, 64), 0
    for index, length in enumerate((16, 64, 16, 16)):
        scheduler.submit(sequence(f"{index}", range(1, length + 1), max_tokens=1))
    while scheduler.unfinished:
        turn, _ = run_turn(scheduler, device)
        computed += turn.plan.shape[1]
    # Programs come in a few sizes, so a turn may compute a little more.
    assert rows <= computed < rows + 64


def test_without_priorities_the_most_urgent_is_the_first_to_come():
    """Turn by turn the same rows as first come, first served."""
    turns = {}
    for policy in ("continuous", "priority"):
        scheduler, device, turns[policy] = make_scheduler(slots=3, policy=policy), FakeDevice(3, 64), []
        for index in range(12):
            scheduler.submit(sequence(f"{index}", prompt_of(1 + 7 * index % 40, index), max_tokens=1 + 5 * index % 9))
        while scheduler.unfinished:
            turn, _ = run_turn(scheduler, device)
            turns[policy].append([one.tolist() for one in turn.plan.rows])
    assert turns["continuous"] == turns["priority"]


LATER, URGENT = replace(LONG, priority=5), request_of("urgent", prompt_of(20, 3), max_tokens=2)


def test_the_prompt_of_the_most_urgent_is_computed_first():
    engine = fake_engine(slots=2, run_ahead=0, policy="priority")
    for request in (LATER, URGENT):
        engine.submit(request)
        engine.step()
    engine.step()
    assert live(engine, "urgent").computed == 20
    assert {output.id: output.token_ids for output in finish(engine)} == {
        "long": expected_of(LATER),
        "urgent": expected_of(URGENT),
    }


@pytest.mark.parametrize("ahead", [2, 3])
def test_a_slot_is_free_before_its_tokens_have_come(ahead):
    """It waits for them: what it goes on from is not known yet."""
    engine = fake_engine(slots=2, run_ahead=ahead, policy="priority")
    long = replace(request_of("long", [1], max_tokens=20), priority=5)
    requests = [long, request_of("beside", prompt_of(48, 2), max_tokens=1), URGENT]
    for request in requests[:2]:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    state, plan, seen = live(engine, "long"), engine.scheduler.plan, []

    def planned():
        turn = plan()
        seen.append((state.slot is None, state.in_flight > 0, bool(engine.scheduler.free)))
        return turn

    engine.scheduler.plan = planned
    engine.submit(URGENT)
    outputs = {output.id: output.token_ids for output in finish(engine)}
    assert outputs == {request.id: expected_of(request) for request in requests}
    assert (True, True, True) in seen
    assert (True, False, True) not in seen


class Aside(Continuous):
    """Takes the slot of the request "long" once, for nobody."""

    preempts = True

    def __init__(self, plan, reuse):
        self.left, self.reuse, self.again = plan, reuse, 0

    def decide(self, view):
        self.left -= 1
        lost = [one for one in view.running if one.id == "long"] if self.left == 0 else []
        if not lost:
            return super().decide(view)
        known = min(lost[0].computed, len(lost[0].tokens)) if self.reuse else 0
        ended = len(lost[0].output) + lost[0].in_flight == lost[0].max_tokens  # once these have come
        self.again = 0 if ended else lost[0].computed - known
        return Decision(lost)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("plan", range(3, TURNS + 4))
def test_rows_that_nobody_took_are_not_computed_again(plan, ahead, reuse):
    """But for those of tokens that were on their way, since whose rows these are was not known."""
    engine = fake_engine(slots=2, run_ahead=ahead, prefix_reuse=reuse)
    engine.scheduler.policy = policy = Aside(plan, reuse)
    beside = request_of("beside", prompt_of(5), max_tokens=30)
    engine.submit(beside)
    engine.step()
    engine.submit(LONG)
    outputs = {output.id: output for output in finish(engine)}
    for request in (beside, LONG):
        assert outputs[request.id].token_ids == expected_of(request)
    assert outputs["long"].metrics.preemptions == (plan <= TURNS + ahead)
    assert engine.stats.live_rows == 5 + 29 + 45 + 5 + policy.again
    assert not reuse or policy.again <= max(0, ahead - 1)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("at", range(1, 8))
def test_rows_of_another_slot_are_found_again(at, ahead):
    """Whether it waited for them when it lost its slot or had them already: they are told of once."""
    engine = fake_engine(slots=2, run_ahead=ahead, policy="priority")
    beside = request_of("beside", [*LONG.prompt_ids[:40], 1], max_tokens=20)
    for request in (beside, LATER):
        engine.submit(request)
    for _ in range(at):
        engine.step()
    had = live(engine, "long").computed
    assert had == (0 if at < 4 else 41 + at)
    engine.submit(URGENT)
    outputs = {output.id: output for output in finish(engine)}
    assert outputs["long"].token_ids == expected_of(LATER)
    assert (outputs["long"].cached_tokens, outputs["long"].metrics.preemptions) == (40, 1)
    assert engine.stats.live_rows == (41 + 19) + (20 + 1) + (5 + 5) + max(0, had - 40)
    assert engine.stats.cached_tokens == 40


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("at", range(TURNS))
def test_every_logprob_of_a_prompt_comes_once(at, ahead, count):
    """Each tells where its row is and for which token."""
    engine = fake_engine(slots=1, run_ahead=ahead, policy="priority")
    run = engine.run

    def told(turn):
        rows = turn.plan.rows
        values = np.zeros((len(rows.tokens), 21), np.float32)
        values[:, 0] = rows.positions * 1000.0 + rows.targets
        return run(turn)._replace(prompt_logprobs=values, prompt_top_ids=np.zeros((len(rows.tokens), 20), np.int32))

    engine.run = told
    engine.submit(replace(request_of("long", LONG.prompt_ids, max_tokens=count, prompt_logprobs=0), priority=1))
    outputs = [output for _ in range(at) for output in engine.step()]
    engine.submit(URGENT)
    outputs = {output.id: output for output in [*outputs, *finish(engine)]}
    expected = [position * 1000.0 + token for position, token in enumerate(LONG.prompt_ids[1:])]
    assert outputs["long"].prompt_logprobs[0] is None
    assert [one.logprob for one in outputs["long"].prompt_logprobs[1:]] == expected
    assert outputs["long"].token_ids == expected_of(LONG)[:count]


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_a_priority_that_nobody_looks_at_is_refused(policy):
    engine = fake_engine(policy=policy)
    with pytest.raises(ValueError, match=f"priority is 5, but the policy {policy.title()} does not look at it"):
        engine.submit(LATER)
    with pytest.raises(ValueError, match="request 1: priority is 5"):
        engine.stream([URGENT, LATER])
    assert not engine.unfinished


@pytest.mark.parametrize("priority", [1.0, "1", None, True])
def test_a_priority_that_is_no_integer_is_refused(priority):
    with pytest.raises(ValueError, match="priority must be an integer"):
        Request(prompt_ids=[1], priority=priority)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 15, 16])
def test_samples_of_one_request_compute_its_prompt_once(length, slots, policy):
    """However short it is, but for its last token, whose logits each of them needs."""
    requests = [
        request_of("other", prompt_of(30, 9), max_tokens=5),
        request_of("samples", prompt_of(length), max_tokens=4, n=5),
        request_of("next", prompt_of(9, 4), max_tokens=3),
    ]
    computed = {}
    for reuse in (False, True):
        engine = fake_engine(slots, policy=policy, prefix_reuse=reuse)
        for output in engine.generate(requests):
            (request,) = (one for one in requests if one.id == output.id)
            assert output.token_ids == expected_of(request)
            assert output.cached_tokens == (length - 1 if reuse and output.id == "samples" and output.index else 0)
        computed[reuse] = engine.stats.live_rows - (30 + 4) - (9 + 2) - 5 * 3
    assert computed == {False: 5 * length, True: length + 4}
