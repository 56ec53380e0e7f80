"""The benchmark: figures computed by hand, what runs when, what it finds wrong and what it refuses."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from batching import EngineConfig
from batching.request import Output
from scripts import bench_runs, benchmark, open_loop
from scripts.bench_report import Configuration, all_figures, spread_over
from scripts.bench_runs import Workload, engine_failures, run_once
from scripts.benchmark import Engines
from scripts.limits import Limits
from scripts.traces import Item, token_hash
from tests.batching.fake_engine import fake_engine

CHECKPOINT = Path(__file__).parent.parent / "data/llama_tied_gqa4"
TINY = ["--model", str(CHECKPOINT), "--slots", "2", "--max-len", "32", "--chunk-sizes", "16", "--checks"]
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


def write(tmp_path: Path, lines: list[str], name: str = "workload.jsonl") -> str:
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    return str(tmp_path / name)


def good_lines(**more) -> list[str]:
    how = {"ignore_eos": True} | more
    return [json.dumps({"prompt_ids": list(range(3, 3 + p)), "max_tokens": g} | how) for p, g in GOOD]


def item_lines(**more) -> list[str]:
    fields = [{"id": f"r{index}", "prompt_tokens": p, "max_tokens": g} for index, (p, g) in enumerate(GOOD)]
    return [json.dumps(one | more) for one in fields]


def run(tmp_path, *options: str) -> tuple[int, dict]:
    target = tmp_path / "figures.json"
    status = benchmark.main([*TINY, "--json", str(target), *options])
    return status, json.loads(target.read_text())


def test_figures_of_a_scripted_run_by_hand(monkeypatch):
    """Two slots, every turn takes a second; a and b come first, c waits for b, d comes when all have ended."""
    engine, now = fake_engine(slots=2, prefix_reuse=False, run_ahead=0), 0.0
    step = engine.run

    def turn(turn):
        nonlocal now
        now += 1
        return step(turn)

    def sleep(seconds):
        nonlocal now
        now += seconds

    engine.run, engine.scheduler.clock = turn, lambda: now
    monkeypatch.setattr(open_loop, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    items = [
        Item("a", 3, prompt_ids=(1, 2, 3), ttft_slo_s=1.0, tpot_slo_s=0.5),
        Item("b", 1, prompt_ids=(4, 5), ttft_slo_s=1.0, tpot_slo_s=0.5),
        Item("c", 2, prompt_ids=(6, 7, 8, 9), ttft_slo_s=1.5),
        Item("d", 2, arrival_s=10.0, prompt_ids=(1,)),
    ]
    workload, one = Workload("w", items, (), 0), Configuration("w", "continuous")
    ran = run_once(engine, workload, one, "continuous", Console(quiet=True))
    figures = all_figures([ran], [Limits(10.0, 20.0), Limits(40.0, 10.0)])["runs"][0]["figures"]

    # Tokens: a at 1, 2, 3; b at 1; c at 2, 3; d at 11, 12.
    assert (figures["completed"], figures["prompt_tokens"], figures["generated_tokens"]) == (4, 10, 8)
    assert figures["duration_s"] == 12
    assert figures["requests_per_s"] == pytest.approx(4 / 12)
    assert figures["generated_tokens_per_s"] == pytest.approx(8 / 12)
    assert figures["total_tokens_per_s"] == pytest.approx(18 / 12)
    assert figures["goodput_per_s"] == pytest.approx(2 / 12)  # b and d: a is slow after the first, c before it
    assert figures["ttft_s"] == pytest.approx({"mean": 1.25, "p50": 1, "p90": 1.7, "p99": 1.97})
    assert figures["tpot_s"] == {"mean": 1, "p50": 1, "p90": 1, "p99": 1}
    assert figures["itl_s"]["mean"] == 1
    assert figures["latency_s"] == pytest.approx({"mean": 2.25, "p50": 2.5, "p90": 3, "p99": 3})
    # Turns of 5, 5, 2, 1 and 1 rows, in programs of 8, 8, 2, 2 and 2; the device waits while the host runs it.
    assert (figures["turns"], figures["busy_share"]) == (5, 0.8)
    assert figures["padding_share"] == pytest.approx(1 - 14 / 22)
    assert (figures["wasted_rows"], figures["preemptions"], figures["cached_tokens"]) == (0, 0, 0)
    assert (figures["gap_share"], figures["host_s_per_turn"]) == (1, 1)
    assert figures["flops_per_turn"] == ran.work.flops / 5 > 0
    assert figures["share_of_matrix_rate"] == pytest.approx(ran.work.flops / 5 / 40)
    assert figures["share_of_memory_rate"] == pytest.approx(ran.work.bytes / 5 / 20)
    assert figures["compiled_in_window"] == 0


def test_medians_and_spreads():
    runs = [{"a": 3, "b": {"p50": 1.0, "p90": None}}, {"a": 1, "b": {"p50": 2.0, "p90": 4}, "c": 5}, {"a": 7, "b": {}}]
    assert spread_over(runs[:2]) == {
        "a": {"median": 2, "lowest": 1, "highest": 3},
        "b": {"p50": {"median": 1.5, "lowest": 1, "highest": 2}, "p90": None},
        "c": None,
    }
    assert spread_over(runs)["a"] == {"median": 3, "lowest": 1, "highest": 7}


def test_one_run_of_every_configuration_and_then_the_next(tmp_path, capsys):
    """Plain requests under two policies on two engines, and requests that come one after the other."""
    late = [json.dumps({"id": f"r{n}", "prompt_tokens": 2, "max_tokens": 3, "arrival_s": n / 100}) for n in range(3)]
    paths = write(tmp_path, good_lines(), "a.jsonl"), write(tmp_path, late, "b.jsonl")
    picture = str(tmp_path / "picture.png")
    how = ["--workload", ",".join(paths), "--slots", "2,4", "--repeat", "2", "--picture", picture]
    status, figures = run(tmp_path, *how)
    assert status == 0
    labels = ["continuous, 2 slots", "static, 2 slots", "continuous, 4 slots", "static, 4 slots"]
    once = [(workload, label) for workload in ("a.jsonl", "b.jsonl") for label in labels]
    assert [(one["workload"], one["label"]) for one in figures["runs"]] == once * 2
    assert [(one["workload"], one["label"]) for one in figures["configurations"]] == once
    for one in figures["runs"]:
        tokens = {"a.jsonl": (24, 17), "b.jsonl": (6, 9)}[one["workload"]]
        assert (one["figures"]["prompt_tokens"], one["figures"]["generated_tokens"]) == tokens
        assert one["figures"]["compiled_in_window"] == 0
        assert (one["compared"], one["different"]) == (3, [])  # also where tokens are drawn: seeds are the same
    for index, one in enumerate(figures["configurations"]):
        speeds = [each["figures"]["generated_tokens_per_s"] for each in figures["runs"][index::8]]
        spread = {"median": pytest.approx(sum(speeds) / 2), "lowest": min(speeds), "highest": max(speeds)}
        assert one["medians"]["generated_tokens_per_s"] == spread
        base = figures["configurations"][index | 1]["medians"]["generated_tokens_per_s"]["median"]
        assert one["ratio"] == pytest.approx(spread["median"].expected / base)
    assert [one["programs"] > 0 for one in figures["start_up"]] == [True, True]
    assert figures["limits"][1] == {"flops_per_s": 2e9, "bytes_per_s": 1e9}
    assert figures["machine"]["cores"] > 0
    assert figures["versions"].keys() == {"python", "jax", "jaxlib", "carousel"}
    assert figures["workloads"]["b.jsonl"] == {"requests": 3, "bad_lines": 0}
    assert "speed against static" in capsys.readouterr().err
    for name in ("picture_a.png", "picture_b.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_other_tokens_than_expected(tmp_path, capsys):
    path, kept = write(tmp_path, item_lines()), tmp_path / "expected.jsonl"
    assert run(tmp_path, "--workload", path, "--repeat", "1", "--write-expected", str(kept))[0] == 0
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [one["id"] for one in lines] == ["r0", "r1", "r2"]
    assert run(tmp_path, "--workload", str(kept), "--repeat", "1")[0] == 0
    capsys.readouterr()
    lines[1]["expected"] = token_hash([1, 2])
    path = write(tmp_path, [json.dumps(one) for one in lines])
    status, figures = run(tmp_path, "--workload", path, "--repeat", "1")
    assert status == 1
    assert [one["unexpected"] for one in figures["runs"]] == [["r1"], ["r1"]]
    assert "static: other tokens than the workload expects: r1" in capsys.readouterr().err


def test_what_is_expected_is_not_written_where_runs_differ(tmp_path, monkeypatch, capsys):
    def wrong(output):
        if output.id == "r1" and next(runs) == 1:
            output.token_ids[0] ^= 1
        return output.id

    runs = iter(range(9))
    monkeypatch.setattr(bench_runs, "sample_name", wrong)
    kept = tmp_path / "expected.jsonl"
    how = ["--workload", write(tmp_path, item_lines()), "--repeat", "1", "--write-expected", str(kept)]
    status, figures = run(tmp_path, *how)
    assert status == 1
    assert [one["different"] for one in figures["runs"]] == [[], ["r1"]]
    assert not kept.exists()
    assert "is not written" in capsys.readouterr().err


def test_plain_requests_get_hashes_where_they_can_be_items(tmp_path, capsys):
    kept = tmp_path / "expected.jsonl"
    path = write(tmp_path, good_lines(temperature=0))
    how = ["--policies", "continuous", "--repeat", "1", "--write-expected", str(kept)]
    assert run(tmp_path, "--workload", path, *how)[0] == 0
    assert all("expected" in json.loads(line) for line in kept.read_text().splitlines())
    assert benchmark.main([*TINY, "--workload", write(tmp_path, good_lines(temperature=0.5)), *how]) == 2
    assert "line 1: only prompt_ids" in capsys.readouterr().err.splitlines()[-1]


def test_lines_that_cannot_be_served_are_counted_apart(tmp_path, capsys):
    first, *rest = good_lines()
    status, figures = run(tmp_path, "--workload", write(tmp_path, [first, *BAD, *rest]), "--repeat", "1")
    assert status == 1
    assert figures["failed_requests"] == 2
    for one in figures["runs"]:
        figure = one["figures"]
        assert (figure["completed"], figure["prompt_tokens"], figure["generated_tokens"]) == (3, 24, 17)
        assert figure["failures"] == {"error": 1}
    shown = capsys.readouterr().err
    assert "failed requests: 2" in shown
    assert "line 2: fields that are not supported: ['best_of']" in shown
    assert "line-3: error: the prompt has 40 tokens" in shown
    long = json.dumps({"id": "long", "prompt_tokens": 40, "max_tokens": 1})
    status, figures = run(tmp_path, "--workload", write(tmp_path, [*item_lines(), "{}", long]), "--repeat", "1")
    assert (status, figures["failed_requests"]) == (1, 2)
    assert figures["runs"][0]["failed_because"]["long"].startswith("the prompt has 40 tokens")
    assert "line 4: fields that are missing" in capsys.readouterr().err


def test_an_answer_that_is_too_short_has_failed():
    outputs = {"a": Output("a", [1], None, "stop", completion_tokens=1), "b": Output("b", [1], None, "length")}
    assert engine_failures(outputs, {"a": 2}) == {"a": ("early end", "1 tokens, 2 were asked for")}


def test_a_run_in_which_something_compiles_is_reported(tmp_path, monkeypatch, capsys):
    def serve(engine, *rest):
        jax.jit(lambda x: x + 19)(np.float32(1))
        return served(engine, *rest)

    served = bench_runs.serve_workload
    monkeypatch.setattr(bench_runs, "serve_workload", serve)
    how = ["--workload", write(tmp_path, item_lines()), "--policies", "continuous", "--repeat", "1"]
    status, figures = run(tmp_path, *how)
    assert status == 1
    assert figures["runs"][0]["figures"]["compiled_in_window"] == 1
    assert "compiled in the window" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [item_lines(priority=-1), good_lines(priority=-1)])
def test_a_priority_is_handed_to_policies_that_look_at_it(lines, tmp_path):
    how = ["--workload", write(tmp_path, lines), "--repeat", "1", "--policies", "continuous,priority"]
    assert run(tmp_path, *how)[0] == 0


def test_prompts_are_computed_whole_unless_asked_for_and_no_run_finds_an_earlier_ones(tmp_path):
    lines = [json.dumps({"prompt_ids": [*range(3, 23), last], "max_tokens": 2, "ignore_eos": True}) for last in (1, 2)]
    path = write(tmp_path, lines)
    for options, cached in ([], 0), (["--prefix-reuse"], 20):
        _, figures = run(tmp_path, "--workload", path, "--policies", "continuous", "--repeat", "2", *options)
        assert [one["figures"]["cached_tokens"] for one in figures["runs"]] == [cached] * 2
        assert [one["figures"]["prompt_tokens"] for one in figures["runs"]] == [42] * 2
        assert figures["runs"][1]["different"] == []


def test_engines_are_all_combinations():
    engines = Engines(slots="2,4", chunk_sizes=("64", "128,256"), attention="cpu,xla")
    chosen = [(one.slots, one.chunk_sizes, one.attention) for one in engines.configs("static")]
    assert chosen == [(s, c, a) for s in (2, 4) for c in ((64, 128), (256,)) for a in ("cpu", "xla")]
    assert {one.policy for one in engines.configs("static")} == {"static"}
    assert {one.name for one in fields(EngineConfig)} - {one.name for one in fields(Engines)} == {"policy"}


@pytest.mark.parametrize("line", [*BAD, "", '{"id": "a", "prompt_tokens": 40, "max_tokens": 1}'])
def test_a_workload_without_a_request_that_can_be_served(line, tmp_path, capsys):
    assert benchmark.main([*TINY, "--workload", write(tmp_path, [line])]) == 2
    assert "be served" in capsys.readouterr().err.splitlines()[-1]


def test_what_cannot_be_run_or_written(tmp_path, capsys):
    path = write(tmp_path, good_lines())
    unknown = write(tmp_path, ['{"id": "a", "prompt_ids": [999999], "max_tokens": 1}'], "unknown.jsonl")
    for arguments, reason in (
        (["--workload", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--workload", path, "--json", path], "--json and --workload are the same"),
        (["--workload", f"{unknown},{path}", "--json", path], "--json and --workload are the same"),
        (["--workload", path, "--json", "no-such-folder/x.json"], "no-such-folder"),
        (["--workload", path, "--max-len", "4096"], "4096"),
        (["--workload", path, "--attention", "mosaic_tpu"], "mosaic_tpu"),
        (["--workload", path, "--attention", "cpu,mosaic_tpu"], "mosaic_tpu"),
        (["--workload", unknown], "a token that the model does not know"),
    ):
        assert benchmark.main([*TINY, *arguments]) == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]
    assert Path(path).read_text().splitlines() == good_lines()


@pytest.mark.parametrize(
    "options",
    [
        *(["--policies", policies] for policies in ("", "static,", "static,static", "fastest")),
        *(["--slots", slots] for slots in ("", "0", "2,2", "two")),
        ["--chunk-sizes", "16,"],
        ["--attention", "fast"],
        ["--repeat", "0"],
        ["--workload", "a/x.jsonl,b/x.jsonl"],
        ["--workload", "a.jsonl,b.jsonl", "--write-expected", "c.jsonl"],
        ["--server", "http://localhost:1", "--write-expected", "c.jsonl"],
        ["--server", "localhost"],
        ["--server-model", "x"],
        ["--picture", "x.gif"],
        ["--connections", "0"],
    ],
)
def test_options_without_a_meaning(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([*TINY, "--workload", "unread.jsonl", *options])
    assert stopped.value.code == 2
