"""The key `x-guidance` of a JSON schema: how JSON is written may be chosen, not what of the schema is ignored."""

import re

import pytest

from batching.grammar import GrammarCompiler
from batching.params import SamplingParams
from tests.batching.test_grammar import PADDED, TOKENIZERS

COMPILER = GrammarCompiler(TOKENIZERS["bytes"], PADDED, [256])


@pytest.mark.parametrize(
    ("options", "compact", "spaced"),
    [
        ({}, True, True),
        ({"whitespace_flexible": True}, True, True),
        ({"whitespace_flexible": False}, True, False),
        ({"whitespace_flexible": False, "item_separator": ", "}, False, True),
        ({"whitespace_pattern": "\n"}, True, False),
    ],
)
@pytest.mark.parametrize("bad_words", [(), ("x",)])
def test_whitespace_and_separators_may_be_chosen(options, compact, spaced, bad_words):
    schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": options}
    for text, follows in (("[1,2]", compact), ("[1, 2]", spaced)):
        matcher = COMPILER.matcher(SamplingParams(json_schema=schema, bad_words=bad_words), [256])
        for token in COMPILER._tokens.encode(text):
            matcher.advance(token)
        assert (matcher.error is None) == follows, text


def test_escapes_may_be_chosen():
    schema = {"type": "string", "maxLength": 1}
    for options, text in (
        ({"json_allowed_escapes": "n"}, '"\\n"'),
        ({"json_allow_general_unicode_escapes": True}, '"\\u0041"'),
    ):
        matcher = COMPILER.matcher(SamplingParams(json_schema=schema | {"x-guidance": options}), [256])
        assert [matcher.advance(token) for token in COMPILER._tokens.encode(text)] == [None] * len(text)
        assert matcher.finished


@pytest.mark.parametrize("options", [{"lenient": True}, {"coerce_one_of": True}, {"nonsense": 1}, 5, None, ["lenient"]])
def test_other_options_are_refused(options):
    schema = {"type": "string", "x-guidance": options}
    message = (
        "json_schema: x-guidance may hold item_separator, key_separator, whitespace_flexible, whitespace_pattern, "
    )
    with pytest.raises(ValueError, match=re.escape(message) + ".*" + re.escape(f"not be {options!r}")):
        SamplingParams(json_schema=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"not": {}, "x-guidance": {"lenient": True}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"not": {}, "x-guidance": {"lenient": True}}}},
        {"allOf": [{"not": {}, "x-guidance": {"lenient": True}}]},
    ],
)
def test_further_down_the_key_means_nothing(schema):
    with pytest.raises(ValueError, match=r'json_schema: Unimplemented keys: \["not"\]'):
        COMPILER.matcher(SamplingParams(json_schema=schema), [256])
