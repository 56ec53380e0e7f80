"""What benchmark runs come to: figures of each run, medians with their spread, tables and pictures."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table

from batching.engine import EngineStats
from scripts.command import naming
from scripts.limits import Limits, Work
from scripts.metrics import Served, request_metrics, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
# Colours that all eyes tell apart (Okabe and Ito, 2008), and two more: as many as there are policies.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B", "#999999")
NO_WORK = Work()
LINES, MARKERS = ("-", "--", ":", "-."), "osD^vPX*p"
MOST_NAMED = 8  # requests that a line names
MOST_COLUMNS = 3  # of a table


@dataclass(frozen=True)
class Configuration:
    """What is compared with others. `name` is the policy or the server; `engine` tells its engine from the others."""

    workload: str
    name: str
    engine: str = ""
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)  # for JSON

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, self.engine)))


@dataclass(frozen=True)
class Ran:
    """What one run of a configuration gave."""

    configuration: Configuration
    served: list[Served]  # what failed, for any of the reasons in `failures`, has this outcome here
    failures: dict[str, tuple[str, str]]  # by request: the kind, and the reason
    hashes: dict[str, str]  # of the tokens of each request that completed, where they are known
    unexpected: list[str]  # requests whose tokens are not those that the workload expects
    stats: EngineStats | None = None
    work: Work = NO_WORK  # of the rows that held a token, in all turns
    compiled: tuple[str, ...] = ()  # programs, in the window
    more: Mapping[str, Any] = field(default_factory=dict)  # figures that others do not have


def all_figures(runs: Sequence[Ran], limits: Sequence[Limits]) -> dict[str, Any]:
    """`configurations`, each with medians and spreads, and `runs`, both in the order in which they ran.

    The ratios are to the last name that ran the same workload on the same engine.
    """
    firsts: dict[str, Ran] = {}
    shown = [run_figures(run, firsts.setdefault(run.configuration.workload, run), limits) for run in runs]
    result = []
    for one in dict.fromkeys(run.configuration for run in runs):
        own = [figures for figures, run in zip(shown, runs, strict=True) if run.configuration == one]
        result.append(identity(one) | {"medians": spread_over([figures["figures"] for figures in own])})
    bases = {(one["workload"], one["engine"]): speed(one) for one in result}
    for one in result:
        base = bases[one["workload"], one["engine"]]
        one["ratio"] = speed(one) / base if base else None
    return {"configurations": result, "runs": shown}


def identity(one: Configuration) -> dict[str, Any]:
    return {"workload": one.workload, "label": one.label, "name": one.name, "engine": one.engine, **one.details}


def speed(configuration: Mapping[str, Any]) -> float:
    """Median of generated tokens per second; 0 if nothing can be said."""
    spread = configuration["medians"]["generated_tokens_per_s"]
    return 0.0 if spread is None else spread["median"]


def run_figures(run: Ran, first: Ran, limits: Sequence[Limits]) -> dict[str, Any]:
    """`figures` are numbers alone. `different`: requests whose tokens are not those of the first run."""
    figures = summary(run.served) | {"failures": dict(Counter(kind for kind, _ in run.failures.values()))}
    if run.stats is not None:
        figures |= engine_figures(run.stats, run.work, limits) | {"compiled_in_window": len(run.compiled)}
    return identity(run.configuration) | {
        "figures": figures | dict(run.more),
        "failed_because": {name: reason for name, (_, reason) in run.failures.items()},
        "compared": len(run.hashes),
        "different": [name for name, one in run.hashes.items() if first.hashes.get(name, one) != one],
        "unexpected": run.unexpected,
        "compiled": list(run.compiled),
    }


def engine_figures(stats: EngineStats, work: Work, limits: Sequence[Limits]) -> dict[str, Any]:
    """Shares of rates are of the time with turns, at the best rates that were measured: flops, and bytes that have to
    be read or written at least once."""
    turns, rate = max(stats.turns, 1), 1 / stats.wall_s if stats.wall_s else 0.0
    return {
        "turns": stats.turns,
        "busy_share": stats.busy_share,
        "padding_share": stats.padding_share,
        "wasted_rows": stats.wasted_rows,
        "preemptions": stats.preemptions,
        "cached_tokens": stats.cached_tokens,
        "host_s_per_turn": stats.host_s / turns,
        "gap_share": stats.gap_share,
        "flops_per_turn": work.flops / turns,
        "bytes_per_turn": work.bytes / turns,
        "share_of_matrix_rate": work.flops * rate / max(one.flops_per_s for one in limits),
        "share_of_memory_rate": work.bytes * rate / max(one.bytes_per_s for one in limits),
    }


def spread_over(runs: Sequence[Any]) -> Any:
    """The same figure of several runs, or a tree of them: its median, lowest and highest; None if a run has none."""
    if all(isinstance(one, Mapping) for one in runs):
        names = dict.fromkeys(name for one in runs for name in one)
        return {name: spread_over([one.get(name) for one in runs]) for name in names}
    if any(one is None for one in runs):
        return None
    return {"median": statistics.median(runs), "lowest": min(runs), "highest": max(runs)}


def machine() -> dict[str, Any]:
    """What the runs ran on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    sizes = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    known = hasattr(os, "sysconf") and all(name in os.sysconf_names for name in sizes)
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": int(np.prod([os.sysconf(name) for name in sizes])) if known else None,
    }


def versions() -> dict[str, str | None]:
    """`carousel` is the commit, with -dirty if files differ from it; None where that cannot be told."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
        commit = told.stdout.strip() if (ROOT / ".git").exists() else None
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {"python": platform.python_version()} | found | {"carousel": commit}


def complaints(runs: Sequence[Ran]) -> list[str]:
    """What a person must know of runs that were not as they should be, a line each."""
    lines: dict[str, None] = {}
    for run in runs:
        where = f"{run.configuration.workload}, {run.configuration.label}"
        for name, (kind, reason) in run.failures.items():
            lines[f"{where}: {name}: {kind}: {reason}"] = None
        if run.unexpected:
            lines[f"{where}: other tokens than the workload expects: {named(run.unexpected)}"] = None
        if run.compiled:
            lines[f"{where}: compiled in the window, which spoils its figures: {named(run.compiled)}"] = None
    return [*lines]


def named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


Shown = Callable[[Any], str]  # of a figure's spread, or of a tree of them


def middle(text: str, times: float = 1.0) -> Shown:
    """Shows the median as a format string says."""
    return lambda spread: text.format(spread["median"] * times)


def quantiles(tree: Mapping[str, Any]) -> str:
    """Medians of p50, p90 and p99."""
    found = [None if one is None else one["median"] for name, one in tree.items() if name != "mean"]
    scale, unit, digits = (1, "s", 2) if min((one for one in found if one), default=0) >= 0.5 else (1e3, "ms", 1)
    return " / ".join("-" if one is None else f"{one * scale:.{digits}f}" for one in found) + f" {unit}"


# A line of a table: its name, the figure, and how that is shown. A line that no configuration has a figure for is left
# out.
LINES_OF_FIGURES: tuple[tuple[str, str, Shown], ...] = (
    ("generated tokens per second, median", "generated_tokens_per_s", middle("{:.1f}")),
    ("lowest and highest", "generated_tokens_per_s", lambda one: f"{one['lowest']:.4g} .. {one['highest']:.4g}"),
    ("requests per second", "requests_per_s", middle("{:.2f}")),
    ("met their objectives, a second", "goodput_per_s", middle("{:.2f}")),
    ("time to first token, p50 / p90 / p99", "ttft_s", quantiles),
    ("time per output token", "tpot_s", quantiles),
    ("inter-token latency", "itl_s", quantiles),
    ("latency, from arrival to end", "latency_s", quantiles),
    ("requests that failed or ended early", "failed", middle("{:.0f}")),
    ("requests that were sent late", "sent_late", middle("{:.0f}")),
    ("turns", "turns", middle("{:.0f}")),
    ("busy slots, mean", "busy_share", middle("{:.0%}")),
    ("rows that were padding", "padding_share", middle("{:.0%}")),
    ("rows that were wasted", "wasted_rows", middle("{:.0f}")),
    ("preemptions", "preemptions", middle("{:.0f}")),
    ("prompt tokens found, not computed", "cached_tokens", middle("{:.0f}")),
    ("the host's work, a turn", "host_s_per_turn", middle("{:.2f} ms", 1e3)),
    ("of the time, the device waited for it", "gap_share", middle("{:.1%}")),
    ("work of a turn", "flops_per_turn", middle("{:.1f} GFLOP", 1e-9)),
    ("share of the matrix rate", "share_of_matrix_rate", middle("{:.0%}")),
    ("share of the memory rate", "share_of_memory_rate", middle("{:.0%}")),
)


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """One for each workload, or for each engine it ran on if one would be too wide; a column for each configuration."""
    counts = Counter(one["workload"] for one in figures["configurations"])

    def place(one: Mapping[str, Any]) -> tuple[str, str]:
        return one["workload"], one["engine"] if counts[one["workload"]] > MOST_COLUMNS else ""

    result = []
    for (workload, engine), grouped in groupby(figures["configurations"], key=place):
        group = list(grouped)
        shown = Table(Column(no_wrap=True), title=", ".join(filter(None, (workload, engine))))
        for one in group:
            shown.add_column(one["name" if engine else "label"], justify="right")
        for name, key, show in LINES_OF_FIGURES:
            spreads = [one["medians"].get(key) for one in group]
            if any(one is not None for one in spreads):
                shown.add_row(name, *("-" if one is None else show(one) for one in spreads))
        if len(group) > 1:
            ratios = ["-" if one["ratio"] is None else f"{one['ratio']:.2f} x" for one in group]
            shown.add_row(f"speed against {group[-1]['name']}", *ratios)
        shown.add_row("same tokens as the first run", *(same_tokens(one, figures["runs"]) for one in group))
        result.append(shown)
    return result


def same_tokens(configuration: Mapping[str, Any], runs: Iterable[Mapping[str, Any]]) -> str:
    """Of the run that has the fewest."""
    own = [run for run in runs if all(run[key] == configuration[key] for key in ("workload", "label"))]
    worst = min(own, key=lambda run: run["compared"] - len(run["different"]))
    compared = worst["compared"]
    return f"{compared - len(worst['different'])} of {compared}" if compared else "not known"


def draw(runs: Sequence[Ran], figures: Mapping[str, Any], workload: str, path: str) -> None:
    """Speed with its spread, how long first and later tokens took, and speed against the slowest requests."""
    from matplotlib.figure import Figure

    shown = [one for one in figures["configurations"] if one["workload"] == workload]
    names, engines = (list(dict.fromkeys(one[key] for one in shown)) for key in ("name", "engine"))
    picture = Figure(figsize=(9, 6.4), layout="constrained")
    picture.suptitle(f"{workload}, runs of each: {len(figures['runs']) // len(figures['configurations'])}")
    (speeds, ttft), (scatter, tpot) = picture.subplots(2, 2)
    for place, one in enumerate(shown):
        colour, turn = COLOURS[names.index(one["name"]) % len(COLOURS)], engines.index(one["engine"])
        how = {"color": colour, "linestyle": LINES[turn % len(LINES)], "label": one["label"]}
        own = [run for run in runs if (run.configuration.workload, run.configuration.label) == (workload, one["label"])]
        metrics = [request_metrics(each) for run in own for each in run.served if each.outcome == "completed"]
        cumulative(ttft, [each.ttft_s for each in metrics if each.ttft_s is not None], how)
        cumulative(tpot, [each.tpot_s * 1e3 for each in metrics if each.tpot_s is not None], how)
        speed, latency = one["medians"]["generated_tokens_per_s"], one["medians"]["latency_s"]["p99"]
        if speed is None or latency is None:
            continue
        spread = [[speed["median"] - speed["lowest"]], [speed["highest"] - speed["median"]]]
        speeds.barh([place], [speed["median"]], color=colour, alpha=0.75, xerr=spread, capsize=4, ecolor="#222222")
        scatter.plot(speed["median"], latency["median"], marker=MARKERS[turn % len(MARKERS)], markersize=8, **how)
    speeds.set(xlabel="generated tokens per second", yticks=range(len(shown)), xlim=(0, None))
    speeds.set_yticklabels([one["label"] for one in shown])
    speeds.invert_yaxis()
    ttft.set(xlabel="time to first token, seconds", ylabel="share of requests", ylim=(0, 1.02), xlim=(0, None))
    tpot.set(xlabel="time per output token, milliseconds", ylabel="share of requests", ylim=(0, 1.02), xlim=(0, None))
    scatter.update_datalim([(0, 0)])  # so that the margins are those of axes that start at 0
    scatter.set(xlabel="generated tokens per second", ylabel="p99 latency, seconds", xlim=(0, None), ylim=(0, None))
    picture.legend(
        *scatter.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small", handlelength=4
    )
    with naming(path):
        picture.savefig(path, dpi=150)


def cumulative(axes: "Axes", values: Sequence[float], how: Mapping[str, Any]) -> None:
    """The share of values up to each."""
    ordered = np.sort(values)
    if len(ordered):
        shares = np.arange(len(ordered) + 1) / len(ordered)
        axes.step([ordered[0], *ordered], shares, where="post", **how)
