"""What serving over HTTP costs: one workload through an engine and through a server with one like it, in turns.

The server is `python -m scripts.serve` in a process of its own, asked by streaming clients that all come at once; the
engine is in this one, and rests meanwhile. Then requests one at a time through both: how long until the first text,
from when a request is handed over, or sent on a connection that is open. Every prompt is computed whole. The clients
take some of the same processors, which counts against the server.

Exit status: 0; 1 if a request failed, or the two gave different tokens; 2 if something could not be run or written; 130
after Ctrl-C.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from batching import Engine, EngineConfig
from scripts.bench_report import machine, versions
from scripts.bench_runs import as_served, engine_failures, read, wanted_tokens
from scripts.bench_server import Answer, Client, ServerRun, ask, connected
from scripts.command import Refused, Report, check_targets, exit_status, write_json
from scripts.figures import system_figures
from scripts.http_client import KEY, Failed, Server
from scripts.jobs import warm_up
from scripts.metrics import summary
from scripts.startup import make_engine
from scripts.ticker import Ticker
from scripts.traces import Item

FIRST_TOKENS = 8  # of a request whose first text is timed
STOP_S = 60.0


@dataclass(frozen=True)
class Engines:
    """How both serve."""

    slots: int = EngineConfig.slots
    """Requests that run at once."""
    max_len: int = EngineConfig.max_len
    """Positions in a slot: prompt and generated tokens."""
    chunk_sizes: tuple[int, ...] = EngineConfig.chunk_sizes
    """Most prompt tokens a turn."""

    def config(self) -> EngineConfig:
        """Raises ValueError for what cannot be."""
        return EngineConfig(
            slots=self.slots, max_len=self.max_len, chunk_sizes=self.chunk_sizes, prefix_reuse=False, checks=False
        )

    @property
    def arguments(self) -> list[str]:
        sizes = [str(size) for size in self.chunk_sizes]
        lengths = ["--slots", str(self.slots), "--max-len", str(self.max_len), "--chunk-sizes", *sizes]
        return [*lengths, "--no-prefix-reuse", "--no-checks"]


@dataclass(frozen=True)
class Options:
    workload: Path
    """Requests, as for scripts.benchmark."""
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    repeat: int = 3
    """Runs of each."""
    first_texts: int = 20
    """Requests, one at a time, whose first text is timed in each run; 0 for none."""
    json: str | None = None
    """Where all figures go, as one JSON object; - is stdout."""
    engine: tyro.conf.OmitArgPrefixes[Engines] = field(default_factory=Engines)
    """How both serve."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.first_texts < 0:
            raise ValueError("repeat must be at least 1, and first_texts not negative")
        self.engine.config()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.bench_serve", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda report: bench(options, console, report), console)


def bench(options: Options, console: Console, report: Report) -> int:
    """Load, run, show. The exit status."""
    check_targets({"--workload": str(options.workload)}, {"--json": options.json})
    workload = read(options.workload, report)
    items = workload.as_items()
    if any(item.arrival_s or item.after for item in items):
        raise Refused(f"{options.workload}: here all requests come at once")
    engine, started = make_engine(options.model, options.engine.config(), console)
    if engine.tokenizer is None:
        raise Refused(f"{options.model} has no tokenizer: a server could tell no text of it")
    warm_up(engine)
    wanted = wanted_tokens(replace(workload, items=items, jobs=()))
    runs: list[dict[str, Any]] = []
    with serving(options) as address, asyncio.Runner() as runner:
        report(f"the server is at {address}")
        client = runner.run(
            connected(Server(address, "bench", connections=len(items)), options.model, items[0], report)
        )
        warm = items[: options.engine.slots]
        with Ticker(console, "warm-up, server", len(warm)) as ticker:
            runner.run(over_http(client, warm, ticker))
        for number in range(options.repeat):
            text = f"run {number + 1} of {options.repeat}"
            run: dict[str, Any] = {}
            for side in ("engine", "server") if number % 2 == 0 else ("server", "engine"):
                with Ticker(console, f"{text}, {side}", len(items)) as ticker:
                    if side == "engine":
                        run[side] = through_engine(engine, items, wanted)
                    else:
                        run[side] = runner.run(over_http(client, items, ticker))
            firsts = [replace(item, max_tokens=FIRST_TOKENS, ignore_eos=True) for item in items[: options.first_texts]]
            run["first_text"] = runner.run(first_texts(engine, client, firsts))
            runs.append(run)
            rates = [run[name]["summary"]["generated_tokens_per_s"] for name in ("engine", "server")]
            report(f"{text}: engine {rates[0]:.1f}, server {rates[1]:.1f} tokens per second")
    figures = {"machine": machine(), "versions": versions()} | system_figures(options.model, engine)
    figures |= {"workload": workload.name, "requests": len(items), "start_up": started} | compared(runs)
    console.print(table(figures))
    for name in figures["different"]:
        report(f"{name}: the server's tokens are not those of the engine")
    for name, reason in figures["failures"].items():
        report(f"{name}: {reason}")
    write_json(options.json, figures | {"runs": runs})
    return int(bool(figures["different"] or figures["failures"]))


@contextlib.contextmanager
def serving(options: Options) -> Iterator[str]:
    """The address of a server that is ready. Raises Refused if it does not come up."""
    model = ["--model", options.model, "--served-model-name", "bench", "--port", "0"]
    command = [sys.executable, "-m", "scripts.serve", *model, *options.engine.arguments]
    said: deque[str] = deque(maxlen=20)
    environment = dict(os.environ)
    environment.pop(KEY, None)  # it is asked without one
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        rest = threading.Thread(target=said.extend, args=(process.stderr,))
        try:
            for line in process.stderr:
                said.append(line.strip())
                if found := re.search(r"serving \S+ at (http://\S+)", line):
                    break
            else:
                raise Refused(f"the server ended: {' '.join(said)}")
            rest.start()  # so that it can always write
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if rest.ident is not None:
                rest.join()


def through_engine(engine: Engine, items: Sequence[Item], wanted: dict[str, int]) -> dict[str, Any]:
    """By `Engine.generate`: figures, tokens, and what failed."""
    requests = [item.request(engine.model_config.vocab_size) for item in items]
    start = time.monotonic()
    outputs = engine.generate(requests)
    served = [as_served(output, start) for output in outputs]
    failures = engine_failures({output.id: output for output in outputs}, wanted)
    tokens = {output.id: output.token_ids for output in outputs}
    return {"summary": summary(served), "tokens": tokens, "failures": {name: one[1] for name, one in failures.items()}}


async def over_http(client: Client, items: Sequence[Item], ticker: Ticker) -> dict[str, Any]:
    """The same of a server."""
    run = await ServerRun(client, items, ticker.update).run()
    failures = {name: reason for name, (_, reason) in run.failures.items()}
    return {"summary": summary(run.served), "tokens": run.tokens, "failures": failures}


async def first_texts(engine: Engine, client: Client, items: Sequence[Item]) -> list[tuple[float, float]]:
    """Of each request, seconds until the first text comes from the engine, and from the server. Raises Refused."""
    times = []
    for item in items:
        request, answer = item.request(client.vocabulary), Answer()
        start, first = time.monotonic(), None
        for delta in engine.stream([request]):
            if first is None and delta.text:
                first = time.monotonic()
        try:
            await ask(client.server, client.request(item, item.prompt(client.vocabulary)), item, answer)
        except Failed as error:
            raise Refused(f"{item.id} alone: {error}") from error
        if first is not None:
            times.append((first - start, answer.texts[0][0] - answer.sent))
    return times


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of runs next to one another, and what differs."""
    rates = np.array(
        [[run[name]["summary"]["generated_tokens_per_s"] for name in ("engine", "server")] for run in runs]
    )
    ratios = rates[:, 1] / rates[:, 0]
    figures: dict[str, Any] = {"tokens_per_s": {"engine": rates[:, 0].tolist(), "server": rates[:, 1].tolist()}}
    figures |= {"ratios": ratios.tolist(), "ratio": float(np.median(ratios))}
    times = np.array([pair for run in runs for pair in run["first_text"]]).reshape(-1, 2)
    if len(times):
        engine, server = np.percentile(times, (50, 90), axis=0).T.tolist()
        figures["first_text_s"] = {
            "engine": dict(zip(("p50", "p90"), engine, strict=True)),
            "server": dict(zip(("p50", "p90"), server, strict=True)),
            "difference_of_p50": server[0] - engine[0],
            "p50_of_differences": float(np.median(times[:, 1] - times[:, 0])),
        }
    first = runs[0]["engine"]["tokens"]
    both = [run[name] for run in runs for name in ("engine", "server")]
    different = {name for one in both for name, tokens in one["tokens"].items() if tokens != first.get(name)}
    failures = {name: reason for one in both for name, reason in one["failures"].items()}
    unseen = {name for one in both for name in first.keys() - one["tokens"].keys() - failures.keys()}
    failures |= dict.fromkeys(unseen, "the ids of its tokens were not told")
    return figures | {"different": sorted(different), "failures": failures}


def table(figures: dict[str, Any]) -> Table:
    """One column each."""
    shown = Table("", "engine.generate", "server")
    rates = figures["tokens_per_s"]
    for index in range(len(rates["engine"])):
        pair = [f"{rates[name][index]:.1f}" for name in ("engine", "server")]
        shown.add_row(f"tokens per second, run {index + 1}", *pair)
    low, high = min(figures["ratios"]), max(figures["ratios"])
    shown.add_row("ratio, median (lowest, highest)", "1", f"{figures['ratio']:.3f} ({low:.3f}, {high:.3f})")
    if (times := figures.get("first_text_s")) is not None:
        for name in ("p50", "p90"):
            pair = [f"{times[which][name] * 1e3:.1f} ms" for which in ("engine", "server")]
            shown.add_row(f"first text of a request alone, {name}", *pair)
        shown.add_row("overhead, difference of p50", "", f"{times['difference_of_p50'] * 1e3:+.1f} ms")
    same = figures["requests"] - len(figures["different"]) - len(figures["failures"])
    shown.add_row("same tokens", "", f"{same} of {figures['requests']}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
