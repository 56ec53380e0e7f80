"""The server's OpenAPI document. What the engine's parameters may be is said where they are checked, and read there."""

import math
from collections.abc import Mapping
from typing import Any

from batching.params import INTEGERS, MOST_LOGPROBS, MOST_STOP_STRINGS, NUMBERS, SCHEMA_OPTIONS
from scripts.server import constraints, protocol, tokens

Schema = dict[str, Any]

TEXT, FLAG, WHOLE, NUMBER = ({"type": kind} for kind in ("string", "boolean", "integer", "number"))
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
FINISH = {"type": "string", "enum": ["stop", "length"]}
NOT_A_BODY = ("408", "413", "415")  # statuses that say something of the body as such
REFUSALS = {
    "400": "It cannot be served, whenever it is sent; `param` names the field.",
    "401": "The server has a key, and this is not it.",
    "404": "The model does not exist.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "The queue is full: ask again later.",
    "500": "The request failed in the engine.",
    "503": "The server is shutting down, or reads too many bodies: ask elsewhere.",
}


def document(model: str) -> dict[str, Any]:
    """OpenAPI 3.1. `model`: its name to clients. The live page is no part of the interface, and not in it."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Carousel",
            "version": "1",
            "description": "OpenAI's completions and chat completions, with vLLM's further fields. A field that is "
            "null counts as left out; one that is unknown or not supported is refused by name.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": {"post": _post("Continue prompts.", "CompletionRequest", "Completion", stream=True)},
            "/v1/chat/completions": {"post": _post("Answer a chat.", "ChatRequest", "ChatCompletion", stream=True)},
            "/tokenize": {"post": _post("A text or a chat as token ids.", "TokenizeRequest", "Tokenized")},
            "/detokenize": {"post": _post("Token ids as a text.", "DetokenizeRequest", "Detokenized")},
            "/v1/models": {"get": _get("The model that there is.", _json(_ref("Models")))},
            "/v1/models/{name}": {
                "get": _get("What is said of a model.", _json(_ref("Model")), "404"),
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": TEXT, "example": model}],
            },
            "/health": {"get": _get("Whether the server takes requests.", _json(_ref("Health"))) | {"security": []}},
            "/metrics": {"get": _get("For Prometheus, with vLLM's names after `carousel:`.", {"text/plain": {}})},
            "/openapi.json": {"get": _get("This document.", _json({"type": "object"}))},
        },
        "components": {
            "schemas": _requests(model) | _answers(model),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


# Operations.


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _get(summary: str, content: dict[str, Any], *refusals: str) -> dict[str, Any]:
    told = _refused(["401", *refusals, "500", "503"])
    if _ref("Health") in [one.get("schema") for one in content.values()]:
        told = {"503": {"description": "It does not.", "content": content}}
    return {"summary": summary, "responses": {"200": {"description": summary, "content": content}} | told}


def _post(summary: str, body: str, answer: str, *, stream: bool = False) -> dict[str, Any]:
    content = _json(_ref(answer))
    if stream:
        content["text/event-stream"] = {}
        summary += " With `stream` in pieces, as server-sent events, of which the last is [DONE]."
    statuses = [status for status in REFUSALS if stream or status != "429"]
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(_ref(body))},
        "responses": {"200": {"description": summary, "content": content}} | _refused(statuses),
    }


def _refused(statuses: list[str]) -> dict[str, Any]:
    return {status: {"description": REFUSALS[status], "content": _json(_ref("Error"))} for status in statuses}


# Schemas.


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    """With these fields alone; those that are not required may be null, and so may unknown ones: see `Fields`."""
    optional = {name: _or_null(schema) for name, schema in (optional or {}).items()}
    fields = {"properties": {**required, **optional}, "required": [*required], "additionalProperties": {"type": "null"}}
    return {"type": "object"} | fields | more


def _or_null(schema: Schema) -> Schema:
    if "enum" in schema:
        return {"enum": [*schema["enum"], *([] if None in schema["enum"] else [None])]}
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items} | bounds


def _harmless(*fields: Mapping[str, tuple[Any, ...]]) -> dict[str, Schema]:
    """Fields of which only the values that have no effect are accepted."""
    return {name: {"enum": [None, *values]} for one in fields for name, values in one.items()}


def _bounded(kind: str, least: float, most: float) -> Schema:
    schema: Schema = {"type": kind}
    if least == math.ulp(0.0):  # above 0, that means
        schema["exclusiveMinimum"] = 0
    elif math.isfinite(least):
        schema["minimum"] = least
    return schema | ({"maximum": most} if math.isfinite(most) else {})


def _sampling() -> dict[str, Schema]:
    """The fields that completions and chats have in common."""
    numbers = {name: _bounded("integer", least, most) for name, least, most, _ in INTEGERS}
    numbers |= {name: _bounded("number", least, most) for name, least, most, _ in NUMBERS}
    numbers["seed"]["minimum"] = -(2**63)
    numbers["n"]["default"] = 1
    word = {"type": "string", "minLength": 1}
    bias = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
    bias |= {"propertyNames": {"pattern": "^[0-9]{1,9}$"}, "maxProperties": protocol.MOST["logit_bias"]}
    fields = {name: schema for name, schema in numbers.items() if name in protocol.SAMPLING}
    fields |= {
        "logit_bias": bias,
        "allowed_token_ids": _list(TOKEN_ID, minItems=1, maxItems=protocol.MOST_TOKEN_IDS),
        "bad_words": _list({"type": "string", "pattern": r"\S"}, maxItems=protocol.MOST_BAD_WORDS),
        "stop_token_ids": _list(TOKEN_ID, maxItems=protocol.MOST["stop_token_ids"]),
        "stop": {"anyOf": [word, _list(word, maxItems=MOST_STOP_STRINGS)]},
        "ignore_eos": FLAG,
    }
    fields |= dict.fromkeys(("max_tokens", "max_completion_tokens"), numbers["max_tokens"])
    fields |= {"best_of": numbers["n"], "add_special_tokens": FLAG}
    fields |= dict.fromkeys(("stream", "return_token_ids", "return_tokens_as_token_ids"), FLAG)
    options = {"include_usage": FLAG, "continuous_usage_stats": FLAG} | _harmless(protocol.HARMLESS_IN_STREAMS)
    fields |= {"stream_options": _object({}, options)}
    fields |= {
        "priority": WHOLE,
        "user": TEXT,
        "safety_identifier": TEXT,
        "predicted_tokens": {"type": "integer", "minimum": 0},
    }
    seconds = {"type": "number", "minimum": 1e-9, "maximum": 1e9}
    fields |= {"ttft_slo_s": seconds, "tpot_slo_s": seconds}
    return fields | _constraints() | _harmless(protocol.HARMLESS)


def _constraints() -> dict[str, Schema]:
    """What the text of an answer must follow: at most one of these."""
    told = f"A JSON schema; its x-guidance may hold {', '.join(SCHEMA_OPTIONS)}."
    schema = {"type": "object", "description": told}
    kinds = {
        "json": {"anyOf": [schema, TEXT]},
        "regex": {"type": "string", "maxLength": constraints.MOST_CHARACTERS},
        "choice": _list({"type": "string", "minLength": 1}, minItems=1, maxItems=constraints.MOST_CHOICES),
    }
    form = _object({"schema": schema}, {"name": TEXT, "description": TEXT, "strict": FLAG})
    forms = [_object({"type": {"const": kind}}) for kind in ("text", "json_object")]
    forms.append(_object({"type": {"const": "json_schema"}, "json_schema": form}))
    guided = {f"guided_{name}": kind for name, kind in kinds.items()}
    guided |= _harmless(dict.fromkeys(("guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern"), ()))
    outputs = _object({}, kinds | {"json_object": FLAG} | _harmless(constraints.HARMLESS))
    return {"response_format": {"anyOf": forms}, "structured_outputs": outputs} | guided


def _messages() -> Schema:
    part = _object({"type": {"const": "text"}, "text": TEXT}, additionalProperties=False)
    content = {"anyOf": [TEXT, _list(part)]}
    optional = {"name": TEXT} | _harmless(protocol.HARMLESS_IN_MESSAGES)
    return _list(_object({"role": TEXT, "content": content}, optional), minItems=1, maxItems=protocol.MOST_MESSAGES)


def _requests(model: str) -> dict[str, Schema]:
    name = {"model": {"enum": [model]}}
    ids = _list(TOKEN_ID, minItems=1)
    prompt = {"anyOf": [TEXT, ids, _list({"anyOf": [TEXT, ids]}, minItems=1)]}
    most = {"type": "integer", "minimum": 0, "maximum": MOST_LOGPROBS}
    limit = {"type": "integer", "minimum": 1}
    chat = _sampling() | {"logprobs": FLAG, "top_logprobs": most, "max_tokens": limit, "max_completion_tokens": limit}
    chat |= {"prompt_cache_key": TEXT} | _harmless(protocol.HARMLESS_IN_CHAT)
    to_ids = {"prompt": TEXT, "messages": _messages(), "add_special_tokens": FLAG, "return_token_strs": FLAG}
    one_of = [{"required": [one], "properties": {one: {"not": {"type": "null"}}}} for one in ("prompt", "messages")]
    return {
        "CompletionRequest": _object({"prompt": prompt}, name | _sampling() | {"echo": FLAG, "logprobs": most}),
        "ChatRequest": _object({"messages": _messages()}, name | chat),
        "TokenizeRequest": _object({}, name | to_ids | _harmless(tokens.HARMLESS), oneOf=one_of),
        "DetokenizeRequest": _object({"tokens": _list(TOKEN_ID)}, name),
    }


def _answers(model: str) -> dict[str, Schema]:
    """Fields of these may come to be more: a client must not mind."""

    def told(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
        return _object(required, optional, additionalProperties=True)

    null = {"type": "null"}
    count = {"type": "integer", "minimum": 0}
    ids = {"prompt_token_ids": _list(TOKEN_ID), "token_ids": _list(TOKEN_ID), "prompt_logprobs": {"type": "array"}}
    ends = {"index": count, "finish_reason": FINISH, "logprobs": _or_null({"type": "object"})}
    ends |= {"stop_reason": {"type": ["integer", "string", "null"]}}
    message = told({"role": {"const": "assistant"}, "content": TEXT, "refusal": null})
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), count)
    usage = told(counts | {"prompt_tokens_details": told({"cached_tokens": count})})
    head = {"id": TEXT, "created": count, "model": {"const": model}, "usage": usage}

    def answer(kind: str, choice: Schema) -> Schema:
        return told(head | {"object": {"const": kind}, "choices": _list(choice, minItems=1)})

    error = told({"message": TEXT, "type": TEXT, "param": _or_null(TEXT), "code": _or_null(TEXT)})
    card = {"id": {"const": model}, "object": {"const": "model"}, "created": count, "owned_by": TEXT}
    return {
        "Completion": answer("text_completion", told(ends | {"text": TEXT}, ids)),
        "ChatCompletion": answer("chat.completion", told(ends | {"message": message}, ids)),
        "Tokenized": told(
            {"count": count, "max_model_len": count, "tokens": _list(TOKEN_ID), "token_strs": _or_null(_list(TEXT))}
        ),
        "Detokenized": told({"prompt": TEXT}),
        "Model": told(card | {"max_model_len": count}),
        "Models": told({"object": {"const": "list"}, "data": _list(_ref("Model"), minItems=1)}),
        "Health": told({"status": {"enum": ["ok", "closing", "broken"]}}),
        "Error": told({"error": error}),
    }
