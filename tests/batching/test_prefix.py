"""Prefix reuse against a fake device: which slot, what is copied, who waits; and that nobody notices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.plan import Sampled
from batching.policies import POLICIES, Decision
from batching.prefix import WORTHWHILE, Copy, Prefixes, common
from tests.batching.fake import FakeDevice, alone, make_scheduler, run_turn, sequence

SCORED: dict[str, dict] = {"first": {}, "scored": {"prompt_logprobs": 0}, "other": {}}


def tokens_of(length, seed=0):
    return [int(x) for x in np.random.default_rng(seed).integers(0, 97, length)]


class Served:
    """A scheduler that reuses, with its device."""

    def __init__(self, slots=4, max_len=512, chunk_sizes=(128,), **how):
        self.scheduler = make_scheduler(slots, max_len, chunk_sizes, **{"reuse": True} | how)
        self.device = FakeDevice(slots, max_len)
        self.live_rows, self.copies, self.submitted = 0, [], []

    def submit(self, prompt, max_tokens=2):
        one = sequence(str(len(self.submitted)), prompt, max_tokens=max_tokens)
        self.submitted.append(one)
        self.scheduler.submit(one)
        return one

    def turn(self):
        turn, _ = run_turn(self.scheduler, self.device)
        if turn:
            self.live_rows += turn.plan.live_rows
            self.copies += turn.copies

    def finish(self):
        """Serve all to the end; their tokens must be right, and the rows computed those that were not found."""
        while self.scheduler.unfinished:
            self.turn()
        for one in self.submitted:
            assert one.output == alone(one.prompt, one.max_tokens)[: len(one.output)]
            assert one.finish_reason == "cancelled" or len(one.output) == one.max_tokens
        assert self.live_rows == sum(one.computed - one.cached for one in self.submitted)

    def serve(self, prompt, max_tokens=2):
        one = self.submit(prompt, max_tokens)
        self.finish()
        return one


@pytest.mark.parametrize("extra", [-20, -1, 0, 1, 20])
def test_a_prompt_again_longer_or_shorter(extra):
    """All but the last token is found, in the slot where it is, though others are empty."""
    served = Served()
    first = served.serve(tokens_of(100))
    again = served.serve(tokens_of(120)[: 100 + extra])
    assert again.cached == min(100, len(again.prompt) - 1)
    assert again.slot == (first.slot if extra > -WORTHWHILE else 1)
    assert served.scheduler.free == [0, 1, 2, 3]


def test_a_prompt_that_goes_on_after_an_answer():
    """The next turn of a conversation: its prompt is what was prompt and answer before."""
    served = Served()
    first = served.serve(tokens_of(50), max_tokens=30)
    said = [*first.prompt, *first.output]
    exact = served.serve(said)
    assert exact.cached == len(said) - 1  # the last token of an answer was never fed back
    longer = served.serve([*said, *exact.output, 5, 6, 7])
    assert longer.cached == len(said) + 1
    assert {one.slot for one in served.submitted} == {0}
    assert served.copies == []


@pytest.mark.parametrize("shared", [1, WORTHWHILE - 1, WORTHWHILE, 100])
def test_rows_of_a_running_request_are_copied(shared):
    served = Served()
    first = served.submit(tokens_of(150), max_tokens=20)
    for _ in range(4):
        served.turn()
    other = served.submit([*first.prompt[:shared], 97, *tokens_of(9, 1)])
    served.finish()
    found = shared if shared >= WORTHWHILE else 0
    assert other.cached == found
    assert served.copies == ([Copy(0, 1, found)] if found else [])


def test_only_rows_that_are_written_are_copied_and_the_rest_is_waited_for():
    served = Served()
    first = served.submit(tokens_of(300), max_tokens=20)
    served.turn()
    assert first.computed == 128
    other = served.submit([*first.prompt[:250], 1])
    served.turn()
    assert (first.computed, other.computed, served.copies) == (256, 0, [])
    served.finish()
    assert served.copies == [Copy(0, 1, 250)]


def test_what_others_may_need_is_not_taken():
    """A long conversation keeps its slot while an empty one will do; the one that was freed first goes first."""
    served = Served(slots=2)
    system = tokens_of(100)
    long = served.serve([*system, *tokens_of(200, 1)])
    assert served.serve([*system, *tokens_of(5, 2)]).slot == 1
    assert served.copies == [Copy(0, 1, 100)]
    assert served.serve([*long.prompt, *long.output]).cached == 301
    assert served.serve(tokens_of(30, 3)).slot == 1
    assert served.serve(tokens_of(30, 4)).slot == 0
    assert served.serve(tokens_of(30, 5)).slot == 1


@pytest.mark.parametrize("block_q", [1, 16])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_shared_prompt_is_computed_once(policy, block_q):
    """64 requests that share 300 tokens, on 16 slots: one computes them, at once or while the others wait."""
    system = tokens_of(300)
    prompts = [[*system, *tokens_of(1 + index % 40, index + 1)] for index in range(64)]
    served = {}
    for reuse in (False, True):
        served[reuse] = Served(slots=16, policy=policy, block_q=block_q, reuse=reuse)
        for index, prompt in enumerate(prompts):
            served[reuse].submit(prompt, 1 + index % 9)
        served[reuse].finish()
    computed = [sum(len(one.prompt) - one.cached for one in served[reuse].submitted) for reuse in (False, True)]
    assert computed[0] == sum(map(len, prompts))
    assert computed[1] <= 300 + sum(len(prompt) - 300 for prompt in prompts)
    assert computed[1] < 0.15 * computed[0]


def test_samples_of_one_prompt_share_all_but_its_last_token():
    served = Served(slots=8, chunk_sizes=(64,))
    for _ in range(8):
        served.submit(tokens_of(200))
    served.finish()
    assert [one.cached for one in served.submitted] == [0] + [199] * 7


@pytest.mark.parametrize("after", [1, 2])
def test_the_leader_is_cancelled_and_the_others_go_on_from_there(after):
    served = Served()
    leader = served.submit(tokens_of(300))
    others = [served.submit([*tokens_of(300), 5, index]) for index in range(3)]
    for _ in range(after):
        served.turn()
    assert [one.computed for one in others] == [0, 0, 0]
    served.scheduler.cancel(leader.id)
    served.finish()
    assert [one.cached for one in others] == [128 * after, 301, 301]


def test_rows_behind_logits_that_are_not_finite_are_not_used():
    served = Served()
    leader = served.submit(tokens_of(100))
    others = [served.submit([*tokens_of(100), 5, index]) for index in range(3)]
    turn = served.scheduler.plan()
    served.device.step(turn.plan.rows)
    served.scheduler.commit(turn, Sampled(np.full(4, -1)))
    assert leader.finish_reason == "error"
    while served.scheduler.unfinished:
        served.turn()
    assert [one.cached for one in others] == [0, 101, 101]
    assert all(one.output == alone(one.prompt, 2) for one in others)


def test_rows_are_copied_before_their_slot_is_taken():
    """The leader ends with its first token, and in the next turn another has its slot."""
    served = Served(slots=2)
    served.submit(tokens_of(128), max_tokens=1)
    follower, other = served.submit([*tokens_of(128), 5]), served.submit(tokens_of(60, 1))
    served.finish()
    assert (follower.cached, other.cached) == (128, 0)
    assert served.copies == [Copy(0, 1, 128)]


@pytest.mark.parametrize("shared", [WORTHWHILE - 1, WORTHWHILE])
def test_nobody_waits_for_few_rows(shared):
    served = Served(chunk_sizes=(256,))
    first, second = (served.submit([*tokens_of(shared), *tokens_of(50, seed)]) for seed in (1, 2))
    served.turn()
    assert first.computed == len(first.prompt)
    assert second.computed == (0 if shared >= WORTHWHILE else len(second.prompt))
    served.finish()


def test_an_empty_slot_is_taken_first_though_it_was_freed_last():
    served = Served(slots=2)
    kept = served.serve(tokens_of(30))
    broken = served.submit(tokens_of(30, 1))
    turn = served.scheduler.plan()
    served.device.step(turn.plan.rows)
    served.scheduler.commit(turn, Sampled(np.full(2, -1)))
    other = sequence("other", tokens_of(30, 2), max_tokens=1)
    served.scheduler.submit(other)
    served.turn()
    assert (kept.slot, broken.slot, other.slot) == (0, 1, 1)


def test_after_a_failed_turn_nothing_is_counted_on():
    served = Served()
    first = served.serve(tokens_of(100))
    running = served.submit([*tokens_of(100), 3, 4], 9)
    queued = [served.submit([*tokens_of(100), 3, 4, index]) for index in range(6)]
    served.turn()
    served.scheduler.plan()
    served.scheduler.fail_running("it broke")
    served.device.cache[:] = -999
    assert running.finish_reason == "error"
    while served.scheduler.unfinished:
        served.turn()
    assert first.cached == 0
    for one in queued[3:]:
        assert one.output == alone(one.prompt, 2)
    assert sorted(one.cached for one in queued[3:]) == [0, 102, 102]


def test_a_policy_that_starves_the_leader_does_not_starve_the_others():
    class Last:
        """Prompt rows for the one that was admitted last alone."""

        def decide(self, view):
            admit = view.waiting[: view.free]
            return Decision(admit=admit, prefill=[*view.prefilling, *admit][-1:])

    served = Served(chunk_sizes=(16,))
    served.scheduler.policy = Last()
    for index in range(4):
        served.submit([*tokens_of(100), index])
    served.finish()
    assert [one.metrics.end for one in served.submitted] == sorted(one.metrics.end for one in served.submitted)[::-1]


def test_off_slots_are_given_out_in_order_and_nothing_is_found():
    served = Served(reuse=False)
    for _ in range(4):
        assert served.serve(tokens_of(50)).slot == 0
    assert [one.cached for one in served.submitted] == [0] * 4
    assert served.scheduler.prefixes.held(0) == ()


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_whole():
    prefixes, prompt = Prefixes(2, reuse=True), tokens_of(50)
    first, scored, other = (sequence(name, prompt, **how) for name, how in SCORED.items())
    prefixes.place(first, [0, 1])
    first.computed = 50
    prefixes.release(first)
    assert (prefixes.place(scored, [0, 1]), scored.cached) == (1, 0)
    assert (prefixes.place(other, [0]), other.cached) == (0, 49)
    assert prefixes.take_copies() == ()


@given(st.lists(st.integers(0, 1), max_size=200), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_common(tokens, change, cut, most):
    other = [token if index != change else 2 for index, token in enumerate(tokens)][:cut]
    expected = 0
    while expected < min(len(other), most) and other[expected] == tokens[expected]:
        expected += 1
    assert common(tuple(tokens), tuple(other), most) == expected
