"""Requests with a grammar in an engine: their texts, their ends, what else they ask for, and who runs beside them."""

from pathlib import Path

import numpy as np
import pytest

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.plan import Flag, Sampled
from model.checkpoint import load
from tests.batching.compiling import compile_events
from tests.batching.fake import FakeDevice, alone, make_scheduler, run_turn, sequence
from tests.batching.schemas import SCHEMAS, check
from tests.batching.test_engine import prompt_of
from tests.batching.test_grammar import byte_level

DATA = Path(__file__).parents[1] / "data"
S = 512
TOKENIZER = byte_level("he", "ab")
EOS = TOKENIZER.encode("<eos>")[0]
A, B, AB = (TOKENIZER.encode(text)[0] for text in ("a", "b", "ab"))


@pytest.fixture(scope="module")
def tiny():
    return load(DATA / "llama_tied_gqa4").model


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine(tiny, EngineConfig(slots=4, max_len=S, chunk_sizes=(16,)), tokenizer=TOKENIZER, eos_ids=[EOS])


def serve(engine, *each, seed=1):
    """One request for each set of fields."""
    requests = [
        Request(prompt_ids=prompt_of(9, index), params=SamplingParams(**{"seed": seed} | fields))
        for index, fields in enumerate(each)
    ]
    return engine.generate(requests)


def test_texts_follow_their_constraints(engine):
    """More requests than slots, of every kind, some of them without a constraint."""
    kinds = [{"json_schema": schema} for schema in SCHEMAS.values()]
    kinds += [{"regex": "[ab]{2,9}c"}, {"choice": ["he", "hello", "x"]}, {"max_tokens": 30}]
    outputs = serve(engine, *kinds, *kinds)
    for output, kind in zip(outputs, kinds * 2, strict=True):
        if "max_tokens" in kind:
            assert output.completion_tokens == 30
            continue
        assert (output.finish_reason, output.stop_reason) == ("stop", EOS)
        assert output.token_ids[-1] == EOS
        if "json_schema" in kind:
            check(output.text, kind["json_schema"])
    assert {output.text for output in outputs[11::13]} <= {"he", "hello", "x"}
    assert all(set(output.text[:-1]) <= set("ab") and output.text[-1] == "c" for output in outputs[10::13])


def test_neighbours_without_a_constraint_are_not_affected(engine):
    """The same tokens and, bit for bit, the same logits."""
    free = [{"max_tokens": 24, "temperature": temperature, "logprobs": 5} for temperature in (0.0, 1.0)]
    bound = [{"json_schema": SCHEMAS["nested"]}, {"regex": "[ab]{40}"}]
    dull = [{"max_tokens": 60, "ignore_eos": True}] * 2
    beside_bound = serve(engine, *free, *bound)[:2]
    beside_others = serve(engine, *free, *dull)[:2]
    for output, expected in zip(beside_bound, beside_others, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.logprobs == expected.logprobs


def test_tokens_do_not_depend_on_the_schedule_and_nothing_compiles(tiny, engine):
    """An engine's first requests with and without a grammar: everything that they need was compiled before."""
    kinds = [{"json_schema": SCHEMAS[name]} for name in ("nested", "anyOf")] + [{"regex": "[a-z]{5,30}"}] * 3
    expected = [output.token_ids for output in serve(engine, *kinds)]
    other = Engine(tiny, EngineConfig(slots=1, max_len=S, chunk_sizes=(16,)), tokenizer=TOKENIZER, eos_ids=[EOS])
    with compile_events() as compiled:
        assert [output.token_ids for output in serve(other, *kinds)] == expected
    assert compiled == []


def test_what_cannot_be_a_grammar_is_refused_before_any_work(engine, tiny):
    turns = engine.stats.turns
    with pytest.raises(ValueError, match=r'request 1: json_schema: Unimplemented keys: \["not"\]'):
        serve(engine, {"regex": "a"}, {"json_schema": {"not": {}}})
    assert not engine.unfinished
    assert engine.stats.turns == turns


def test_end_tokens_beyond_the_vocabulary_are_none(tiny):
    """A model's files may name ids that it does not have, as of a padded vocabulary."""
    size = tiny.config.vocab_size
    config = EngineConfig(slots=3, max_len=S, chunk_sizes=(16,))
    engine = Engine(tiny, config, tokenizer=TOKENIZER, eos_ids=[EOS, size, size + 5, -1])
    word, value, long = serve(
        engine,
        {"regex": "[ab]{3}"},
        {"json_schema": SCHEMAS["enum"]},
        {"min_tokens": 7, "logit_bias": {EOS: 100.0, size - 1: 99.0}},
    )
    assert [output.stop_reason for output in (word, value, long)] == [EOS] * 3
    assert len(word.text) == 3
    check(value.text, SCHEMAS["enum"])
    assert long.token_ids == [size - 1] * 7 + [EOS], "the last id is not -1"


def test_samples_have_grammars_of_their_own(engine):
    outputs = engine.generate([[5, 6]], SamplingParams(regex="[a-z]{4,9}", n=4, seed=3))
    assert all(4 <= len(output.text) <= 9 and output.text.isalpha() for output in outputs)
    assert len({output.text for output in outputs}) == 4


def test_a_stream_of_constrained_text(engine):
    request = Request(prompt_ids=[5], params=SamplingParams(json_schema=SCHEMAS["nested"], seed=1))
    deltas = list(engine.stream([request]))
    assert "".join(delta.text for delta in deltas) == deltas[-1].output.text
    check(deltas[-1].output.text, SCHEMAS["nested"])


def test_without_an_end_token_the_text_ends_where_nothing_can_follow(engine):
    kinds = [{"regex": "[ab]{3}", "ignore_eos": True}, {"json_schema": SCHEMAS["enum"], "ignore_eos": True}]
    word, value = serve(engine, *kinds)
    for output in (word, value):
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert EOS not in output.token_ids
        assert output.text == TOKENIZER.decode(output.token_ids)
    assert len(word.text) == 3
    check(value.text, SCHEMAS["enum"])


def test_max_tokens_cuts(engine):
    (output,) = serve(engine, {"regex": "[a-z]{20,}", "max_tokens": 5})
    assert (output.finish_reason, output.completion_tokens) == ("length", 5)
    assert output.text.isalpha()


def test_stop_strings_and_stop_tokens_end_the_text_early(engine):
    word, token = serve(
        engine, {"regex": "(a|b)b{3}c", "stop": "bb"}, {"choice": ["aab"], "stop_token_ids": [AB], "ignore_eos": True}
    )
    assert (word.finish_reason, word.stop_reason) == ("stop", "bb")
    assert word.text in ("a", "")
    assert (token.finish_reason, token.stop_reason, token.text) == ("stop", AB, "a")


def test_min_tokens_holds_where_the_grammar_leaves_room(engine):
    """A text that is complete too early ends that request alone, with an error."""
    roomy, tight, other = serve(
        engine,
        {"regex": "a*", "min_tokens": 7, "max_tokens": 60},
        {"regex": "a{3}", "min_tokens": 7},
        {"choice": ["ab"]},
    )
    assert roomy.completion_tokens > 7
    assert set(roomy.text) == {"a"}
    assert tight.finish_reason == "error"
    assert tight.error == "the logits after 12 tokens leave no token that is allowed"
    assert tight.unservable
    assert tight.text == "aaa"
    assert other.text == "ab"


def test_other_restrictions_apply_as_well(engine):
    allowed, bad, biased, nothing, spelt = serve(
        engine,
        {"regex": "[a-e]{9}", "allowed_token_ids": [A, B, EOS, 40]},
        {"regex": "[ab]{9}", "bad_words": ["b", "ab"]},
        {"regex": "[a-z]{9}", "logit_bias": {B: 100.0}},
        {"regex": "[c-e]{9}", "allowed_token_ids": [A, B, EOS, 40]},
        {"choice": ["ab"], "allowed_token_ids": [A, B, EOS]},
    )
    assert spelt.text == "ab"
    assert set(allowed.text) == {"a", "b"}
    assert len(allowed.text) == 9
    assert set(bad.text) == {"a"}
    assert biased.text == "b" * 9
    assert nothing.finish_reason == "error"
    assert nothing.error == "the logits after 9 tokens leave no token that is allowed"


class Told:
    """A grammar that says what it is told to."""

    error = "it was told so"

    def __init__(self, *answers):
        self.answers, self.tokens = list(answers), []

    def advance(self, token):
        self.tokens.append(token)
        return self.answers.pop(0)


@pytest.mark.parametrize("end", ["stop", "error"])
def test_a_grammar_ends_its_own_request(end):
    scheduler, device = make_scheduler(), FakeDevice(4, 64)
    bound, free = sequence("bound", [1, 2, 3], max_tokens=9), sequence("free", [1, 2, 3], max_tokens=9)
    bound.grammar = Told(None, None, end)
    for one in (bound, free):
        scheduler.submit(one)
    while scheduler.unfinished:
        turn, _ = run_turn(scheduler, device)
        masked = turn.plan.rows.words[: len(turn.sampled), 0] & Flag.MASK != 0
        assert masked.tolist() == [one is bound for one in turn.sampled]
    assert (bound.finish_reason, free.finish_reason) == (end, "length")
    assert bound.output == bound.grammar.tokens == alone([1, 2, 3], 3)
    assert free.output == alone([1, 2, 3], 9)


def test_the_error_says_what_the_grammar_says():
    scheduler, device = make_scheduler(), FakeDevice(4, 64)
    bound = sequence("bound", [1, 2, 3], max_tokens=9)
    bound.grammar = Told()
    scheduler.submit(bound)
    turn = scheduler.plan()
    device.step(turn.plan.rows)
    scheduler.commit(turn, Sampled(np.int32([-2])))
    assert bound.end(None).error == "the logits after 3 tokens leave no token that the grammar allows: it was told so"


def test_a_constraint_in_a_line_of_json():
    schema = {"type": "object", "properties": {"b": True, "a": True}}
    request = Request.from_json({"prompt": "x", "json_schema": schema, "max_tokens": 3})
    assert request.params.json_schema == '{"type": "object", "properties": {"b": true, "a": true}}'
    assert Request.from_json({"prompt": "x", "choice": ["a"]}).params.choice == ("a",)
