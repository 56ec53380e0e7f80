"""Timelines as they are written: the format of traces, what is in one, pictures, and both from the command line."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count

import jax
import numpy as np
import pytest

from scripts.generate import main
from scripts.timeline import Compilations, Timeline, TurnProfile
from scripts.timeline_picture import IDLE, PREFILL, draw, nice_step, trace, write_trace
from tests.batching.fake_engine import finish, request_of
from tests.scripts.test_generate import GOOD, TINY, write_lines
from tests.scripts.test_timeline import A, B, C, grid, longer, random_run, recorded, submit, timed_engine

REQUIRED = {  # by the format, beside name, ph, pid and tid
    "X": {"ts", "dur", "cat", "args"},
    "M": {"args"},
    "C": {"ts", "args"},
    "i": {"ts", "s", "cat"},
    "b": {"ts", "id", "cat"},
    "n": {"ts", "id", "cat"},
    "e": {"ts", "id", "cat"},
}
SECOND = 1_000_000.0  # in a trace's unit


def check_trace(written):
    """What the format asks for, and what a viewer needs to show it. The events by phase."""
    events = json.loads(json.dumps(written, allow_nan=False))["traceEvents"]
    by_phase, names, ends = defaultdict(list), defaultdict(dict), defaultdict(float)
    asynchronous, last = defaultdict(list), 0.0
    for event in events:
        phase, place = event["ph"], (event["pid"], event["tid"])
        assert {"name", "pid", "tid"} | REQUIRED[phase] <= event.keys()
        assert all(isinstance(number, int) and number > 0 for number in place)
        by_phase[phase].append(event)
        if phase == "M":
            names[place][event["name"]] = event["args"]
            continue
        assert event["ts"] >= last, "in the order of time"
        last = event["ts"]
        assert {"process_name", "thread_name", "thread_sort_index"} <= names[place].keys(), "a track without a name"
        if phase == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= ends[place] - 0.002, f"{event} overlaps the one before it"
            ends[place] = event["ts"] + event["dur"]
        elif phase == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif phase == "b":
            asynchronous[event["id"]].append(event["name"])
        elif phase == "e":
            assert asynchronous[event["id"]].pop() == event["name"], "ends in the order of nesting"
    assert not any(asynchronous.values()), "an async event that does not end"
    tids = {(pid, tid) for pid, tid in names}
    assert len({tid for _, tid in tids}) == len(tids), "a viewer may take two tracks for one"
    return by_phase


@pytest.mark.parametrize(
    ("run_ahead", "device", "gaps"),
    [(0, [(5, 15), (21, 31)], [(1, 5), (15, 21)]), (1, [(5, 15), (15, 25)], [(1, 5)])],
)
def test_the_tracks_of_a_run(run_ahead, device, gaps):
    """The turns of `test_times`: one request, two chunks, and its only token."""
    timeline = recorded(timed_engine(slots=1, run_ahead=run_ahead), longer(A, 1))
    events = check_trace(trace([timeline]))
    tracks = {one["tid"]: one["args"]["name"] for one in events["M"] if one["name"] == "thread_name"}
    shown = defaultdict(list)
    for one in events["X"]:
        shown[tracks[one["tid"]]].append((one["name"], one["ts"] / SECOND, (one["ts"] + one["dur"]) / SECOND))
    assert [one[1:] for one in shown["device (at most)"]] == device
    assert [one[1:] for one in shown["device waits for the host (at most)"]] == gaps
    assert [one[1:] for one in shown["slot 0"]] == device
    assert [one[0] for one in shown["slot 0"]] == ["a: prefill 0..15", "a: prefill 16..19"]
    for plan, launch, launched, wait, ready, committed in (one.times for one in timeline.turns):
        host = {("plan", plan, launch), ("launch", launch, launched)}
        assert host | {("wait for the device", wait, ready), ("commit", ready, committed)} <= set(shown["host"])
    assert len(shown["host"]) == 8


@pytest.mark.parametrize("policy", ["continuous", "static", "priority"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_the_trace_of_a_random_run(run_ahead, policy, seconds):
    """Every request from its arrival to its end: in the queue and in slots, without a break."""
    timeline, *_ = random_run(run_ahead, policy, seconds=seconds)
    written, phases = trace([timeline]), defaultdict(list)
    check_trace(written)
    for one in written["traceEvents"]:
        if one["ph"] in "be":
            phases[one["id"]].append((one["name"], one["ts"] / SECOND))
    assert len(phases) == len(timeline.requests)
    zero = min(one.metrics.arrival for one in timeline.requests)
    for sequence in timeline.requests:
        (those,) = [one for one in phases.values() if one[0][0] == sequence.id]
        assert (those[0][1], those[-1][1]) == (sequence.metrics.arrival - zero, sequence.metrics.end - zero)
        inner = those[1:-1]
        assert [name for name, _ in inner[::2]] == [name for name, _ in inner[1::2]]
        assert [at for _, at in inner[1:-1:2]] == [at for _, at in inner[2::2]], "a break between phases"
        assert (inner[0], inner[-1][1]) == (("queued", those[0][1]), those[-1][1])
        queued = sum(name == "queued" for name, _ in inner) // 2
        assert queued - 1 <= sequence.metrics.preemptions <= queued


def test_requests_and_copies():
    engine = timed_engine(slots=1, policy="priority", run_ahead=1)
    submit(engine, replace(A, priority=5), replace(C, priority=6))
    with Timeline().recording(engine) as timeline:
        engine.step()
        submit(engine, B)
        engine.step()
        engine.cancel("c")
        finish(engine)
    begun = check_trace(trace([timeline]))["b"]
    names = {one["id"]: one["name"] for one in begun if "args" in one}
    phases = {name: [one["name"] for one in begun if names[one["id"]] == name] for name in "abc"}
    stays = ["queued", "slot 0"]
    assert phases == {"a": ["a", *stays, *stays], "b": ["b", *stays], "c": ["c", "queued"]}
    ends = {one["name"]: one["args"]["finish_reason"] for one in begun if "args" in one}
    assert ends == {"a": "length", "b": "length", "c": "cancelled"}

    engine = timed_engine(slots=2, prefix_reuse=True)
    timeline = recorded(engine, request_of("n", A.prompt_ids, max_tokens=3, n=2, ignore_eos=True))
    (copy,) = check_trace(trace([timeline]))["i"]
    assert (copy["name"], copy["args"]) == ("19 rows from slot 0", {"source": 0, "target": 1, "length": 19})


def test_two_runs_and_what_was_compiled(tmp_path):
    engine = timed_engine()
    with Compilations() as compilations:
        jax.jit(lambda x: x * 3 + 29)(np.float32(1))
    ((name, begin, end),) = [one for one in compilations.events if "lambda" in one[0]]
    assert begin < end
    compilations.events[:] = [(name, 0.5, 0.75)]
    runs = [recorded(engine, *(replace(one, id=f"{one.id}{run}") for one in (A, B, C))) for run in range(2)]
    runs[0].name, runs[1].name = "first", "second"
    path = tmp_path / "trace.json"
    write_trace(str(path), runs, compilations)
    written = json.loads(path.read_text())
    assert [run["name"] for run in written["otherData"]["runs"]] == ["first", "second"]
    events = check_trace(written)
    processes = {one["args"]["name"] for one in events["M"] if one["name"] == "process_name"}
    assert processes == {"compilation", "run 1: first", "run 2: second"}
    assert [(one["name"], one["ts"], one["dur"]) for one in events["X"] if one["cat"] == "compile"] == [
        (name, 0.5 * SECOND, 0.25 * SECOND)
    ]
    counters = defaultdict(list)
    for one in events["C"]:
        if one["pid"] == 2:
            counters[one["name"]].append(one["args"])
    assert [one["slots"] for one in counters["busy"]] == [2, 2, 2, 2, 1, 0]
    assert [one["requests"] for one in counters["waiting"]] == [1, 1, 1, 1, 0, 0]
    assert [one["padding"] for one in counters["rows"]] == [2, 14, 12, 0, 14, 0]
    speeds = [turn.tokens / turn.wall_s for turn in runs[0].turns]
    assert [one["tokens per second"] for one in counters["generated"]] == [*speeds, 0.0]


def test_a_trace_of_nothing():
    assert trace([])["traceEvents"] == []
    assert Timeline().summary()["gap_share"] == 0.0
    check_trace(trace([Timeline("empty")]))


def test_the_timeline_of_all_runs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    jax.clear_caches()  # else there is nothing left to compile
    path, picture = tmp_path / "timeline.json", tmp_path / "timeline.png"
    arguments = ["--prompts", write_lines(tmp_path / "in.jsonl", [json.dumps(request) for request in GOOD])]
    targets = ["--timeline", str(path), "--picture", str(picture), "--json", "-"]
    assert main([*TINY, *arguments, *targets, "--compare", "static"]) == 0
    shown = capsys.readouterr()
    assert f"timeline: {path}" in shown.err
    assert f"picture: {picture}" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")

    runs, written = json.loads(shown.out)["runs"], json.loads(path.read_text())
    for run, summary in zip(runs, written["otherData"]["runs"], strict=True):
        assert summary["name"] == run["policy"]
        assert summary["tokens"] == run["generated_tokens"] == 20
        assert summary["turns"] + summary["dropped_turns"] == run["turns"]
        assert summary["host_s"] == pytest.approx(run["host_s_per_turn"] * run["turns"])
        assert summary["gap_share"] == pytest.approx(run["gap_share"])
    events = check_trace(written)
    programs = [one for one in events["X"] if one["cat"] == "compile"]
    assert len(programs) >= 2
    named = {one["args"]["name"] for one in events["M"] if one["name"] == "process_name"}
    assert named == {"compilation", "run 1: continuous", "run 2: static"}
    ends = [(one["name"], one["args"]["finish_reason"]) for one in events["b"] if "args" in one]
    assert sorted(ends) == sorted([(request["id"], "length") for request in GOOD] * 2)


def test_a_timeline_on_stdout_alone(tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [json.dumps(GOOD[0])])
    assert main([*TINY, "--prompts", path, "--timeline", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["otherData"]["runs"][0]["tokens"] == 6
    assert "[one] 3 token ids" in shown.err


def test_a_profile_of_some_turns(tmp_path, monkeypatch, capsys):
    """The second time there are too few turns, and that is said."""
    path, folder = write_lines(tmp_path / "in.jsonl", [json.dumps(GOOD[0])]), tmp_path / "new" / "folder"
    arguments = [*TINY, "--prompts", path, "--profile", str(folder)]
    assert main([*arguments, "--profile-turns", "2:3"]) == 0
    assert f"profile: {folder}" in capsys.readouterr().err
    assert any(one.suffix == ".pb" and one.stat().st_size for one in folder.rglob("*"))
    monkeypatch.setattr("jax.profiler.start_trace", lambda *_: pytest.fail("there is no such turn"))
    assert main(arguments) == 0
    assert "no profile: the run had 6 turns, and --profile-turns starts at 10" in capsys.readouterr().err


def test_a_step_that_fails():
    engine = timed_engine(run_ahead=1)
    run, calls = engine.run, []

    def failing(turn):
        calls.append(turn)
        if len(calls) == 3:
            raise RuntimeError("for the test")
        return run(turn)

    engine.run = failing
    submit(engine, A, B, C)
    with Timeline().recording(engine) as timeline:
        with pytest.raises(RuntimeError, match="for the test"):
            finish(engine)
        finish(engine)
    assert grid(timeline) == ["a:0-15 c:0-3", "b? ."]
    assert timeline.dropped == 2
    check_trace(trace([timeline]))


@pytest.mark.parametrize("turns", ["", "5", "0:3", "4:3", "-1:2", "1:2:3", "a:b", "1:", ":2", "1.5:2"])
def test_turns_that_are_no_range(turns):
    with pytest.raises(ValueError, match="profile_turns"):
        TurnProfile("folder", turns)


@pytest.mark.parametrize(
    ("profiled", "told"),
    [
        ("2:3", ["launch 1", "start", "launch 2", "launch 3", "launch 4", "commit 3", "stop", "launch 5"]),
        ("5:9", ["launch 1", "launch 2", "launch 3", "launch 4", "commit 3", "start", "launch 5", "stop"]),
        ("6:9", ["launch 1", "launch 2", "launch 3", "launch 4", "commit 3", "launch 5"]),
    ],
)
def test_the_turns_that_are_profiled(profiled, told, monkeypatch):
    happened = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: happened.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: happened.append("stop"))
    engine = timed_engine(run_ahead=1)
    run, launches, commits = engine.run, count(1), count(1)

    def numbered(turn):
        happened.append(f"launch {next(launches)}")
        return run(turn)

    engine.run, engine.on_turn = numbered, lambda *_: happened.append(f"commit {next(commits)}")
    submit(engine, A, B, C)
    profile = TurnProfile("folder", profiled)
    with profile.of(engine):
        finish(engine)
    assert [one for one in happened if "commit" not in one or one == "commit 3"] == told
    assert profile.done == ("start" in told)
    assert profile.launched == 5


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_the_picture(name, tmp_path):
    pytest.importorskip("matplotlib")
    engine = timed_engine()
    runs = [recorded(engine, *(replace(one, id=f"{one.id}{run}") for one in (A, B, C))) for run in range(2)]
    path = tmp_path / name
    draw([*runs, Timeline("empty")], str(path))
    if path.suffix == ".svg":
        assert path.read_bytes().startswith(b"<?xml")
        return
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    colours = Counter(map(tuple, np.round(imread(path)[..., :3] * 255).astype(int).reshape(-1, 3).tolist()))
    for colour in (PREFILL, IDLE):
        assert colours[tuple(round(255 * part) for part in to_rgb(colour))] > 1000


@pytest.mark.parametrize(
    ("turns", "marks", "step"), [(1, 12, 1), (12, 12, 1), (13, 12, 2), (239, 12, 20), (239, 4, 100), (5, 0, 5)]
)
def test_steps_between_marks(turns, marks, step):
    assert nice_step(turns, marks) == step
