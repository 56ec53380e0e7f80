"""Scaling: does cost grow as it should?

Three series, each point about twice the one before: the length of one request's prompt, the number of requests queued
at once, and the slots in use in one decode turn (the compiled program alone). After a round that is not counted the
points take turns; medians count. Beside each is its roofline: what the machine's matrix and memory rates, measured in
the same process, allow at least for the live rows of the turns that were run, with the weights read once a turn. A step
is called worse where the measured growth exceeds that of the rooflines by more than 20 %. Memory is read before the
limits are measured, which takes memory of its own.

Exit status: 0, whatever the figures; 2 if something could not be run or written; 130 after Ctrl-C.
"""

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Column, Table

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.plan import FROM_DEVICE, BatchPlan, Chunk, build_plan
from scripts.command import Refused, check_matplotlib, check_picture, check_targets, exit_status, naming, write_json
from scripts.figures import system_figures
from scripts.limits import Limits, Work, measure_limits
from scripts.profile_step import work_of
from scripts.startup import MB, make_engine

WORSE = 1.2  # times the growth of the rooflines
HEADINGS = ("", "turns", "ms", "roofline ms", "growth", "roofline")
TURNS = 5  # decode turns timed one after the other at each visit: one alone is short


@dataclass(frozen=True)
class Options:
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    shortest: int = 64
    """Tokens of the shortest prompt of the first series; doubled while it fits in max_len."""
    fewest: int = 8
    """Requests of the second series' first point; doubled while they fit in max_queue."""
    doublings: int = 3
    """At most so many in each of these two; the third series always ends with every slot in use."""
    prompt: int = 32
    """Prompt tokens of each request of the second series."""
    answer: int = 32
    """Tokens generated for each request of the second series."""
    length: int = 256
    """Tokens that each row of the third series attends to."""
    repeat: int = 3
    """Times that each point is timed, in turns; the medians count."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout."""
    picture: str | None = None
    """Where a picture goes: a .png or .svg file; needs matplotlib."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=lambda: EngineConfig(prefix_reuse=False))
    """How requests are served."""

    def __post_init__(self) -> None:
        for name in ("shortest", "fewest", "doublings", "prompt", "answer", "length", "repeat"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if max(self.shortest, self.length, self.prompt + self.answer - 1) > self.engine.max_len:
            raise ValueError(f"shortest, length, and prompt + answer - 1, must fit in max_len {self.engine.max_len}")
        if self.fewest > self.engine.max_queue:
            raise ValueError(f"fewest must fit in max_queue {self.engine.max_queue}, not be {self.fewest}")
        check_picture(self.picture)


Sample = tuple[list[float], list[BatchPlan]]  # seconds, one or several, and the turns that each of them is for


def doubled(first: int, most: int, doublings: int = 64) -> list[int]:
    """first, 2 first, 4 first and so on, up to `most`."""
    return [first << step for step in range(doublings + 1) if first << step <= most]


def series_of(engine: Engine, options: Options) -> dict[str, dict[int, Callable[[], Sample]]]:
    """Series -> point -> what runs it once."""
    prompts = doubled(options.shortest, options.engine.max_len, options.doublings)
    counts = doubled(options.fewest, options.engine.max_queue, options.doublings)
    slots = sorted({*doubled(1, options.engine.slots), options.engine.slots})
    return {
        "prompt tokens": {n: partial(serve, engine, 1, n, 1) for n in prompts},
        "requests": {n: partial(serve, engine, n, options.prompt, options.answer) for n in counts},
        "slots in use": {n: partial(decode, engine, n, options.length) for n in slots},
    }


def serve(engine: Engine, count: int, prompt: int, answer: int) -> Sample:
    """So many equal requests, queued at once, to their end. Raises Refused if one fails."""
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    ids = [(position % 97 + 3) % engine.model_config.vocab_size for position in range(prompt)]
    requests = [Request(prompt_ids=ids, params=params) for _ in range(count)]
    plans, start = [], time.perf_counter()
    for request in requests:
        engine.submit(request)
    while (turn := engine.scheduler.plan()) is not None:
        engine.finish(turn, turn.fetch(engine.run(turn)))
        plans.append(turn.plan)
    taken = time.perf_counter() - start
    if errors := [output.error for output in engine.step() if output.error is not None]:
        raise Refused(f"a request of {prompt} prompt tokens failed: {errors[0]}")
    return [taken], plans


def decode(engine: Engine, rows: int, length: int) -> Sample:
    """A few decode turns of so many live rows: the compiled program alone."""
    chunks = [Chunk(slot, length - 1, (FROM_DEVICE,), True) for slot in range(rows)]
    runner, plan, taken = engine.runner, build_plan(engine.scheduler.shapes, chunks, []), []
    for _ in range(TURNS):
        start = time.perf_counter()
        runner.state, sampled = runner.programs[plan.shape](runner.weights, runner.state, plan.rows)
        np.asarray(sampled.tokens)
        taken.append(time.perf_counter() - start)
    return taken, [plan]


def turn_work(engine: Engine, plan: BatchPlan) -> Work:
    """All that one turn has to do; one that samples nothing could leave out the head."""
    sampled = (plan.rows.sample_slots < engine.config.slots).any()
    return sum((work for part, work in work_of(engine, plan).items() if sampled or part != "head"), Work())


def roofline(work: Sequence[Work], limits: Limits) -> float:
    """Seconds that the limits allow at least for these turns, one after the other."""
    return sum(max(turn.flops / limits.flops_per_s, turn.bytes / limits.bytes_per_s) for turn in work)


def growth(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much each point costs compared with the one before it, measured and by the rooflines."""
    steps = []
    for before, after in pairwise(points):
        measured, least = (after[key] / before[key] for key in ("s", "roofline_s"))
        ends = {"from": before["at"], "to": after["at"]}
        steps.append(ends | {"measured": measured, "roofline": least, "worse": measured > WORSE * least})
    return steps


def memory(engine: Engine) -> dict[str, float | None]:
    """MB resident now (None: not known here) and at most, and how much of each is neither model nor cache."""
    # On an accelerator model and cache are elsewhere: nothing is taken off.
    held = engine.runner.weight_bytes + engine.runner.cache_bytes if jax.devices()[0].platform == "cpu" else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else None
    result: dict[str, float | None] = {
        "model_mb": engine.runner.weight_bytes / MB,
        "cache_mb": engine.runner.cache_bytes / MB,
    }
    for name, used in (("current", now), ("peak", max(peak, now or 0))):  # the kernel counts both in batches
        both = (None, None) if used is None else (used / MB, (used - held) / MB)
        result[f"{name}_mb"], result[f"beyond_{name}_mb"] = both
    return result


def measure(engine: Engine, options: Options) -> dict[str, Any]:
    """The points of all series with their growth, memory, and the limits."""
    series = series_of(engine, options)
    runs = {(name, at): run for name, points in series.items() for at, run in points.items()}
    work = {key: [turn_work(engine, plan) for plan in run()[1]] for key, run in runs.items()}
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for key in [*runs] * options.repeat:
        taken[key] += runs[key]()[0]
    used, limits = memory(engine), measure_limits()
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in series}
    for (name, at), times in taken.items():
        turns = work[name, at]
        figures = {"at": at, "turns": len(turns), "s": statistics.median(times), "s_range": [min(times), max(times)]}
        points[name].append(figures | {"roofline_s": roofline(turns, limits)} | sum(turns, Work())._asdict())
    return {
        "shape": {"prompt": options.prompt, "answer": options.answer, "length": options.length},
        "limits": limits._asdict(),
        "worse_above": WORSE,
        "series": {name: {"points": its, "growth": growth(its)} for name, its in points.items()},
        "memory": used,
    }


def table(result: dict[str, Any]) -> Table:
    """A line a point, the growth since the one before it beside it."""
    shown = Table("", *(Column(name, justify="right") for name in HEADINGS), "")
    for name, series in result["series"].items():
        for one, step in zip(series["points"], [None, *series["growth"]], strict=True):
            cells = [str(one["at"]), str(one["turns"]), f"{one['s'] * 1e3:.2f}", f"{one['roofline_s'] * 1e3:.2f}"]
            if step is not None:
                cells += [f"{step['measured']:.2f} x", f"{step['roofline']:.2f} x", "worse" if step["worse"] else ""]
            shown.add_row("" if step else name, *cells)
        shown.add_section()
    limits = result["limits"]
    used = {name: "unknown" if mb is None else f"{mb:.0f} MB" for name, mb in result["memory"].items()}
    shown.caption = (
        f"limits: {limits['flops_per_s'] / 1e9:.0f} GFLOP/s, {limits['bytes_per_s'] / 1e9:.0f} GB/s\n"
        f"memory: model {used['model_mb']}, cache {used['cache_mb']}; "
        f"beyond them {used['beyond_current_mb']} now, {used['beyond_peak_mb']} at most"
    )
    return shown


def draw(result: dict[str, Any], path: str) -> None:
    """Measured seconds and rooflines, on logarithmic axes: a doubling is the same step everywhere."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (name, series) in zip(figure.subplots(1, 3), result["series"].items(), strict=True):
        at, taken, least = ([one[key] for one in series["points"]] for key in ("at", "s", "roofline_s"))
        axes.loglog(at, taken, "o-", color="#9bb8d3", label="measured")
        axes.loglog(at, least, "s--", color="#1f4e79", label="roofline")
        axes.set_xticks(at, [str(one) for one in at])
        axes.set_xticks([], minor=True)
        axes.set(xlabel=name, ylabel="seconds")
        axes.legend()
    with naming(path):
        figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.scaling", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda _: show(options, console), console)


def show(options: Options, console: Console) -> int:
    """Load, time, show. The exit status."""
    check_matplotlib(options.picture)
    inputs = {"--model": options.model} if os.path.isfile(options.model) else {}
    check_targets(inputs, {"--json": options.json, "--picture": options.picture})
    engine, _ = make_engine(options.model, options.engine, console)
    with console.status("timing"):
        result = measure(engine, options)
    console.print(table(result))
    write_json(options.json, system_figures(options.model, engine) | result)
    if options.picture is not None:
        draw(result, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
