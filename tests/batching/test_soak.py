"""Thousands of random requests that come, stop, fail and are given up: each ends once, slots add up, nobody starves."""

import contextlib
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from batching import Engine, EngineConfig, QueueFull
from batching.plan import NOT_FINITE
from model.checkpoint import load
from tests.batching.fake import alone
from tests.batching.fake_engine import LETTERS, check_slots, fake_engine, letters, request_of, text_of

S = 64


class Broken(Exception):
    """What a step raises now and then."""


class Crowd:
    """Sends requests to an engine, a few a turn and none twice, and checks it after every step."""

    def __init__(self, engine, requests, generator):
        self.engine, self.generator = engine, generator
        self.todo, self.sent, self.refused = list(reversed(requests)), {}, 0
        self.outputs = {}  # (id, sample) -> Output
        self.pieces = {}  # of those that are streamed: (id, sample) -> Deltas
        self.admitted = []

    def serve(self):
        turn = self.engine.run

        def run(planned):
            self.admitted += [(one.id, one.index) for one in planned.admitted] if planned else []
            return turn(planned)

        self.engine.run = run
        while self.todo or self.engine.unfinished:
            self.send()
            if self.sent and self.generator.random() < 0.1:
                self.engine.cancel(self.generator.choice(list(self.sent)[-40:]))
            with contextlib.suppress(Broken):
                self.keep(self.engine.step())
            check_slots(self.engine)
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

    def check(self, expected):
        """`expected(request, sample)`: the tokens, text, finish reason and stop reason of one that nobody disturbs."""
        arrival = {name: place for place, name in enumerate(self.sent)}
        order = [(arrival[name], index) for name, index in self.admitted]
        assert order == sorted(order), "somebody was admitted before one who came earlier"
        for (name, index), output in self.outputs.items():
            tokens, text, *reasons = expected(self.sent[name], index)
            if output.finish_reason in ("cancelled", "error"):
                assert output.token_ids == tokens[: len(output.token_ids)]
            else:
                assert (output.token_ids, output.text) == (tokens, text)
                assert [output.finish_reason, output.stop_reason] == reasons
            assert output.completion_tokens == len(output.token_ids) == len(output.metrics.tokens)
            pieces = self.pieces.get((name, index), [])
            if pieces:
                assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
                assert "".join(piece.text for piece in pieces) == output.text


def random_request(index, generator, **params):
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
        params["stop"] = [text_of(likely[at : at + generator.randint(1, 3)]), text_of([5, 6])]
    if generator.random() < 0.1:
        params["min_tokens"] = min(limit or room, generator.randint(1, 4))
    params["n"] = generator.choice([1] * 20 + [2, 3]) if params.get("temperature") != 0 else 1
    return request_of(str(index), prompt, max_tokens=limit, ignore_eos=generator.random() < 0.2, **params)


def by_hand(eos):
    """What the fake device's tokens make of a request."""

    def expected(request, _):
        params, prompt = request.params, request.prompt_ids
        ids = {*params.stop_token_ids} | ({eos} if not params.ignore_eos else set())
        tokens = alone(prompt, params.max_tokens or S - len(prompt) + 1)
        for count, token in enumerate(tokens, start=1):
            if token in ids:
                return tokens[:count], text_of(tokens[: count - 1]), "stop", token
            text, early = text_of(tokens[:count]), min(params.min_tokens, count)
            found = [(text.find(stop, max(0, early + 1 - len(stop))), -len(stop), stop) for stop in params.stop]
            found = [one for one in found if one[0] >= 0]
            if found:
                return tokens[:count], text[: min(found)[0]], "stop", min(found)[2]
        return tokens, text_of(tokens), "length", None

    return expected


def disturb(engine, generator):
    """Logits that are not finite and steps that fail, both rare."""
    turn = engine.run

    def run(planned):
        if planned and generator.random() < 0.002:
            raise Broken
        sampled = turn(planned)
        if planned and planned.sampled and generator.random() < 0.01:
            sampled.tokens[generator.randrange(len(planned.sampled))] = NOT_FINITE
        return sampled

    engine.run = run


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_ten_thousand_requests(policy):
    generator = random.Random(policy)
    engine = fake_engine(16, S, chunk_sizes=(64,), max_queue=8, policy=policy, tokenizer=letters(), eos_ids=[11])
    requests = [random_request(index, generator) for index in range(10_000 if policy == "continuous" else 1000)]
    disturb(engine, generator)
    crowd = Crowd(engine, requests, generator)
    crowd.serve()
    crowd.check(by_hand(11))
    reasons = Counter(output.finish_reason for output in crowd.outputs.values())
    assert min(reasons[reason] for reason in ("stop", "length", "cancelled", "error")) > len(requests) / 200
    assert crowd.refused > 100


def test_five_hundred_requests_through_a_real_model():
    """Beside each other, given up and stopped: the tokens that each gets when it is alone."""
    generator = random.Random(0)
    model = load(Path(__file__).parents[1] / "data" / "llama_tied_gqa4").model
    config = EngineConfig(slots=4, max_len=S, chunk_sizes=(16,), max_queue=10)
    engine = Engine(model, config, tokenizer=letters(), eos_ids=range(11, 320, 30))
    requests = []
    for index in range(500):
        draw = {"temperature": generator.choice([0, 0.7, 1.5]), "top_k": generator.choice([0, 5]), "seed": index}
        draw["stop"] = generator.choice([(), tuple(LETTERS[40:50])])
        requests.append(random_request(index, generator, **draw))
    crowd = Crowd(engine, requests, generator)
    crowd.serve()
    undisturbed = {}
    for request in requests:
        for output in engine.generate([replace(request, id=f"again {request.id}")]):
            result = output.token_ids, output.text, output.finish_reason, output.stop_reason
            undisturbed[request.id, output.index] = result
    crowd.check(lambda request, index: undisturbed[request.id, index])
    reasons = Counter((one.finish_reason, type(one.stop_reason)) for one in crowd.outputs.values())
    assert {("length", type(None)), ("stop", int), ("stop", str), ("cancelled", type(None))} <= set(reasons)
