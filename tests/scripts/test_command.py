"""Targets that cannot be written, and what the machine refuses: one line, and an exit status."""

import os
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from batching import Engine
from scripts.command import Refused, check_targets, exit_status
from scripts.generate import main

TINY = ["--model", str(Path(__file__).parent.parent / "data/llama_tied_gqa4"), "--slots", "2", "--max-len", "32"]


def one_request(tmp_path: Path) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt_ids": [1], "max_tokens": 2}')
    return str(path)


def status(run, capsys) -> tuple[int, str]:
    code = exit_status(run, Console(stderr=True, soft_wrap=True))
    return code, capsys.readouterr().err


def test_a_new_target_is_not_there_before_there_is_something_to_write(tmp_path):
    old = tmp_path / "old"
    old.write_text("kept")
    check_targets({"--in": None}, {"--out": str(tmp_path / "new"), "--json": str(old), "--more": None})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert old.read_text() == "kept"


@pytest.mark.parametrize("other", ["file", "./file", "link", "twin"])
@pytest.mark.parametrize("exists", [True, False])
def test_one_file_for_two_targets(tmp_path, monkeypatch, exists, other):
    monkeypatch.chdir(tmp_path)
    os.symlink("file", "link")
    if exists:
        (tmp_path / "file").write_text("kept")
        os.link("file", "twin")
    elif other == "twin":
        pytest.skip("a hard link is to a file that exists")
    with pytest.raises(Refused, match="--json and --out are the same"):
        check_targets({}, {"--out": "file", "--json": other})
    with pytest.raises(Refused, match="--out and --in are the same"):
        check_targets({"--in": other}, {"--out": "file"})
    if exists:
        assert (tmp_path / "file").read_text() == "kept"


def test_stdin_and_stdout_are_two_but_stdout_is_one():
    check_targets({"--in": "-"}, {"--out": "-"})
    with pytest.raises(Refused, match="the same: -"):
        check_targets({}, {"--out": "-", "--json": "-"})


def test_exit_statuses(capsys):
    def interrupted(report):
        raise KeyboardInterrupt

    def refused(report):
        raise Refused("two\nlines [bold]")

    assert status(lambda report: 1, capsys) == (1, "")
    assert status(interrupted, capsys) == (130, "")
    assert status(refused, capsys) == (2, "error: two lines [bold]\n")
    with pytest.raises(ZeroDivisionError):  # a mistake of ours is not hidden
        exit_status(lambda report: 1 // 0, Console(stderr=True))


@pytest.mark.parametrize("option", ["--out", "--json"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_a_full_disk(option, tmp_path, capsys):
    path = one_request(tmp_path)
    assert main([*TINY, "--prompts", path, option, "/dev/full"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: [Errno 28] No space left on device: '/dev/full'"


@pytest.mark.parametrize("arguments", [["--out", "-"], ["--json", "-"], []])
def test_nobody_reads_stdout(arguments, tmp_path, monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    path = one_request(tmp_path)
    with open(write, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        assert main([*TINY, "--prompts", path, *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: [Errno 32] Broken pipe: 'stdout'"


def more_than_an_address_space():
    return jnp.zeros((1 << 20, 1 << 30), jnp.float32)


def more_than_python_has():
    raise MemoryError


def more_than_an_index_holds():
    return list(range(10**30))


@pytest.mark.parametrize(
    ("allocate", "reason"),
    [
        (more_than_an_address_space, "not enough memory"),
        (more_than_python_has, "not enough memory"),
        (more_than_an_index_holds, "too large"),
    ],
)
def test_more_cache_than_fits(monkeypatch, capsys, allocate, reason):
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: allocate())
    assert main(["a prompt"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith("error: ")
    assert reason in shown[-1]
