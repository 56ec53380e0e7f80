"""The small files beside the weights, and errors that name the file."""

import contextlib
import json
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
