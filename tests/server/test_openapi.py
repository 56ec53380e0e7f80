"""The server is as its OpenAPI document says, and nothing that fits it, or does not, makes the server fail."""

import copy
import warnings
from collections import Counter

import httpx2
import hypothesis
import pytest
import requests
from hypothesis import HealthCheck

from scripts.server.openapi import document

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS, load_all_checks
    from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

load_all_checks()
# Not that all that fits must be accepted: fields contradict one another, a prompt is too long, a schema is none.
CHECKED = [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name != "positive_data_acceptance"]
PATHS = document("tiny")["paths"]
POSTED = [path for path, operations in PATHS.items() if "post" in operations]
READ = [path for path, operations in PATHS.items() if "get" in operations]
GENERATING = ["/v1/completions", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def told(server):
    """The server's own document."""
    return httpx2.get(f"{server.url}/openapi.json").json()


def fuzz(server, told, method, path, mode, examples) -> Counter[int]:
    """How often each status came. Every answer is checked in all ways that schemathesis knows."""
    statuses: Counter[int] = Counter()
    operation = schemathesis.openapi.from_dict(copy.deepcopy(told))[path][method]
    how = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
    with requests.Session() as session:

        @hypothesis.settings(max_examples=examples, **how)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def fuzzed(case):
            reply = case.call(base_url=server.url, session=session, timeout=60)
            statuses[reply.status_code] += 1
            case.validate_response(reply, checks=CHECKED)

        fuzzed()
    server.wait(server.idle)
    assert max(statuses) < 500
    return statuses


@pytest.mark.parametrize("path", POSTED)
def test_bodies_that_do_not_fit(server, told, path):
    assert set(fuzz(server, told, "POST", path, GenerationMode.NEGATIVE, 40)) <= {400, 404}


@pytest.mark.parametrize("path", POSTED)
def test_bodies_that_fit(server, told, path):
    assert set(fuzz(server, told, "POST", path, GenerationMode.POSITIVE, 40)) <= {200, 400}


@pytest.mark.parametrize("path", READ)
def test_what_is_read(server, told, path):
    statuses = fuzz(server, told, "GET", path, GenerationMode.POSITIVE, 20)
    assert statuses[200] > 0
    assert set(statuses) <= {200, *((404,) if "{" in path else ())}


def narrowed(told, path) -> dict:
    """With bodies that get as far as the engine: short, of tokens that there are, without contradictions."""
    told = copy.deepcopy(told)
    body = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    fields = told["components"]["schemas"][body]["properties"]
    token = {"enum": [*range(3, 320)]}  # (an integer may also be 3.0, which is refused)
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": 9}
    text = {"type": "string", "minLength": 1, "maxLength": 9}
    role = {"enum": ["system", "user", "assistant"]}
    message = {"type": "object", "properties": {"role": role, "content": text}, "required": ["role", "content"]}
    bias = {
        "type": "object",
        "patternProperties": {"^[0-9]{1,2}$": {"type": "number", "minimum": -100, "maximum": 100}},
    }
    limit, few = {"type": "integer", "minimum": 1, "maximum": 9}, {"type": "integer", "minimum": 0, "maximum": 4}
    shorter = {
        "prompt": {"anyOf": [text, tokens, {"type": "array", "items": tokens, "minItems": 1, "maxItems": 3}]},
        "messages": {"type": "array", "items": message | {"additionalProperties": False}, "minItems": 1, "maxItems": 3},
        "n": {"enum": [1, 2, 3]}, "max_tokens": limit, "min_tokens": {"enum": [0, 1]},
        "seed": {"enum": [-(2**63), 0, 2**64 - 1]}, "stop_token_ids": tokens, "allowed_token_ids": tokens,
        "logit_bias": bias,
        "bad_words": {"type": "array", "items": {"enum": ["e", "th"]}}, "stop": text, "stream": {"type": "boolean"},
        "top_k": {"enum": [-1, 0, 1, 2**31]},
    }  # fmt: skip
    kept = "model temperature top_p min_p repetition_penalty presence_penalty frequency_penalty ignore_eos echo"
    kept = [*kept.split(), "return_token_ids", "return_tokens_as_token_ids", "add_special_tokens", "safety_identifier"]
    more = {"logprobs": few} if path == GENERATING[0] else {"logprobs": {"const": True}, "top_logprobs": few}
    required = ["prompt" if path == GENERATING[0] else "messages", *(("logprobs",) if "top_logprobs" in more else ())]
    chosen = {name: schema for name, schema in fields.items() if name in kept}
    chosen |= {name: schema for name, schema in shorter.items() if name in fields}
    schema = {"type": "object", "properties": chosen | more, "required": required, "additionalProperties": False}
    told["components"]["schemas"][body] = schema
    return told


@pytest.mark.parametrize("path", GENERATING)
def test_bodies_that_are_served(server, told, path):
    """Most are, and all answers are as the document says."""
    statuses = fuzz(server, narrowed(told, path), "POST", path, GenerationMode.POSITIVE, 60)
    assert statuses[200] > 20, statuses


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", POSTED)
def test_bodies_at_length(server, told, path, mode):
    fuzz(server, told, "POST", path, mode, 2000)
    if mode == GenerationMode.POSITIVE and path in GENERATING:
        fuzz(server, narrowed(told, path), "POST", path, mode, 2000)


@pytest.mark.parametrize("path", PATHS)
def test_other_methods_are_refused(server, path):
    with httpx2.Client(base_url=server.url) as http:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NONE"):
            known = {name.upper() for name in PATHS[path]} - {"PARAMETERS"}
            if method not in known | ({"HEAD"} if "GET" in known else set()):
                reply = http.request(method, path.replace("{name}", "tiny"))
                assert reply.status_code == 405
                assert known <= set(reply.headers["allow"].split(", "))


def test_the_document_is_one():
    """By OpenAPI's own schema."""
    OPENAPI_31_VALIDATOR.validate(document("tiny"))
    with pytest.raises(ValueError, match="required"):
        OPENAPI_31_VALIDATOR.validate(document("tiny") | {"info": {}})
