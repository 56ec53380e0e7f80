"""Stop strings and streamed text against their definition: the text of all tokens so far, decoded at once."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models

from batching import SamplingParams
from batching.text import TextStream, overlap
from model.tokenizer import Detokenizer, Tokenizer, tokenizer_from_gguf
from tests.batching.fake import alone
from tests.batching.fake_engine import expected_of, fake_engine, finish, letters, prompt_of, request_of, text_of
from tests.model.test_tokenizer import smollm, spm_fields

BAD = "\ufffd"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@cache
def tokenizer_named(name: str) -> Tokenizer:
    """Real tokenizers in small, one of each kind."""
    if name == "byte level":
        return smollm()
    if name == "byte fallback":
        return tokenizer_from_gguf(spm_fields())
    if name == "word pieces":
        pieces = ["[UNK]", ".", ",", "'", "do", "not", *LETTERS, *(f"##{letter}" for letter in LETTERS), "##ing"]
        model = models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
        decoder = decoders.WordPiece(cleanup=True)
    else:  # a later token changes what earlier ones mean
        model = models.BPE({letter: index for index, letter in enumerate(LETTERS)}, [])
        decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a.a"), "x")])
    core = tokenizers.Tokenizer(model)
    core.decoder = decoder
    return Tokenizer(core)


NAMES = ["byte level", "byte fallback", "word pieces", "as a whole"]


def tokens_of(name):
    """Token ids, many of them single bytes or letters, a few beyond the vocabulary."""
    size = tokenizer_named(name).vocab_size
    return st.lists(st.integers(0, min(size, 280)) | st.integers(0, size + 2), min_size=1, max_size=24)


def streamed(tokenizer, ids, stop, min_tokens=0):
    """The pieces, the stop string that was found, and how many tokens that took."""
    stream, pieces = TextStream(tokenizer, stop), []
    for count, token in enumerate(ids, start=1):
        pieces.append(stream.push(token, last=count == len(ids), may_stop=count > min_tokens))
        if stream.stop_reason is not None:
            break
    assert stream.text == "".join(pieces)
    return pieces, stream.stop_reason, len(pieces)


def by_definition(tokenizer, ids, stop):
    """The same from the text decoded at once after every token, for stop strings without U+FFFD."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        found = [(text.find(one), -len(one), one) for one in stop if one in text]
        if found:
            start, _, reason = min(found)
            return text[:start], reason, count
    return tokenizer.decode(ids), None, len(ids)


@st.composite
def cases(draw, name):
    """Tokens, and stop strings of which some are in their text, in part or whole."""
    ids = draw(tokens_of(name))
    text, stop = tokenizer_named(name).decode(ids), []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        one = text[start : start + draw(st.integers(1, 6))] + draw(st.sampled_from(["", "", "", "a", " z"]))
        stop.append(one.replace(BAD, "") or draw(st.text(LETTERS, min_size=1, max_size=2)))
    return ids, stop


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_stop_strings_are_found_as_in_the_text_decoded_at_once(name, data):
    ids, stop = data.draw(cases(name))
    pieces, reason, count = streamed(tokenizer_named(name), ids, stop)
    assert ("".join(pieces), reason, count) == by_definition(tokenizer_named(name), ids, stop)
    if reason is not None:
        assert not any(one in "".join(pieces) for one in stop)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_held_back_is_the_longest_start_of_a_stop_string(name, data):
    ids, stop = data.draw(cases(name))
    stream, plain, certain, out = TextStream(tokenizer_named(name), stop), Detokenizer(tokenizer_named(name)), "", ""
    for token in ids:
        certain += plain.push(token)
        out += stream.push(token)
        if stream.stop_reason is not None:
            return
        starts = [one[:length] for one in stop for length in range(1, len(one)) if certain.endswith(one[:length])]
        assert out == certain[: len(certain) - max(map(len, starts), default=0)]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF, exclude_characters=BAD)))
@settings(max_examples=200, deadline=None)
def test_characters_come_whole(name, text):
    """However a text is cut into tokens, and wherever it is cut short, U+FFFD comes at the end alone."""
    ids = tokenizer_named(name).encode(text, add_special_tokens=False)
    for count in {len(ids), len(ids) // 2}:
        pieces, _, _ = streamed(tokenizer_named(name), ids[:count], ["\0"])
        assert "".join(pieces) == tokenizer_named(name).decode(ids[:count])
        assert BAD not in "".join(pieces[:-1])


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@pytest.mark.parametrize("stop", ["END", "\n\n", "漢字", "é!"])
def test_every_way_to_cut_a_stop_string_into_tokens(name, stop):
    """Its bytes as single tokens, or cut in two anywhere: found with the last byte, and nothing of it comes out."""
    tokenizer = tokenizer_named(name)
    core = tokenizer._core
    if name == "byte fallback":
        single = [core.token_to_id(f"<0x{byte:02X}>") for byte in f"ab{stop}".encode()]
    else:
        alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        single = [core.token_to_id(letter) for letter in alphabet.pre_tokenize_str(f"ab{stop}")[0][0]]
    assert tokenizer.decode(single) == f"ab{stop}"
    cuts = [single]
    for start in (f"ab{stop[:at]}" for at in range(len(stop) + 1)):
        cuts.append(tokenizer.encode(start, add_special_tokens=False) + single[len(start.encode()) :])
    for ids in cuts:
        before = tokenizer.decode(ids).removesuffix(stop)
        pieces, reason, count = streamed(tokenizer, [*ids, single[0]], [stop])
        assert ("".join(pieces), reason, count) == (before, stop, len(ids))


def test_pieces_wait_and_come_by_hand():
    stream = TextStream(tokenizer_named("byte level"), ["abc", "bd"])
    ids = [tokenizer_named("byte level")._core.token_to_id(letter) for letter in "xabaabd"]
    assert [stream.push(token) for token in ids] == ["x", "", "", "ab", "a", "", "a"]
    assert stream.stop_reason == "bd"
    stream = TextStream(tokenizer_named("byte level"), ["abc", "ab"])
    assert [stream.push(token) for token in ids[:3]] == ["x", "", ""]
    assert stream.stop_reason == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [("xab", "abc", 2), ("abc", "abc", 0), ("aab", "aaab", 0), ("aaa", "aaab", 3), ("", "a", 0), ("a", "a", 0)],
)
def test_overlap(text, stop, length):
    assert overlap(text, stop) == length


def test_bytes_that_never_became_a_character_can_be_the_stop_string():
    """They are only known to be none when the request ends."""
    tokenizer = tokenizer_named("byte level")
    half = tokenizer._core.token_to_id("ð")
    assert streamed(tokenizer, [half], [BAD]) == ([""], BAD, 1)
    assert streamed(tokenizer, [half], ["a"]) == ([BAD], None, 1)
    fallback = tokenizer_named("byte fallback")
    assert streamed(fallback, [3 + 0xE6], [BAD]) == ([""], BAD, 1)
    assert streamed(fallback, [3 + byte for byte in "漢!".encode()], [BAD])[1] is None


@pytest.mark.parametrize(
    ("stop", "kept"), [("a", ("a",)), (["a", "b"], ("a", "b")), (None, ()), ([], ()), (("a",) * 16, ("a",) * 16)]
)
def test_stop_strings_as_params(stop, kept):
    assert SamplingParams(stop=stop).stop == kept


@pytest.mark.parametrize("stop", ["", [""], [5], 5, {"a": 1}, ["a"] * 17, [["a"]], [b"a"]])
def test_stop_strings_that_are_refused(stop):
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=stop)


def test_stop_strings_need_a_tokenizer():
    engine = fake_engine()
    with pytest.raises(ValueError, match=re.escape("request 0: the model has no tokenizer: stop strings")):
        engine.generate([request_of("a", [1], stop="x")])
    assert not engine.unfinished


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_engine_ends_a_request_at_a_stop_string_and_the_next_one_has_its_slot_at_once(run_ahead):
    engine = fake_engine(slots=1, tokenizer=letters(), run_ahead=run_ahead)
    prompt, other = prompt_of(20, 1), request_of("b", prompt_of(5, 2), max_tokens=4)
    tokens = alone(prompt, 12)
    stop = text_of(tokens[5:8])
    engine.submit(request_of("a", prompt, max_tokens=12, stop=[stop, "never"]))
    engine.submit(other)
    outputs, steps = [], 0
    while engine.unfinished:
        outputs += engine.step()
        steps += 1
    assert [output.id for output in outputs] == ["a", "b"]
    first = outputs[0]
    assert (first.finish_reason, first.stop_reason, first.text) == ("stop", stop, text_of(tokens[:5]))
    assert (first.token_ids, first.completion_tokens) == (tokens[:8], 8)
    assert outputs[1].token_ids == expected_of(other)
    assert outputs[1].text == text_of(expected_of(other))
    assert steps == first.metrics.turns + outputs[1].metrics.turns + run_ahead
    assert finish(engine) == []


def test_a_stop_string_in_the_last_token_is_the_reason():
    engine = fake_engine(tokenizer=letters())
    tokens = alone(prompt_of(5), 6)
    for count, reason in ((6, "stop"), (5, "length")):
        output = engine.generate([request_of("a", prompt_of(5), max_tokens=count, stop=text_of(tokens[4:6]))])[0]
        assert (output.finish_reason, output.token_ids) == (reason, tokens[:count])
        assert output.text == text_of(tokens[: 4 if reason == "stop" else 5])
        assert output.stop_reason == (text_of(tokens[4:6]) if reason == "stop" else None)


def test_the_prompt_is_not_searched():
    engine = fake_engine(tokenizer=letters())
    prompt = prompt_of(9)
    output = engine.generate([request_of("a", prompt, max_tokens=3, stop=text_of(prompt[-2:]))])[0]
    assert output.finish_reason == "length"


def test_pieces_of_a_stream_with_stop_strings():
    """Joined they are the Output's text; a piece that could become a stop string waits, also until the end."""
    engine = fake_engine(tokenizer=letters())
    prompt = next(prompt_of(5, seed) for seed in range(99) if len(set(alone(prompt_of(5, seed), 9))) == 9)
    letter = text_of(alone(prompt, 9))
    request = request_of("a", prompt, max_tokens=9, stop=[letter[2:4] + "x", letter[6:8], letter[8] + "x"])
    deltas = list(engine.stream([request]))
    assert [delta.text for delta in deltas] == [*letter[:2], "", "", letter[2:5], letter[5], "", ""]
    assert deltas[-1].output.text == letter[:6]
    ended = request_of("a", prompt, max_tokens=9, stop=[letter[8] + "x"])
    assert [delta.text for delta in engine.stream([ended])] == list(letter)
    cancelled = []
    for delta in engine.stream([request]):
        cancelled.append(delta.text)
        if len(cancelled) == 3:
            engine.cancel("a")
    assert cancelled == [*letter[:2], "", letter[2]]


@pytest.mark.parametrize("least", range(8))
def test_min_tokens_and_stop_strings(least):
    engine = fake_engine(tokenizer=letters())
    tokens = alone(prompt_of(5), 8)
    stop = text_of(tokens[3:5])
    output = engine.generate([request_of("a", prompt_of(5), max_tokens=8, min_tokens=least, stop=stop)])[0]
    assert output.token_ids == (tokens[:5] if least < 5 else tokens)
    assert output.text == text_of(tokens[:3] if least < 5 else tokens)


def test_end_tokens_have_no_text_and_ids_beyond_the_tokenizer_neither():
    """Embeddings are padded: the model may know more ids than the tokenizer."""
    engine = fake_engine(tokenizer=letters(), eos_ids=[319, 7])
    forced, step = [5, 300, 6, 7], engine.device.step
    steps = iter(forced)

    def forced_step(rows):
        sampled = step(rows)
        sampled.tokens[0] = next(steps, 0)
        return sampled

    engine.device.step = forced_step
    output = engine.generate([request_of("a", prompt_of(5), max_tokens=9, stop="never")])[0]
    assert (output.token_ids, output.text) == (forced, text_of([5, 6]))
    assert (output.finish_reason, output.stop_reason) == ("stop", 7)


def test_stop_strings_in_a_real_run():
    """The default model's recorded greedy text, cut at a word of it."""
    cases = json.loads((Path(__file__).parents[1] / "data" / "smollm2_135m_instruct.json").read_text(encoding="utf-8"))
    for case in cases:
        text = smollm().decode(case["greedy"])
        word = text.split()[-1]
        pieces, reason, _ = streamed(smollm(), case["greedy"], [word])
        assert reason == word
        assert "".join(pieces) == text[: text.index(word)]
