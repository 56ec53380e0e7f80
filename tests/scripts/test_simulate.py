"""The simulator against the engine, turn by turn, and its commands on a tiny model."""

import json
import statistics
from pathlib import Path

import pytest

from batching import Engine, EngineConfig
from batching.policies import POLICIES, make_policy
from scripts import simulate
from scripts.fleet import Fleet, RoundRobin
from scripts.open_loop import serve_items
from scripts.replica import Replica, Setup
from scripts.step_cost import FittedCost, Line, Shape, load_cost, load_of
from scripts.step_fit import TurnRecord, fit
from scripts.traces import Item, write_workload

CHECKPOINT = Path(__file__).parent.parent / "data/llama_tied_gqa4"
POLICY = f"{Path(__file__).parent.parent / 'data/policies/last_come.py'}:LastCome"  # somebody's own
TINY = ["--model", str(CHECKPOINT), "--slots", "3", "--max-len", "64", "--chunk-sizes", "16"]
COST = FittedCost({Shape(0, 4, 3): Line(0.01, 1e-6)}, row_s=0.001, about={"slots": 2, "max_len": 32, "vocabulary": 320})


def items(count=9):
    return [
        Item(
            f"r{n}",
            1 + 5 * n % 12,
            prompt_tokens=2 + 7 * n % 30,
            seed=n,
            prefix_tokens=2,
            priority=n % 3,
            user=f"u{n % 4}",
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def engine():
    return Engine.from_pretrained(CHECKPOINT, EngineConfig(slots=3, max_len=64, chunk_sizes=(16,)))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("policy", [*POLICIES, POLICY])
def test_turns_are_those_of_the_engine(engine, policy, run_ahead, reuse, monkeypatch):
    """The same policy, by the same name, one in a file of its own too: every turn has the same rows for the same
    requests."""
    engine.reconfigure(policy=policy, run_ahead=run_ahead, prefix_reuse=reuse)
    engine.scheduler.prefixes.forget()
    launched, launch = [], engine.run

    def watched(turn):
        launched.append((load_of(turn, 3), [one.id for one in turn.sampled]))
        return launch(turn)

    monkeypatch.setattr(engine, "run", watched)
    real = {one.id: one for one in serve_items(engine, items())}

    shapes = engine.runner.shapes
    replica = Replica(Setup(shapes, 64, 1024, run_ahead, reuse), COST, make_policy(policy), leaps=False)
    planned, plan = [], replica.scheduler.plan

    def noted():
        if (turn := plan()) is not None:
            planned.append((replica.scheduler.load, [one.id for one in turn.sampled]))
        return turn

    monkeypatch.setattr(replica.scheduler, "plan", noted)
    run = Fleet(items(), [replica], RoundRobin(), 320 if reuse else None)
    made_up = {one.id: one for one in run.run()}
    assert planned == launched
    assert {name: len(one.tokens) for name, one in made_up.items()} == {n: len(one.tokens) for n, one in real.items()}
    assert all(one.outcome == "completed" for one in real.values())


def test_a_workload_on_the_engine(engine):
    """Followers come after those before them, what is refused has failed, times begin at 0."""
    engine.reconfigure(policy="continuous", run_ahead=1, prefix_reuse=True)
    chain = [
        Item("a", 5, 0.01, prompt_tokens=20),
        Item("b", 3, 0.02, prompt_tokens=4, after="a", continues=True),
        Item("long", 60, prompt_tokens=20),
        Item("c", 2, 0.01, prompt_tokens=4, after="long"),
    ]
    woken = []
    served = {one.id: one for one in serve_items(engine, chain, on_wake=lambda: woken.append(1))}
    assert {name for name, one in served.items() if one.outcome == "failed"} == {"long"}
    assert served["b"].prompt_tokens == 20 + 5 + 4
    assert served["b"].arrival == served["a"].end + 0.02
    assert served["c"].arrival == served["long"].end + 0.01
    assert [len(served[name].tokens) for name in ("a", "b", "long", "c")] == [5, 3, 0, 2]
    for name in "abc":
        one = served[name]
        assert one.arrival < one.tokens[0] <= one.tokens[-1] <= one.end
    assert woken


def files(tmp_path, count=9):
    workload, cost = tmp_path / "workload.jsonl", tmp_path / "cost.json"
    write_workload(workload, items(count))
    cost.write_text(json.dumps(COST.to_json()))
    return str(workload), str(cost)


def test_what_is_recorded_can_be_run(tmp_path, capsys):
    workload, _ = files(tmp_path)
    cost, turns, target = (str(tmp_path / name) for name in ("fitted.json", "turns.jsonl", "figures.json"))
    record = ["record", "--workload", workload, "--out", cost, "--turns", turns, *TINY]
    assert simulate.main(record) == 0
    assert "in sum" in capsys.readouterr().err
    lines = [TurnRecord.from_json(json.loads(line)) for line in Path(turns).read_text().splitlines()]
    fitted = load_cost(Path(cost))
    assert fit(lines).programs == fitted.programs
    assert fitted.about["slots"] == 3
    assert json.loads(Path(cost).read_text())["residuals"]["all"]["turns"] == len(lines)

    assert simulate.main(["run", "--cost", cost, "--workload", workload, "--json", target]) == 0
    figures = json.loads(Path(target).read_text())
    assert (figures["completed"], figures["slots"], figures["chunk_sizes"], figures["run_ahead"]) == (9, 3, [16], 0)
    assert figures["generated_tokens"] == sum(one.max_tokens for one in items())
    assert figures["turns"] == len(lines)
    assert "busy slots" in capsys.readouterr().err


def test_options_go_before_what_the_cost_tells(tmp_path, capsys):
    workload, cost = files(tmp_path, 30)
    how = ["--replicas", "2", "--router", "prefix", "--policy", "static", "--slots", "4", "--prefix-reuse", "True"]
    how += ["--max-len", "64", "--block-q", "16", "--chunk-sizes", "16", "32", "--max-queue", "500", "--run-ahead", "1"]
    shown = []
    for more in ([], ["--every-turn"]):
        assert simulate.main(["run", "--cost", cost, "--workload", workload, "--json", "-", *how, *more]) == 0
        shown.append(json.loads(capsys.readouterr().out))
        assert shown[-1].pop("simulated_in_s") > 0
    assert shown[0] == shown[1]
    asked = {"replicas": 2, "router": "prefix", "policy": "static", "slots": 4, "prefix_reuse": True, "max_len": 64}
    asked |= {"block_q": 16, "chunk_sizes": [16, 32], "max_queue": 500, "run_ahead": 1, "completed": 30}
    assert shown[0] == shown[0] | asked


def test_failed_requests_are_told(tmp_path, capsys):
    workload, cost = files(tmp_path, 12)
    assert simulate.main(["run", "--cost", cost, "--workload", workload, "--max-queue", "4", "--json", "-"]) == 0
    shown = capsys.readouterr()
    figures = json.loads(shown.out)
    assert figures["failed"] == sum(figures["refused"].values()) == 8
    assert "max_queue is 4" in shown.err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"--workload": "missing.jsonl"}, "missing.jsonl"),
        ({"--workload": "bad.jsonl"}, "line 1"),
        ({"--workload": "empty.jsonl"}, "holds no request"),
        ({"--cost": "missing.json"}, "missing.json"),
        ({"--cost": "bad.jsonl"}, "bad.jsonl"),
        ({"--policy": "fifo"}, "'fifo' is not one of"),
        ({"--slots": "0"}, "slots must be at least 1"),
        ({"--block-q": "0"}, "block_q must be at least 1"),
        ({"--json": "workload.jsonl"}, "are the same"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, monkeypatch, capsys, change, reason):
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"id": 1}\n')
    Path("empty.jsonl").write_text("\n")
    options = {"--workload": "workload.jsonl", "--cost": "cost.json", "--json": "out.json"} | change
    assert simulate.main(["run", *(word for pair in options.items() for word in pair)]) == 2
    assert reason in capsys.readouterr().err.replace("\n", " ")
    assert not Path("out.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--cost", "c", "--workload", "w", "--replicas", "0"],
        ["record", "--workload", "w", "--out", "o", "--run-ahead", "1"],
        ["validate", "--load", "1.5"],
        ["validate", "--requests", "0"],
        ["validate", "--repeat", "0"],
        ["validate", "--slots", "1"],
        ["validate", "--run-ahead", "1"],
        ["validate", "--policy", "static"],
        ["fit"],
        [],
    ],
)
def test_options_without_meaning_are_refused(words):
    with pytest.raises(SystemExit) as refused:
        simulate.main(words)
    assert refused.value.code == 2


def test_a_model_that_is_not_there(tmp_path, capsys):
    workload, _ = files(tmp_path)
    out = tmp_path / "cost-of-nothing.json"
    assert simulate.main(["record", "--workload", workload, "--out", str(out), "--model", str(tmp_path)]) == 2
    assert "error" in capsys.readouterr().err
    assert not out.exists()


def test_validate_compares_five_runs(tmp_path, capsys):
    target = tmp_path / "figures.json"
    words = ["validate", *TINY, "--requests", "12", "--repeat", "2", "--json", str(target)]
    assert simulate.main(words) == 0
    figures = json.loads(target.read_text())
    how = [(one["slots"], one["policy"], one["run_ahead"], len(one["runs"])) for one in figures["cases"]]
    assert how == [
        (3, "continuous", 0, 8),
        (3, "continuous", 0, 2),
        (3, "continuous", 1, 2),
        (1, "continuous", 0, 2),
        (3, "static", 1, 2),
    ]
    for case in figures["cases"]:
        for run in case["runs"]:
            there, here = run["real"], run["simulated"]
            assert there["completed"] == here["completed"] == 12
            assert there["generated_tokens"] == here["generated_tokens"]
            assert (run["turns_alone"] is None) == (case["run_ahead"] == 1 or case["name"] == "as measured")
        off = [run["simulated"]["tpot_s"]["p50"] / run["real"]["tpot_s"]["p50"] - 1 for run in case["runs"]]
        (tpot,) = (one for one in case["compared"] if one["figure"] == "TPOT p50")
        assert tpot["off"] == pytest.approx(statistics.median(off))
        assert (tpot["lowest"], tpot["highest"]) == pytest.approx((min(off), max(off)))
        for one in case["compared"]:
            assert one["met"] == (abs(one["off"]) <= (0.2 if "p99" in one["figure"] else 0.1))
    assert figures["met"] == all(one["met"] for case in figures["cases"][1:] for one in case["compared"])
    assert "medians of 2" in capsys.readouterr().err
