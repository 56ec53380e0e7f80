"""Any body at all is understood or refused; what is understood, and what it comes to."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching import SamplingParams
from batching.request import Logprobs
from scripts.server import protocol
from scripts.server.answers import Answer
from scripts.server.errors import ApiError
from scripts.server.logprobs import Teller, TokenNames
from scripts.server.prompts import requests_of, tokenised
from scripts.server.protocol import Served, chat, completion
from tests.batching.fake_engine import letters
from tests.model.test_tokenizer import smollm

SERVED = Served("tiny", letters(), max_len=64, most_choices=16)
LONG = replace(SERVED, max_len=4096)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner))
LISTS = st.lists(st.integers(-1, 99), max_size=3) | st.lists(st.text(max_size=3))
CLOSE = SCALARS | st.integers(-2, 30) | LISTS | VALUES
NAMES = sorted(
    {*protocol.SAMPLING, *protocol.HARMLESS, *protocol.HARMLESS_IN_CHAT, "prompt", "messages", "logprobs", "max_tokens"}
    | {"max_completion_tokens", "top_logprobs", "stream", "stream_options", "echo", "response_format", "guided_json"}
    | {"structured_outputs", "guided_choice", "guided_regex", "user", "priority", "model", "return_token_ids", "other"}
)


def of(read, served=SERVED, **fields):
    return read(json.dumps(fields).encode(), served)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([completion, chat]), st.dictionaries(st.sampled_from(NAMES), CLOSE, max_size=4), st.booleans())
def test_any_fields(read, fields, good):
    """What is understood can be asked of the engine, and what is not is an error of the client's."""
    rest = {"prompt": "\u4e01\u4e02", "messages": [{"role": "user", "content": "\u4e01"}]}
    needed = "prompt" if read is completion else "messages"
    try:
        asked = of(read, **({needed: rest[needed]} if good else {}) | fields)
        prompts = asked.prompts if read is completion else ()
        requests = requests_of(asked, tokenised(replace(asked, prompts=prompts), SERVED), "a", SERVED)
        assert all(request.params.n * asked.copies <= SERVED.most_choices for request in requests)
    except ApiError as error:
        refusal = error
    else:
        return
    assert refusal.status in (400, 404)
    assert set(json.loads(refusal.body)["error"]) == {"message", "type", "param", "code"}
    assert len(refusal.body) < 20_000


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | VALUES.map(lambda one: json.dumps(one).encode()))
def test_any_bytes(body):
    for read in (completion, chat):
        with pytest.raises(ApiError):
            read(body, SERVED)


def test_every_field_arrives():
    chosen = {
        "min_tokens": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": {"5": 1.0}, "allowed_token_ids": [5, 6],
        "bad_words": ["a"], "seed": 9, "n": 3, "stop_token_ids": [7], "stop": ["x"], "ignore_eos": True,
    }  # fmt: skip
    assert set(chosen) == set(protocol.SAMPLING) - {"prompt_logprobs"}
    wanted = SamplingParams(**chosen, max_tokens=5, logprobs=3, regex="a+")
    assert of(completion, prompt="a", max_tokens=5, logprobs=3, guided_regex="a+", **chosen).params == wanted
    messages = [{"role": "user", "content": "a"}]
    more = {"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 3, "structured_outputs": {"regex": "a+"}}
    assert of(chat, messages=messages, **more, **chosen).params == wanted


def test_null_is_left_out():
    names = [*protocol.SAMPLING, *protocol.HARMLESS, "max_tokens", "logprobs", "echo", "stream", "stream_options"]
    assert of(completion, prompt="a", **dict.fromkeys(names)) == of(completion, prompt="a")
    messages = [{"role": "user", "content": "a", **dict.fromkeys(protocol.HARMLESS_IN_MESSAGES)}]
    names = [*protocol.SAMPLING, *protocol.HARMLESS, *protocol.HARMLESS_IN_CHAT, "response_format"]
    plain = of(chat, messages=[{"role": "user", "content": "a"}])
    assert of(chat, messages=messages, **dict.fromkeys(names)) == plain


def test_policies_are_told_what_they_look_at():
    assert of(completion, prompt="a", user="me").facts == {}
    fair = replace(SERVED, uses=frozenset(["user"]))
    asked = of(completion, fair, prompt="a", user="me", priority=2)
    assert requests_of(asked, [[1]], "x", fair)[0].user == "me"
    assert asked.facts == {"user": "me", "priority": 2}


def test_logprobs_are_bounded():
    asked = of(completion, LONG, prompt=[1], logprobs=20, max_tokens=1000, n=13)
    with pytest.raises(ApiError, match="273000 logprobs"):
        requests_of(asked, [[1]], "a", LONG)
    asked = of(completion, LONG, prompt=[1], logprobs=20, max_tokens=1000, n=12)
    assert requests_of(asked, [[1]], "a", LONG)[0].params.n == 12
    asked = of(completion, LONG, prompt=["a"] * 16, logprobs=19, echo=True, max_tokens=1)
    with pytest.raises(ApiError, match="at most"):
        requests_of(asked, [[1] * 1000] * 16, "a", LONG)
    asked = of(chat, LONG, messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=20, n=4)
    with pytest.raises(ApiError, match="at most"):
        requests_of(asked, [[1]], "a", LONG)


def test_long_texts_are_refused_unread():
    asked = of(completion, prompt="\u4e00" * 65)
    with pytest.raises(ApiError) as told:
        tokenised(asked, SERVED)
    assert told.value.code == "context_length_exceeded"
    assert tokenised(of(completion, prompt="\u4e00" * 64), SERVED) == [[0]]  # one word, which is unknown


def test_special_tokens():
    tokenizer = smollm()
    served = replace(LONG, tokenizer=tokenizer)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenised(of(chat, served, messages=messages), served) == [tokenizer.encode_chat(messages)]
    for flag in (True, False):
        asked = of(completion, served, prompt="hello", add_special_tokens=flag)
        assert tokenised(asked, served) == [tokenizer.encode("hello", add_special_tokens=flag)]


def test_names_of_tokens():
    names = TokenNames(smollm())
    assert names.of(smollm().encode(" sun")[0]) == (" sun", list(b" sun"))
    euro = smollm().encode("\u20ac")
    spelt = [names.of(token) for token in euro]
    assert bytes(byte for _, content in spelt for byte in content).decode() == "\u20ac"
    assert len(euro) == 1 or spelt[0][0].startswith("bytes:\\xe2")
    assert names.of(2)[0] == "<|im_end|>"
    assert names.of(10**6) == ("", [])


def test_logprobs_are_numbers():
    one = Logprobs(5, float("-inf"), [6, 7], [-0.5, float("-inf")])
    teller = Teller(TokenNames(letters()), letters(), ids=True)
    told = json.dumps([teller.completion([5], [one]), teller.chat([one]), teller.prompt([None, one])], allow_nan=False)
    assert told.count("-9999.0") == 7


def test_answers_keep_the_order_of_choices():
    """A sample's copies are beside each other, samples in their order, prompts in theirs."""
    for fields in ({"temperature": 0}, {"seed": 5}):
        asked = of(completion, prompt=[[1], [2]], n=2, **fields)
        answer = Answer("a", asked, requests_of(asked, [[1], [2]], "a", SERVED), SERVED, TokenNames(letters()))
        choices = {key: [*sample.choices] for key, sample in answer._samples.items()}
        if "seed" in fields:
            assert choices == {("a-0", 0): [0], ("a-0", 1): [1], ("a-1", 0): [2], ("a-1", 1): [3]}
        else:
            assert choices == {("a-0", 0): [0, 1], ("a-1", 0): [2, 3]}
        assert asked.choices == 4
