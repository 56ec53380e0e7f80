"""The device check: planted faults are found and named, and what hangs or crashes does not stop the rest."""

import json
import sys
from dataclasses import replace

import jax
import pytest

from pallas_kernels.attention import IMPLEMENTATIONS
from scripts import device_check, device_engine, device_steps
from scripts.attention_cases import Case
from scripts.device_check import Group, Options

CASE = Case("tiny", 4, 2, 16, decode=(4, None), chunks=((3, 20),), window=6, rows=1024)

# Steps named by what happens in them, as `scripts.device_steps` tells of its own.
STUB = """
import json, os, sys, time
what = json.loads(sys.argv[1])
def emit(**event): print(json.dumps(event), flush=True)
print("a library's words")
emit(event="info", device="stub", platform="cpu", jax="0")
steps = [item for item in {steps} if item not in what["skip"]]
emit(event="plan", items=steps)
for item in steps:
    emit(event="start", item=item)
    if "hang" in item: time.sleep(600)
    if "crash" in item: sys.exit("broke")
    if "slow" in item: time.sleep(1)
    emit(event="result", item=item, status="error" if "lost" in item else "ok", reason="")
    if "lost" in item: os._exit(3)
"""


def stub(*steps):
    return [sys.executable, "-c", STUB.replace("{steps}", repr(steps))]


def statuses(group):
    return {item: found["status"] for item, found in group.results.items()}


def run_stub(*steps, seconds=60.0, stall_s=0.5):
    group = Group("decode", stub(*steps), lambda *_: None)
    group.run(["*"], seconds, stall_s)
    return group


@pytest.fixture
def quick_start(monkeypatch):
    monkeypatch.setattr(device_check, "START_S", 5)


@pytest.mark.usefixtures("quick_start")
def test_a_step_that_hangs_is_cut_and_the_rest_goes_on():
    group = run_stub("one", "hang", "two")
    assert statuses(group) == {"one": "ok", "hang": "hang", "two": "ok"}
    assert group.trouble == []


@pytest.mark.usefixtures("quick_start")
def test_a_step_that_ends_its_process_and_one_that_loses_the_device():
    group = run_stub("crash", "one", "lost", "two")
    assert statuses(group) == {"crash": "crash", "one": "ok", "lost": "error", "two": "ok"}
    assert "status 1: broke" in group.results["crash"]["reason"]


@pytest.mark.usefixtures("quick_start")
def test_what_the_time_does_not_reach_is_named():
    assert statuses(run_stub("one", "slow", "two", seconds=0.8, stall_s=9)) == {
        "one": "ok",
        "slow": "not run",
        "two": "not run",
    }


def test_a_process_that_never_starts_a_step():
    group = Group("decode", [sys.executable, "-c", "raise SystemExit('no such module')"], lambda *_: None)
    group.run(["*"], 30, 1)
    assert "no such module" in group.trouble[0]


@pytest.mark.usefixtures("quick_start")
def test_no_more_processes_than_a_few():
    group = run_stub(*(f"crash {index}" for index in range(9)))
    assert list(statuses(group).values()) == ["crash"] * device_check.MOST_PROCESSES + ["not run"] * 5


@pytest.mark.usefixtures("quick_start")
def test_all_groups(tmp_path, monkeypatch, capsys):
    target, lines = tmp_path / "x.json", []
    monkeypatch.setattr(device_check, "GROUPS", {"decode": ("correctness", 30), "bench_decode": ("bench", 30)})
    status = device_check.check(Options(json=str(target)), lines.append, stub("one"))
    assert status == 0
    result = json.loads(target.read_text())
    assert result["complete"]
    assert result["machine"]["device"] == "stub"
    assert {name: list(group["results"]) for name, group in result["groups"].items()} == {
        "decode": ["one"],
        "bench_decode": ["one"],
    }
    assert "device stub" in lines[0]
    assert any(text.startswith("bench_decode") and "1 ok" in text for text in lines)

    lines.clear()
    options = Options(json=str(target), only="correctness", stall_s=0.5)
    assert device_check.check(options, lines.append, stub("one", "hang")) == 1
    assert list(json.loads(target.read_text())["groups"]) == ["decode"]
    assert lines[-1].startswith("  hang: hang: nothing for")


def test_a_budget_that_is_over(monkeypatch):
    monkeypatch.setattr(device_check, "GROUPS", {"decode": ("correctness", 30)})
    lines = []
    assert device_check.check(Options(budget_s=1e-9), lines.append, stub("one")) == 1
    assert "not reached" in lines[-1]


def test_what_a_rival_cannot_do_is_no_fault_of_ours():
    for item, bad in (("case:torch_flash", False), ("case:jax_nn", False), ("case:xla", True), ("engine/h64", True)):
        assert device_check.is_bad((item, {"status": "wrong"})) is bad
        assert not device_check.is_bad((item, {"status": "cannot"}))
        assert device_check.is_bad((item, {"status": "hang"}))


def test_bench_rows_are_summed_up_by_case():
    row = {"case": "a", "implementation": "xla", "status": "ok", "s": 1e-5, "share_of_roofline": 0.5, "bound": "memory"}
    rows = [row, row | {"implementation": "jax_nn", "s": 2e-5}, row | {"case": "b", "status": "error"}]
    (line,) = device_check.bench_lines(rows)
    assert line.split() == "a xla 10.0 us 50% of memory jax_nn 20.0 us 50% of memory".split()


def test_a_real_process():
    events = []
    command = [sys.executable, "-m", "scripts.device_steps"]
    group = Group("decode", command, lambda _, event, item: events.append(event["event"]))
    group.run(["decode/h64_group_3_window:*:bfloat16", "nothing"], 100, 100)
    assert [found["status"] for found in group.results.values()] == ["ok"], (group.results, group.trouble)
    assert [event for event in events if event != "noise"] == ["info", "plan", "start", "result"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "nope"], "'nope' is not one of correctness"),
        (["--budget-s", "0"], "must be positive"),
    ],
)
def test_options_that_cannot_be(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        device_check.main(arguments)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert reason in " ".join((shown.out + shown.err).replace("│", " ").split())


def test_what_cannot_be_written_is_known_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(device_check.subprocess, "Popen", lambda *_, **__: pytest.fail("goes on"))
    assert device_check.main(["--json", "no-such-folder/x.json"]) == 2
    assert "no-such-folder/x.json" in capsys.readouterr().err


def plant(monkeypatch, **changes):
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", IMPLEMENTATIONS["xla"]._replace(**changes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_conformance(dtype):
    found = device_steps.conform(CASE, "xla", dtype)
    assert found["status"] == "ok", found
    assert found["cache_bytes"] == 3 * 2 * 1024 * 32 * (4 if dtype == "float32" else 2)


def test_attention_that_sees_too_much(monkeypatch):
    right = IMPLEMENTATIONS["xla"].attend
    plant(monkeypatch, attend=lambda *args, window, **options: right(*args, window=window + 1, **options))
    found = device_steps.conform(CASE, "xla", "float32")
    assert found["status"] == "wrong"
    assert found["error"] > 0.1


def test_a_write_that_goes_astray(monkeypatch):
    right = IMPLEMENTATIONS["xla"].write

    def also_padding(cache, k, v, slots, positions, **how):
        slots = slots.at[1].set(0)  # the padding row of the case
        return right(cache, k, v, slots, positions.at[1].set(100), **how)

    plant(monkeypatch, write=also_padding)
    found = device_steps.conform(CASE, "xla", "float32")
    assert (found["status"], found["reason"]) == ("wrong", "write_rows left another cache than it should")


def test_a_cache_that_is_copied(monkeypatch):
    """On the way, or because it is not written in place."""
    right, jit = IMPLEMENTATIONS["xla"].write, jax.jit

    def backwards_and_back(*args, **how):
        turned = jax.lax.optimization_barrier([one[:, :, ::-1] for one in right(*args, **how)])
        return tuple(one[:, :, ::-1] for one in turned)

    with monkeypatch.context() as patch:
        plant(patch, write=backwards_and_back)
        found = device_steps.conform(CASE, "xla", "float32")
    assert found["status"] == "wrong"
    assert "bytes beside a cache of" in found["reason"]
    monkeypatch.setattr(device_steps.jax, "jit", lambda function, donate_argnums: jit(function))
    found = device_steps.conform(CASE, "xla", "float32")
    assert (found["status"], found["reason"]) == ("wrong", f"writes 0 bytes in place of {found['cache_bytes']}")


def test_what_is_not_supported_is_no_fault(monkeypatch):
    plant(monkeypatch, unsupported=lambda *_: "not today")
    assert device_steps.conform(CASE, "xla", "float32")["status"] == "cannot"


def test_a_step_that_raises_is_contained_and_a_lost_device_ends_the_process(monkeypatch):
    def fails():
        raise NotImplementedError("two\nlines")

    events, steps = [], {"bad": fails, "good": lambda: {"status": "ok"}, "unwanted": fails}
    assert device_steps.run_group(steps, lambda item: item != "unwanted", events.append) == 0
    assert [event.get("status") for event in events] == [None, None, "error", None, "ok"]
    assert events[2]["reason"] == "NotImplementedError: two lines"
    monkeypatch.setattr(device_steps, "device_lives", lambda: False)
    assert device_steps.run_group(steps, lambda item: True, events.append) == device_steps.DEVICE_LOST


def test_the_plan_of_each_group(monkeypatch):
    monkeypatch.setattr(device_steps.attention_timing, "measure_rates", lambda: device_steps.Limits(1, 1))
    monkeypatch.setattr(device_steps.attention_timing, "default_size", lambda: "main")
    plans = {group: list(device_steps.plan(group)) for group in device_check.GROUPS}
    assert "decode/h256_group_8_scale:" + device_steps.preferred() + ":bfloat16" in plans["decode"]
    assert all(item.startswith(("prefill", "mixed")) for item in plans["prefill"])
    assert len(plans["portable"]) == 3
    assert len(plans["bench_decode"]) + len(plans["bench_prefill"]) == 2 + len(device_steps.cases_of("main"))
    assert sum("prefill" in item for item in plans["bench_rivals"][3:9]) == 3


@pytest.fixture
def tiny_models(monkeypatch):
    config = device_engine.make_config(16, 8)
    config = replace(config, vocab_size=64, width=32, mlp_width=32, num_heads=4, num_kv_heads=2)
    monkeypatch.setattr(device_engine, "MODELS", {"tiny": config})
    monkeypatch.setattr(device_engine, "PROMPTS", (1, 9))
    monkeypatch.setattr(device_engine, "ANSWER", 4)
    monkeypatch.setattr(
        device_engine, "SETTINGS", {"slots": 2, "max_len": 2048, "chunk_sizes": (16,), "dtype": "bfloat16"}
    )


@pytest.mark.usefixtures("tiny_models")
def test_two_engines_agree():
    found = device_engine.compare_engines("tiny", "reference")
    reasons = found["reason"].split("; ")
    assert len(reasons) == 2, reasons
    for reason in reasons:  # which gathers the whole slots
        assert "reference: program" in reason
        assert "a layer's cache has 0.5" in reason
    assert found["tokens"] == 8
    assert found["same_tokens"] >= 6
    assert found["worst_margin"] < 0.3
    assert set(found["reference"]["temp_bytes"]) == {"2+0", "2+16"}


@pytest.mark.usefixtures("tiny_models")
def test_an_engine_whose_attention_is_wrong(monkeypatch):
    right = IMPLEMENTATIONS["reference"].attend
    wrong = IMPLEMENTATIONS["reference"]._replace(attend=lambda *args, **options: -right(*args, **options))
    monkeypatch.setitem(IMPLEMENTATIONS, "reference", wrong)
    jax.clear_caches()  # where a layer's program has the right one
    found = device_engine.compare_engines("tiny", "reference")
    jax.clear_caches()
    assert found["status"] == "wrong"
    assert "deviations apart" in found["reason"]
