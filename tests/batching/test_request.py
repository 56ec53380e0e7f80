"""What a request may say."""

import re

import numpy as np
import pytest

from batching import Request, SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0, unless prompt_logprobs asks for the prompt's score"),
        ({"max_tokens": -1, "prompt_logprobs": 1}, "max_tokens must be at least 1, not -1"),
        ({"max_tokens": 1.0}, "max_tokens must be an integer, not 1.0"),
        ({"max_tokens": True}, "max_tokens must be an integer, not True"),
        ({"temperature": -0.1}, "temperature must be finite and at least 0, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"temperature": 10**400}, "temperature must be finite"),
        ({"temperature": 1e39}, "temperature must be finite"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"seed": -1}, "seed must be in 0 .. 2**64 - 1, not -1"),
        ({"seed": 2**64}, "seed must be in 0"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of integers, not 5"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list of integers, not 'ab'"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, not -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 exceeds max_tokens 4"),
        ({"top_k": -2}, "top_k must be at least 1, or 0 or -1 for all tokens, not -2"),
        ({"top_k": 2.0}, "top_k must be an integer, not 2.0"),
        ({"top_k": None}, "top_k must be an integer, not None"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.0000001}, "top_p must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p must be above 0 and at most 1, not nan"),
        ({"top_p": True}, "top_p must be a number, not True"),
        ({"top_p": None}, "top_p must be a number, not None"),
        ({"min_p": -1e-5}, "min_p must be in 0 .. 1, not -1e-05"),
        ({"min_p": 1.5}, "min_p must be in 0 .. 1, not 1.5"),
        ({"min_p": "0.1"}, "min_p must be a number, not '0.1'"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in 1e-5 .. 1e5, not 0"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty must be in 1e-5 .. 1e5, not 1e-38"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be in 1e-5 .. 1e5, not inf"),
        ({"presence_penalty": 2.1}, "presence_penalty must be in -2 .. 2, not 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be in -2 .. 2, not nan"),
        ({"logit_bias": [1]}, "logit_bias must be an object of token ids and numbers, not [1]"),
        ({"logit_bias": {1: 100.5}}, "logit_bias of token 1 must be in -100 .. 100, not 100.5"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of token 1 must be in -100 .. 100, not nan"),
        ({"logit_bias": {1: None}}, "logit_bias of token 1 must be a number, not None"),
        ({"logit_bias": {"x": 1}}, "each token id of logit_bias must be an integer, not 'x'"),
        ({"logit_bias": {True: 1}}, "each token id of logit_bias must be an integer, not True"),
        ({"logit_bias": {1: 1, "1": 2}}, "logit_bias names token 1 twice"),
        ({"allowed_token_ids": []}, "allowed_token_ids holds no token: nothing could be sampled"),
        ({"allowed_token_ids": [1.5]}, "each of allowed_token_ids must be an integer, not 1.5"),
        ({"bad_words": "ab"}, "bad_words must be a list of strings that are more than spaces, not 'ab'"),
        ({"bad_words": ["a", " "]}, "bad_words must be a list of strings that are more than spaces"),
        ({"bad_words": [5]}, "bad_words must be a list of strings"),
        ({"logprobs": 21}, "logprobs must be in 0 .. 20, not 21"),
        ({"logprobs": -1}, "logprobs must be in 0 .. 20, not -1"),
        ({"logprobs": True}, "logprobs must be an integer, not True"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be in 0 .. 20, not 21"),
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"n": None}, "n must be an integer, not None"),
        ({"n": 2, "temperature": 0}, "n must be 1 where nothing is drawn, not 2"),
        ({"n": 2, "max_tokens": 0, "prompt_logprobs": 0}, "n must be 1 where nothing is drawn, not 2"),
    ],
)
def test_sampling_params_refuse(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give exactly one of prompt, prompt_ids and messages, not none"),
        ({"prompt": "a", "prompt_ids": [1]}, "not ['prompt', 'prompt_ids']"),
        ({"prompt": 5}, "prompt must be a string, not int"),
        ({"prompt_ids": {"a": 1}}, "prompt_ids must be a list of integers"),
        ({"messages": 5}, "messages must be a list that is not empty, not 5"),
        ({"messages": []}, "messages must be a list that is not empty, not []"),
        ({"messages": [5]}, "message 0 must have a role and a content, not be 5"),
        ({"messages": [[["role", "user"], ["content", "hi"]]]}, "message 0 must have a role and a content"),
        ({"messages": [{"role": "user"}]}, "message 0: 'content' must be a string, not None"),
        ({"prompt": "a", "id": ""}, "id must be a string that is not empty, not ''"),
        ({"prompt": "a", "id": 7}, "id must be a string that is not empty, not 7"),
        ({"prompt": "a", "params": {"seed": 1}}, "params must be SamplingParams, not dict"),
    ],
)
def test_requests_refuse(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Request(**fields)


def test_from_json():
    line = {"id": "a", "prompt_ids": [1, 2], "max_tokens": 20, "ignore_eos": True}
    request = Request.from_json(line, {"temperature": 0.0, "max_tokens": 5})
    expected = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    assert request == Request(id="a", prompt_ids=(1, 2), params=expected)


@pytest.mark.parametrize("line", [[], "text", 5, None])
def test_from_json_wants_an_object(line):
    with pytest.raises(ValueError, match="a request is a JSON object"):
        Request.from_json(line)


def test_from_json_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=re.escape("fields that are not supported: ['params', 'top_q']")):
        Request.from_json({"prompt": "a", "top_q": 1, "params": {}})


def test_fields_are_kept_as_plain_values():
    params = SamplingParams(logit_bias={"5": 1, np.int8(7): np.float32(-100)}, allowed_token_ids=np.arange(3))
    assert params.logit_bias == {5: 1.0, 7: -100.0}
    assert {type(key) for key in params.logit_bias} | {type(value) for value in params.logit_bias.values()} == {
        int,
        float,
    }
    assert params.allowed_token_ids == (0, 1, 2)
    assert SamplingParams(stop_token_ids=np.int8([5, 7])).stop_token_ids == (5, 7)
    assert SamplingParams(top_p=1, presence_penalty=np.float32(-2)).presence_penalty == -2.0
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_none_is_none_of_a_list():
    lists = ("stop", "stop_token_ids", "bad_words")
    assert SamplingParams(**dict.fromkeys(lists)) == SamplingParams()
    others = ("logit_bias", "allowed_token_ids", "json_schema", "regex", "choice")
    assert SamplingParams(**dict.fromkeys(others)) == SamplingParams()


def test_numpy_integers_are_integers():
    ids = np.array([1, 2], np.int32)
    assert Request(prompt_ids=ids).prompt_ids == (1, 2)
    params = SamplingParams(max_tokens=np.int8(100), seed=np.uint8(5), temperature=np.float32(0.5))
    assert (params.max_tokens, params.seed, params.temperature) == (100, 5, 0.5)
    assert {type(params.max_tokens), type(params.seed)} == {int}


def test_ids_are_distinct():
    assert Request(prompt="a").id != Request(prompt="a").id
