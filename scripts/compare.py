"""Compare result files of scripts.benchmark, ours and servers', of scripts.bench_attention and scripts.device_check.

One page tells of every model and workload apart: throughput against latency with the points that no other of the same
machine beats, rooflines at the rates that each run measured, figures of every configuration, and what a million
generated tokens cost. Every figure names its file. A configuration with a run in which a request failed, gave other
tokens than its workload expects, or met a compilation is shown with the reason, and is in no frontier and has no cost.

What a server runs on is not in its results: it is a machine of its own, unless --machine names one.

Exit status: 0; 1 if a file was skipped, which is told with the reason; 2 if none was left, or something could not be
read or written; 130 after Ctrl-C.
"""

import hashlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from rich.console import Console

from scripts.bench_report import named, same_tokens
from scripts.command import STDOUT, Refused, Report, check_targets, exit_status, opened
from scripts.compare_page import as_html, as_markdown, document
from scripts.limits import Limits

Spread = Mapping[str, float]  # median, lowest and highest of several runs
READ = (  # of a configuration's medians; a dot leads into a tree
    *("generated_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99", "latency_s.p50"),
    *("latency_s.p99", "goodput_per_s", "busy_share", "padding_share", "gap_share", "generated_tokens"),
    *("cached_tokens", "share_of_matrix_rate", "share_of_memory_rate", "flops_per_turn", "bytes_per_turn"),
)


SHOWN = {"workload", "label", "name", "engine", "medians", "ratio"}  # of a configuration
NAMED = ("case", "implementation", "dtype")  # what all cases of attention have, and what those do that were timed
TIMED = ("s", "flops", "bytes", "gb_per_s", "tflop_per_s", "share_of_memory_rate", "share_of_matrix_rate")
KINDS = {  # the script that wrote a file, and what all its results have
    "scripts.benchmark": {"configurations", "runs", "workloads", "machine", "limits"},
    "scripts.bench_attention": {"cases", "limits", "device", "dtype"},
    "scripts.device_check": {"groups", "machine", "complete"},
}


@dataclass(frozen=True)
class Options:
    results: tyro.conf.Positional[tuple[str, ...]]
    """JSON files of scripts.benchmark, scripts.bench_attention or scripts.device_check."""
    html: str | None = None
    """Where the page goes, one file that needs no other; needs matplotlib."""
    markdown: str | None = None
    """Where the same goes as Markdown, without pictures; - is stdout, and so it is without --html."""
    price: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=2.5: what an hour of a machine costs. NAME is a file, which goes first, or a machine's name in the page."""
    machine: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """FILE=NAME: what a file's runs ran on, where it does not tell, or not as other files do."""

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError("there must be a file to compare")
        for name, price in pairs("price", self.price).items():
            if not (re.fullmatch(r"\d*\.?\d+", price) and 0 < float(price) < math.inf):
                raise ValueError(f"the price of {name} must be a number above 0, not {price}")
        pairs("machine", self.machine)


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Raises ValueError for what is not NAME=VALUE, or names something twice."""
    found: dict[str, str] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        if not name or not value or name in found:
            raise ValueError(f"{option} must be NAME=VALUE, each name once, not {text}")
        found[name] = value
    return found


@dataclass(frozen=True, eq=False)
class Source:
    """A result file."""

    number: int  # by which the page cites it
    path: str
    sha256: str  # its first 12 digits
    kind: str  # the script that wrote it
    machine: str
    data: Mapping[str, Any]
    limits: Sequence[Limits]  # in the order in which they were measured
    price: float | None = None  # of an hour

    @property
    def cases(self) -> list[Mapping[str, Any]]:
        """Attention's cases, each with each implementation."""
        return [one for one in results(self.data) if "case" in one]


@dataclass(frozen=True, eq=False)
class Row:
    """A configuration of a benchmark."""

    source: Source
    label: str
    details: Mapping[str, Any]
    figures: Mapping[str, Spread | None]  # by the names in `READ`
    problems: Sequence[str]
    tag: str = ""  # by which pictures name it

    def median(self, name: str) -> float | None:
        spread = self.figures[name]
        return None if spread is None else spread["median"]

    def point(self, measure: str) -> tuple[float, float] | None:
        """Latency and throughput; None for what is in no frontier."""
        latency, speed = self.median(measure), self.median("generated_tokens_per_s")
        return None if self.problems or latency is None or speed is None else (latency, speed)

    @property
    def cost(self) -> Spread | None:
        """Of a million generated tokens; the lowest is that of the fastest run."""
        speed, price = self.figures["generated_tokens_per_s"], self.source.price
        if self.problems or price is None or speed is None or not speed["lowest"]:
            return None
        places = {"median": "median", "lowest": "highest", "highest": "lowest"}
        return {one: price / 3600 / speed[other] * 1e6 for one, other in places.items()}


class Key(NamedTuple):
    """What must be the same for figures to be compared."""

    model: str
    workload: str
    requests: int
    bad_lines: int
    prompt_tokens: int | None  # None where no run was without failures


@dataclass
class Group:
    """What is compared."""

    key: Key
    rows: list[Row] = field(default_factory=list)

    def frontiers(self, measure: str) -> dict[str, list[Row]]:
        """By machine: the rows that no other beats, from the lowest latency on."""
        result = {}
        for machine in dict.fromkeys(row.source.machine for row in self.rows):
            own = [(row, row.point(measure)) for row in self.rows if row.source.machine == machine]
            placed = [(row, at) for row, at in own if at is not None]
            result[machine] = [placed[index][0] for index in pareto([at for _, at in placed])]
        return result


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Those than which no other has a lower latency and a throughput as high, or a higher one and a latency as low."""
    beaten = {one for one in points for at in points if at != one and at[0] <= one[0] and at[1] >= one[1]}
    return sorted((at for at, one in enumerate(points) if one not in beaten), key=lambda at: points[at])


def amount(value: Any) -> float:
    """Raises ValueError for what is no number that a figure can have."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.40} is no figure")
    return float(value)


def results(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Of attention."""
    steps = [found for group in data.get("groups", {}).values() for found in group["results"].values()]
    return [*data.get("cases", ()), *steps]


def machine_name(data: Mapping[str, Any], kind: str) -> str:
    """As far as the file tells: the accelerator, or the processor and its cores."""
    about = data["machine"] if kind == "scripts.device_check" else data
    if "server" in data or about.get("platform") != "cpu":
        return f"server at {data['server']}" if "server" in data else str(about.get("device", "not told"))
    if kind != "scripts.benchmark":
        return "a CPU"
    return f"{data['machine']['cpu']}, {data['machine']['cores']} cores"


def source_of(path: str, data: bytes, number: int, machine: str | None) -> Source:
    """Raises ValueError, and what reading a file of another form raises."""
    value = json.loads(data)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # neither NaN nor a lone surrogate can be shown
    kind = next((kind for kind, names in KINDS.items() if isinstance(value, dict) and names <= {*value}), None)
    if kind is None:
        raise ValueError(f"not a result of {', '.join(KINDS)}, or one of another version")
    value["versions"] = {**value.get("versions", {})}
    measured = [*value.get("limits", ()), *(one for one in results(value) if one.get("flops_per_s"))]
    limits = [Limits(amount(one["flops_per_s"]), amount(one["bytes_per_s"])) for one in measured]
    digest = hashlib.sha256(data).hexdigest()[:12]
    source = Source(number, path, digest, kind, machine or machine_name(value, kind), value, limits)
    for one in source.cases:
        _ = [one[name] for name in NAMED], [amount(one[name]) for name in (TIMED if one["status"] == "ok" else ())]
    return source


def rows_of(source: Source) -> list[tuple[Key, Row]]:
    """Of a benchmark's file. Raises KeyError, TypeError, ValueError or AttributeError if it is not as one."""
    data, result = source.data, []
    for one in data["configurations"] if source.kind == "scripts.benchmark" else ():
        about = data["workloads"][one["workload"]]
        same = [run for run in data["runs"] if run["workload"] == one["workload"]]
        clean = [run["figures"]["prompt_tokens"] for run in same if not run["figures"]["failed"]]
        counts = int(amount(about["requests"])), int(amount(about["bad_lines"]))
        key = Key(str(data["model"]), str(one["workload"]), *counts, int(amount(clean[0])) if clean else None)
        own = [run for run in same if run["label"] == one["label"]]
        details = {name: value for name, value in one.items() if name not in SHOWN}
        details |= {"tokens as in the first run": same_tokens(one, own)}
        figures = {name: spread_at(one["medians"], name) for name in READ}
        result.append((key, Row(source, str(one["label"]), details, figures, problems(own))))
    return result


def spread_at(medians: Mapping[str, Any], name: str) -> Spread | None:
    found: Any = medians
    for part in name.split("."):
        found = None if found is None else found.get(part)
    return None if found is None else {one: amount(found[one]) for one in ("median", "lowest", "highest")}


def problems(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why these runs say nothing of how fast they are."""
    lines: dict[str, None] = {}
    for run in runs:
        for name, reason in run["failed_because"].items():
            lines[f"{name} failed: {reason}"] = None
        if run["figures"]["failed"] and not run["failed_because"]:
            lines[f"{run['figures']['failed']} requests failed"] = None
        if run["unexpected"]:
            lines[f"other tokens than the workload expects: {named(run['unexpected'])}"] = None
        if run["compiled"]:
            lines[f"compiled in the window: {named(run['compiled'])}"] = None
    return [*lines]


def read_all(options: Options, report: Report) -> tuple[list[Source], list[Group], list[str]]:
    """What can be compared, and a line for each file that cannot."""
    machines, prices = pairs("machine", options.machine), pairs("price", options.price)
    sources, skipped = list[Source](), list[str]()
    groups: dict[Key, Group] = {}
    for path in options.results:
        name = Path(path).name
        try:
            machine = machines.get(path) or machines.get(name)
            source = source_of(path, Path(path).read_bytes(), len(sources) + 1, machine)
            price = prices.get(path) or prices.get(name) or prices.get(source.machine)
            source = replace(source, price=None if price is None else float(price))
            if twin := next((one for one in sources if one.sha256 == source.sha256), None):
                raise ValueError(f"the same as {twin.path}")
            rows = rows_of(source)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            skipped.append(f"{path}: {' '.join(f'{type(error).__name__}: {error}'.split())}")
            report(f"skipped {skipped[-1]}")
            continue
        sources.append(source)
        for key, row in rows:
            group = groups.setdefault(key, Group(key))
            group.rows.append(replace(row, tag=str(len(group.rows) + 1)))
    files = {*options.results, *(Path(one).name for one in options.results)}
    unknown = {*machines} - files | {*prices} - files - {one.machine for one in sources}
    if unknown and sources and not skipped:  # else it may be of a file that could not be read
        there = ", ".join(dict.fromkeys(one.machine for one in sources))
        raise Refused(f"no such file or machine: {', '.join(sorted(unknown))}; machines are {there}")
    return sources, [*groups.values()], skipped


def compare(options: Options, report: Report) -> int:
    """Read, write. The exit status."""
    if options.html is not None and importlib.util.find_spec("matplotlib") is None:
        raise Refused("--html needs matplotlib")
    markdown = STDOUT if options.markdown is None and options.html is None else options.markdown
    check_targets({one: one for one in options.results}, {"--html": options.html, "--markdown": markdown})
    sources, groups, skipped = read_all(options, report)
    if not sources:
        raise Refused("no file is left to compare")
    for target, form in ((options.html, as_html), (markdown, as_markdown)):
        if target is not None:
            with opened(target) as file:
                file.write(form(document(sources, groups, skipped, form is as_html)))
    return int(bool(skipped))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.compare", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda report: compare(options, report), console)


if __name__ == "__main__":
    sys.exit(main())
