"""Prefix reuse under random requests that begin alike, random policies, cancellations and turns that fail."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from batching.policies import POLICIES, Decision
from tests.batching.fake import FakeDevice, alone, make_scheduler, run_turn, sequence
from tests.batching.test_prefix import tokens_of


class Whimsical:
    """Admits, orders and leaves out whom it likes, but always does something."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def decide(self, view):
        admit = self.random.sample(list(view.waiting), min(view.free, len(view.waiting), self.random.randint(0, 3)))
        if not admit and not view.prefilling and not view.decoding:
            admit = view.waiting[:1]
        could = [*view.prefilling, *admit]
        prefill = self.random.sample(could, self.random.randint(min(1, len(could)), len(could)))
        return Decision(admit=admit, prefill=prefill, decode=not prefill or self.random.random() < 0.7)


@st.composite
def workloads(draw):
    """Requests that begin alike, with arrival and cancellation turns, turns that fail, and a way to serve them."""
    max_len = draw(st.sampled_from([40, 100]))
    trunks = [tokens_of(max_len, seed) for seed in range(2)]
    requests = []
    for index in range(draw(st.integers(1, 14))):
        trunk = draw(st.sampled_from(trunks))
        shared, own = draw(st.integers(0, max_len - 1)), draw(st.integers(0, 12))
        prompt = [*trunk[:shared], *tokens_of(max(own, 1 - shared), 100 + index)][:max_len]
        if draw(st.booleans()):  # as if it went on after an answer
            prompt = [*prompt, *alone(prompt, draw(st.integers(1, 30)))][:max_len]
        count = draw(st.integers(1, min(30, max_len - len(prompt) + 1)))
        arrival, cancelled = draw(st.integers(0, 25)), draw(st.none() | st.integers(0, 60))
        requests.append((index, prompt, count, arrival, cancelled))
    how = dict(
        slots=draw(st.integers(1, 6)),
        max_len=max_len,
        chunk_sizes=draw(st.sampled_from([(16,), (32,), (16, 64)])),
        block_q=draw(st.sampled_from([1, 16])),
        reuse=draw(st.sampled_from([True, True, True, False])),
    )
    policy = draw(st.sampled_from(sorted(POLICIES)) | st.integers(0, 10**6))
    return requests, how, policy, draw(st.sets(st.integers(0, 60), max_size=2))


@settings(max_examples=400, deadline=None)
@given(workloads())
def test_tokens_depend_on_the_request_alone(workload):
    """Whatever is found, copied, waited for, cancelled or lost: one end each, and the tokens of the request alone."""
    requests, how, policy, failing = workload
    scheduler, device = make_scheduler(**how), FakeDevice(how["slots"], how["max_len"])
    scheduler.policy = Whimsical(policy) if isinstance(policy, int) else POLICIES[policy]()
    sequences = {index: sequence(str(index), prompt, max_tokens=count) for index, prompt, count, _, _ in requests}
    ended, now = [], 0
    while scheduler.unfinished or any(arrival >= now for *_, arrival, _ in requests):
        for index, _, _, arrival, _ in requests:
            if arrival == now:
                scheduler.submit(sequences[index])
        for index, _, _, arrival, cancelled in requests:
            if cancelled == now and arrival <= now:
                scheduler.cancel(str(index))
        if now in failing:
            scheduler.plan()
            scheduler.fail_running("it broke")
            device.cache[:], device.last_token[:] = -999, -999
        ended += run_turn(scheduler, device)[1]
        now += 1
        assert now < 4000, "somebody starves"
    assert sorted(int(one.id) for one in ended) == sorted(sequences)
    for index, prompt, count, *_ in requests:
        one = sequences[index]
        expected = alone(prompt, count)
        assert one.output == (expected if one.finish_reason == "length" else expected[: len(one.output)])
        assert one.finish_reason in ("length", "cancelled", *(["error"] if failing else []))
        assert one.cached <= min(one.computed, len(prompt) - 1) * how["reuse"]
