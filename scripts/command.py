"""What every command does at its edges: where results go, and one line with an exit status for what goes wrong."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console

STDOUT = "-"  # as a target
Report = Callable[[str], None]  # shows one line to the person


class Refused(Exception):
    """Nothing can be run, and why."""


def exit_status(
    run: Callable[[Report], int], console: Console, *, smaller: str = "fewer --slots or a smaller --max-len"
) -> int:
    """What `run` returns; 2 and one line if something cannot be run or written; 130 after Ctrl-C.

    `smaller`: what to ask for where memory was not enough.
    """

    def report(text: str) -> None:
        console.print(text, markup=False)

    try:
        status = run(report)
        with naming("stdout"):
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except (Refused, OSError) as error:
        reason = str(error)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = f"not enough memory; {smaller} would take less. {error}"
    report("error: " + " ".join(reason.split()))
    _settle_stdout()
    return 2


def _settle_stdout() -> None:
    """Drops what stdout does not take, which would fail once more when Python exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_targets(inputs: Mapping[str, str | None], targets: Mapping[str, str | None]) -> None:
    """Raises Refused or OSError before the work, rather than after it, for a target that cannot be written.

    Both map options to paths; a target that is an input, or another target, is refused.
    """
    seen = {option: path for option, path in inputs.items() if path not in (None, "-")}
    for option, path in targets.items():
        if path is None:
            continue
        for other, used in seen.items():
            if used is not None and _same(path, used):
                raise Refused(f"{option} and {other} are the same: {path}")
        seen[option] = path
        if path != STDOUT:
            new = not os.path.lexists(path)
            with open(path, "a"):
                pass
            if new:
                os.unlink(path)


def check_picture(path: str | None) -> None:
    """For a script's options. Raises ValueError for a picture of a kind that is not drawn."""
    if path is not None and Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"picture must end in .png or .svg, not {path}")


def check_matplotlib(picture: str | None) -> None:
    """Before long work rather than after it. Raises Refused where a picture is asked for and cannot be drawn."""
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise Refused("--picture needs matplotlib")


def _same(path: str, other: str) -> bool:
    if STDOUT in (path, other):
        return path == other
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


@contextmanager
def naming(target: str) -> Iterator[None]:
    """Puts the target's name into an OSError that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = "stdout" if target == STDOUT else target
        raise


@contextmanager
def opened(target: str) -> Iterator[TextIO]:
    """The target to write to; stdout stays open."""
    with naming(target):
        if target == STDOUT:
            yield sys.stdout
            sys.stdout.flush()
        else:
            with open(target, "w") as file:
                yield file


def write_json(target: str | None, value: Any) -> None:
    """One JSON object, if there is a target for it."""
    if target is not None:
        with opened(target) as file:
            file.write(json.dumps(value, indent=2) + "\n")


def say(text: str, file: TextIO) -> None:
    """Prints what the file's encoding can hold, and question marks for the rest, such as lone surrogates."""
    encoding = file.encoding or "utf-8"
    with naming("stdout"):
        print(text.encode(encoding, errors="replace").decode(encoding), file=file)
