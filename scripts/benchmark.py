"""Benchmark: one workload under several policies, alternating in one process, and what the machine could do at most.

Compilation and a warm-up lie outside the window. Every request is queued at the start of a run. The limits, a large
matrix product and a read of a large matrix, are measured before and after the runs. Requests that fail are counted
apart: their tokens enter no figure. Every prompt is computed whole; with --prefix-reuse no run finds what an earlier
one computed, and the share of the matrix rate counts whole prompts still.

Exit status: 0; 1 if a request failed; 2 if something could not be run or written; 130 after Ctrl-C.
"""

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from batching import Engine, EngineConfig
from batching.policies import make_policy
from scripts.command import Refused, Report, check_targets, exit_status, write_json
from scripts.display import RunDisplay
from scripts.figures import failures, run_figures, system_figures
from scripts.jobs import Job, Run, again, read_jobs, run_policy, warm_up
from scripts.limits import Limits, measure_limits, request_flops
from scripts.startup import make_engine


@dataclass(frozen=True)
class Options:
    workload: Path
    """Requests as JSON Lines, as for scripts.generate."""
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    policies: str = "continuous,static"
    """Names with commas between; each runs --repeat times, in turns. The ratios are to the last one."""
    repeat: int = 3
    """Runs of each policy."""
    json: str | None = None
    """Where all figures go, as one JSON object; - is stdout."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=lambda: EngineConfig(prefix_reuse=False))
    """How requests are served; the policies are those of --policies."""

    def __post_init__(self) -> None:
        names = self.policies.split(",")
        for name in names:
            make_policy(name)
        if len(set(names)) < len(names):
            raise ValueError(f"policies must be different ones, not {self.policies}")
        if self.repeat < 1:
            raise ValueError(f"repeat must be at least 1, not {self.repeat}")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a request failed, 2 if nothing could be run."""
    options = tyro.cli(Options, prog="python -m scripts.benchmark", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda report: benchmark(options, console, report), console)


def benchmark(options: Options, console: Console, report: Report) -> int:
    """Load, run, show. The exit status."""
    jobs = read_workload(options, report)
    engine, start_up = make_engine(options.model, options.engine, console)
    limits = [measure_limits()]
    warm_up(engine)
    runs = run_all(engine, options, jobs, console, report)
    limits.append(measure_limits())
    failed = failed_lines(jobs, runs)
    figures = summary(engine, options, runs, limits) | {"failed_requests": len(failed), "start_up": start_up}
    console.print(table(figures))
    write_json(options.json, figures)
    return int(bool(failed))


def read_workload(options: Options, report: Report) -> list[Job]:
    """Raises Refused if no line of it is a request."""
    model = options.model if os.path.isfile(options.model) else None
    check_targets({"--workload": str(options.workload), "--model": model}, {"--json": options.json})
    data = options.workload.read_bytes()
    jobs = read_jobs([(f"line {n}", line) for n, line in enumerate(data.splitlines(), start=1)], {}, report)
    if all(job.request is None for job in jobs):
        raise Refused(f"{options.workload} has no request that can be served")
    return jobs


def failed_lines(jobs: list[Job], runs: list[Run]) -> set[str]:
    """The lines that no run served, and those that failed in some run."""
    failed = {output.id for run in runs for output in failures(run)}
    return {job.where for job in jobs if job.id in failed or job.output is None or job.output.finish_reason == "error"}


def run_all(engine: Engine, options: Options, jobs: list[Job], console: Console, report: Report) -> list[Run]:
    """Each policy in turn, over and over, so that what else the machine does falls on all alike.

    Raises Refused if the first run served nothing.
    """
    runs: list[Run] = []
    for _ in range(options.repeat):
        for policy in options.policies.split(","):
            todo = again(jobs) if runs else jobs
            with RunDisplay(console, engine, policy, sum(job.output is None for job in todo)) as display:
                how: dict[str, Any] = {"report": report, "on_turn": display.update}
                runs.append(run_policy(engine, policy, todo, **how, asked_to_stop=lambda: False))
            if len(failures(runs[0])) == len(runs[0].outputs):
                raise Refused("no request of the workload could be served")
    return runs


def summary(engine: Engine, options: Options, runs: list[Run], limits: list[Limits]) -> dict[str, Any]:
    """All runs, and for each policy the median with its spread and the ratio to the last policy's."""
    flops = sum(
        request_flops(engine.model_config, output.prompt_tokens, output.completion_tokens)
        for output in runs[0].outputs
        if output.completion_tokens and output.finish_reason != "error"
    )
    shown = [run_figures(run, runs[0]) for run in runs]
    peak = max(limit.flops_per_s for limit in limits)
    policies = {}
    for policy in dict.fromkeys(run.policy for run in runs):
        speeds = [one["generated_tokens_per_s"] for one in shown if one["policy"] == policy]
        walls = [run.wall_s for run in runs if run.policy == policy]
        policies[policy] = {
            "tokens_per_s": statistics.median(speeds),
            "tokens_per_s_range": [min(speeds), max(speeds)],
            "share_of_matrix_rate": flops / statistics.median(walls) / peak,
        }
    base = policies[runs[-1].policy]["tokens_per_s"]
    for figures in policies.values():
        figures["ratio"] = figures["tokens_per_s"] / base
    return system_figures(options.model, engine) | {
        "workload": options.workload.name,
        "workload_flops": flops,
        "limits": [limit._asdict() for limit in limits],
        "policies": policies,
        "runs": shown,
    }


def table(figures: dict[str, Any]) -> Table:
    """One column per policy."""
    policies = figures["policies"]
    last = list(policies)[-1]
    result = Table("", *policies)
    firsts = {policy: next(run for run in figures["runs"] if run["policy"] == policy) for policy in policies}
    rows = {
        "generated tokens per second, median": lambda p: f"{policies[p]['tokens_per_s']:.1f}",
        "lowest and highest": lambda p: " .. ".join(f"{one:.1f}" for one in policies[p]["tokens_per_s_range"]),
        f"against {last}": lambda p: f"{policies[p]['ratio']:.2f} x",
        "share of the matrix rate": lambda p: f"{policies[p]['share_of_matrix_rate']:.0%}",
        "turns": lambda p: f"{firsts[p]['turns']}",
        "busy slots, mean": lambda p: f"{firsts[p]['busy_share']:.0%}",
        "rows that were padding": lambda p: f"{firsts[p]['padding_share']:.0%}",
        "other tokens than the first run": lambda p: f"{len(firsts[p]['different'])} requests",
    }
    for name, show in rows.items():
        result.add_row(name, *(show(policy) for policy in policies))
    before, after = figures["limits"]
    result.caption = f"failed requests: {figures['failed_requests']}\nlimits before and after: " + ", ".join(
        f"{one['flops_per_s'] / 1e9:.0f} GFLOP/s and {one['bytes_per_s'] / 1e9:.0f} GB/s" for one in (before, after)
    )
    return result


if __name__ == "__main__":
    sys.exit(main())
