"""What cannot be served is refused in OpenAI's form, with the right status, before any work."""

import json

import httpx2
import openai
import pytest

from tests.server.servers import check

PROMPT = {"prompt": "abc", "max_tokens": 2}
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
BAD_COMPLETIONS = [  # fields, the field that the error is about, and a part of its message
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": []}, "prompt", "must be"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "must be"),
    ({"prompt": [1, "a"]}, "prompt", "must be"),
    ({"prompt": [[]]}, "prompt", "must be"),
    ({"prompt": [1.5]}, "prompt", "must be"),
    ({"prompt": [True]}, "prompt", "must be"),
    ({"prompt": [400]}, "prompt", "prompt holds 400"),
    ({"prompt": [-1]}, "prompt", "vocabulary"),
    ({"prompt": ["abc", [400]]}, "prompt", "prompt 1: prompt holds 400"),
    ({"prompt": [10**30]}, "prompt", "vocabulary"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"prompt": ["a"] * 10, "n": 13}, "n", "at most 128"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"temperature": -1}, "temperature", "finite and at least 0"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": True}, "temperature", "must be a number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 0, "temperature": 0}, "n", "at least 1"),
    ({"n": 1000}, "n", "at most 128"),
    ({"n": 1000, "temperature": 0}, "n", "at most 128"),
    ({"best_of": 3}, "best_of", "other than n"),
    ({"user": 5}, "user", "must be a string"),
    ({"max_tokens": -1}, "max_tokens", "at least"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "must not differ"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": 2.5}, "max_tokens", "an integer"),
    ({"min_tokens": 5}, "min_tokens", "exceeds"),
    ({"seed": 2**64}, "seed", "2**64"),
    ({"seed": -(2**63) - 1}, "seed", "2**64"),
    ({"logprobs": 21}, "logprobs", "in 0 .. 20"),
    ({"logprobs": True}, "logprobs", "an integer"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop", "empty"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "-100 .. 100"),
    ({"logit_bias": {"5000": 1}}, "logit_bias", "vocabulary"),
    ({"logit_bias": [5]}, "logit_bias", "object"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "no token"),
    ({"bad_words": ["a"] * 129}, "bad_words", "at most 128"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown"),
    ({"stream": True, "echo": True, "logprobs": 1}, "logprobs", "cannot be streamed"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "cannot be streamed"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "needs include_usage",
    ),
    ({"prompt": ["a", "b"], "stop_token_ids": [999]}, "stop_token_ids", "prompt 0: stop_token_ids holds 999"),
    ({"bad_words": ["\ud800"]}, "bad_words", "surrogate"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "not supported"),
    ({"priority": 3}, "priority", "does not look at it"),
    ({"priority": "high"}, "priority", "integer"),
    ({"top_logprobs": 3}, "top_logprobs", "unknown"),
    ({"max_token": 3}, "max_token", "unknown"),
    ({"guided_regex": "("}, "regex", "regex"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one constraint"),
    ({"guided_choice": []}, "choice", "empty"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "not supported"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be text"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
    ({"model": 5}, "model", "a string"),
]
BAD_CHATS = [
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hello"}, "messages", "a list"),
    ({"messages": ["hello"]}, "messages[0]", "an object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages", "no such role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "not supported"),
    ({"messages": [{"role": "user", "content": "a", "mood": "good"}]}, "messages[0].mood", "unknown"),
    ({"messages": [{"role": "user", "content": "a"}] * 1025}, "messages", "at most 1024"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "in 0 .. 20"),
    ({"max_completion_tokens": 3}, "max_tokens", "must not differ"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"store": True}, "store", "not supported"),
    ({"echo": True}, "echo", "not supported"),
]
HARMLESS = {
    "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "user": "a", "store": False, "metadata": {},
    "service_tier": "auto", "stop": None, "modalities": ["text"], "safety_identifier": "a", "logit_bias": None,
    "response_format": {"type": "text"}, "prompt_cache_key": "a", "seed": -5, "stream": False, "functions": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.url, timeout=60) as one:
        yield one


@pytest.mark.parametrize(("fields", "param", "part"), BAD_COMPLETIONS, ids=lambda value: f"{value!s:.40}")
def test_bad_completions(http, fields, param, part):
    content = json.dumps(PROMPT | fields)
    reply = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error = check(reply, 400, param)
    assert part in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "param", "part"), BAD_CHATS, ids=lambda value: f"{value!s:.40}")
def test_bad_chats(http, fields, param, part):
    error = check(http.post("/v1/chat/completions", json=HELLO | fields), 400, param)
    assert part in error["message"]


def test_what_has_no_effect_is_accepted(http):
    whole = {"messages": [{"role": "user", "content": "hel\nlo"}]}
    plain = http.post("/v1/chat/completions", json=HELLO | whole | {"seed": 2**64 - 5}).json()
    reply = http.post("/v1/chat/completions", json=HELLO | HARMLESS | whole)
    assert reply.json()["choices"] == plain["choices"]  # a negative seed is its two's complement
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": parts, "tool_calls": None, "type": "text"}]
    reply = http.post("/v1/chat/completions", json=HELLO | {"messages": messages, "seed": -5})
    assert reply.json()["choices"] == plain["choices"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b'"a"', b"\xff", b'{"prompt": NaN}', b'{"n": 1, "n": 2}', b"[" * 100_000, b"{" * 9,
        b"1" * 5000, b"[]" * 200_000,
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_what_is_no_json_object(http, path, body):
    check(http.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


def test_other_statuses(http, client):
    assert check(http.get("/v1/nothing"), 404)
    assert check(http.post("/v1/models"), 405)
    reply = http.get("/v1/completions")
    assert check(reply, 405)
    assert reply.headers["allow"] == "POST"
    assert check(http.post("/v1/completions", data={"prompt": "a"}), 415)
    assert http.head("/health").status_code == 200
    assert check(http.options("/v1/completions"), 405)
    error = check(http.post("/v1/completions", json=PROMPT | {"model": "other"}), 404, "model")
    assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError) as told:
        client.models.retrieve("org/other")
    assert told.value.code == "model_not_found"
    assert client.models.retrieve("tiny").max_model_len == 96
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(model="tiny", prompt="x" * 97)
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(model="tiny", prompt="a" * 100_000)
    assert told.value.code == "context_length_exceeded"


def test_tokens_and_texts(http, alone):
    text = "on the sun, \u00e4 \u65e5"
    ids = alone.tokenizer.encode(text)
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == ids
    assert (found["count"], found["max_model_len"], len(found["token_strs"])) == (len(ids), 96, len(ids))
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    found = http.post("/tokenize", json={"messages": HELLO["messages"]}).json()
    assert found["tokens"] == alone.tokenizer.encode_chat(HELLO["messages"])
    check(http.post("/tokenize", json={"prompt": "a", "messages": []}), 400, "prompt")
    check(http.post("/detokenize", json={"tokens": ["a"]}), 400, "tokens")
