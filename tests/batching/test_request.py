"""What a request may say."""

import re

import numpy as np
import pytest

from batching import Request, SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
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


def test_numpy_integers_are_integers():
    ids = np.array([1, 2], np.int32)
    assert Request(prompt_ids=ids).prompt_ids == (1, 2)
    params = SamplingParams(max_tokens=np.int8(100), seed=np.uint8(5), temperature=np.float32(0.5))
    assert (params.max_tokens, params.seed, params.temperature) == (100, 5, 0.5)
    assert {type(params.max_tokens), type(params.seed)} == {int}


def test_ids_are_distinct():
    assert Request(prompt="a").id != Request(prompt="a").id
