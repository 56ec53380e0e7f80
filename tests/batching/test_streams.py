"""Who gets what: streams beside each other, closed, cancelled and failing, text and end tokens."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.plan import Sampled
from model.checkpoint import load, read_tokenizer, resolve
from model.tokenizer import Tokenizer
from tests.batching.fake_engine import fake_engine
from tests.batching.test_engine import prompt_of

DATA = Path(__file__).parents[1] / "data"
S = 96


@pytest.fixture(scope="module")
def tiny():
    return load(DATA / "llama_tied_gqa4")


@pytest.fixture
def engine(tiny):
    return Engine(tiny.model, EngineConfig(slots=2, max_len=S, chunk_sizes=(16,)))


def request_of(name, tokens=5, seed=None):
    prompt = prompt_of(9, ord(name) if seed is None else seed)
    return Request(prompt_ids=prompt, params=SamplingParams(max_tokens=tokens, temperature=0), id=name)


def expected_of(tiny, *requests):
    engine = Engine(tiny.model, EngineConfig(slots=1, max_len=S, chunk_sizes=(16,)))
    return {output.id: output.token_ids for output in engine.generate(requests)}


def idle(engine):
    return (
        not engine.unfinished
        and not engine.delivery.waiting
        and not engine._unqueued
        and engine.scheduler.free == [0, 1]
    )


def test_streams_beside_each_other_and_beside_submitted_requests(tiny, engine):
    """Each gets its own pieces, all of them, whoever turns the wheel."""
    params = SamplingParams(max_tokens=5, temperature=0)
    requests = [Request(prompt_ids=prompt_of(9, seed), params=params, id=str(seed)) for seed in range(4)]
    expected = {output.id: output.token_ids for output in engine.generate(requests)}
    engine.submit(requests[3])
    streams = [engine.stream([requests[0], requests[1]]), engine.stream([requests[2]])]
    got, open_streams = {}, list(streams)
    while open_streams:
        for stream in list(open_streams):
            delta = next(stream, None)
            if delta is None:
                open_streams.remove(stream)
            else:
                got.setdefault(delta.id, []).extend(delta.token_ids)
    assert got == {name: expected[name] for name in "012"}
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    assert [(output.id, output.token_ids) for output in outputs] == [("3", expected["3"])]


def test_closing_a_stream_ends_what_is_left_of_it(tiny, engine):
    engine.submit(request_of("c"))
    stream = engine.stream([request_of("a", 50), request_of("b", 50), request_of("d", 50)])
    next(stream)
    stream.close()
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    assert [(output.id, output.token_ids) for output in outputs] == [("c", expected_of(tiny, request_of("c"))["c"])]
    assert idle(engine)
    engine.reconfigure(policy="static")


def test_an_id_may_come_again_at_once_after_its_request_was_given_up(tiny, engine):
    new = request_of("a", 4, seed=1)
    for _ in engine.stream([request_of("a", 40)]):
        break
    assert engine.generate([new])[0].token_ids == expected_of(tiny, new)["a"]
    engine.submit(request_of("a", 40))
    engine.step()
    assert engine.cancel("a")
    engine.submit(new)
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    # One turn is in flight when it is given up: its token was not read yet.
    assert [(output.finish_reason, output.completion_tokens) for output in outputs] == [("cancelled", 0), ("length", 4)]
    assert outputs[1].token_ids == expected_of(tiny, new)["a"]
    assert idle(engine)


def test_a_stream_that_is_refused_harms_nobody(tiny, engine):
    first, second = engine.stream([request_of("a")]), engine.stream([request_of("b"), request_of("a", seed=3)])
    got = list(next(first).token_ids)
    with pytest.raises(ValueError, match="'a' is still running"):
        next(second)
    for delta in first:
        got += delta.token_ids
    assert got == expected_of(tiny, request_of("a"))["a"]
    late = engine.stream([request_of("b")])
    engine.submit(request_of("b", seed=4))
    with pytest.raises(ValueError, match="'b' is still running"):
        next(late)
    while engine.unfinished:
        outputs = engine.step()
    assert outputs[0].finish_reason == "length"
    assert idle(engine)


def test_cancel_reaches_a_request_that_is_not_queued_yet(tiny):
    engine = Engine(tiny.model, EngineConfig(slots=2, max_len=S, chunk_sizes=(16,), max_queue=1))
    stream = engine.stream([request_of(name) for name in "abcde"])
    next(stream)
    with pytest.raises(ValueError, match="'e' is still running"):
        engine.submit(request_of("e"))
    assert engine.cancel("e")
    assert not engine.cancel("e")
    ends = {delta.id: delta.output for delta in stream if delta.output is not None}
    assert {name: output.finish_reason for name, output in ends.items()} == dict.fromkeys("abcd", "length") | {
        "e": "cancelled"
    }
    assert ends["e"].token_ids == []
    assert idle(engine)


def test_the_id_of_a_request_cancelled_before_it_was_queued_may_come_again(tiny):
    engine = Engine(tiny.model, EngineConfig(slots=2, max_len=S, chunk_sizes=(16,), max_queue=1))
    first = engine.stream([request_of(name) for name in "abcde"])
    next(first)
    assert engine.cancel("e")
    second = engine.stream([request_of("x"), request_of("e", seed=1)])
    next(second)
    ends = [delta.output.finish_reason for delta in first if delta.output is not None and delta.id == "e"]
    assert ends == ["cancelled"]
    got = [token for delta in second if delta.id == "e" for token in delta.token_ids]
    assert got == expected_of(tiny, request_of("e", seed=1))["e"]
    assert idle(engine)


def test_cancel_from_within_a_stream(tiny, engine):
    ends = {}
    for delta in engine.stream([request_of("a", 30), request_of("b", 6)]):
        if delta.id == "a" and delta.output is None:
            engine.cancel("a")
        if delta.output is not None:
            ends[delta.id] = (delta.output.finish_reason, len(delta.output.token_ids))
    assert ends == {"a": ("cancelled", 1), "b": ("length", 6)}
    assert engine.stats.prompt_tokens == 18


def test_prompt_tokens_that_were_never_computed_do_not_count(engine):
    engine.submit(Request(prompt_ids=prompt_of(60, 1), params=SamplingParams(max_tokens=2), id="a"))
    engine.step()
    engine.cancel("a")
    engine.step()
    assert engine.stats.prompt_tokens == 18  # 16 and the two rows that no decode row took


def test_no_requests(engine):
    assert engine.generate([]) == []
    assert list(engine.stream([])) == []
    assert engine.generate(prompt for prompt in [[5]])[0].prompt_tokens == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_fails_ends_who_has_a_slot_and_nobody_else(tiny, engine, when):
    """Before the program runs, or after it took the state: no wrong tokens afterwards, and everybody ends once."""
    programs = dict(engine.runner.programs)

    def failing(params, state, rows):
        if when == "after":
            programs[0, len(rows.tokens)](params, state, rows)
        raise KeyboardInterrupt

    for name in "abcd":
        engine.submit(request_of(name))
    engine.step()
    engine.step()
    engine.runner.programs = dict.fromkeys(programs, failing)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.programs = programs
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    assert [output.id for output in outputs] == list("abcd")
    assert [output.finish_reason for output in outputs] == ["error", "error", "length", "length"]
    assert outputs[0].error == "the step failed: KeyboardInterrupt: "
    expected = expected_of(tiny, request_of("c"), request_of("d"))
    assert {output.id: output.token_ids for output in outputs[2:]} == expected
    assert idle(engine)


@pytest.fixture(scope="module")
def words():
    """Token 5 is "w5 ", and so on: text shows which tokens it is made of."""
    core = Core(models.WordLevel({f"w{index}": index for index in range(320)}, unk_token="w0"))
    core.decoder = decoders.Sequence([decoders.Fuse()])
    return Tokenizer(core)


def test_end_tokens_and_their_text(tiny, words):
    plain = Engine(tiny.model, EngineConfig(slots=2, max_len=S, chunk_sizes=(16,)), tokenizer=words)
    prompt = prompt_of(9, 7)
    greedy = {"max_tokens": 12, "temperature": 0}
    whole = plain.generate([prompt], SamplingParams(**greedy))[0]
    assert whole.text == "".join(f"w{token}" for token in whole.token_ids)
    end = whole.token_ids[6]
    first = whole.token_ids.index(end)
    engine = Engine(
        tiny.model, EngineConfig(slots=2, max_len=S, chunk_sizes=(16,)), tokenizer=words, eos_ids=[end, 319]
    )
    stopped, through, by_id = engine.generate(
        [prompt] * 3,
        [
            SamplingParams(**greedy),
            SamplingParams(**greedy, ignore_eos=True),
            SamplingParams(**greedy, ignore_eos=True, stop_token_ids=(whole.token_ids[2],)),
        ],
    )
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", end)
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.text == "".join(f"w{token}" for token in whole.token_ids[:first])
    assert (through.finish_reason, through.token_ids) == ("length", whole.token_ids)
    assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[2]) + 1]
    assert idle(engine)


def test_a_streams_pieces_are_the_text_and_unfinished_characters_come_at_the_end():
    """The real tokenizer: emoji are split over tokens, and a limit may cut one in two."""
    tokenizer = read_tokenizer(resolve("smollm2-135m-instruct"))
    engine = fake_engine(tokenizer=tokenizer)
    emoji = tokenizer.encode("😀🚀 done")
    forced = iter(emoji[:-2])
    engine.run = lambda turn: Sampled(jnp.asarray([next(forced)] * 2))  # the tokens that the model "draws"
    request = Request(prompt_ids=[5], params=SamplingParams(max_tokens=len(emoji) - 2), id="a")
    deltas = list(engine.stream([request]))
    text = tokenizer.decode(emoji[:-2])
    assert "".join(delta.text for delta in deltas) == deltas[-1].output.text == text
    assert json.dumps(text)
