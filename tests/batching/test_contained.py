"""An exception over one request is that request's error: the others get their tokens, and nobody's end is lost."""

import contextlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.grammar import slot_masks
from batching.intake import slot_rows
from batching.sequence import SequenceState
from model.checkpoint import load
from model.tokenizer import Detokenizer
from tests.batching.fake import FakeDevice, make_scheduler, run_turn, sequence
from tests.batching.fake_engine import check_slots, expected_of, fake_engine, letters, prompt_of, request_of, text_of
from tests.batching.test_grammar import byte_level


class Broken:
    error = None

    def advance(self, token):
        raise ArithmeticError("no such state")


def test_a_grammar_that_raises_ends_its_own_request_alone():
    scheduler, device = make_scheduler(slots=3, block_q=1), FakeDevice(3, 64)
    names = ("broken", "ends", "goes on", "cancelled")
    requests = {name: sequence(name, range(1, 4), max_tokens=1 if name == "ends" else 3) for name in names}
    requests["broken"].grammar = Broken()
    for one in requests.values():
        scheduler.submit(one)
    turn = scheduler.plan()
    scheduler.cancel("cancelled")
    ended = [
        p.sequence.id
        for p in scheduler.commit(turn, device.step(turn.plan.rows))
        if p.sequence.finish_reason is not None
    ]
    assert sorted(ended) == ["broken", "cancelled", "ends"]
    assert (requests["broken"].finish_reason, requests["broken"].error) == ("error", "ArithmeticError: no such state")
    while scheduler.unfinished:
        run_turn(scheduler, device)
    assert len(requests["goes on"].output) == 3


# Requests whose second tokens come in the same turn, in this order, and one that gets a slot when another ended.
COUNTS = {"first": 2, "broken": 4, "ends": 2, "goes on": 5, "queued": 3}
REQUESTS = {name: request_of(name, prompt_of(5, seed), max_tokens=n) for seed, (name, n) in enumerate(COUNTS.items())}


class Crowd:
    """An engine with these requests. Some are streamed, all are counted."""

    def __init__(self, requests=REQUESTS, **how):
        self.requests, self.ends, self.pieces, self.raised = requests, {}, {}, []
        self.engine = fake_engine(**{"slots": 4, "chunk_sizes": (64,), "tokenizer": letters()} | how)

    def submit(self, deliver=None):
        """`deliver`: what "broken" is streamed to, after it was noted."""
        for name, request in self.requests.items():
            if name == "broken" and deliver is not None:
                self.engine.subscribe(self.engine.prepare([request]), lambda delta: (self.note(delta), deliver(delta)))
            elif name in ("ends", "queued"):
                self.engine.subscribe(self.engine.prepare([request]), self.note)
            else:
                self.engine.submit(request)

    def note(self, delta):
        self.pieces.setdefault(delta.id, []).append(delta)
        self.keep([] if delta.output is None else [delta.output])

    def keep(self, outputs):
        for output in outputs:
            assert output.id not in self.ends, "it ends twice"
            self.ends[output.id] = output

    def finish(self):
        steps = 0
        while self.engine.unfinished:
            try:
                self.keep(self.engine.step())
            except (KeyboardInterrupt, OSError) as error:
                self.raised.append(error)
            check_slots(self.engine)
            steps += 1
            assert steps < 100, "it never comes to an end"
        assert not self.engine.delivery.waiting

    def check(self, *others):
        """These are served as if nothing had happened, and all have an end whose parts fit together."""
        for name in others:
            output, expected = self.ends[name], expected_of(self.requests[name])
            assert (output.finish_reason, output.token_ids, output.text) == ("length", expected, text_of(expected))
        for name, pieces in self.pieces.items():
            text = "".join(piece.text for piece in pieces)
            assert text_of(expected_of(self.requests[name])).startswith(text)
            assert name == "broken" or text == self.ends[name].text


def count_of(times):
    """REQUESTS, but "broken" has so many tokens."""
    return REQUESTS | {"broken": request_of("broken", prompt_of(5, 1), max_tokens=times)}


def raising(error, at, name="broken"):
    """A `Detokenizer.push` that raises once, at one of a request's tokens."""
    push, seen = Detokenizer.push, []

    def pushed(self, token):
        if token == expected_of(REQUESTS[name])[at] and token not in seen:
            seen.append(token)
            raise error
        return push(self, token)

    assert sum(expected_of(one).count(expected_of(REQUESTS[name])[at]) for one in REQUESTS.values()) == 1
    return mock.patch.object(Detokenizer, "push", pushed)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(("at", "count"), [(0, 4), (1, 4), (1, 2), (0, 1)])
def test_a_text_that_cannot_be_read(at, count, ahead):
    """Also of the last token."""
    crowd = Crowd(count_of(count), run_ahead=ahead)
    crowd.submit()
    with raising(ArithmeticError("no such character"), at):
        crowd.finish()
    crowd.check("first", "ends", "goes on", "queued")
    broken = crowd.ends["broken"]
    assert (broken.finish_reason, broken.error) == ("error", "ArithmeticError: no such character")
    assert broken.token_ids == expected_of(REQUESTS["broken"])[: at + 1]
    assert broken.text == text_of(broken.token_ids[:at])


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("at", range(4))
def test_a_consumer_that_fails(at, ahead, caplog):
    """It is given nothing more; its end is one that nobody waits for."""

    def deliver(delta):
        if len(crowd.pieces["broken"]) == at + 1:
            raise ArithmeticError("no room")

    crowd = Crowd(run_ahead=ahead)
    crowd.submit(deliver)
    crowd.finish()
    crowd.check("first", "ends", "goes on", "queued")
    assert len(crowd.pieces["broken"]) == at + 1
    assert ("broken" in crowd.ends) is (at == 3)
    assert "a consumer of request broken failed" in caplog.text


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("deliver", [None, lambda delta: None])
def test_an_output_that_cannot_be_made(deliver, ahead):
    crowd, end = Crowd(run_ahead=ahead), SequenceState.end

    def ended(self, text):
        if self.id == "broken":
            raise ArithmeticError("no such output")
        return end(self, text)

    crowd.submit(deliver)
    with mock.patch.object(SequenceState, "end", ended):
        crowd.finish()
    crowd.check("first", "ends", "goes on", "queued")
    broken, expected = crowd.ends["broken"], expected_of(REQUESTS["broken"])
    assert (broken.finish_reason, broken.error) == ("error", "ArithmeticError: no such output")
    assert (broken.token_ids, broken.text) == (expected, text_of(expected))
    assert broken.metrics is not None


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(
    ("where", "count"), [("text", 2), ("text", 4), ("consumer", 2), ("consumer", 4), ("output", 2)]
)
def test_an_interrupt_while_tokens_are_put(where, count, ahead):
    """Who had ended has that end, who had a slot ends with an error, the queue goes on.

    It comes over the second token of "broken", or over its Output.
    """
    interrupt, end = KeyboardInterrupt(), SequenceState.end

    def deliver(delta):
        if where == "consumer" and len(crowd.pieces["broken"]) == 2:
            raise interrupt

    def ended(self, text):
        if where == "output" and self.id == "broken" and not crowd.raised:
            raise interrupt
        return end(self, text)

    crowd = Crowd(count_of(count), run_ahead=ahead)
    crowd.submit(deliver)
    reading = raising(interrupt, 1) if where == "text" else contextlib.nullcontext()
    with reading, mock.patch.object(SequenceState, "end", ended):
        crowd.finish()
    assert crowd.raised == [interrupt]
    assert set(crowd.ends) == set(REQUESTS)
    in_queue = (where, count) != ("output", 4)
    crowd.check("first", "ends", *["queued"] * in_queue)
    assert crowd.ends["broken"].finish_reason == ("length" if (where, count) == ("consumer", 2) else "error")
    assert crowd.ends["goes on"].finish_reason == "error"


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_interrupt_when_the_last_one_with_a_slot_had_ended(ahead):
    """The queue goes on: none of it was concerned."""
    requests = {name: REQUESTS[name] for name in ("broken", "queued", "goes on")}
    crowd = Crowd(requests, slots=1, run_ahead=ahead)
    crowd.submit()
    with raising(KeyboardInterrupt(), 3):
        crowd.finish()
    assert len(crowd.raised) == 1
    crowd.check("queued", "goes on")
    assert crowd.ends["broken"].finish_reason == "error"


def test_an_interrupt_over_a_token_of_one_that_lost_its_slot():
    """It has no slot, yet it cannot go on: its text would lack that token."""
    urgent = replace(request_of("urgent", prompt_of(9, 7), max_tokens=2), priority=-1)
    crowd = Crowd({"broken": REQUESTS["broken"], "urgent": urgent}, slots=1, policy="priority", run_ahead=1)
    crowd.engine.submit(REQUESTS["broken"])
    for _ in range(2):
        crowd.keep(crowd.engine.step())
    crowd.engine.submit(urgent)
    with raising(KeyboardInterrupt(), 1):
        crowd.finish()
    assert len(crowd.raised) == 1
    broken = crowd.ends["broken"]
    assert (broken.finish_reason, broken.metrics.preemptions) == ("error", 1)
    assert text_of(broken.token_ids).startswith(broken.text)
    assert "urgent" in crowd.ends


@pytest.fixture(scope="module")
def engine():
    model, tokenizer = load(Path(__file__).parents[1] / "data" / "llama_tied_gqa4").model, byte_level("he", "ab")
    return Engine(model, EngineConfig(slots=3, max_len=64, chunk_sizes=(16,)), tokenizer=tokenizer, eos_ids=[256])


def alike(names, **params):
    """Requests whose prompts begin alike: who comes later waits for rows of who came first."""
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0} | params)
    return [Request(prompt_ids=[*prompt_of(20), seed], params=params, id=name) for seed, name in enumerate(names)]


@pytest.mark.parametrize(
    ("what", "after", "fields"),
    [
        ("slot_rows", 0, {"frequency_penalty": 1.5}),
        ("slot_masks", 0, {"regex": "[a-z]{4,9}"}),
        ("slot_masks", 3, {"regex": "[a-z]{4,9}"}),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_the_device_cannot_be_told_of_one_request(engine, place, what, after, fields):
    """Of the others it is told, and who has the slot next gets what it should."""
    function, names = {"slot_rows": slot_rows, "slot_masks": slot_masks}[what], ["a", "b", "next"]
    names.insert(place, "broken")
    requests = alike(names, **fields)
    expected = {request.id: engine.generate([request])[0].token_ids for request in requests}

    def raising(asked, size):
        each = asked if isinstance(asked, list) else [asked]
        if any(one.id == "broken" and len(one.output) == after for one in each):
            raise ArithmeticError("no room")
        return function(asked, size)

    with mock.patch(f"batching.runner.{what}", raising):
        broken, *others = sorted(engine.generate(requests), key=lambda output: output.id != "broken")
    assert (broken.finish_reason, broken.error) == ("error", "ArithmeticError: no room")
    assert broken.token_ids == expected["broken"][:after]
    assert {one.id: one.token_ids for one in others} == {name: expected[name] for name in names if name != "broken"}
    assert {one.error for one in others} == {None}


def test_a_state_that_cannot_be_made_again_at_once(engine):
    """Each failure is told as what it is, to those who had slots then, and the turn after it works."""
    requests, ends = alike("abcdefg", repetition_penalty=1.3), {}
    expected = engine.generate([requests[-1]])[0].token_ids
    for request in requests:
        engine.submit(request)
    broken = mock.Mock(side_effect=OSError("it broke"))
    programs = mock.patch.object(engine.runner, "programs", dict.fromkeys(engine.runner.programs, broken))
    with programs, pytest.raises(OSError, match="it broke"):
        engine.step()
    allocation = mock.patch("batching.runner.init_state", side_effect=MemoryError("no room"))
    with allocation, pytest.raises(MemoryError, match="no room"):
        engine.step()
    while engine.unfinished:
        ends |= {output.id: output for output in engine.step()}
    assert {ends[name].error for name in "abc"} == {"the step failed: OSError: it broke"}
    assert {ends[name].error for name in "def"} == {"the step failed: MemoryError: no room"}
    assert (ends["g"].finish_reason, ends["g"].token_ids) == ("length", expected)
