"""A more urgent request takes the slot of a less urgent one, which goes on later: it gets what it would have got."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.policies import Continuous, Decision
from model.checkpoint import load
from tests.batching.fake import alone
from tests.batching.fake_engine import expected_of, fake_engine, finish, letters, prompt_of, request_of, text_of
from tests.batching.schemas import SCHEMAS
from tests.batching.test_cancel import TURNS, live
from tests.batching.test_grammar import byte_level
from tests.batching.test_policies import LATER, URGENT
from tests.batching.test_soak import S, by_hand


class Fickle:
    """Takes slots from whom it likes, for nobody or for whom it likes."""

    uses = ("priority",)

    def __init__(self, seed):
        self.random = random.Random(seed)

    def decide(self, view):
        lost = [one for one in view.running if self.random.random() < 0.1]
        prefilling, decoding = ([one for one in some if one not in lost] for some in (view.prefilling, view.decoding))
        admit = self.random.sample(list(view.waiting), self.random.randint(0, min(view.free, len(view.waiting))))
        could = [*prefilling, *admit]
        if not could and not decoding:
            return Continuous().decide(view)
        prefill = self.random.sample(could, self.random.randint(min(1, len(could)), len(could)))
        return Decision(lost, admit, prefill, decode=not prefill or self.random.random() < 0.7)


def key_of(one):
    return one.id, one.index


class Watched:
    """An engine that is checked at every plan, and what happened in it."""

    def __init__(self, engine, by_priority=True):
        self.engine, self.by_priority, self.plan, self.run = engine, by_priority, engine.scheduler.plan, engine.run
        self.lost, self.rows = Counter(), 0
        self.reached = defaultdict(lambda: (0, 0))  # positions that were had, and how many of them not computed
        engine.scheduler.plan, engine.run = self.watch, self.note

    def watch(self):
        before = list(self.engine.scheduler.running)
        turn = self.plan()
        running, free = self.engine.scheduler.running, self.engine.scheduler.free
        lost, gained = ([one for one in a if one not in b] for a, b in ((before, running), (running, before)))
        self.lost.update(map(key_of, lost))
        places = [one.arrived for one in self.engine.scheduler.waiting]
        assert places == sorted(places), "the queue is not in order of arrival"
        if self.by_priority:
            waiting = [one for one in self.engine.scheduler.waiting if not one.in_flight]
            assert len(lost) <= len(gained)
            assert all(one.priority < other.priority for one in gained for other in lost), "for nobody more urgent"
            assert not (free and waiting), "a slot is free and somebody could have it"
            assert all(one.priority <= other.priority for one in running for other in waiting), "the less urgent first"
            for one in gained:
                later = [other for other in waiting if other.priority == one.priority and other not in lost]
                assert all(one.arrived < other.arrived for other in later), "not in order of arrival"
        return turn

    def note(self, turn):
        """Which positions are computed for whom, and which were passed over."""
        owners, rows = {one.slot: one for one in self.engine.scheduler.running}, turn.plan.rows
        self.rows += turn.plan.live_rows
        for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
            if slot in owners:
                reached, found = self.reached[key := key_of(owners[slot])]
                self.reached[key] = max(reached, position + 1), found + max(0, position - reached)
        return self.run(turn)

    def check(self, outputs):
        """All that is counted adds up."""
        for output in outputs:
            key = key_of(output)
            assert output.metrics.preemptions == self.lost[key]
            assert output.cached_tokens >= self.reached[key][1]
            assert output.cached_tokens == self.reached[key][1] or not output.token_ids
        stats = self.engine.stats
        assert stats.preemptions == self.lost.total()
        assert stats.cached_tokens == sum(output.cached_tokens for output in outputs)
        prompts = sum(output.prompt_tokens for output in outputs if output.token_ids)
        assert prompts + sum(output.cached_tokens for output in outputs if not output.token_ids) <= stats.prompt_tokens
        assert stats.prompt_tokens <= sum(output.prompt_tokens for output in outputs)
        assert stats.live_rows == self.rows


@st.composite
def workloads(draw):
    """Requests with the steps before which they arrive and are cancelled, and a way to serve them."""
    requests = []
    for index in range(draw(st.integers(1, 10))):
        trunk, own = draw(st.sampled_from([0, 0, 7, 20, 40])), draw(st.integers(1, 20))
        prompt = [*prompt_of(trunk, 1), *prompt_of(own, 10 + index)]
        count, params = draw(st.integers(1, min(20, S - len(prompt) + 1))), {}
        tokens, at = alone(prompt, count), draw(st.integers(0, count - 1))
        end = draw(st.sampled_from(["length", "token", "string"]))
        params |= {"stop_token_ids": [tokens[at]]} if end == "token" else {}
        params |= {"stop": text_of(tokens[at : at + 2])} if end == "string" else {}
        request = request_of(str(index), prompt, max_tokens=count, **params)
        request = replace(request, priority=draw(st.integers(-1, 2)))
        requests.append((request, draw(st.integers(0, 25)), draw(st.none() | st.integers(0, 45))))
    how = {
        "slots": draw(st.integers(1, 4)),
        "chunk_sizes": draw(st.sampled_from([(16,), (32,), (16, 64)])),
        "run_ahead": draw(st.integers(0, 3)),
        "prefix_reuse": draw(st.booleans()),
    }
    return requests, how, draw(st.none() | st.integers(0, 10**6))


@settings(max_examples=300, deadline=None)
@given(workloads())
def test_tokens_depend_on_the_request_alone(workload):
    """Whenever whoever comes, is put back, stops or is cancelled: one end each, in the order that priorities demand."""
    requests, how, seed = workload
    engine = fake_engine(max_len=S, policy="priority", tokenizer=letters(), **how)
    engine.scheduler.policy = engine.scheduler.policy if seed is None else Fickle(seed)
    watched, outputs, now = Watched(engine, by_priority=seed is None), [], 0
    while engine.unfinished or any(arrival >= now for _, arrival, _ in requests):
        for request, arrival, _ in requests:
            if arrival == now:
                engine.submit(request)
        for request, arrival, cancelled in requests:
            if cancelled == now and arrival <= now:
                engine.cancel(request.id)
        outputs += engine.step()
        now += 1
        assert now < 2000, "somebody starves"
    watched.check(outputs)
    assert not engine.delivery.waiting
    expected, asked = by_hand(-1), {request.id: request for request, *_ in requests}
    assert sorted(output.id for output in outputs) == sorted(asked)
    for output in outputs:
        tokens, text, *reasons = expected(asked[output.id], 0)
        if output.finish_reason != "cancelled":
            assert [output.finish_reason, output.stop_reason, output.error] == reasons
            assert (output.token_ids, output.text) == (tokens, text)
        assert output.token_ids == tokens[: len(output.token_ids)]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("at", range(TURNS + 4))
def test_wherever_it_is_when_it_loses_its_slot(at, ahead, reuse):
    """Queued, between chunks, decoding, with its last token on the way, or gone."""
    engine = fake_engine(slots=1, run_ahead=ahead, prefix_reuse=reuse, policy="priority")
    watched, outputs = Watched(engine), []
    engine.submit(LATER)
    for _ in range(at):
        outputs += engine.step()
    state = live(engine, "long")
    had, coming = (0, 0) if state is None else (len(state.output), state.in_flight)
    engine.submit(URGENT)
    outputs += finish(engine)
    watched.check(outputs)
    ends = {output.id: output for output in outputs}
    assert ends["long"].token_ids == expected_of(LATER)
    assert ends["urgent"].token_ids == expected_of(URGENT)
    assert ends["long"].metrics.preemptions == (at > 0 and state is not None)
    before = had + coming >= LATER.params.max_tokens or state is None
    assert [output.id for output in outputs] == (["long", "urgent"] if before else ["urgent", "long"])


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_several_times_and_at_its_old_place(ahead, reuse):
    """Of those that are equally urgent the first to come goes on first, however often it lost its slot."""
    engine, outputs = fake_engine(slots=1, run_ahead=ahead, prefix_reuse=reuse, policy="priority"), []
    watched, names = Watched(engine), ["a", "b", "c"]
    for name in names:
        engine.submit(replace(LATER, id=name))
    for times in range(6):
        while (state := live(engine, "a")) and (state.slot is None or len(state.output) < times):
            outputs += engine.step()
        engine.submit(replace(URGENT, id=f"urgent {times}"))
    outputs += finish(engine)
    watched.check(outputs)
    ends = [output for output in outputs if output.id in names]
    assert [output.id for output in ends] == names
    assert all(output.token_ids == expected_of(LATER) for output in ends)
    assert watched.lost[("a", 0)] == watched.lost.total() >= 4


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("how", ["cancel", "stop token", "stop string", "length"])
def test_it_ends_while_it_waits(how, ahead):
    """By a token that was on the way when it lost its slot: one end, and it never needs a slot again."""
    tokens, params, count = expected_of(LATER), {}, 2 + ahead if how == "length" else 6
    params |= {"stop_token_ids": tokens[2:3]} if how == "stop token" else {}
    params |= {"stop": text_of(tokens[1:3])} if how == "stop string" else {}
    engine = fake_engine(slots=1, run_ahead=ahead, policy="priority", tokenizer=letters())
    engine.submit(replace(request_of("long", LATER.prompt_ids, max_tokens=count, **params), priority=5))
    while len((state := live(engine, "long")).output) < 2:
        engine.step()
    engine.submit(URGENT)
    run, coming = engine.run, []

    def launch(turn):
        coming.append(state.in_flight if state.slot is None else None)
        if how == "cancel" and len(coming) == 1:
            assert engine.cancel("long")
            assert not engine.cancel("long")
        return run(turn)

    engine.run, turns = launch, state.metrics.turns
    outputs = finish(engine)
    assert (coming[0], state.metrics.turns, state.metrics.preemptions) == (ahead, turns, 1)
    ends = {output.id: output for output in outputs}
    assert len(ends) == len(outputs) == 2
    assert ends["urgent"].token_ids == expected_of(URGENT)
    assert ends["long"].token_ids == tokens[: {"cancel": 2, "length": count}.get(how, 3)]
    assert ends["long"].finish_reason == {"cancel": "cancelled", "length": "length"}.get(how, "stop")


TOKENIZER = byte_level("he", "ab")
EOS, *FEW = (TOKENIZER.encode(text)[0] for text in ("<eos>", "a", "b", "c", "d"))
KINDS = {
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.7, "temperature": 0},
    "repetition": {"repetition_penalty": 3.0, "allowed_token_ids": range(40, 60)},
    "bad words": {"allowed_token_ids": FEW, "bad_words": ["cd", "dca", "bb", "aba", "cc"]},
    "min_tokens": {"min_tokens": 9, "logit_bias": {EOS: 100.0, 70: 99.5}},
    "stop": {"allowed_token_ids": FEW, "stop": ["ddd", "bac", "cdb"]},
    "prompt": {"prompt_logprobs": 3},
    "score": {"max_tokens": 0, "prompt_logprobs": 3},
    "samples": {"n": 3, "top_p": 0.9},
    "json": {"json_schema": SCHEMAS["nested"], "max_tokens": 40},
    "regex": {"regex": "[a-z]{9,14}"},
    "choice": {"choice": ["he said hello", "he said no"], "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def engine():
    model = load(Path(__file__).parents[1] / "data" / "llama_tied_gqa4").model
    config = EngineConfig(slots=3, max_len=128, chunk_sizes=(16,), policy="priority")
    return Engine(model, config, tokenizer=TOKENIZER, eos_ids=[EOS])


def one_of_each_kind():
    for index, (name, kind) in enumerate(KINDS.items()):
        params = SamplingParams(**{"max_tokens": 16, "seed": index, "logprobs": 2} | kind)
        yield Request(prompt_ids=prompt_of(11 + 29 * index % 60, index), params=params, id=name, priority=9)


def told(output):
    """What does not depend on the schedule, and the logprobs apart."""
    scored = [one for one in output.prompt_logprobs or [] if one is not None]
    values = [one.logprob for one in (*output.logprobs, *scored)]
    ids = [one.token_id for one in (*output.logprobs, *scored)]
    result = (output.token_ids, output.text, output.finish_reason, output.stop_reason, output.error, output.seed, ids)
    return result, values


@pytest.mark.parametrize(("ahead", "reuse"), [(0, False), (1, True), (3, True)])
def test_every_field_means_the_same_on_a_real_model(engine, ahead, reuse):
    """Urgent requests come again and again and take all slots that there are, from every kind of request."""
    engine.reconfigure(run_ahead=ahead, prefix_reuse=reuse)
    expected = {(one.id, one.index): told(one) for request in one_of_each_kind() for one in engine.generate([request])}
    outputs, draw, burst = [], random.Random(ahead), 0
    for request in one_of_each_kind():
        engine.submit(request)
    while engine.unfinished:
        outputs += [output for _ in range(draw.randint(4, 14)) for output in engine.step()]
        for index in range(3 if burst < 60 else 0):
            name = f"urgent {burst} {index}"
            engine.submit(request_of(name, prompt_of(3 + burst % 20, burst), max_tokens=1, temperature=0))
        burst += 1
    ends = {(one.id, one.index): one for one in outputs if one.id in KINDS}
    assert set(ends) == set(expected)
    for key, output in ends.items():
        (result, values), (owed, near) = told(output), expected[key]
        assert result == owed, key
        np.testing.assert_allclose(values, near, atol=1e-5, err_msg=str(key))
    times = Counter({one.id: one.metrics.preemptions for one in ends.values()})
    assert all(times[name] for name in KINDS)
