"""The profile of a turn of a tiny model: which parts, that they add up, and what it refuses."""

import json
from pathlib import Path

import pytest

from scripts import command, profile_step
from scripts.limits import Limits

CHECKPOINT = Path(__file__).parent.parent / "data/llama_tied_gqa4"
TINY = ["--model", str(CHECKPOINT), "--slots", "3", "--max-len", "32", "--chunk-sizes", "16"]
TURN = ["--rows", "2", "--length", "20", "--chunk", "5", "--behind", "3", "--repeat", "2"]
PARTS = {"launch", "embedding", "QKV", "attention", "output", "MLP", "head", "sampling", "host"}


def test_every_part_of_a_turn(tmp_path, capsys):
    target = tmp_path / "figures.json"
    assert profile_step.main([*TINY, *TURN, "--json", str(target)]) == 0
    figures = json.loads(target.read_text())

    assert figures["shape"] == {"rows": 2, "length": 20, "chunk": 5, "behind": 3}
    assert figures["live_rows"] == 7 <= figures["program_rows"]
    assert set(figures["parts"]) == PARTS
    for part in figures["parts"].values():
        assert part["s"] >= 0
        assert part["share"] == pytest.approx(part["s"] / figures["turn_s"])
        for amount, rate in (("flops", "matrix"), ("bytes", "memory")):
            limit = figures["limits"][f"{amount}_per_s"]
            too_short = part["s"] < figures["parts"]["launch"]["s"] / 10
            expected = 0.0 if too_short or not part[amount] else part[amount] / part["s"] / limit
            assert part[f"share_of_{rate}_rate"] == pytest.approx(expected)
    assert figures["accounted"] == pytest.approx(sum(part["share"] for part in figures["parts"].values()))
    assert figures["accounted"] > 0
    # Three layers of 8 heads of 8: a key costs 4 * 64; the rows see 20, 20 and 4..8 keys.
    assert figures["parts"]["attention"]["flops"] == 3 * 4 * 64 * (20 + 20 + 4 + 5 + 6 + 7 + 8)
    assert figures["parts"]["head"]["flops"] == 2 * 3 * 64 * 320
    assert figures["limits"]["flops_per_s"] > 0
    shown = capsys.readouterr().err
    assert "rows 2, length 20, chunk 5, behind 3" in shown


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_the_picture(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(profile_step, "measure_limits", lambda: Limits(1e9, 1e9))
    assert profile_step.main([*TINY, "--rows", "3", "--length", "8", "--repeat", "1", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    profile_step.draw(figures, str(tmp_path / name))
    assert (tmp_path / name).read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rows", "4"], "rows must be in 0 .. 3"),
        (["--rows", "3", "--chunk", "5"], "rows must be in 0 .. 2"),
        (["--rows", "1", "--length", "33"], "max_len 32"),
        (["--rows", "1", "--length", "0"], "max_len 32"),
        (["--rows", "1", "--chunk", "16", "--behind", "17"], "max_len 32"),
        (["--rows", "1", "--chunk", "17"], "chunk_sizes"),
        (["--rows", "3", "--max-queue", "2"], "max_queue"),
        (["--rows", "0"], "rows or a chunk"),
        (["--rows", "1", "--repeat", "0"], "repeat"),
        (["--rows", "1", "--picture", "picture.txt"], ".png or .svg"),
    ],
)
def test_turns_that_cannot_be(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        profile_step.main([*TINY, "--length", "8", *arguments])
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert reason in " ".join((shown.out + shown.err).replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--json", "no-such-folder/x.json"], "no-such-folder/x.json"),
        (["--json", "x.svg", "--picture", "x.svg"], "--picture and --json are the same"),
        (["--picture", "no-such-folder/x.svg"], "no-such-folder/x.svg"),
    ],
)
def test_what_cannot_be_written_is_known_before_the_model_is_loaded(arguments, reason, monkeypatch, capsys):
    monkeypatch.setattr(profile_step, "make_engine", lambda *_: pytest.fail("loads the model"))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: name)
    assert profile_step.main([*TINY, *TURN, *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_picture_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(profile_step, "make_engine", lambda *_: pytest.fail("loads the model"))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert profile_step.main([*TINY, *TURN, "--picture", "x.svg"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_a_slot_shorter_than_the_requests_that_host_time_is_measured_with(monkeypatch, capsys):
    monkeypatch.setattr(profile_step, "measure_limits", lambda: Limits(1e9, 1e9))
    arguments = ["--slots", "2", "--max-len", "2", "--rows", "2", "--length", "2", "--repeat", "1"]
    assert profile_step.main([*TINY, *arguments]) == 0
