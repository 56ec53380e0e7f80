"""What an answer must follow, in any of the forms in which OpenAI's and vLLM's clients say it."""

from typing import Any

from scripts.server.errors import invalid
from scripts.server.fields import Fields

MOST_CHOICES = 1024
MOST_CHARACTERS = 2**16  # of an expression
ANY_OBJECT = {"type": "object"}
KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice"}  # vLLM's name -> that of SamplingParams
GUIDED = {f"guided_{name}": name for name in KINDS}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "grammar": (), "structural_tag": (), "whitespace_pattern": (), "disable_fallback": (True, False),
    "disable_any_whitespace": (False,), "disable_additional_properties": (False,),
}  # fmt: skip


def constraint(fields: Fields) -> dict[str, Any]:
    """The sampling field that says it, if there is one. Raises ApiError, also for more than one."""
    found: dict[str, tuple[str, Any]] = {}  # where it was -> which kind, and what
    if (schema := _response_format(fields)) is not None:
        found["response_format"] = "json", schema
    outputs = Fields(fields.take("structured_outputs", dict, {}), "structured_outputs.")
    found |= {f"structured_outputs.{name}": (name, value) for name, value in outputs.take_all(KINDS).items()}
    if outputs.take("json_object", bool, False):
        found["structured_outputs.json_object"] = "json", ANY_OBJECT
    outputs.refuse(HARMLESS)
    outputs.end()
    found |= {name: (GUIDED[name], value) for name, value in fields.take_all(GUIDED).items()}
    fields.refuse({"guided_grammar": (), "guided_decoding_backend": (), "guided_whitespace_pattern": ()})
    if len(found) > 1:
        raise invalid(f"an answer can follow one constraint, not {' and '.join(found)}", [*found][1])
    for where, (kind, value) in found.items():
        if kind == "choice" and isinstance(value, list) and len(value) > MOST_CHOICES:
            raise invalid(f"{where} holds {len(value)} choices; at most {MOST_CHOICES}", where)
        if kind == "regex" and isinstance(value, str) and len(value) > MOST_CHARACTERS:
            raise invalid(f"{where} has {len(value)} characters; at most {MOST_CHARACTERS}", where)
        return {KINDS[kind]: value}
    return {}


def _response_format(fields: Fields) -> Any:
    """Its schema; None where the answer is text. A schema is followed whether it is strict or not."""
    form = Fields(fields.take("response_format", dict, {"type": "text"}), "response_format.")
    kind, schema = form.take("type", str), None
    if kind not in ("text", "json_object", "json_schema"):
        raise form.error("type", f"must be text, json_object or json_schema, not {kind!r:.100}")
    if kind == "json_object":
        schema = ANY_OBJECT
    elif kind == "json_schema":
        inner = Fields(form.take("json_schema", dict, {}), "response_format.json_schema.")
        for name, of in (("name", str), ("description", str), ("strict", bool)):  # they do not change what is valid
            inner.take(name, of)
        schema = inner.take("schema", dict)
        if schema is None:
            raise inner.error("schema", "is missing")
        inner.end()
    form.end()
    return schema
