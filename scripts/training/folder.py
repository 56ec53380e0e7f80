"""A run's folder: what it is (`run.json`), what happened (`log.jsonl`), its tokenizer, checkpoints and model."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.checkpoint import save_orbax, save_safetensors
from model.files import read_json
from model.transformer import Transformer
from scripts.command import Refused, naming

RUN, LOG, PICTURE = "run.json", "log.jsonl", "curve.png"
TOKENIZER, CHECKPOINTS, MODEL = "tokenizer", "checkpoints", "model"
LOCK = ".lock"


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """Before any work: the folder is there, can be written, and is new or that of a run to resume.

    No other process may train in it meanwhile. If it was new or empty and the block did not come to a run, it is so
    again. Raises Refused or OSError.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with naming(str(folder)), tempfile.TemporaryFile(dir=folder):
            pass
        with _locked(folder):
            # A process that was killed as it began may have left the two that are taken out.
            found = {file.name for file in folder.iterdir()} - {LOCK, _beside(folder / RUN).name}
            try:
                if found and not resume:
                    raise Refused(f"{folder} is not empty: --resume goes on with the run in it")
                if found - {TOKENIZER} and RUN not in found:
                    raise Refused(f"{folder} holds no run that could be resumed: there is no {RUN}")
                yield
            finally:
                if not (folder / RUN).exists():
                    (folder / LOCK).unlink(missing_ok=True)
                    if not found:
                        _beside(folder / RUN).unlink(missing_ok=True)
                        shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    finally:
        if new and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises Refused where another process has it. The lock ends with the process, however that ends."""
    with (folder / LOCK).open("a") as file:
        try:
            with naming(str(folder)):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"another process trains in {folder}") from error
        yield


def write_atomically(path: Path, text: str) -> None:
    """All of it or, if the process is killed, none."""
    with naming(str(path)):
        beside = _beside(path)
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)


def _beside(path: Path) -> Path:
    """Where it is written until it is complete."""
    return path.with_name(f".{path.name}.new")


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the run in a folder, and its arithmetic. Raises ValueError or FileNotFoundError."""
    run = read_json(folder / RUN)
    for name in ("options", "arithmetic"):
        if not isinstance(run.get(name), dict):
            raise ValueError(f"{folder / RUN}: {name} must be a JSON object, not {_short(run.get(name))}")
    return run["options"], run["arithmetic"]


def check_same(folder: Path, arithmetic: Mapping[str, Any]) -> None:
    """What the run in the folder computes must be what is asked for now; a folder without a run takes it over.

    Raises Refused, naming what differs, and ValueError for a file that is damaged.
    """
    path = folder / RUN
    if not path.exists():
        return
    options, before = read_run(folder)
    # Older runs have it among their options alone.
    before = {"evaluate_batches": options.get("evaluate_batches")} | before
    now = json.loads(json.dumps(arithmetic))
    changed = [name for name in sorted(now.keys() | before.keys()) if now.get(name) != before.get(name)]
    if changed:
        shown = "; ".join(f"{name} was {_short(before.get(name))}, now {_short(now.get(name))}" for name in changed)
        raise Refused(f"{path} is of another run, whose results would not be these: {shown}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:100]}..."


class Log:
    """Lines of JSON, each with its step. Those after `step`, of work that was lost and is done again, are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.lines = [line for line in read_log(path) if line["step"] <= step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.lines))
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        with naming(str(self.path)):
            self.lines.append(line)
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Without a last line that a killed process did not finish. Raises ValueError for any other that is damaged."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: not JSON: {error}") from error
        if not isinstance(found[-1], dict) or type(found[-1].get("step")) is not int:
            raise ValueError(f"{path} line {number}: must be an object with a step, not {line[:100]}")
    return found


def export(
    folder: Path,
    hf_config: dict[str, Any],
    model: Transformer,
    *,
    eos_ids: Iterable[int],
    tokenizer_from: Path,
    replace: bool = False,
) -> None:
    """A folder that `model.checkpoint.load` takes, and HF transformers; with `replace` instead of one that is there.

    Weights with `rope_freq_factors`, for which HF has no place, are saved as Orbax has them. Raises FileExistsError.
    """
    save = save_safetensors if hf_config.get("rope_freq_factors") is None else save_orbax
    target = folder.with_name(f".{folder.name}.new") if replace else folder
    if replace:
        for left in (target, *folder.parent.glob(f".{target.name}.*")):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
    save(target, hf_config, model, eos_ids=eos_ids, tokenizer_from=tokenizer_from)
    if replace:
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        target.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
