"""The host side against a fake device: no weights, no jax, milliseconds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.plan import FROM_DEVICE
from batching.policies import POLICIES, Decision, make_policy
from batching.request import QueueFull
from tests.batching.fake import FakeDevice, alone, make_scheduler, next_token, run_turn, sequence


def prompt_of(length, seed=0):
    return [int(x) for x in np.random.default_rng(seed).integers(0, 97, length)]


def test_one_request_by_hand():
    """A prompt of 17 at chunk 16 takes two turns, then one turn a token; the token that ends it frees the slot."""
    scheduler, device = make_scheduler(slots=2), FakeDevice(2, 64)
    one = sequence("a", prompt_of(17), max_tokens=3)
    scheduler.submit(one)
    turn, ended = run_turn(scheduler, device)
    assert turn.plan.shape == (2, 16)
    assert turn.plan.live_rows == 16
    assert turn.sampled == ()
    turn, ended = run_turn(scheduler, device)
    assert turn.plan.live_rows == 1
    assert one.output == [next_token(one.prompt)]
    turn, ended = run_turn(scheduler, device)
    assert turn.plan.shape == (2, 0)
    assert turn.plan.rows.tokens.tolist() == [FROM_DEVICE, 0]
    assert turn.plan.rows.slots.tolist() == [0, 2]
    assert turn.plan.rows.positions.tolist() == [17, 0]
    assert not ended
    _, ended = run_turn(scheduler, device)
    assert ended == [one]
    assert one.finish_reason == "length"
    assert one.output == alone(one.prompt, 3)
    assert one.metrics.turns == 4
    assert scheduler.free == [0, 1]
    assert not scheduler.unfinished
    assert scheduler.plan() is None


def test_a_freed_slot_is_taken_in_the_very_next_turn():
    scheduler, device = make_scheduler(slots=1), FakeDevice(1, 64)
    for name in "ab":
        scheduler.submit(sequence(name, prompt_of(3), max_tokens=2))
    assert [run_turn(scheduler, device)[1] for _ in range(1)] == [[]]
    _, ended = run_turn(scheduler, device)
    assert [one.id for one in ended] == ["a"]
    turn, _ = run_turn(scheduler, device)
    assert turn.plan.live_rows == 3
    assert turn.plan.rows.slots[1:4].tolist() == [0, 0, 0]


def test_prefill_rides_beside_decode():
    scheduler, device = make_scheduler(slots=2), FakeDevice(2, 64)
    scheduler.submit(sequence("a", prompt_of(5), max_tokens=9))
    run_turn(scheduler, device)
    scheduler.submit(sequence("b", prompt_of(40), max_tokens=1))
    turns = [run_turn(scheduler, device)[0] for _ in range(3)]
    assert [turn.plan.live_rows for turn in turns] == [1 + 16, 1 + 16, 1 + 8]
    assert [len(turn.sampled) for turn in turns] == [1, 1, 2]


def test_static_waits_for_the_longest_and_pads():
    scheduler, device = make_scheduler(slots=2, policy="static"), FakeDevice(2, 64)
    scheduler.submit(sequence("long", prompt_of(5), max_tokens=4))
    scheduler.submit(sequence("short", prompt_of(5), max_tokens=2))
    scheduler.submit(sequence("next", prompt_of(5), max_tokens=1))
    busy = []
    while scheduler.unfinished:
        turn, _ = run_turn(scheduler, device)
        busy.append((turn.busy, turn.plan.num_decode, turn.plan.live_rows))
    # Prompts take a block of 16 rows each, so one chunk of 16 a turn.
    assert busy == [(2, 2, 5), (2, 2, 5), (2, 2, 2), (1, 2, 1), (1, 2, 1), (1, 2, 5)]


@pytest.mark.parametrize(("prompt", "max_tokens", "accepted"), [(64, 1, True), (65, 1, False), (64, 2, False)])
def test_lengths_at_the_end_of_a_slot(prompt, max_tokens, accepted):
    scheduler, device = make_scheduler(), FakeDevice(4, 64)
    one = sequence("a", prompt_of(prompt), max_tokens=max_tokens)
    if not accepted:
        with pytest.raises(ValueError, match=rf"{prompt} tokens.*64"):
            scheduler.submit(one)
        assert not scheduler.unfinished
        return
    scheduler.submit(one)
    while scheduler.unfinished:
        run_turn(scheduler, device)
    assert one.output == alone(one.prompt, 1)


@pytest.mark.parametrize("prompt", [1, 63, 64])
def test_without_max_tokens_a_request_fills_its_slot(prompt):
    scheduler, device = make_scheduler(), FakeDevice(4, 64)
    one = sequence("a", prompt_of(prompt))
    scheduler.submit(one)
    while scheduler.unfinished:
        run_turn(scheduler, device)
    assert one.output == alone(one.prompt, 64 - prompt + 1)
    assert one.finish_reason == "length"


def test_stop_token():
    prompt = prompt_of(4)
    expected = alone(prompt, 10)
    scheduler, device = make_scheduler(), FakeDevice(4, 64)
    one = sequence("a", prompt, max_tokens=10, stop_token_ids=(expected[6],))
    scheduler.submit(one)
    while scheduler.unfinished:
        run_turn(scheduler, device)
    first = expected.index(expected[6])
    assert one.output == expected[: first + 1]
    assert (one.finish_reason, one.stop_reason) == ("stop", expected[6])


def test_non_finite_logits_end_that_request_alone():
    scheduler, device = make_scheduler(), FakeDevice(4, 64)
    bad, good = sequence("bad", prompt_of(4), max_tokens=5), sequence("good", prompt_of(4, 1), max_tokens=5)
    scheduler.submit(bad)
    scheduler.submit(good)
    run_turn(scheduler, device)
    run_turn(scheduler, device)
    turn = scheduler.plan()
    sampled = device.step(turn.plan.rows)
    sampled.tokens[0] = -1
    scheduler.commit(turn, sampled)
    assert bad.finish_reason == "error"
    assert bad.error == "the logits after 6 tokens are not finite"
    assert bad.slot in scheduler.free
    while scheduler.unfinished:
        run_turn(scheduler, device)
    assert good.output == alone(good.prompt, 5)


def test_queue_bound_and_duplicates():
    scheduler = make_scheduler(max_queue=2)
    scheduler.submit(sequence("a", [1], max_tokens=1))
    with pytest.raises(ValueError, match="'a' is still running"):
        scheduler.submit(sequence("a", [1], max_tokens=1))
    scheduler.submit(sequence("b", [1], max_tokens=1))
    with pytest.raises(QueueFull, match="2 requests are waiting, max_queue is 2"):
        scheduler.submit(sequence("c", [1], max_tokens=1))
    device = FakeDevice(4, 64)
    ended = []
    while scheduler.unfinished:
        ended += run_turn(scheduler, device)[1]
    assert [one.id for one in ended] == ["a", "b"]
    scheduler.submit(sequence("a", [1], max_tokens=1))  # an ended id may come again


@pytest.mark.parametrize("at", range(6))
def test_cancel_anywhere(at):
    """Queued, between chunks, decoding: one end, the slot is free, its next user is right."""
    scheduler, device = make_scheduler(slots=1), FakeDevice(1, 64)
    one, following = sequence("a", prompt_of(40), max_tokens=3), sequence("b", prompt_of(20, 2), max_tokens=3)
    scheduler.submit(one)
    scheduler.submit(following)
    ended = []
    for _ in range(at):
        ended += run_turn(scheduler, device)[1]
    assert scheduler.cancel("a") is (at < 5)
    assert scheduler.cancel("a") is False
    assert scheduler.cancel("nobody") is False
    while scheduler.unfinished:
        ended += run_turn(scheduler, device)[1]
    assert [one.id for one in ended] == ["a", "b"]
    assert one.finish_reason == ("cancelled" if at < 5 else "length")
    assert one.output == alone(one.prompt, 3)[: max(0, at - 2)]
    assert following.output == alone(following.prompt, 3)


def test_cancel_while_its_row_is_on_the_device():
    scheduler, device = make_scheduler(slots=1), FakeDevice(1, 64)
    one, following = sequence("a", prompt_of(4), max_tokens=9), sequence("b", prompt_of(4, 2), max_tokens=2)
    scheduler.submit(one)
    scheduler.submit(following)
    turn = scheduler.plan()
    scheduler.cancel("a")
    progress = scheduler.commit(turn, device.step(turn.plan.rows))
    assert [(step.sequence.id, step.token) for step in progress] == [("a", None)]
    assert one.output == []
    while scheduler.unfinished:
        run_turn(scheduler, device)
    assert following.output == alone(following.prompt, 2)


def test_a_policy_that_schedules_nothing_is_reported():
    class Lazy:
        def decide(self, view):
            return Decision()

    scheduler = make_scheduler()
    scheduler.policy = Lazy()
    scheduler.submit(sequence("a", [1], max_tokens=1))
    with pytest.raises(RuntimeError, match="Lazy scheduled nothing for 1 requests"):
        scheduler.plan()


def test_unknown_policy():
    with pytest.raises(ValueError, match=r"'fastest' is not one of .*'continuous'.*path\.py:Name"):
        make_policy("fastest")


@st.composite
def workloads(draw):
    """Requests with arrival turns and cancellation turns, and a way to serve them."""
    max_len = draw(st.sampled_from([16, 33, 64]))
    requests = []
    for index in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, max_len))
        count = draw(st.integers(1, max_len - prompt + 1))
        arrival, cancelled = draw(st.integers(0, 20)), draw(st.none() | st.integers(0, 40))
        requests.append((index, prompt_of(prompt, seed=index), count, arrival, cancelled))
    return dict(
        requests=requests,
        slots=draw(st.integers(1, 8)),
        max_len=max_len,
        chunk_sizes=draw(st.sampled_from([(16,), (32,), (16, 64)])),
        block_q=draw(st.sampled_from([1, 16])),
        policy=draw(st.sampled_from(sorted(POLICIES))),
    )


@settings(max_examples=300, deadline=None)
@given(workloads())
def test_tokens_depend_on_the_request_alone(workload):
    """Any arrivals, slots, chunk sizes, policy and cancellations: one end each, tokens as if alone, no slot leaks."""
    requests, max_len = workload.pop("requests"), workload["max_len"]
    scheduler, device = make_scheduler(**workload), FakeDevice(workload["slots"], max_len)
    sequences = {index: sequence(str(index), prompt, max_tokens=count) for index, prompt, count, _, _ in requests}
    ended, now = [], 0
    while scheduler.unfinished or any(arrival >= now for *_, arrival, _ in requests):
        for index, _, _, arrival, _ in requests:
            if arrival == now:
                scheduler.submit(sequences[index])
        for index, _, _, arrival, cancelled in requests:
            if cancelled == now and arrival <= now:
                scheduler.cancel(str(index))
        ended += run_turn(scheduler, device)[1]
        now += 1
        assert now < 2000, "somebody starves"
    assert sorted(int(one.id) for one in ended) == sorted(sequences)
    for index, prompt, count, *_ in requests:
        one = sequences[index]
        expected = alone(prompt, count)
        assert one.output == (expected if one.finish_reason == "length" else expected[: len(one.output)])
        assert one.finish_reason in ("length", "cancelled")
