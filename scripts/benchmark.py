"""Benchmark: workloads under several policies, on one engine or several, or against a server; one run of each in turns.

A workload is a file of requests: as in scripts/traces.py if its first line is one of those, which come when they come;
else as for scripts.generate, all there at the start of a run. A priority is handed to the policies that look at it.
Commas separate alternatives, and every combination is run: workloads, policies, slots, chunk sizes, attention. What is
served, and how it is measured, is the same for all of them: scripts/metrics.py defines the figures.

Compilation and a warm-up lie outside the window; a run in which something compiles is reported. The machine's limits, a
large matrix product and a read of a large matrix, are measured before and after the runs. Requests that fail, or end
with fewer tokens than they must have, are counted apart: their tokens and times enter no figure. Every prompt is
computed whole, unless --prefix-reuse; no run finds what an earlier one computed.

With --server the same requests go to any server that speaks OpenAI's completions, and no engine is made.

Exit status: 0; 1 if a request failed, has other tokens than its line expects, or something compiled during a run; 2 if
something could not be run or written; 130 after Ctrl-C.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from batching import EngineConfig
from scripts.bench_report import Configuration, Ran, all_figures, complaints, draw, machine, tables, versions
from scripts.bench_runs import Workload, check_served, judged, make_engines, read, run_once
from scripts.bench_server import ServerRun, connected, first_model
from scripts.command import (
    Refused,
    Report,
    check_matplotlib,
    check_picture,
    check_targets,
    exit_status,
    opened,
    write_json,
)
from scripts.figures import system_figures
from scripts.http_client import Server
from scripts.jobs import warm_up
from scripts.limits import Limits, measure_limits
from scripts.ticker import Ticker
from scripts.traces import workload_text


@dataclass(frozen=True)
class Engines:
    """How requests are served."""

    slots: str = "16"
    """Slots; 8,16 is an engine with 8 and one with 16."""
    chunk_sizes: tuple[str, ...] = ("128",)
    """Most prompt tokens a turn. Spaces separate sizes of one engine: 64 128,256 is one with two and one with one."""
    attention: str | None = None
    """Implementations of attention, such as cpu,xla; without it the first that runs here."""
    max_len: int = EngineConfig.max_len
    """Positions in a slot: prompt and generated tokens."""
    dtype: str = EngineConfig.dtype
    """Of weights and activations."""
    cache_dtype: str | None = EngineConfig.cache_dtype
    """Of keys and values; without it as --dtype."""
    max_queue: int = EngineConfig.max_queue
    """Requests that may wait; an arrival that finds no room has failed."""
    run_ahead: int = EngineConfig.run_ahead
    """Turns that the device may have while their tokens are not read."""
    prefix_reuse: bool = False
    """Rows that are in some slot already are not computed again."""
    deterministic: bool = EngineConfig.deterministic
    """Logprobs too are the same to the last bit, whatever runs beside a request."""
    checks: bool = EngineConfig.checks
    """Verify every turn, which costs time."""

    def configs(self, policy: str) -> list[EngineConfig]:
        """One for each combination. Raises ValueError."""
        varied = ("slots", "chunk_sizes", "attention")
        same = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in varied}
        slots = [int(one) for one in self.slots.split(",")]
        chunks = [tuple(int(size) for size in one.split()) for one in " ".join(self.chunk_sizes).split(",")]
        attentions = [None] if self.attention is None else self.attention.split(",")
        chosen: list[dict[str, Any]] = [
            dict(zip(varied, one, strict=True)) for one in product(slots, chunks, attentions)
        ]
        configs = [EngineConfig(**same, **one, policy=policy) for one in chosen]
        if len(set(configs)) < len(configs):
            raise ValueError("slots, chunk_sizes and attention must be different ones")
        return configs


@dataclass(frozen=True)
class Options:
    workload: str
    """Files with commas between."""
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    policies: str = "continuous,static"
    """Names with commas between. The ratios are to the last one."""
    repeat: int = 3
    """Runs of each configuration."""
    json: str | None = None
    """Where all figures go, as one JSON object; - is stdout."""
    picture: str | None = None
    """Where a picture goes: a .png or .svg file, of several workloads one each; needs matplotlib."""
    write_expected: str | None = None
    """Where the workload goes with the hashes of these tokens, if all runs agree on them."""
    server: str | None = None
    """The address of a server, such as http://localhost:8000, to serve the workloads instead."""
    server_model: str | None = None
    """The server's name for the model; else the first that it has. --model tells the vocabulary and the tokenizer."""
    api_key_env: str | None = None
    """The environment variable that holds the server's key."""
    connections: int = 256
    """To the server at once; a request that finds none free is sent later."""
    timeout_s: float = 600.0
    """A request to the server that has not ended then has failed."""
    engine: tyro.conf.OmitArgPrefixes[Engines] = field(default_factory=Engines)
    """How requests are served."""

    def __post_init__(self) -> None:
        names = self.policies.split(",")
        for name in names:
            self.engine.configs(name)
        if len(set(names)) < len(names):
            raise ValueError(f"policies must be different ones, not {self.policies}")
        if len({path.name for path in self.workloads}) < len(self.workloads):
            raise ValueError(f"workloads must have different names, not {self.workload}")
        if self.repeat < 1 or self.connections < 1 or not self.timeout_s > 0:
            raise ValueError("repeat and connections must be at least 1, and timeout_s above 0")
        if self.write_expected is not None and (len(self.workloads) > 1 or self.server is not None):
            raise ValueError("--write-expected goes with one workload and without --server")
        if self.server is None and (self.server_model is not None or self.api_key_env is not None):
            raise ValueError("--server-model and --api-key-env go with --server")
        if self.server is not None:
            Server(self.server, "")
        check_picture(self.picture)

    @property
    def workloads(self) -> list[Path]:
        return [Path(one) for one in self.workload.split(",")]

    def pictures(self) -> dict[str, str]:
        """By name of the workload."""
        paths = {} if self.picture is None else {one.name: self.picture for one in self.workloads}
        if len(paths) == 1:
            return paths
        return {name: str(Path(p).with_stem(f"{Path(p).stem}_{Path(name).stem}")) for name, p in paths.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.benchmark", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda report: benchmark(options, console, report), console)


def benchmark(options: Options, console: Console, report: Report) -> int:
    """Load, run, show. The exit status."""
    check_matplotlib(options.picture)
    pictures = options.pictures()
    targets = {"--json": options.json, "--write-expected": options.write_expected}
    targets |= {f"--picture of {name}": path for name, path in pictures.items()}
    for path in options.workloads:
        model = options.model if os.path.isfile(options.model) else None
        check_targets({"--workload": str(path), "--model": model}, targets)
    workloads = [read(path, report) for path in options.workloads]
    if options.server is not None or options.write_expected is not None:
        workloads = [replace(one, items=one.as_items(), jobs=()) for one in workloads]
    serve = on_engines if options.server is None else on_server
    runs, limits, figures = serve(options, workloads, console, report)
    failed = {(run.configuration.workload, name) for run in runs for name in run.failures}
    figures = {"machine": machine(), "versions": versions(), "repeat": options.repeat} | figures
    figures |= {"workloads": {one.name: {"requests": one.requests, "bad_lines": one.bad} for one in workloads}}
    figures |= {"limits": [one._asdict() for one in limits]} | all_figures(runs, limits)
    figures |= {"failed_requests": len(failed) + sum(one.bad for one in workloads)}
    wrong = show(figures, runs, console, report)
    write_json(options.json, figures)
    for name, path in pictures.items():
        draw(runs, figures, name, path)
    if options.write_expected is not None:
        wrong |= not write_expected(options.write_expected, workloads[0], runs, report)
    return int(wrong)


Results = tuple[list[Ran], list[Limits], dict[str, Any]]


def on_engines(options: Options, workloads: Sequence[Workload], console: Console, report: Report) -> Results:
    """The runs, the machine's limits before and after, and what else is to be told."""
    policies = options.policies.split(",")
    engines = make_engines(options.model, options.engine.configs(policies[0]), policies, console)
    limits = [measure_limits()]
    started = []
    for engine, figures in engines.values():
        for item in (item for one in workloads for item in one.items):
            if max(item.prompt_ids or (0,)) >= engine.model_config.vocab_size:
                raise Refused(f"{item.id}: prompt_ids holds a token that the model does not know")
        start = time.perf_counter()
        warm_up(engine)
        started.append(figures | {"warm_up_s": time.perf_counter() - start})
    runs: list[Ran] = []
    for _ in range(options.repeat):  # in turns, so that what else the machine does falls on all alike
        for workload, (label, (engine, _)) in product(workloads, engines.items()):
            for policy in policies:
                details = {"policy": policy, "slots": engine.config.slots, "chunk_sizes": engine.config.chunk_sizes}
                details["attention"] = engine.runner.attention
                configuration = Configuration(workload.name, policy, label, details)
                runs.append(run_once(engine, workload, configuration, policy, console))
                check_served(runs)
    limits.append(measure_limits())
    system = system_figures(options.model, next(iter(engines.values()))[0])
    return runs, limits, system | {"engine": asdict(options.engine), "start_up": started}


def on_server(options: Options, workloads: Sequence[Workload], console: Console, report: Report) -> Results:
    """As `on_engines`; one client, warmed up by one request."""
    assert options.server is not None
    key = None if options.api_key_env is None else os.environ.get(options.api_key_env, "").strip()
    if options.api_key_env is not None and not key:
        raise Refused(f"the environment variable {options.api_key_env} holds no key")
    server = Server(options.server, options.server_model or "", key, options.connections, options.timeout_s)
    if not server.model:
        server = replace(server, model=asyncio.run(first_model(server)))
    client = asyncio.run(connected(server, options.model, workloads[0].items[0], report))
    details = {"server": server.url, "server_model": server.model, **client.form._asdict()}
    runs: list[Ran] = []
    for _ in range(options.repeat):
        for workload in workloads:
            configuration = Configuration(workload.name, server.model, "", details)
            with Ticker(console, server.model, workload.requests) as ticker:
                run = asyncio.run(ServerRun(client, workload.items, ticker.update).run())
            runs.append(judged(configuration, run.served, run.failures, run.tokens, workload, more=run.more))
            check_served(runs)
    return runs, [], {"model": options.model} | details


def show(figures: dict[str, Any], runs: Sequence[Ran], console: Console, report: Report) -> bool:
    """Tables, and what went wrong. Whether something did."""
    for table in tables(figures):
        console.print(table)
    lines = complaints(runs)
    for line in lines:
        report(line)
    for one in figures.get("start_up", ()):
        report(
            f"outside the window: compile {one['compile_s']:.1f} s ({one['programs']} programs, "
            f"{one['programs_cached']} from the persistent cache), warm-up {one['warm_up_s']:.1f} s"
        )
    if figures["limits"]:
        report(
            "limits before and after: "
            + ", ".join(
                f"{one['flops_per_s'] / 1e9:.0f} GFLOP/s and {one['bytes_per_s'] / 1e9:.0f} GB/s"
                for one in figures["limits"]
            )
        )
    report(f"failed requests: {figures['failed_requests']}")
    return bool(lines or figures["failed_requests"])


def write_expected(target: str, workload: Workload, runs: Sequence[Ran], report: Report) -> bool:
    """The workload with the hashes of its tokens, unless a request failed or runs differ. Whether it was written."""
    hashes = runs[0].hashes
    if any(run.failures or run.hashes != hashes for run in runs):
        report(f"{target} is not written: not all runs gave the same tokens to all requests")
        return False
    with opened(target) as file:
        file.write(workload_text(replace(item, expected=hashes[item.id]) for item in workload.items))
    return True


if __name__ == "__main__":
    sys.exit(main())
