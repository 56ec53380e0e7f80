"""The benchmark on a tiny model: which runs, which figures, and what it refuses."""

import json
import statistics
from pathlib import Path

import pytest

from model.config import ModelConfig
from scripts import benchmark
from scripts.limits import Limits, request_flops

CHECKPOINT = Path(__file__).parent.parent / "data/llama_tied_gqa4"
TINY = ["--model", str(CHECKPOINT), "--slots", "2", "--max-len", "32", "--chunk-sizes", "16"]
GOOD = [  # prompt, generated
    (3, 6),
    (20, 2),
    (1, 9),
]
BAD = ['{"prompt_ids": [1], "best_of": 1}', json.dumps({"prompt_ids": [1] * 40})]  # refused by reader, by engine


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    measured = iter([Limits(1e9, 3e9), Limits(2e9, 1e9)] * 9)
    monkeypatch.setattr(benchmark, "measure_limits", lambda: next(measured))


def write(tmp_path: Path, lines: list[str]) -> str:
    path = tmp_path / "workload.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def good_lines() -> list[str]:
    return [
        json.dumps({"prompt_ids": list(range(3, 3 + prompt)), "max_tokens": generated, "ignore_eos": True})
        for prompt, generated in GOOD
    ]


def test_policies_in_turns_and_figures_from_the_runs(tmp_path, capsys):
    path, target = write(tmp_path, good_lines()), tmp_path / "figures.json"
    assert benchmark.main([*TINY, "--workload", path, "--repeat", "3", "--json", str(target)]) == 0
    figures = json.loads(target.read_text())
    runs, policies = figures["runs"], figures["policies"]

    assert [run["policy"] for run in runs] == ["continuous", "static"] * 3
    for run in runs:
        assert (run["prompt_tokens"], run["generated_tokens"]) == (24, 17)
        assert run["wall_s"] > 0
        assert run["different"] == []  # the later runs have the seeds that were drawn for the first
    config = ModelConfig.from_hf(json.loads((CHECKPOINT / "config.json").read_text()))
    assert figures["workload_flops"] == sum(request_flops(config, *lengths) for lengths in GOOD)
    for policy, shown in policies.items():
        walls = [run["wall_s"] for run in runs if run["policy"] == policy]
        speeds = [17 / wall for wall in walls]
        assert shown["tokens_per_s"] == pytest.approx(statistics.median(speeds))
        assert shown["tokens_per_s_range"] == pytest.approx([min(speeds), max(speeds)])
        assert shown["share_of_matrix_rate"] == pytest.approx(
            figures["workload_flops"] / statistics.median(walls) / 2e9
        )
    assert policies["static"]["ratio"] == 1
    speed = {policy: shown["tokens_per_s"] for policy, shown in policies.items()}
    assert policies["continuous"]["ratio"] == speed["continuous"] / speed["static"]
    assert figures["limits"][1] == {"flops_per_s": 2e9, "bytes_per_s": 1e9}
    assert figures["failed_requests"] == 0
    assert figures["workload"] == "workload.jsonl"
    assert "against static" in capsys.readouterr().err


def test_lines_that_cannot_be_served_are_counted_apart(tmp_path, capsys):
    first, *rest = good_lines()
    path = write(tmp_path, [first, *BAD, *rest])
    assert benchmark.main([*TINY, "--workload", path, "--repeat", "1", "--json", "-"]) == 1
    shown = capsys.readouterr()
    figures = json.loads(shown.out)
    assert figures["failed_requests"] == 2
    for run in figures["runs"]:
        assert (run["requests"], run["prompt_tokens"], run["generated_tokens"]) == (3, 24, 17)
    assert "failed requests: 2" in shown.err
    assert "line 2: fields that are not supported: ['best_of']" in shown.err
    assert "line 3: the prompt has 40 tokens" in shown.err


@pytest.mark.parametrize("line", [*BAD, ""])
def test_a_workload_without_a_request_that_can_be_served(line, tmp_path, capsys):
    assert benchmark.main([*TINY, "--workload", write(tmp_path, [line])]) == 2
    assert "be served" in capsys.readouterr().err.splitlines()[-1]


def test_what_cannot_be_run_or_written(tmp_path, capsys):
    path = write(tmp_path, good_lines())
    for arguments, reason in (
        (["--workload", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--workload", path, "--json", path], "--json and --workload are the same"),
        (["--workload", path, "--json", "no-such-folder/x.json"], "no-such-folder"),
        (["--workload", path, "--max-len", "4096"], "4096"),
    ):
        assert benchmark.main([*TINY, *arguments]) == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]
    assert Path(path).read_text().splitlines() == good_lines()


@pytest.mark.parametrize("policies", ["", "static,", "static,static", "fastest"])
def test_policies_without_a_meaning(policies, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([*TINY, "--workload", "unread.jsonl", "--policies", policies])
    assert stopped.value.code == 2


def test_prompts_are_computed_whole_unless_asked_for_and_no_run_finds_an_earlier_ones(tmp_path, capsys):
    lines = [json.dumps({"prompt_ids": [*range(3, 23), last], "max_tokens": 2, "ignore_eos": True}) for last in (1, 2)]
    path, target = write(tmp_path, lines), tmp_path / "figures.json"
    for options, cached in ([], 0), (["--prefix-reuse"], 20):
        how = [*TINY, "--workload", path, "--policies", "continuous", "--repeat", "2", "--json", str(target), *options]
        assert benchmark.main(how) == 0
        runs = json.loads(target.read_text())["runs"]
        assert [run["cached_tokens"] for run in runs] == [cached] * 2
        assert [run["prompt_tokens"] for run in runs] == [42] * 2
        assert runs[1]["different"] == []
