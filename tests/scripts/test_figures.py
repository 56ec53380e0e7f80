"""Figures of runs that are made up: what failed is counted, and enters nothing else."""

import io

from rich.console import Console

from batching.engine import EngineStats
from batching.request import Metrics, Output
from scripts.figures import run_figures, runs_table
from scripts.jobs import Run


def output(name: str, reason, tokens: list[int], times: list[float]) -> Output:
    metrics = Metrics(arrival=1.0, tokens=times, end=times[-1])
    return Output(name, tokens, None, reason, prompt_tokens=4, completion_tokens=len(tokens), metrics=metrics)


GOOD = output("good", "length", [5, 6, 7], [2.0, 3.0, 4.0])
FAILED = output("failed", "error", [5, 6], [100.0, 300.0])


def run(policy: str, outputs: list[Output], wall_s: float) -> Run:
    generated = sum(one.completion_tokens for one in outputs)
    stats = EngineStats(turns=3, slots=2, busy_slots=3, rows=8, live_rows=6)
    stats.prompt_tokens, stats.generated_tokens = 4 * len(outputs), generated
    return Run(policy, outputs, wall_s, stats)


def test_a_failed_request_enters_no_figure():
    with_failed, without = run("a", [GOOD, FAILED], 2.0), run("a", [GOOD], 2.0)
    figures, expected = run_figures(with_failed, with_failed), run_figures(without, without)
    assert figures == expected | {"failed_requests": 1, "finish_reasons": {"length": 1, "error": 1}}
    assert (figures["requests"], figures["prompt_tokens"], figures["generated_tokens"]) == (1, 4, 3)
    assert figures["generated_tokens_per_s"] == 1.5
    assert figures["ttft_s"] == figures["tpot_s"] == {"p50": 1.0, "p90": 1.0}


def test_ratio_and_difference_to_the_first_run():
    other = output("good", "length", [5, 6, 8], [2.0, 3.0, 4.0])
    figures = run_figures(run("b", [other], 1.0), run("a", [GOOD, FAILED], 2.0))
    assert figures["ratio_to_first"] == 2.0
    assert figures["different"] == ["good"]


def test_the_table_tells_of_failures_where_there_are_some():
    def shown(one: Run) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(runs_table([run_figures(one, one)]))
        return console.file.getvalue()

    assert "failed requests" in shown(run("a", [GOOD, FAILED], 2.0))
    assert "failed requests" not in shown(run("a", [GOOD], 2.0))
