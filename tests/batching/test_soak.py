"""Thousands of random requests that come, stop, fail and are given up: each ends once, slots add up, nobody starves."""

import contextlib
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from batching import Engine, EngineConfig, QueueFull
from batching.plan import NOT_FINITE
from model.checkpoint import load
from tests.batching.fake import alone
from tests.batching.fake_engine import check_slots, fake_engine, letters, request_of, text_of
from tests.batching.schemas import SCHEMAS
from tests.batching.test_grammar import byte_level

S = 64
LONGEST_WAIT = S + 30  # turns: a slot's longest use, with its prompt in chunks beside others


class Broken(Exception):
    """What a step raises now and then."""


class Crowd:
    """Sends requests to an engine, a few a turn and none twice, and checks it after every step."""

    def __init__(self, engine, requests, generator):
        self.engine, self.generator = engine, generator
        self.todo, self.sent, self.refused = list(reversed(requests)), {}, 0
        self.outputs = {}  # (id, sample) -> Output
        self.pieces = {}  # of those that are streamed: (id, sample) -> Deltas
        self.admitted = {}  # (id, sample) of those that got a slot, in that order
        self.turns, self.idle, self.next, self.next_since = 0, 0, None, 0

    def serve(self):
        turn = self.engine.run

        def run(planned):
            self.admitted |= dict.fromkeys((one.id, one.index) for one in planned.admitted)
            self.check_queue()
            return turn(planned)

        self.engine.run = run
        while self.todo or self.engine.unfinished:
            self.send()
            if self.sent and self.generator.random() < 0.1:
                self.engine.cancel(self.generator.choice(list(self.sent)[-40:]))
            with contextlib.suppress(Broken):
                self.keep(self.engine.step())
            check_slots(self.engine)
            self.idle += 1
            assert self.idle < 100, "nothing goes on"
        self.engine.run = turn
        assert not self.engine.delivery.waiting
        assert set(self.outputs) == {(one.id, index) for one in self.sent.values() for index in range(one.params.n)}

    def send(self):
        for _ in range(self.generator.choice([0, 0, 1, 2, 3, 6]) if self.todo else 0):
            request = self.todo[-1] if self.todo else None
            try:
                if request is not None and self.generator.random() < 0.5:
                    self.engine.submit(request)
                elif request is not None:
                    self.engine.subscribe(self.engine.prepare([request]), self.keep_piece)
            except QueueFull:
                self.refused += 1
                return
            self.sent |= {request.id: self.todo.pop()} if request is not None else {}

    def keep(self, outputs):
        for output in outputs:
            assert (output.id, output.index) not in self.outputs, "ended twice"
            self.outputs[output.id, output.index] = output

    def keep_piece(self, delta):
        assert (delta.id, delta.index) not in self.outputs, "a piece after the end"
        self.pieces.setdefault((delta.id, delta.index), []).append(delta)
        self.keep([] if delta.output is None else [delta.output])

    def check_queue(self):
        """As a turn is planned: nobody waits for nothing, nobody waits long to be the next, or then for a slot."""
        scheduler, self.turns, self.idle = self.engine.scheduler, self.turns + 1, 0
        waiting = [one for one in scheduler.waiting if not one.in_flight]
        if self.engine.config.policy != "static":
            assert not (waiting and scheduler.free), "a slot is free and somebody waits"
        most = min((one.priority for one in waiting), default=None)
        assert most is None or all(one.priority <= most for one in scheduler.running), "a more urgent one waits"
        first = next((one for one in waiting if one.priority == most), None)
        self.next, self.next_since = first, self.next_since if first is self.next else self.turns
        assert first is None or self.turns - self.next_since <= LONGEST_WAIT, "somebody starves"

    def check(self, expected):
        """`expected(request, sample)`: tokens, text, finish reason, stop reason and error if nobody disturbs it."""
        arrival = {name: place for place, name in enumerate(self.sent)}
        order = [(self.sent[name].priority, arrival[name], index) for name, index in self.admitted]
        assert sorted(order, key=lambda one: one[0]) == sorted(order), "somebody got a slot before one who came earlier"
        for (name, index), output in self.outputs.items():
            tokens, text, *ends = expected(self.sent[name], index)
            if [output.finish_reason, output.stop_reason, output.error] == ends:
                assert (output.token_ids, output.text) == (tokens, text)
            else:
                assert output.finish_reason in ("cancelled", "error")
                self.check_cut(output, tokens, some=ends[0] == "error")
            assert output.completion_tokens == len(output.token_ids) == len(output.metrics.tokens)
            pieces = self.pieces.get((name, index), [])
            if pieces:
                assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
                assert "".join(piece.text for piece in pieces) == output.text

    def check_cut(self, output, tokens, some):
        """It has the first tokens, with `some` perhaps all, and the text of those: nothing is held back or hidden."""
        assert output.token_ids == tokens[: len(output.token_ids)]
        assert some or not tokens or len(output.token_ids) < len(tokens)
        assert output.text == self.engine.tokenizer.decode(output.token_ids)


def random_request(index, generator, text=text_of, **params):
    """Of every kind: short and long, with every way to end. Some share the beginning of their prompts."""
    prompt = [generator.randrange(97) for _ in range(generator.choice([1, 3, 9, 17, 30, 50]))]
    if generator.random() < 0.3:
        prompt = [(7 * place) % 97 for place in range(generator.choice([8, 20, 40]))] + prompt[:9]
    room = S - len(prompt) + 1
    limit = min(room, generator.choice([1, 2, 5, 12, 25])) if generator.random() < 0.97 else None
    likely = alone(prompt, min(room, 6))
    ends = generator.choice(["length", "length", "token", "string", "both"])
    if ends in ("token", "both"):
        params["stop_token_ids"] = [generator.randrange(97), generator.choice(likely)]
    if ends in ("string", "both"):
        at = generator.randrange(len(likely))
        params["stop"] = [text(likely[at : at + generator.randint(1, 3)]), text([5, 6])]
    if generator.random() < 0.1:
        params["min_tokens"] = min(limit or room, generator.randint(1, 4))
    params["n"] = generator.choice([1] * 20 + [2, 3]) if params.get("temperature") != 0 else 1
    return request_of(str(index), prompt, **{"max_tokens": limit, "ignore_eos": generator.random() < 0.2} | params)


def by_hand(eos):
    """What the fake device's tokens make of a request."""

    def expected(request, _):
        params, prompt = request.params, request.prompt_ids
        ids = {*params.stop_token_ids} | ({eos} if not params.ignore_eos else set())
        tokens = alone(prompt, params.max_tokens or S - len(prompt) + 1)
        for count, token in enumerate(tokens, start=1):
            if token in ids:
                return tokens[:count], text_of(tokens[: count - 1]), "stop", token, None
            text, early = text_of(tokens[:count]), min(params.min_tokens, count)
            found = [(text.find(stop, max(0, early + 1 - len(stop))), -len(stop), stop) for stop in params.stop]
            found = [one for one in found if one[0] >= 0]
            if found:
                return tokens[:count], text[: min(found)[0]], "stop", min(found)[2], None
        return tokens, text_of(tokens), "length", None, None

    return expected


def disturb(engine, generator):
    """Logits that are not finite and steps that fail, both rare. A step that fails takes all rows with it."""
    turn = engine.run

    def run(planned):
        if generator.random() < 0.002:
            engine.device.cache[:], engine.device.last_token[:] = -999, -999
            raise Broken
        sampled = turn(planned)
        if planned.sampled and generator.random() < 0.01:
            sampled.tokens[generator.randrange(len(planned.sampled))] = NOT_FINITE
        return sampled

    engine.run = run


@pytest.mark.parametrize(
    ("policy", "ahead", "slots", "count"),
    [("continuous", 1, 16, 10_000), ("static", 0, 16, 1000), ("priority", 2, 5, 3000), ("continuous", 3, 2, 1000)],
)
def test_thousands_of_requests(policy, ahead, slots, count):
    generator = random.Random(f"{policy} {slots}")
    config = {"chunk_sizes": (64,), "max_queue": 8, "policy": policy, "run_ahead": ahead}
    engine = fake_engine(slots, S, tokenizer=letters(), eos_ids=[11], **config)
    requests = [random_request(index, generator) for index in range(count)]
    if policy == "priority":
        requests = [replace(request, priority=generator.choice([-1, 0, 0, 5])) for request in requests]
    disturb(engine, generator)
    crowd = Crowd(engine, requests, generator)
    crowd.serve()
    crowd.check(by_hand(11))
    reasons = Counter(output.finish_reason for output in crowd.outputs.values())
    assert min(reasons[reason] for reason in ("stop", "length", "cancelled", "error")) > len(requests) / 200
    assert crowd.refused > 100
    preempted = sum(output.metrics.preemptions for output in crowd.outputs.values())
    assert (preempted > 100) is (policy == "priority")
    assert engine.stats.preemptions == preempted


TOKENIZER = byte_level("he", "ab")
EOS, *FEW = (TOKENIZER.encode(text)[0] for text in ("<eos>", "a", "b", "c", "d"))
POISON = 300  # a token whose embedding is not a number
FIELDS = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {40: 4.0, 41: 3.5, 42: -100.0, EOS: 1.0}, "frequency_penalty": 1.0},
    "stops": {"allowed_token_ids": [*range(40, 60), EOS], "stop": [TOKENIZER.decode([40]), TOKENIZER.decode([50, 52])]},
    "bad words": {"allowed_token_ids": [*FEW, EOS], "bad_words": ["cd", "dca", "bb", "aba", "cc"]},
    "regex": {"regex": "[a-f]{2,9}(x|yz)"},
    "tight": {"regex": "[cd]{3}", "min_tokens": 9, "max_tokens": 12},
    "choice": {"choice": ["he said hello", "he said no", "ab"]},
    "json": {"json_schema": SCHEMAS["enum"]},
    "nested": {"json_schema": SCHEMAS["nested"]},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


def random_fields(index, generator):
    """A request of a random kind, in random company."""
    params = {"temperature": generator.choice([0, 0.7, 1.5]), "seed": index, "logprobs": generator.choice([None, 0, 3])}
    kind = generator.choice(list(FIELDS))
    request = random_request(index, generator, TOKENIZER.decode, **params)
    changes = dict(FIELDS[kind])
    if generator.random() < 0.2:
        changes["prompt_logprobs"] = generator.choice([0, 2])
        if request.params.n == 1 and generator.random() < 0.3:
            changes |= {"max_tokens": 0, "min_tokens": 0}
    prompt = list(request.prompt_ids)
    if generator.random() < 0.04:
        prompt[generator.randrange(len(prompt))] = POISON
    request = replace(request, prompt_ids=prompt, params=replace(request.params, **changes))
    return replace(request, priority=generator.choice([0, 0, 0, 1])), kind


def check_logprobs(output, whole):
    """They are those of a request that nobody disturbs, as far as they go."""
    for told, owed in ((output.logprobs, whole.logprobs), (output.prompt_logprobs, whole.prompt_logprobs)):
        assert (told is None) is (owed is None)
        told, owed = told or [], owed or []
        assert len(told) == len(owed) if output.finish_reason == whole.finish_reason else len(told) <= len(owed)
        for one, other in zip(told, owed, strict=False):
            assert (one and one.token_id) == (other and other.token_id)
            values = [[each.logprob, *each.top_logprobs] for each in (one, other) if each]
            np.testing.assert_allclose(*values or ([], []), atol=2e-5)


def test_five_hundred_requests_through_a_real_model():
    """Beside each other, put back, given up, stopped and broken: what each gets when it is alone."""
    generator = random.Random(0)
    model = load(Path(__file__).parents[1] / "data" / "llama_untied").model
    model.embed.weight[...] = model.embed.weight[...].at[POISON].set(jnp.nan)
    config = EngineConfig(slots=4, max_len=S, chunk_sizes=(16,), max_queue=10, policy="priority", run_ahead=2)
    engine = Engine(model, config, tokenizer=TOKENIZER, eos_ids=[EOS, *range(262, 320, 12)])
    requests, kinds = zip(*(random_fields(index, generator) for index in range(500)), strict=True)
    run = engine.run

    def disturbed(turn):
        if (draw := generator.random()) < 0.002:
            raise Broken
        sampled = run(turn)
        if draw > 0.998:
            raise Broken
        return sampled

    engine.run = disturbed
    crowd = Crowd(engine, requests, generator)
    crowd.serve()
    engine.run, whole = run, {}
    for request in requests:
        for output in engine.generate([replace(request, id=f"again {request.id}")]):
            whole[request.id, output.index] = output
    results = {key: (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.error) for key, o in whole.items()}
    crowd.check(lambda request, index: results[request.id, index])
    for key, output in crowd.outputs.items():
        if whole[key].error is None:
            check_logprobs(output, whole[key])
    check_that_all_was_drawn(crowd.outputs, kinds)


def check_that_all_was_drawn(outputs, kinds):
    ends = Counter((kinds[int(name)], one.finish_reason) for (name, _), one in outputs.items())
    assert all(ends[kind, "stop"] + ends[kind, "length"] > 5 for kind in FIELDS if kind != "tight")
    reasons = Counter((one.finish_reason, type(one.stop_reason)) for one in outputs.values())
    wanted = [("length", type(None)), ("stop", int), ("stop", str), ("stop", type(None)), ("cancelled", type(None))]
    assert min(reasons[one] for one in wanted) > 5
    for error in ("the step failed", "not finite", "no token that is allowed"):
        assert sum(error in (one.error or "") for one in outputs.values()) > 5
    assert sum(one.metrics.preemptions for one in outputs.values()) > 100
    assert sum(one.cached_tokens > 0 for one in outputs.values()) > 50
    scored = [one for one in outputs.values() if one.prompt_logprobs is not None]
    assert len(scored) > 50 < sum(one.logprobs is not None for one in outputs.values())
    assert sum(one.finish_reason == "length" and not one.token_ids for one in scored) > 5
    assert sum(index > 0 for _, index in outputs) > 20
