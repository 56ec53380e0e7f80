"""Benchmark: one workload under several policies, alternating in one process, and what the machine could do at most.

Compilation and a warm-up lie outside the window. Every request is queued at the start of a run. The limits, a large
matrix product and a read of a large matrix, are measured before and after the runs.
"""

import json
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
from scripts.display import RunDisplay
from scripts.figures import run_figures, system_figures
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
    json: Path | None = None
    """Where all figures go."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)
    """How requests are served; the policies are those of --policies."""

    def __post_init__(self) -> None:
        for policy in self.policies.split(","):
            make_policy(policy)
        if self.repeat < 1:
            raise ValueError(f"repeat must be at least 1, not {self.repeat}")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a request failed, 2 if nothing could be run."""
    options = tyro.cli(Options, prog="python -m scripts.benchmark", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        lines = [
            (f"line {number}", line) for number, line in enumerate(options.workload.read_bytes().splitlines(), start=1)
        ]
        if options.json is not None:
            with open(options.json, "a"):
                pass
        jobs = read_jobs(lines, {}, console.print)
        engine, start_up = make_engine(options.model, options.engine, console)
    except (OSError, ValueError) as error:
        console.print(f"error: {error}", markup=False)
        return 2
    limits = [measure_limits()]
    warm_up(engine)
    runs = run_all(engine, options, jobs, console)
    limits.append(measure_limits())
    figures = summary(engine, options, runs, limits) | {"start_up": start_up}
    console.print(table(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(any(job.output is None or job.output.finish_reason == "error" for job in jobs))


def run_all(engine: Engine, options: Options, jobs: list[Job], console: Console) -> list[Run]:
    """Each policy in turn, over and over, so that what else the machine does falls on all alike."""
    runs: list[Run] = []
    for _ in range(options.repeat):
        for policy in options.policies.split(","):
            todo = again(jobs) if runs else jobs
            with RunDisplay(console, engine, policy, len(todo)) as display:
                how: dict[str, Any] = {"report": console.print, "on_turn": display.update}
                runs.append(run_policy(engine, policy, todo, **how, asked_to_stop=lambda: False))
    return runs


def summary(engine: Engine, options: Options, runs: list[Run], limits: list[Limits]) -> dict[str, Any]:
    """All runs, and for each policy the median with its spread and the ratio to the last policy's."""
    flops = sum(
        request_flops(engine.model_config, output.prompt_tokens, output.completion_tokens)
        for output in runs[0].outputs
        if output.completion_tokens
    )
    peak = max(limit.flops_per_s for limit in limits)
    policies = {}
    for policy in dict.fromkeys(run.policy for run in runs):
        speeds = [run.stats.generated_tokens / run.wall_s for run in runs if run.policy == policy]
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
        "runs": [run_figures(run, runs[0]) for run in runs],
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
    result.caption = "limits before and after: " + ", ".join(
        f"{one['flops_per_s'] / 1e9:.0f} GFLOP/s and {one['bytes_per_s'] / 1e9:.0f} GB/s" for one in (before, after)
    )
    return result


if __name__ == "__main__":
    sys.exit(main())
