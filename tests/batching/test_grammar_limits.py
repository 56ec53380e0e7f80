"""Grammars past the library's limits: refused where no text can start, and told where a text gets there."""

import numpy as np
import pytest
from llguidance import LLParserLimits

from batching.grammar import GrammarCompiler
from batching.params import SamplingParams
from tests.batching.test_grammar import PADDED, TOKENIZERS, byte_level, ids, walk

TOKENIZER = TOKENIZERS["bytes"]
END = TOKENIZER.encode("<eos>")[0]
FREE = {"forced": {}, "free": {"bad_words": ["x"]}}  # then what the grammar leaves no choice in may come in any tokens


def optional(count):
    """The library's rows hold four items for each property, and at most 2000."""
    return {"type": "object", "properties": {f"a{index}": {"type": "boolean"} for index in range(count)}}


def compiler_of(tokenizer=TOKENIZER):
    return GrammarCompiler(tokenizer, PADDED, [END])


def token_of(text):
    (token,) = TOKENIZER.encode(text)
    return token


@pytest.mark.parametrize("free", FREE.values(), ids=FREE)
@pytest.mark.parametrize("count", [1, 60, 300, 450, 498])
def test_schemas_within_the_limits(count, free):
    matcher = compiler_of().matcher(SamplingParams(json_schema=optional(count), **free), [END])
    assert ids(matcher.mask()) == [token_of("{")]
    assert matcher.advance(token_of("{")) is None
    assert token_of("}") in ids(matcher.mask())


@pytest.mark.parametrize("free", FREE.values(), ids=FREE)
@pytest.mark.parametrize(
    "schema",
    [optional(499), optional(500), optional(3000), {"anyOf": [optional(300)] * 2}, {"anyOf": [optional(3)] * 700}],
    ids=["499", "500", "3000", "300 twice", "3 many times"],
)
def test_schemas_that_no_text_can_follow_are_refused(schema, free):
    compiler = compiler_of()
    message = r"^json_schema is past the library's limits: Current row has \d+ items; max is 2000; "
    with pytest.raises(ValueError, match=message):
        compiler.matcher(SamplingParams(json_schema=schema, **free), [END])
    assert compiler.cache_info().currsize == 0


def test_a_token_for_the_whole_text_is_no_way_out():
    """Else the answer to every question is the empty object."""
    compiler = compiler_of(byte_level("{}"))
    assert compiler.matcher(SamplingParams(json_schema=optional(9)), [END]) is not None
    with pytest.raises(ValueError, match="json_schema is past the library's limits"):
        compiler.matcher(SamplingParams(json_schema=optional(500)), [END])


@pytest.mark.parametrize("schema", [{"anyOf": [optional(500), {"type": "integer"}]}, {"items": optional(500)}])
def test_limits_that_some_texts_keep_away_from(schema):
    """A text that gets there ends with the library's reason."""
    compiler = compiler_of()
    matcher = compiler.matcher(SamplingParams(json_schema=schema), [END])
    assert matcher.advance(token_of("7")) is None
    matcher = compiler.matcher(SamplingParams(json_schema=schema), [END])
    for text in "[{" if "items" in schema else "{":
        assert token_of(text) in ids(matcher.mask())
        told = matcher.advance(token_of(text))
    assert told == "error"
    assert matcher.error.startswith("Current row has 2007 items; max is 2000; ")
    assert not matcher.mask().any()
    assert not matcher.finished


LARGE = {
    "choice": {"choice": [f"he said {index}" for index in range(3000)]},
    "enum": {"json_schema": {"enum": [f"he said {index}" for index in range(3000)]}},
    "required": {"json_schema": optional(600) | {"required": [f"a{index}" for index in range(600)]}},
    "regex": {"regex": "((a|b){3}c?){40}|x{200}"},
    "any": {"regex": "(?s).{0,50}"},
    "backtracking": {"regex": "(.*a.{6}){3}"},
    "empty": {"regex": "a?"},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_grammars_are_served(name):
    compiler = compiler_of()
    for free in FREE.values():
        matcher = compiler.matcher(SamplingParams(**LARGE[name], **free), [END])
        if name in ("required", "backtracking"):
            for seed in range(60):
                assert matcher.advance(int(np.random.default_rng(seed).choice(ids(matcher.mask())))) is None
        else:
            walk(matcher, TOKENIZER, END, np.random.default_rng(1))


def test_the_first_mask_may_break_a_limit_too():
    compiler = compiler_of()
    compiler._limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=1)
    with pytest.raises(ValueError, match=r"^regex is past the library's limits: lexer error: too many expressions"):
        compiler.matcher(SamplingParams(regex="[ab]{2,9}c"), [END])


def test_each_grammar_is_tried_once(monkeypatch):
    compiler, tried = compiler_of(), []
    monkeypatch.setattr(compiler, "_limit_at_the_start", tried.append)
    for expression in ("a", "b", "a", "b"):
        compiler.matcher(SamplingParams(regex=expression), [END])
    assert len(tried) == 2
