"""Turns launched before those before them are read: when that saves time, and that nothing else comes of it."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.plan import NOT_FINITE, Sampled
from model.checkpoint import load
from tests.batching.fake import alone
from tests.batching.fake_engine import check_slots, expected_of, fake_engine, finish, letters, prompt_of, request_of
from tests.batching.schemas import SCHEMAS
from tests.batching.test_grammar import byte_level
from tests.batching.traffic import Counting, Waste, requests

TURNS = 30
DEVICE = 10  # milliseconds that it takes for a turn


class Paced:
    """An engine of one slot whose host and device take the time that is said, on a clock that only they move."""

    def __init__(self, plan, launch, commit, ahead):
        self.engine, self.now, self.busy_until, self.idle, self.times = fake_engine(1, run_ahead=ahead), 0, 0, 0, []
        scheduler, run = self.engine.scheduler, self.engine.run
        scheduler.clock = lambda: self.now
        scheduler.plan = self.taking(plan, scheduler.plan)
        scheduler.commit = self.taking(commit, scheduler.commit)
        self.engine.run = lambda turn: self.launch(launch, run(turn))
        self.engine.on_turn = lambda turn, times: self.times.append(times)

    def taking(self, time, method):
        """Where there is a turn to plan or to commit."""

        def taken(*args):
            result = method(*args)
            self.now += time if (args or [result])[0] is not None else 0
            return result

        return taken

    def launch(self, time, sampled):
        self.now += time
        self.idle += max(0, self.now - self.busy_until)
        self.busy_until = max(self.busy_until, self.now) + DEVICE
        return Sampled(Coming(sampled.tokens, self.busy_until, self))

    def serve(self):
        (output,) = self.engine.generate([request_of("a", [5, 6, 7], max_tokens=TURNS)])
        assert output.token_ids == alone([5, 6, 7], TURNS)
        assert len(self.times) == self.engine.stats.turns == TURNS
        return self.engine.stats


class Coming:
    """Tokens that the device has not come to yet: who asks for them waits."""

    def __init__(self, tokens, ready, paced):
        self.tokens, self.ready, self.paced = tokens, ready, paced

    def is_ready(self):
        return self.paced.now >= self.ready

    def __array__(self, dtype=None, copy=None):
        self.paced.now = max(self.paced.now, self.ready)
        return self.tokens


def steps(paced):
    """The time from each turn's tokens to the next one's."""
    return [later.ready - earlier.ready for earlier, later in zip(paced.times, paced.times[1:], strict=False)]


def test_in_lock_step_the_device_waits_for_the_host():
    paced = Paced(plan=2, launch=1, commit=1, ahead=0)
    stats = paced.serve()
    assert steps(paced) == [14] * (TURNS - 1)
    assert (stats.wall_s, stats.host_s) == (14 * TURNS, 4 * TURNS)
    assert stats.gap_s == paced.idle == 4 * TURNS - 1, "when the first turn was planned nobody had waited"
    assert stats.gap_share == pytest.approx(4 / 14, abs=0.005)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_ahead_of_the_device_the_host_takes_no_time(ahead):
    paced = Paced(plan=2, launch=1, commit=1, ahead=ahead)
    stats = paced.serve()
    assert steps(paced) == [10] * (TURNS - 1)
    assert (stats.wall_s, stats.host_s) == (3 + 10 * TURNS + 1, 4 * TURNS)
    assert stats.gap_s == paced.idle == 3, "until the first turn was launched"


@pytest.mark.parametrize(("ahead", "step"), [(0, 24), (1, 14), (2, 14)])
def test_a_host_that_is_slower_than_the_device(ahead, step):
    paced = Paced(plan=8, launch=3, commit=3, ahead=ahead)
    stats = paced.serve()
    assert steps(paced)[ahead : -ahead or None] == [step] * (TURNS - 1 - 2 * ahead)
    assert stats.host_s == 14 * TURNS
    assert stats.gap_s >= paced.idle > (TURNS - 5) * 4
    for times in paced.times:
        assert times.plan + 8 == times.launch == times.launched - 3
        assert times.launched <= times.wait <= times.ready == times.committed - 3


@settings(max_examples=40, deadline=None)
@given(requests(), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=3))
def test_what_comes_is_the_same_and_what_is_wasted_is_bounded(requests, slots, cancels):
    """`cancels`: when and who. Who is cancelled gets the beginning."""
    how = {"tokenizer": letters(), "max_queue": 99}
    wanted = {(one.id, one.index): one for one in fake_engine(slots, run_ahead=0, **how).generate(requests)}
    for ahead in range(4):
        engine, outputs, step = fake_engine(slots, run_ahead=ahead, **how), [], 0
        for request in requests:
            engine.submit(request)
        with Waste(engine) as wasted:
            while engine.unfinished:
                for at, who in cancels:
                    if at == step:
                        engine.cancel(str(who))
                outputs += engine.step()
                check_slots(engine)
                step += 1
        assert not engine._in_flight
        assert sorted((one.id, one.index) for one in outputs) == sorted(wanted)
        for output in outputs:
            key, own = (output.id, output.index), wanted[output.id, output.index]
            assert output.finish_reason in (own.finish_reason, "cancelled")
            if output.finish_reason == "cancelled":
                assert output.token_ids == own.token_ids[: len(output.token_ids)]
            else:
                ends = [(one.token_ids, one.text, one.stop_reason) for one in (output, own)]
                assert ends[0] == ends[1]
            assert wasted[key] <= (ahead if output.finish_reason != "length" else 0)


@pytest.mark.parametrize("ahead", range(4))
def test_a_grammar_is_never_ahead_and_its_neighbours_are(ahead):
    engine, most, ends = fake_engine(3, run_ahead=ahead), Counter(), {}
    sequences = engine.prepare(
        [request_of(str(seed), prompt_of(9 + 9 * seed, seed), max_tokens=20) for seed in range(4)]
    )
    for one in sequences[::2]:
        one.grammar = Counting(7, "stop")
    run = engine.run

    def noted(turn):
        for one in engine.scheduler.running:
            most[one.id] = max(most[one.id], one.in_flight)
        return run(turn)

    engine.run = noted
    engine.subscribe(sequences, lambda delta: ends.update({delta.id: delta.output}))
    finish(engine)
    assert most == {"0": 1, "1": 1 + ahead, "2": 1, "3": 1 + ahead}
    for one in sequences:
        count = 20 if one.grammar is None else 7
        assert ends[one.id].token_ids == alone(one.prompt, count)
        assert ends[one.id].finish_reason == ("length" if one.grammar is None else "stop")


def test_through_a_real_model():
    """Everything that a draw looks at of the draws before it, which the host has not seen then."""
    tokenizer = byte_level("he", "ab")
    config = EngineConfig(slots=3, max_len=128, chunk_sizes=(16,), prefix_reuse=False, deterministic=True)
    model = load(Path(__file__).parents[1] / "data" / "llama_tied_gqa4").model
    engine = Engine(model, config, tokenizer=tokenizer, eos_ids=tokenizer.encode("<eos>"))
    kinds = [
        {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.7, "logprobs": 3},
        {"temperature": 0, "bad_words": ["a", "he", "ab x"], "logit_bias": {70: 4.0, 71: 4.0}, "logprobs": 2},
        {"temperature": 1.2, "prompt_logprobs": 4, "logprobs": 0, "n": 2, "seed": 5},
        {"min_tokens": 9, "stop_token_ids": [*range(0, 320, 3)], "seed": 2**40, "logprobs": 1},
        {"json_schema": SCHEMAS["nested"], "seed": 3, "logprobs": 1, "max_tokens": 60},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "stop": ["e", "7"], "seed": 8},
        {"max_tokens": 0, "prompt_logprobs": 2},
    ]
    asked = [
        Request(prompt_ids=prompt_of(7 + 11 * index, index), params=SamplingParams(**{"max_tokens": 24} | kind))
        for index, kind in enumerate(kinds)
    ]
    results = []
    for ahead in (0, 1, 3):
        engine.reconfigure(run_ahead=ahead)
        outputs = engine.generate(asked)
        results.append(
            [(one.token_ids, one.text, one.finish_reason, one.logprobs, one.prompt_logprobs) for one in outputs]
        )
        assert (engine.stats.wasted_rows > 0) is (ahead > 0)
    assert results[0] == results[1] == results[2]
    assert {reason for _, _, reason, *_ in results[0]} == {"length", "stop"}


class Lost:
    """Tokens that cannot be read."""

    def __init__(self, read):
        self.read = read

    def __array__(self, dtype=None, copy=None):
        return self.read()


@pytest.mark.parametrize("ahead", range(4))
@pytest.mark.parametrize("at", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("where", ["launch", "fetch"])
def test_a_step_that_fails(where, at, ahead):
    """Who has a slot ends once; of the turns that the device had then none is read any more; the queue goes on."""
    engine = fake_engine(2, run_ahead=ahead)
    run, read, launched, committed, had = engine.run, engine.finish, [], [], []

    def fail():
        had.extend(one.id for one in engine.scheduler.running)
        raise ZeroDivisionError("it is lost")

    def failing(turn):
        launched.append(turn)
        if len(launched) != at + 1:
            return run(turn)
        return fail() if where == "launch" else run(turn)._replace(tokens=Lost(fail))

    def noted(*come):
        committed.extend(turn for turn in come[:1] if turn is not None)
        read(*come)

    engine.run, engine.finish = failing, noted
    asked = [request_of(str(seed), prompt_of(9 * seed + 3, seed), max_tokens=20) for seed in range(5)]
    for request in asked:
        engine.submit(request)
    outputs = []
    with pytest.raises(ZeroDivisionError):
        outputs.extend(output for _ in range(99) for output in engine.step())
    assert not engine._in_flight
    lost = launched[len(committed) :]
    assert len(lost) == (min(at, ahead) + 1 if where == "launch" else ahead + 1)
    committed.clear()
    outputs += finish(engine)
    assert not any(one is turn for one in committed for turn in lost)
    assert sorted(one.id for one in outputs) == [one.id for one in asked]
    for output in outputs:
        expected = expected_of(asked[int(output.id)])
        assert output.finish_reason == ("error" if output.id in had else "length")
        assert output.error == ("the step failed: ZeroDivisionError: it is lost" if output.id in had else None)
        assert output.token_ids == (expected[: len(output.token_ids)] if output.id in had else expected)


@pytest.mark.parametrize("ahead", range(4))
@pytest.mark.parametrize("count", [0, 1, 4])
def test_logits_that_are_not_finite_while_more_of_them_are_coming(count, ahead):
    """The rows that were computed from them count for nobody: not for who has the slot next."""
    engine, draws = fake_engine(2, run_ahead=ahead), Counter()
    asked = [request_of(str(seed), prompt_of(9, seed), max_tokens=9) for seed in range(4)]
    run = engine.run

    def spoilt(turn):
        sampled = run(turn)
        for row, one in enumerate(turn.sampled):
            draws[one.id] += 1
            if one.id == "1" and draws[one.id] > count:
                sampled.tokens[row] = NOT_FINITE
        return sampled

    engine.run = spoilt
    outputs = {output.id: output for output in engine.generate(asked)}
    bad = outputs.pop("1")
    assert (bad.finish_reason, bad.error) == ("error", f"the logits after {9 + count} tokens are not finite")
    assert bad.token_ids == expected_of(asked[1])[:count]
    assert engine.stats.wasted_rows == draws["1"] - count - 1 == ahead
    for name, output in outputs.items():
        assert (output.finish_reason, output.token_ids) == ("length", expected_of(asked[int(name)]))


@pytest.mark.parametrize("ahead", range(4))
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_when_all_are_cancelled_nothing_is_in_flight(turns, ahead):
    engine = fake_engine(2, run_ahead=ahead)
    for seed in range(4):
        engine.submit(request_of(str(seed), prompt_of(9, seed), max_tokens=30))
    for _ in range(turns):
        assert engine.step() == []
    assert len(engine._in_flight) == min(turns, ahead)
    assert all(engine.cancel(str(seed)) for seed in range(4))
    assert sorted(one.id for one in engine.step()) == ["0", "1", "2", "3"]
    assert not engine._in_flight
    assert not engine.unfinished
    request = request_of("0", prompt_of(9, 7), max_tokens=9)
    assert engine.generate([request])[0].token_ids == expected_of(request)
