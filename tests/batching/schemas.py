"""Ten JSON schemas whose texts are short, and what is right by them."""

import json

import jsonschema

ITEM = {
    "type": "object",
    "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"}, "count": {"$ref": "#/$defs/count"}},
    "required": ["sku", "count"],
    "additionalProperties": False,
}
SCHEMAS = {
    "required and optional": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "nickname": {"type": "string", "maxLength": 8},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", "dark blue", 7, None, [1, {"é": '\n"\\'}]]},
    "array with bounds": {
        "type": "array",
        "items": {"type": "integer", "minimum": -20, "exclusiveMaximum": 20},
        "minItems": 2,
        "maxItems": 5,
    },
    "nested": {
        "type": "object",
        "properties": {
            "user": {
                "type": "object",
                "properties": {
                    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
                    "home": {
                        "type": "object",
                        "properties": {"city": {"type": "string", "maxLength": 10}},
                        "required": ["city"],
                        "additionalProperties": False,
                    },
                },
                "required": ["tags", "home"],
                "additionalProperties": False,
            }
        },
        "required": ["user"],
        "additionalProperties": False,
    },
    "numbers with ranges": {
        "type": "object",
        "properties": {
            "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 1000},
            "share": {"type": "number", "multipleOf": 0.25, "exclusiveMinimum": 0, "maximum": 1},
            "below": {"type": "integer", "minimum": -1000, "exclusiveMaximum": 0},
        },
        "required": ["even", "share", "below"],
        "additionalProperties": False,
    },
    "patterns and formats": {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^(AB|CD)[0-9]{4}x?$"},
            "address": {"type": "string", "format": "ipv4"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["code", "address", "id"],
        "additionalProperties": False,
    },
    "anyOf": {
        "anyOf": [
            {"type": "string", "maxLength": 10},
            {"type": "integer", "minimum": 1, "maximum": 99},
            {
                "type": "object",
                "properties": {"error": {"type": "string", "maxLength": 10}},
                "required": ["error"],
                "additionalProperties": False,
            },
        ]
    },
    "references": {
        "$defs": {"item": ITEM, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "type": "object",
        "properties": {
            "first": {"$ref": "#/$defs/item"},
            "more": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2},
        },
        "required": ["first", "more"],
        "additionalProperties": False,
    },
    "booleans and null": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "off": {"type": ["boolean", "null"]}, "none": {"type": "null"}},
        "required": ["on", "off", "none"],
        "additionalProperties": False,
    },
    "const and tuples": {
        "type": "object",
        "properties": {
            "version": {"const": "1.0"},
            "point": {
                "type": "array",
                "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["m", "km"]}],
                "items": False,
                "minItems": 2,
            },
        },
        "required": ["version", "point"],
        "additionalProperties": False,
    },
}


def check(text, schema):
    """Raises unless the text is JSON that is valid by the schema, formats included."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
