"""A body's fields, taken one by one: each has its type, and none is accepted and ignored."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from model.files import unique_keys
from scripts.server.errors import ApiError, invalid

KINDS = {bool: "true or false", int: "an integer", str: "a string", list: "a list", dict: "an object"}


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises ApiError for anything else."""
    try:
        fields = json.loads(body, object_pairs_hook=unique_keys, parse_constant=_no_number)
    except RecursionError:
        raise invalid("the body is not read: lists or objects are nested too deep") from None
    except ValueError as error:  # not UTF-8 either
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid(f"the body must be a JSON object, not {_shown(fields)}")
    return fields


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number there")


class Fields:
    """The fields of one object. A field that is null counts as left out."""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        """`where`: what stands before the names in messages, such as "response_format."."""
        self._left = {name: value for name, value in given.items() if value is not None}
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of one of KINDS, or the default."""
        value = self._left.pop(name, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.error(name, f"must be {KINDS[kind]}, not {_shown(value)}")
        return value

    def take_all(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of these fields that are given, of any type."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def refuse(self, harmless: Mapping[str, tuple[Any, ...]]) -> None:
        """Of these fields only the values that have no effect are accepted."""
        for name, values in harmless.items():
            value = self._left.pop(name, None)
            if value is not None and not any(value == one and type(value) is type(one) for one in values):
                accepted = ", ".join(json.dumps(one) for one in (None, *values))
                raise self.error(name, f"is not supported: it may be {accepted}, not {_shown(value)}")

    def end(self) -> None:
        """Raises ApiError naming what nobody took."""
        if self._left:
            names = sorted(f"{self._where}{name}"[:100] for name in self._left)
            shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            raise invalid(f"unknown or unsupported fields: {shown}", names[0], "unknown_parameter")

    def error(self, name: str, text: str) -> ApiError:
        return invalid(f"{self._where}{name} {text}", f"{self._where}{name}")


def _shown(value: Any) -> str:
    """A value in a message; a long one is cut."""
    if isinstance(value, list | dict):
        return f"{KINDS[type(value)]} of {len(value)}"
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text) if isinstance(value, str) and len(text) <= 80 else f"{text:.80}"
