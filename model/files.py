"""The small files beside the weights, and errors that name the file."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. Raises FileNotFoundError or ValueError, naming it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: an object's fields; of a key that is there twice nobody could tell which is meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r:.100} is given more than once")
    return fields


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file in front of what is wrong in it; metadata of another type than expected is wrong in many ways."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
        message = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(message if message.startswith(f"{path}:") else f"{path}: {message}") from error


def check_sizes(manifest: Path) -> None:
    """Raises ValueError unless the files beside it have the sizes in bytes that `manifest` gives."""
    sizes = read_json(manifest).get("bytes")
    if not isinstance(sizes, dict):
        raise ValueError(f"{manifest}: expected 'bytes' to give the size of each file, found {sizes!r}")
    for name, size in sizes.items():
        file = manifest.parent / name
        if (found := file.stat().st_size if file.is_file() else "no such file") != size:
            raise ValueError(f"{file}: expected {size} bytes by {manifest.name}, found {found}")
