"""Cancellation wherever a request is: one end, the slot free by the next step, its next user right, others unharmed."""

import itertools

import pytest

from batching import SamplingParams
from tests.batching.fake_engine import (
    check_slots,
    expected_of,
    fake_engine,
    finish,
    letters,
    prompt_of,
    request_of,
    text_of,
)

LONG = request_of("long", prompt_of(45, 1), max_tokens=6)  # a prompt of three chunks
TURNS = 9  # of LONG alone, in lock-step


def neighbours():
    return [request_of(f"n{seed}", prompt_of(7 + 9 * seed, seed), max_tokens=20) for seed in range(2)]


def follower():
    return request_of("next", prompt_of(30, 5), max_tokens=4)


def live(engine, name):
    sequences = [*engine.scheduler.running, *engine.scheduler.waiting]
    return next((one for one in sequences if one.id == name), None)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("run_beside", [False, True])
@pytest.mark.parametrize("at", range(TURNS + 6))
def test_at_every_step_of_a_prefill_and_a_decode(at, run_beside, ahead):
    engine = fake_engine(slots=3 if run_beside else 1, run_ahead=ahead)
    others = neighbours() if run_beside else []
    for request in [*others, LONG, follower()]:
        engine.submit(request)
    outputs = list(itertools.chain.from_iterable(engine.step() for _ in range(at)))
    state = live(engine, "long")
    had, slot = (list(state.output), state.slot) if state else (None, None)
    assert engine.cancel("long") is (state is not None)
    assert engine.cancel("long") is False
    check_slots(engine)
    if slot is not None:
        assert slot in engine.scheduler.free
        outputs += engine.step()
        assert live(engine, "next").slot == slot, "the very next step gives the slot away"
    outputs += finish(engine)
    assert sorted(output.id for output in outputs) == sorted(request.id for request in [*others, LONG, follower()])
    ends = {output.id: output for output in outputs}
    assert ends["long"].finish_reason == ("length" if state is None else "cancelled")
    assert ends["long"].token_ids == (expected_of(LONG) if state is None else had)
    assert ends["long"].metrics.end is not None
    for request in [*others, follower()]:
        assert ends[request.id].token_ids == expected_of(request)
        assert ends[request.id].finish_reason == "length"


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_cases_cover_prefill_decode_and_afterwards(ahead):
    engine = fake_engine(slots=1, run_ahead=ahead)
    engine.submit(LONG)
    seen = []
    while engine.unfinished:
        state = live(engine, "long")
        seen.append((state.slot is not None, state.prefilling, len(state.output)))
        engine.step()
    assert seen[0] == (False, True, 0)
    assert (True, True, 0) in seen
    assert seen[-1] == (True, False, 5)
    assert len(seen) <= TURNS + ahead


def test_between_plan_and_commit():
    """The row is on the device already: its token is dropped."""
    engine = fake_engine(slots=1, run_ahead=0)
    engine.submit(request_of("a", prompt_of(5), max_tokens=9))
    engine.submit(follower())
    engine.step()
    turn = engine.scheduler.plan()
    assert engine.cancel("a")
    engine.finish(turn, engine.run(turn))
    outputs = finish(engine)
    assert [(output.id, output.completion_tokens) for output in outputs] == [("a", 1), ("next", 4)]
    assert outputs[1].token_ids == expected_of(follower())


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["stop string", "stop token", "cancel"])
def test_tokens_that_were_drawn_ahead_are_dropped(how, ahead):
    """At most one row a turn that the device was ahead, and no token of them; a length is known beforehand."""
    engine = fake_engine(slots=1, tokenizer=letters(), run_ahead=ahead)
    tokens, params = expected_of(request_of("a", prompt_of(5), max_tokens=9)), {}
    if how != "cancel":
        params = {"stop": text_of(tokens[1:3])} if how == "stop string" else {"stop_token_ids": tokens[2:3]}
    engine.submit(request_of("a", prompt_of(5), max_tokens=9, **params))
    engine.submit(follower())
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
        if how == "cancel" and (one := live(engine, "a")) and len(one.output) == 3:
            engine.cancel("a")
        check_slots(engine)
    first, second = outputs
    assert (first.token_ids, second.token_ids) == (tokens[:3], expected_of(follower()))
    assert engine.stats.wasted_rows == ahead


@pytest.mark.parametrize("victim", range(5))
def test_in_the_queue(victim):
    engine = fake_engine(slots=1)
    requests = [request_of(str(seed), prompt_of(9, seed), max_tokens=3) for seed in range(5)]
    for request in requests:
        engine.submit(request)
    assert engine.cancel(str(victim))
    outputs = finish(engine)
    assert [output.id for output in outputs] == [str(victim), *(str(seed) for seed in range(5) if seed != victim)]
    assert (outputs[0].finish_reason, outputs[0].token_ids, outputs[0].metrics.admission) == ("cancelled", [], None)
    for output in outputs[1:]:
        assert output.token_ids == expected_of(requests[int(output.id)])


@pytest.mark.parametrize("victims", [[0], [2], [4], [3, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_in_a_stream_that_is_not_all_queued(after, victims):
    """Five requests, one slot, room for one more in the queue."""
    engine = fake_engine(slots=1, max_queue=1, tokenizer=letters())
    requests = [request_of(str(seed), prompt_of(9, seed), max_tokens=3) for seed in range(5)]
    got, ends, cancelled = {}, {}, []
    for count, delta in enumerate(engine.stream(requests), start=1):
        got.setdefault(delta.id, []).append(delta)
        if delta.output is not None:
            assert delta.id not in ends
            ends[delta.id] = delta.output
        if count == after:
            cancelled = [str(one) for one in victims if engine.cancel(str(one))]
    assert [name for name in ends if name not in cancelled] == [name for name in "01234" if name not in cancelled]
    assert set(ends) == set("01234")
    for request in requests:
        output, expected = ends[request.id], expected_of(request)
        assert output.finish_reason == ("cancelled" if request.id in cancelled else "length")
        assert output.token_ids == expected[: len(output.token_ids)]
        assert request.id in cancelled or len(output.token_ids) == 3
        assert "".join(delta.text for delta in got[request.id]) == output.text == text_of(output.token_ids)
    assert finish(engine) == []


@pytest.mark.parametrize("after", range(1, 9))
def test_a_stream_that_is_closed(after):
    """Whatever of it has a slot, waits or is not queued yet is given up, and nothing else."""
    engine = fake_engine(slots=2, max_queue=2)
    engine.submit(LONG)
    stream = engine.stream([request_of(str(seed), prompt_of(9, seed), max_tokens=4) for seed in range(6)])
    for _ in range(after):
        next(stream)
    stream.close()
    check_slots(engine)
    assert [one.id for one in (*engine.scheduler.running, *engine.scheduler.waiting)] in (["long"], [])
    again = engine.generate([request_of(str(seed), prompt_of(9, seed), max_tokens=4) for seed in range(2)])
    assert [output.token_ids for output in again] == [
        expected_of(request_of("x", prompt_of(9, seed), max_tokens=4)) for seed in range(2)
    ]
    assert [(output.id, output.token_ids) for output in finish(engine)] == [("long", expected_of(LONG))]


def test_a_stream_that_was_never_started():
    engine = fake_engine()
    stream = engine.stream([LONG])
    stream.close()
    assert not engine.unfinished
    assert engine.generate([LONG])[0].token_ids == expected_of(LONG)


def test_a_cancelled_request_keeps_the_text_that_was_held_back():
    engine = fake_engine(tokenizer=letters(), run_ahead=0)
    tokens = expected_of(request_of("a", prompt_of(5), max_tokens=9))
    engine.submit(request_of("a", prompt_of(5), max_tokens=9, stop=text_of(tokens[:4]) + "x"))
    for _ in range(3):
        assert engine.step() == []
    engine.cancel("a")
    (output,) = finish(engine)
    assert (output.finish_reason, output.stop_reason) == ("cancelled", None)
    assert (output.token_ids, output.text) == (tokens[:3], text_of(tokens[:3]))


def test_a_consumer_that_fails_loses_its_own_request_alone(caplog):
    engine, pieces = fake_engine(slots=3), {}

    def deliver(delta):
        pieces.setdefault(delta.id, []).append(delta)
        if delta.id == "n0" and len(pieces["n0"]) == 3:
            raise ZeroDivisionError

    first, second = neighbours()
    engine.subscribe(engine.prepare([first, second]), deliver)
    engine.submit(LONG)
    outputs = [*finish(engine), pieces["n1"][-1].output]
    assert len(pieces["n0"]) == 3
    assert "a consumer of request n0 failed" in caplog.text
    for request, output in zip((LONG, second), outputs, strict=True):
        assert (output.finish_reason, output.token_ids) == ("length", expected_of(request))
    assert [token for piece in pieces["n1"] for token in piece.token_ids] == expected_of(second)


def test_when_nothing_can_be_planned_the_queue_ends_with_an_error():
    """Nobody has a slot, so nothing would change before the next attempt."""
    engine = fake_engine()

    def decide(view):
        raise ZeroDivisionError("it is broken")

    working, engine.scheduler.policy.decide = engine.scheduler.policy.decide, decide
    engine.submit(LONG)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    (output,) = finish(engine)
    assert (output.finish_reason, output.error) == ("error", "the step failed: ZeroDivisionError: it is broken")
    engine.scheduler.policy.decide = working
    assert engine.generate([[5]], SamplingParams(max_tokens=2, temperature=0))[0].finish_reason == "length"
