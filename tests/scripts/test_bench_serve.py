"""The comparison of a server with its engine, on a small model, and how it is reckoned."""

import json
from pathlib import Path

import pytest

from scripts import bench_serve
from scripts.traces import Item
from tests.server.servers import checkpoint


def workload(folder: Path, items) -> str:
    path = folder / "w.jsonl"
    path.write_text("".join(json.dumps(item.to_json()) + "\n" for item in items))
    return str(path)


def test_one_workload_through_both(tmp_path, capsys):
    """Both processes, from the command line: the server is started, asked and ended."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    items = [Item(str(index), 3 + index, prompt_ids=tuple(range(60 + index, 75 + 2 * index))) for index in range(5)]
    target = tmp_path / "figures.json"
    arguments = ["--workload", workload(tmp_path, items), "--model", str(checkpoint(folder)), "--json", str(target)]
    arguments += ["--slots", "2", "--max-len", "96", "--chunk-sizes", "32", "--repeat", "2", "--first-texts", "2"]
    assert bench_serve.main(arguments) == 0
    figures = json.loads(target.read_text())
    assert figures["different"] == []
    assert figures["failures"] == {}
    assert len(figures["runs"]) == len(figures["ratios"]) == 2
    for run in figures["runs"]:
        for name in ("engine", "server"):
            assert run[name]["summary"]["generated_tokens"] == sum(item.max_tokens for item in items)
            assert run[name]["tokens"].keys() == {item.id for item in items}
        assert run["engine"]["tokens"] == run["server"]["tokens"]
        assert len(run["first_text"]) == 2
    assert all(figures["first_text_s"][name]["p50"] > 0 for name in ("engine", "server"))
    assert "5 of 5" in capsys.readouterr().err


def run_of(engine: float, server: float, tokens=None, first=(), failures=None) -> dict:
    sides = {"engine": (engine, {"a": [1, 2]}, {}), "server": (server, tokens or {"a": [1, 2]}, failures or {})}
    run = {
        name: {"summary": {"generated_tokens_per_s": rate}, "tokens": told, "failures": failed}
        for name, (rate, told, failed) in sides.items()
    }
    return run | {"first_text": list(first)}


def test_figures_by_hand():
    runs = [run_of(100, 90, first=[(0.1, 0.2), (0.3, 0.31)]), run_of(200, 200, first=[(0.2, 0.21)]), run_of(50, 48)]
    figures = bench_serve.compared(runs)
    assert figures["ratio"] == pytest.approx(0.96)
    assert figures["ratios"] == pytest.approx([0.9, 1.0, 0.96])
    assert figures["first_text_s"]["difference_of_p50"] == pytest.approx(0.21 - 0.2)
    assert figures["first_text_s"]["p50_of_differences"] == pytest.approx(0.01)
    assert (figures["different"], figures["failures"]) == ([], {})


def test_what_differs_is_named():
    figures = bench_serve.compared([run_of(1, 1), run_of(1, 1, {"a": [1, 3]})])
    assert (figures["different"], figures["failures"]) == (["a"], {})
    figures = bench_serve.compared([run_of(1, 1, {"b": []}, failures={"a": "timeout"})])
    assert figures["failures"] == {"a": "timeout"}
    assert bench_serve.compared([run_of(1, 1, {"b": [1]})])["failures"] == {"a": "the ids of its tokens were not told"}


def test_what_is_refused(tmp_path, capsys):
    late = workload(tmp_path, [Item("a", 3, arrival_s=2.0, prompt_ids=(1, 2))])
    assert bench_serve.main(["--workload", late, "--model", "x"]) == 2
    assert "all requests come at once" in capsys.readouterr().err
    for wrong in (["--repeat", "0"], ["--slots", "0"]):
        with pytest.raises(SystemExit):
            bench_serve.main(["--workload", late, *wrong])
    capsys.readouterr()
