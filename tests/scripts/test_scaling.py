"""Scaling on a tiny model: which points, that the growth of hand-made points is right, and what it refuses."""

import json
from pathlib import Path

import pytest

from batching.plan import Sampled
from scripts import command, scaling
from scripts.limits import Limits, Work

CHECKPOINT = Path(__file__).parent.parent / "data/llama_tied_gqa4"
TINY = ["--model", str(CHECKPOINT), "--slots", "3", "--max-len", "32", "--max-queue", "5", "--chunk-sizes", "16"]
SMALL = ["--shortest", "4", "--fewest", "2", "--prompt", "4", "--answer", "3", "--length", "10", "--repeat", "1"]


def points(*given):
    return [{"at": at, "s": s, "roofline_s": least} for at, s, least in given]


def test_points_and_their_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "measure_limits", lambda: Limits(1e9, 2e9))
    target = tmp_path / "figures.json"
    assert scaling.main([*TINY, *SMALL, "--json", str(target)]) == 0
    figures = json.loads(target.read_text())

    at = {name: [point["at"] for point in series["points"]] for name, series in figures["series"].items()}
    assert at == {"prompt tokens": [4, 8, 16, 32], "requests": [2, 4], "slots in use": [1, 2, 3]}
    for series in figures["series"].values():
        for point in series["points"]:
            low, high = point["s_range"]
            assert 0 < low <= point["s"] <= high
            least = max(point["flops"] / 1e9, point["bytes"] / 2e9)
            assert point["roofline_s"] >= least * (1 - 1e-9)  # turn by turn it can only be more
        assert series["growth"] == scaling.growth(series["points"])
    slots = figures["series"]["slots in use"]["points"]
    assert [point["turns"] for point in slots] == [1, 1, 1]
    assert slots[0]["roofline_s"] == pytest.approx(max(slots[0]["flops"] / 1e9, slots[0]["bytes"] / 2e9))
    # Twice the rows are twice the operations, but the weights are read once.
    assert slots[1]["flops"] == pytest.approx(2 * slots[0]["flops"])
    assert slots[1]["bytes"] < 1.5 * slots[0]["bytes"]
    assert figures["limits"] == {"flops_per_s": 1e9, "bytes_per_s": 2e9}
    assert figures["engine"]["slots"] == 3
    shown = capsys.readouterr().err
    assert "slots in use" in shown
    assert "beyond them" in shown


def test_memory_beyond_model_and_cache(monkeypatch, capsys):
    monkeypatch.setattr(scaling, "measure_limits", lambda: Limits(1e9, 1e9))
    assert scaling.main([*TINY, *SMALL, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    used = figures["memory"]
    held = used["model_mb"] + used["cache_mb"] if figures["platform"] == "cpu" else 0
    assert used["cache_mb"] > 0
    assert used["beyond_peak_mb"] == pytest.approx(used["peak_mb"] - held)
    if used["current_mb"] is not None:
        assert 0 < used["current_mb"] <= used["peak_mb"]
        assert used["beyond_current_mb"] == pytest.approx(used["current_mb"] - held)


def test_growth():
    steps = scaling.growth(points((1, 1.0, 0.5), (2, 2.0, 1.0), (4, 4.9, 2.0), (8, 4.9, 1.0)))
    assert [(step["from"], step["to"]) for step in steps] == [(1, 2), (2, 4), (4, 8)]
    assert [step["measured"] for step in steps] == pytest.approx([2.0, 2.45, 1.0])
    assert [step["roofline"] for step in steps] == pytest.approx([2.0, 2.0, 0.5])
    assert [step["worse"] for step in steps] == [False, True, True]
    assert not scaling.growth(points((1, 1.0, 1.0), (2, 2.39, 2.0)))[0]["worse"]  # not by more than 20 %
    assert scaling.growth(points((1, 1.0, 1.0))) == []


def test_roofline_takes_the_slower_rate_turn_by_turn():
    assert scaling.roofline([Work(10, 1), Work(1, 10)], Limits(1.0, 2.0)) == 10 + 5
    assert scaling.roofline([], Limits(1.0, 2.0)) == 0


def test_doubled():
    assert scaling.doubled(64, 1000, 3) == [64, 128, 256, 512]
    assert scaling.doubled(64, 300, 3) == [64, 128, 256]
    assert scaling.doubled(1, 16) == [1, 2, 4, 8, 16]
    assert scaling.doubled(1, 3) == [1, 2]
    assert scaling.doubled(1, 1) == [1]


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_the_picture(name, tmp_path):
    pytest.importorskip("matplotlib")
    hand_made = points((1, 1.0, 0.5), (2, 2.0, 1.0), (3, 9.0, 2.0))
    one = {"points": hand_made, "growth": scaling.growth(hand_made)}
    alone = {"points": hand_made[:1], "growth": []}
    scaling.draw({"series": {"a": one, "b": alone, "c": one}}, str(tmp_path / name))
    assert (tmp_path / name).read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_request_that_fails_gives_no_figures(monkeypatch, capsys):
    def poisoned(self, turn):
        return Sampled(scaling.np.full(8, -1))

    monkeypatch.setattr(scaling.Engine, "run", poisoned)
    monkeypatch.setattr(scaling, "measure_limits", lambda: pytest.fail("goes on"))
    assert scaling.main([*TINY, *SMALL]) == 2
    assert "not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--shortest", "33"], "max_len 32"),
        (["--length", "33"], "max_len 32"),
        (["--prompt", "31", "--answer", "3"], "max_len 32"),
        (["--fewest", "6"], "max_queue 5"),
        (["--doublings", "0"], "doublings must be at least 1"),
        (["--repeat", "0"], "repeat must be at least 1"),
        (["--picture", "picture.txt"], ".png or .svg"),
    ],
)
def test_options_that_cannot_be(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        scaling.main([*TINY, *SMALL, *arguments])
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert reason in " ".join((shown.out + shown.err).replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "found", "reason"),
    [
        (["--json", "no-such-folder/x.json"], True, "no-such-folder/x.json"),
        (["--json", "x.svg", "--picture", "x.svg"], True, "--picture and --json are the same"),
        (["--picture", "x.svg"], False, "needs matplotlib"),
    ],
)
def test_what_cannot_be_written_is_known_before_the_model_is_loaded(arguments, found, reason, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "make_engine", lambda *_: pytest.fail("loads the model"))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: name if found else None)
    assert scaling.main([*TINY, *SMALL, *arguments]) == 2
    assert reason in capsys.readouterr().err
