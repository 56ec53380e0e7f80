"""The attention bench on tiny cases: its figures, and that what is wrong gets none."""

import json
import math

import numpy as np
import pytest

from pallas_kernels.attention import IMPLEMENTATIONS
from scripts import attention_cases, attention_rivals, attention_timing, bench_attention, command
from scripts.attention_cases import Case
from scripts.attention_inputs import worst_error
from scripts.limits import Limits, Work

TINY = [
    Case("tiny/decode", 4, 2, 16, decode=(4, 6, None, 6), window=3),
    Case("tiny/prefill", 4, 2, 16, chunks=((0, 20), (0, 20))),
    Case("tiny/mixed", 4, 2, 16, decode=(4,), chunks=((3, 5),), soft_cap=2.0),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(attention_cases, "QUICK", TINY)
    monkeypatch.setattr(attention_timing, "measure_rates", lambda: Limits(1e9, 2e9))
    monkeypatch.setattr(attention_timing, "TARGET_S", 1e-4)
    for module in (attention_timing, attention_rivals):
        monkeypatch.setattr(module, "rotated_bytes", lambda: 30_000)


def run(tmp_path, *arguments):
    target = tmp_path / "figures.json"
    status = bench_attention.main(["--repeat", "2", "--json", str(target), *arguments])
    return status, json.loads(target.read_text())


def by_case(figures, implementation):
    return {row["case"]: row for row in figures["cases"] if row["implementation"] == implementation}


def test_figures(tmp_path, capsys):
    status, figures = run(tmp_path, "--dtype", "float32")
    assert status == 0
    assert figures["complete"]
    assert figures["limits"] == [{"flops_per_s": 1e9, "bytes_per_s": 2e9}] * 2
    names = [name for name, one in IMPLEMENTATIONS.items() if one.unavailable() is None and name != "reference"]
    assert [row["case"] for row in figures["cases"][:: len(names) + 1]] == [case.name for case in TINY]
    for name in names:
        for row in by_case(figures, name).values():
            assert row["status"] == "ok", row
            assert 0 <= row["error"] <= row["allowed_error"] < 1e-4
            assert row["s_range"][0] <= row["s"] <= row["s_range"][1]
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["s"] / 1e9)
            assert row["share_of_matrix_rate"] == pytest.approx(row["flops"] / row["s"] / 1e9)
            assert row["share_of_memory_rate"] == pytest.approx(row["bytes"] / row["s"] / 2e9)
            assert row["share_of_roofline"] == max(row["share_of_matrix_rate"], row["share_of_memory_rate"])
            assert row["copies"] == max(1, int(30_000 / row["bytes"]))
    rivals = by_case(figures, "jax_nn")
    assert rivals["tiny/prefill"]["status"] == "ok"
    assert {rivals[f"tiny/{name}"]["status"] for name in ("decode", "mixed")} == {"cannot"}
    shown = capsys.readouterr().err
    assert "tiny/prefill" in shown
    assert "TFLOP/s" in shown


@pytest.mark.parametrize(
    "case",
    [
        Case("ragged", 4, 2, 16, decode=(4, 9, 2)),
        Case("window of decode", 4, 2, 16, decode=(9, 9), window=3),
        Case("window of a chunk", 4, 2, 16, chunks=((0, 20),), window=7),
        Case("window that all fits in", 4, 2, 16, chunks=((0, 20),), window=20),
    ],
    ids=lambda case: case.name,
)
def test_a_rival_computes_the_same_problem(case):
    found = attention_rivals.measure(case, "jax_nn", "float32", Limits(1e9, 1e9), 1)
    assert found["status"] == "ok", found["reason"]
    assert (found["flops"], found["bytes"]) == case.work(4)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("behind", 4, 2, 16, chunks=((3, 20),)), "its causal mask"),
        (Case("two sizes", 4, 2, 16, chunks=((0, 20), (0, 10))), "not one batch"),
        (Case("cap", 4, 2, 16, decode=(3,), soft_cap=1.0), "no soft cap"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_a_rival_is_not_asked(case, reason):
    found = attention_rivals.measure(case, "jax_nn", "float32", Limits(1e9, 1e9), 1)
    assert found["status"] == "cannot"
    assert reason in found["reason"]


def plant(monkeypatch, attend):
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", IMPLEMENTATIONS["xla"]._replace(attend=attend))


def test_what_is_wrong_gets_no_figure(tmp_path, monkeypatch):
    right = IMPLEMENTATIONS["xla"].attend

    def forgets_the_window(*args, window, **options):
        return right(*args, window=None if window is None else window - 1, **options)

    plant(monkeypatch, forgets_the_window)
    status, figures = run(tmp_path, "--implementations", "xla", "--rivals", "")
    assert status == 1
    rows = by_case(figures, "xla")
    assert [row["status"] for row in rows.values()] == ["wrong", "ok", "ok"]
    assert rows["tiny/decode"]["error"] > 0.01
    assert "s" not in rows["tiny/decode"]


def test_what_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    right = IMPLEMENTATIONS["xla"].attend

    def fails_on_chunks(q, *args, num_decode, **options):
        if num_decode < len(q):
            raise NotImplementedError("no chunks")
        return right(q, *args, num_decode=num_decode, **options)

    plant(monkeypatch, fails_on_chunks)
    status, figures = run(tmp_path, "--implementations", "xla", "--rivals", "")
    assert status == 1
    assert [row["status"] for row in figures["cases"]] == ["ok", "error", "error"]
    assert figures["cases"][1]["reason"] == "NotImplementedError: no chunks"


def test_what_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_timing, "free_bytes", lambda: 1000)
    status, figures = run(tmp_path, "--implementations", "xla", "--rivals", "")
    assert status == 0
    assert {row["status"] for row in figures["cases"]} == {"does not fit"}

    def full_memory():
        raise MemoryError

    assert attention_timing.outcome(TINY[0], "float32", "xla", full_memory)["status"] == "does not fit"


def test_a_dtype_that_is_not_supported(tmp_path):
    if reason := IMPLEMENTATIONS["cpu"].unavailable():
        pytest.skip(reason)
    status, figures = run(tmp_path, "--implementations", "cpu", "--rivals", "", "--dtype", "float16")
    assert status == 0
    assert {row["status"] for row in figures["cases"]} == {"cannot"}


def test_the_json_tells_after_every_case(tmp_path, monkeypatch):
    target, seen = tmp_path / "figures.json", []

    def measure(case, name, *_):
        seen.append(len(json.loads(target.read_text())["cases"]) if target.exists() else 0)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return {"case": case.name, "implementation": name, "status": "cannot", "reason": "is not there"}

    monkeypatch.setattr(attention_timing, "measure", measure)
    arguments = ["--implementations", "xla", "--rivals", "", "--json", str(target)]
    assert bench_attention.main(arguments) == 130
    assert seen == [0, 1, 2]
    assert not json.loads(target.read_text())["complete"]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_stdout_gets_one_object(capsys):
    assert bench_attention.main(["--implementations", "xla", "--rivals", "", "--json", "-", "--cases", "*/mixed"]) == 0
    assert [row["case"] for row in json.loads(capsys.readouterr().out)["cases"]] == ["tiny/mixed"]


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_the_picture(name, tmp_path):
    pytest.importorskip("matplotlib")
    row = {"case": "a", "implementation": "xla", "status": "ok", "flops": 1e9, "bytes": 1e6, "tflop_per_s": 0.5}
    wrong = {"case": "a", "implementation": "cpu", "status": "wrong"}
    limits = [{"flops_per_s": 1e12, "bytes_per_s": 1e10}]
    figures = {"device": "cpu", "dtype": "float32", "limits": limits, "cases": [row, wrong]}
    bench_attention.draw(figures, str(tmp_path / name))
    bench_attention.draw(figures | {"cases": [wrong]}, str(tmp_path / name))
    assert (tmp_path / name).read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--implementations", "nope"], "'nope' is not one of cpu"),
        (["--rivals", "nope"], "'nope' is not one of jax_nn"),
        (["--repeat", "0"], "repeat must be at least 1"),
        (["--size", "main", "--cases", "nope"], "no case of size main is like nope"),
        (["--picture", "picture.txt"], ".png or .svg"),
    ],
)
def test_options_that_cannot_be(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_attention.main(arguments)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert reason in " ".join((shown.out + shown.err).replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--json", "no-such-folder/x.json"], "no-such-folder/x.json"),
        (["--json", "x.svg", "--picture", "x.svg"], "--picture and --json are the same"),
        (["--cases", "nope"], "no case of size quick is like nope"),
        (["--implementations", "mosaic_tpu"], "'mosaic_tpu' cannot run here"),
        (["--rivals", "tokamax"], "tokamax is not installed"),
    ],
)
def test_what_cannot_be_is_known_before_anything_is_timed(arguments, reason, monkeypatch, capsys):
    monkeypatch.setattr(attention_timing, "measure_rates", lambda: pytest.fail("goes on"))
    absent = dict.fromkeys(("matplotlib",), "there").get  # neither tokamax nor torch
    monkeypatch.setattr(command.importlib.util, "find_spec", absent)
    assert bench_attention.main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_short_calls_are_chained_on_an_accelerator(monkeypatch):
    limits = Limits(1e12, 1e12)
    assert attention_timing.chain_of(Work(1e6, 1e6), limits) == 1  # a CPU
    monkeypatch.setattr(attention_timing, "on_cpu", lambda: False)
    assert attention_timing.chain_of(Work(1e6, 1e6), limits) == attention_timing.CHAIN
    assert attention_timing.chain_of(Work(1e6, 1e9), limits) == 1


def test_calls_of_a_chain_take_turns_over_the_copies():
    problem = attention_timing.prepare(TINY[0], "xla", "float32", copies=5, chain=3)
    turns = attention_timing.turns_of(problem)
    assert [[int(slots[0]) // 4 for slots in turn] for turn in turns] == [[0, 1, 2], [3, 4, 0]]
    last, first = problem.run(problem.inputs.q, problem.inputs.cache, turns[0], problem.inputs.positions)
    assert worst_error(TINY[0], problem.inputs, first, samples=None) < 1e-5
    assert np.isfinite(np.asarray(last)).all()
    assert len(attention_timing.time_problem(problem, 2)) == 2


def test_a_long_call_is_timed_once(monkeypatch):
    monkeypatch.setattr(attention_timing, "LONG_S", 0.0)
    assert len(attention_timing.time_launches(lambda count: math.factorial(500), 5)) == 1
