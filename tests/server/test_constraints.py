"""Answers that follow a schema, an expression or a choice, however a client says it."""

import json

import jsonschema
import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"hot": {"type": "boolean"}, "kind": {"enum": ["sun", "moon"]}},
    "required": ["hot", "kind"],
    "additionalProperties": False,
}
FORMS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"extra_body": {"guided_json": SCHEMA}},
    {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
    {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_schemas(client, form):
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hot?"}], seed=1, max_tokens=80, **form
    )
    assert chat.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(chat.choices[0].message.content), SCHEMA)


def test_any_object(client):
    for form in (
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"json_object": True}}},
    ):
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hot?"}], seed=1, **form
        )
        assert chat.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("field", ["guided_{}", "structured_outputs"])
def test_expressions_and_choices(client, field):
    for kind, value, wanted in (("regex", "(ab){3}c", ["abababc"]), ("choice", ["sun", "moon"], ["sun", "moon"])):
        extra = {field.format(kind): value} if "{}" in field else {field: {kind: value}}
        found = client.completions.create(model="tiny", prompt="x", seed=1, max_tokens=20, extra_body=extra)
        assert found.choices[0].text in wanted


def test_text_is_no_constraint(client):
    arguments = {"model": "tiny", "messages": [{"role": "user", "content": "Hot?"}], "temperature": 0, "max_tokens": 9}
    plain = client.chat.completions.create(**arguments)
    assert client.chat.completions.create(**arguments, response_format={"type": "text"}).choices == plain.choices


MANY = {"type": "object", "properties": {f"a{index}": {"type": "boolean"} for index in range(500)}}


@pytest.mark.parametrize("form", ["response_format", "guided_json", "structured_outputs"])
def test_more_than_the_library_can_follow(client, caplog, form):
    """Refused, where no text can start beforehand."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hot?"}], "seed": 1, "max_tokens": 9}
    forms = {
        "response_format": lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "guided_json": lambda schema: schema,
        "structured_outputs": lambda schema: {"json": schema},
    }
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(**chat, extra_body={form: forms[form](MANY)})
    assert told.value.param == "json_schema"
    assert "json_schema is past the library's limits: Current row has 2007 items; max is 2000" in told.value.message
    later = {"type": "array", "items": MANY, "minItems": 1}
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(**chat, extra_body={form: forms[form](later)})
    assert told.value.code == "unservable"
    assert "Current row has 2007 items; max is 2000" in told.value.message
    assert not caplog.text


def test_what_the_parameters_together_leave_nothing_of(client, alone, caplog):
    """It is the client's fault, told with the status or in the stream."""
    fields = {"response_format": {"type": "json_object"}, "allowed_token_ids": alone.tokenizer.encode("{")}
    arguments = {"model": "tiny", "prompt": "x", "max_tokens": 9, "extra_body": fields}
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(**arguments)
    assert told.value.code == "unservable"
    assert "leave no token that is allowed" in told.value.message
    with pytest.raises(openai.APIError, match="leave no token that is allowed"):
        list(client.completions.create(**arguments, stream=True))
    assert not caplog.text
