"""Bench attention: every implementation that runs here over named cases, beside other libraries, against the machine.

Each case is checked first, on a sample of rows and heads in float64 with every cache row that may not be read NaN, and
what is wrong is not timed. How calls are timed: see scripts/attention_timing.py. Shares are of this machine's rates,
measured before the cases and after them: on an accelerator a bfloat16 matrix product and a copy, read and written; on
a CPU a float32 product and the reading of a large matrix. The JSON is written anew after every case.

Exit status: 0; 1 if an implementation of ours was wrong or failed; 2 if something could not be run or written; 130
after Ctrl-C.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from pallas_kernels.attention import IMPLEMENTATIONS
from scripts import attention_rivals, attention_timing
from scripts.attention_cases import Case, Size, cases_of
from scripts.attention_rivals import RIVALS
from scripts.command import STDOUT, Refused, check_matplotlib, check_picture, check_targets, exit_status, naming
from scripts.command import write_json as write_once

DTYPES = ("float32", "bfloat16", "float16")
SLOW = ("reference",)  # gathers a whole slot a row: only if asked for


@dataclass(frozen=True)
class Options:
    size: Size | None = None
    """How many cases: quick takes seconds on a CPU. None: main on an accelerator, quick on a CPU."""
    cases: str = "*"
    """Names with commas between, or patterns such as llama3_8b/*."""
    implementations: str | None = None
    """Names with commas between; None: all that run here but the reference."""
    rivals: str | None = None
    """Other libraries' attention, names with commas between; none: "". None: all that are installed."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of queries and cache. None: bfloat16 on an accelerator, float32 on a CPU."""
    repeat: int = 5
    """Times that each case is timed; the medians count."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout."""
    picture: str | None = None
    """Where a picture of the roofline goes: a .png or .svg file; needs matplotlib."""

    def __post_init__(self) -> None:
        for known, given in ((IMPLEMENTATIONS, self.implementations), (RIVALS, self.rivals)):
            for name in names(given):
                if name not in known:
                    raise ValueError(f"{name!r} is not one of {', '.join(known)}")
        if self.repeat < 1:
            raise ValueError(f"repeat must be at least 1, not {self.repeat}")
        if self.size is not None:
            cases_of(self.size, names(self.cases))
        check_picture(self.picture)


def names(given: str | None) -> list[str]:
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def chosen_implementations(options: Options) -> list[str]:
    """Raises Refused for one that was named and cannot run here."""
    reasons = {name: one.unavailable() for name, one in IMPLEMENTATIONS.items()}
    for name in names(options.implementations):
        if reasons[name] is not None:
            raise Refused(f"attention implementation {name!r} cannot run here: {reasons[name]}")
    every = [name for name, reason in reasons.items() if reason is None and name not in SLOW]
    return names(options.implementations) or every


def chosen_rivals(options: Options) -> list[str]:
    """Raises Refused for one that was named and is not there."""
    reasons = {name: rival.unavailable() for name, rival in RIVALS.items()}
    for name in names(options.rivals):
        if reasons[name] is not None:
            raise Refused(f"rival {name!r} cannot run here: {reasons[name]}")
    if options.rivals is not None:
        return names(options.rivals)
    return [name for name, reason in reasons.items() if reason is None]


def chosen_cases(options: Options) -> list[Case]:
    try:
        return cases_of(options.size or attention_timing.default_size(), names(options.cases))
    except ValueError as error:
        raise Refused(str(error)) from None


def write_json(target: str | None, value: dict[str, Any], *, done: bool) -> None:
    """All or nothing: who reads it while it grows, or after the run was cut off, reads one whole object."""
    if target == STDOUT or (target is not None and os.path.exists(target) and not os.path.isfile(target)):
        if done:
            write_once(target, value)
    elif target is not None:
        new = Path(f"{target}.new")
        with naming(target):
            new.write_text(json.dumps(value, indent=2) + "\n")
            os.replace(new, target)


def bench(options: Options, console: Console) -> int:
    """Check the options, measure, show. The exit status."""
    check_matplotlib(options.picture)
    check_targets({}, {"--json": options.json, "--picture": options.picture})
    cases, dtype = chosen_cases(options), options.dtype or attention_timing.default_dtype()
    runs = [(attention_timing.measure, name) for name in chosen_implementations(options)]
    ours = {name for _, name in runs}
    runs += [(attention_rivals.measure, name) for name in chosen_rivals(options)]
    result: dict[str, Any] = attention_timing.machine() | {
        "dtype": dtype,
        "options": asdict(options),
        "complete": False,
        "cases": [],
    }
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rates", total=len(cases) * len(runs))
        limits = attention_timing.measure_rates()
        result["limits"] = [limits._asdict()]
        for case in cases:
            for measure, name in runs:
                progress.update(task, description=f"{case.name} {name}")
                result["cases"].append(measure(case, name, dtype, limits, options.repeat))
                progress.advance(task)
                if not console.is_terminal:
                    console.print(line(result["cases"][-1]), markup=False)
                write_json(options.json, result, done=False)
        result["limits"].append(attention_timing.measure_rates()._asdict())
    result["complete"] = True
    write_json(options.json, result, done=True)
    console.print(table(result))
    if options.picture is not None:
        draw(result, options.picture)
    return int(any(row["status"] in ("wrong", "error") for row in result["cases"] if row["implementation"] in ours))


def line(row: dict[str, Any]) -> str:
    """What was found, in one line."""
    start = f"{row['case']:40} {row['implementation']:12}"
    if row["status"] != "ok":
        return f"{start}{row['status']}: {row['reason'][:300]}"
    return (
        f"{start}{row['s'] * 1e6:9.1f} us {row['gb_per_s']:6.4g} GB/s {row['tflop_per_s']:7.3g} TFLOP/s "
        f"{row['share_of_roofline']:4.0%} of {row['bound']}"
    )


def table(result: dict[str, Any]) -> Table:
    """A line for each implementation, under each case's name: shares of the memory and the matrix rate, worst error."""
    headings = ("us", "GB/s", "memory", "TFLOP/s", "matrix", "error")
    numbers = [Column(name, justify="right", no_wrap=True) for name in headings]
    shown = Table(Column("", overflow="fold"), *numbers, box=box.SIMPLE_HEAD, pad_edge=False)
    last = None
    for row in result["cases"]:
        if row["case"] != last:
            shown.add_row(row["case"])
            last = row["case"]
        cells = [row["status"]]
        if row["status"] == "ok":
            cells = [f"{row['s'] * 1e6:.1f}", f"{row['gb_per_s']:.1f}", f"{row['share_of_memory_rate']:.0%}"]
            cells += [f"{row['tflop_per_s']:.3g}", f"{row['share_of_matrix_rate']:.0%}", f"{row['error']:.0e}"]
        shown.add_row(f"  {row['implementation']}", *cells)
    shown.caption = f"{result['device']}, {result['dtype']}; limits before and after: " + ", ".join(
        f"{one['flops_per_s'] / 1e12:.3g} TFLOP/s and {one['bytes_per_s'] / 1e9:.0f} GB/s" for one in result["limits"]
    )
    return shown


def draw(result: dict[str, Any], path: str) -> None:
    """The roofline: operations a byte against operations a second, and what the machine's two rates allow."""
    import numpy as np
    from matplotlib.figure import Figure

    rows = [row for row in result["cases"] if row["status"] == "ok"]
    flops, moved = (max(one[key] for one in result["limits"]) for key in ("flops_per_s", "bytes_per_s"))
    intensities = [row["flops"] / row["bytes"] for row in rows] + [flops / moved]
    at = np.geomspace(min(intensities) / 2, max(intensities) * 2, 200)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.loglog(at, np.minimum(at * moved, flops) / 1e12, color="black", label="memory and matrix rate")
    styles = zip(dict.fromkeys(row["implementation"] for row in rows), "os^vDPX*<>", strict=False)
    for index, (name, marker) in enumerate(styles):
        mine = [row for row in rows if row["implementation"] == name]
        x, y = [row["flops"] / row["bytes"] for row in mine], [row["tflop_per_s"] for row in mine]
        axes.loglog(x, y, marker, color=f"C{index}", label=name, alpha=0.75)
    axes.set(xlabel="FLOP per byte", ylabel="TFLOP/s", title=f"attention on {result['device']}, {result['dtype']}")
    axes.legend()
    with naming(path):
        figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.bench_attention", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda _: bench(options, console), console)


if __name__ == "__main__":
    sys.exit(main())
