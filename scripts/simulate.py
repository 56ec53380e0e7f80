"""Simulate serving: the scheduler and the policies as they are, with measured costs of turns in place of a device.

record: serve a workload on a real engine, one turn at a time, and fit the cost of a turn to what was measured.
run: serve a workload by simulated replicas behind a router.
validate: record one workload, then serve others both ways, and compare.

A workload is a file of requests as in scripts/traces.py, a cost one as in scripts/step_cost.py.

Exit status: 0, whatever the figures; 2 if something could not be run or written; 130 after Ctrl-C.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from batching import EngineConfig
from batching.params import as_int
from batching.plan import PlanShapes
from batching.policies import make_policy
from scripts.command import Refused, check_targets, exit_status, opened, write_json
from scripts.fleet import ROUTERS, Fleet
from scripts.jobs import warm_up
from scripts.metrics import summary
from scripts.replica import Replica, Setup
from scripts.startup import make_engine
from scripts.step_cost import StepCost, load_cost
from scripts.step_fit import fit, residuals, residuals_table
from scripts.ticker import Ticker
from scripts.traces import Item, read_workload
from scripts.validate import Validation, about, recorded, validate, validation_table

RouterName = Literal["round-robin", "load", "prefix"]


@dataclass(frozen=True)
class Record:
    """Serve a workload on a real engine and fit the cost of a turn to it."""

    workload: Path
    """The requests; those of all lengths and numbers at once tell most."""
    out: str
    """Where the cost goes; - is stdout."""
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    turns: str | None = None
    """Where the measured turns go, as JSON Lines."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=lambda: EngineConfig(run_ahead=0))
    """How requests are served. Turns that overlap can't be timed: run_ahead is 0."""

    def __post_init__(self) -> None:
        if self.engine.run_ahead:
            raise ValueError(f"run_ahead must be 0, not {self.engine.run_ahead}: turns that overlap cannot be timed")


@dataclass(frozen=True)
class Simulate:
    """Serve a workload by simulated replicas. What is not given is as the engine was set that the cost is of."""

    cost: Path
    """What turns take."""
    workload: Path
    """The requests."""
    replicas: int = 1
    """Engines that share the workload."""
    router: RouterName = "load"
    """Which of them gets a request: the next, that with the fewest tokens, or that which holds most of its prompt."""
    policy: str | None = None
    """Who gets the next turn."""
    slots: int | None = None
    max_len: int | None = None
    chunk_sizes: tuple[int, ...] | None = None
    block_q: int | None = None
    """Rows of a block of attention: 1 on CPUs."""
    max_queue: int | None = None
    """Of each replica; a request that finds it full has failed."""
    run_ahead: int | None = None
    prefix_reuse: bool | None = None
    """Makes prompts of tokens, not of lengths alone: slower."""
    every_turn: bool = False
    """Take each turn by itself, also where many are alike: slower, and the same figures."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, not {self.replicas}")


Command = (
    Annotated[Record, tyro.conf.subcommand("record")]
    | Annotated[Simulate, tyro.conf.subcommand("run")]
    | Annotated[Validation, tyro.conf.subcommand("validate")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 2 if nothing could be run."""
    command = tyro.cli(Command, prog="python -m scripts.simulate", description=__doc__, args=argv)  # type: ignore
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda report: _run(command, console), console)


def _run(command: Record | Simulate | Validation, console: Console) -> int:
    if isinstance(command, Record):
        record(command, console)
    elif isinstance(command, Simulate):
        write_json(command.json, simulate(command, console))
    else:
        check_targets({}, {"--json": command.json})
        figures = validate(command, console)
        console.print(residuals_table(figures["residuals"]))
        console.print(validation_table(figures))
        write_json(command.json, figures)
    return 0


def record(options: Record, console: Console) -> None:
    check_targets({"--workload": str(options.workload)}, {"--out": options.out, "--turns": options.turns})
    items = read_items(options.workload)
    engine, _ = make_engine(options.model, options.engine, console)
    warm_up(engine)
    with Ticker(console, "measuring", len(items)) as ticker:
        served, records = recorded(engine, items, ticker.update)
    cost = fit(records, about(options.model, engine))
    off = residuals(cost, records)
    console.print(residuals_table(off))
    if failed := sum(one.outcome == "failed" for one in served):
        console.print(f"{failed} of {len(items)} requests failed")
    write_json(options.out, cost.to_json() | {"residuals": off})
    if options.turns is not None:
        with opened(options.turns) as file:
            file.writelines(json.dumps(one.to_json()) + "\n" for one in records)


def simulate(options: Simulate, console: Console) -> dict[str, Any]:
    """The figures, shown. Raises Refused for what cannot be simulated."""
    check_targets({"--workload": str(options.workload), "--cost": str(options.cost)}, {"--json": options.json})
    items = read_items(options.workload)
    try:
        cost = load_cost(options.cost)
        config, block_q = settings(options, cost)
        shapes = PlanShapes.choose(config.slots, config.chunk_sizes, block_q)
        vocabulary = int(cost.about.get("vocabulary", 1 << 15)) if config.prefix_reuse else None
        policies = [make_policy(config.policy) for _ in range(options.replicas)]
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error
    setup = Setup(shapes, config.max_len, config.max_queue, config.run_ahead, config.prefix_reuse)
    replicas = [Replica(setup, cost, policy, leaps=not options.every_turn) for policy in policies]
    fleet = Fleet(items, replicas, ROUTERS[options.router](), vocabulary)
    start = time.perf_counter()
    with Ticker(console, "simulating", len(items)) as ticker:
        try:
            served = fleet.run(ticker.update)
        except (ValueError, RuntimeError) as error:  # a prompt that cannot be made, a policy that plans nothing
            raise Refused(str(error)) from error
    chosen = {name: getattr(config, name) for name in SETTINGS}
    figures = {"workload": options.workload.name, "cost": options.cost.name, "router": options.router} | chosen
    figures |= {"replicas": options.replicas, "block_q": block_q} | summary(served) | fleet_figures(fleet)
    console.print(table(figures))
    return figures | {"simulated_in_s": time.perf_counter() - start}


SETTINGS = ("policy", "slots", "max_len", "chunk_sizes", "max_queue", "run_ahead", "prefix_reuse")


def settings(options: Simulate, cost: StepCost) -> tuple[EngineConfig, int]:
    """The engines' configuration, and `block_q`: as asked for, else as the cost tells, else as an engine's default."""
    known = {name: cost.about[name] for name in (*SETTINGS, "block_q") if name in cost.about}
    asked = {name: getattr(options, name) for name in (*SETTINGS, "block_q") if getattr(options, name) is not None}
    chosen = known | asked
    block_q = as_int(chosen.pop("block_q", 1), "block_q")
    if block_q < 1:
        raise ValueError(f"block_q must be at least 1, not {block_q}")
    return EngineConfig(**chosen), block_q


def read_items(path: Path) -> list[Item]:
    """Raises Refused for a file that is not a workload."""
    try:
        items = read_workload(path)
    except ValueError as error:
        raise Refused(str(error)) from error
    if not items:
        raise Refused(f"{path} holds no request")
    return items


def fleet_figures(fleet: Fleet) -> dict[str, Any]:
    """What the replicas did; shares are of slots or rows over all turns, not of time."""
    stats = [replica.stats for replica in fleet.replicas]
    turns, rows = sum(one.turns for one in stats), sum(one.rows for one in stats)
    return {
        "turns": turns,
        "busy_share": sum(one.busy_slots for one in stats) / max(1, sum(one.turns * one.slots for one in stats)),
        "padding_share": 1 - sum(one.live_rows for one in stats) / max(1, rows),
        "preemptions": fleet.preemptions,
        "cached_tokens": fleet.cached_tokens,
        "refused": dict(Counter(fleet.refused.values()).most_common(10)),
    }


def table(figures: dict[str, Any]) -> Table:
    """A line per figure."""
    ms = {name: figures[f"{name}_s"] for name in ("ttft", "tpot", "itl", "latency")}
    rows = {
        "requests": f"{figures['requests']}: {figures['completed']} completed, {figures['failed']} failed",
        "seconds from the first arrival to the last end": f"{figures['duration_s']:.2f}",
        "requests per second": _number(figures["requests_per_s"]),
        "generated tokens per second": _number(figures["generated_tokens_per_s"]),
        "time to first token, p50 / p90 / p99": _spread(ms["ttft"]),
        "time per output token": _spread(ms["tpot"]),
        "inter-token latency": _spread(ms["itl"]),
        "latency": _spread(ms["latency"]),
        "turns": f"{figures['turns']}",
        "busy slots, mean": f"{figures['busy_share']:.0%}",
        "rows that were padding": f"{figures['padding_share']:.0%}",
    }
    if figures["goodput_per_s"] is not None:
        rows["requests per second that met their objectives"] = _number(figures["goodput_per_s"])
    if figures["preemptions"]:
        rows["preemptions"] = f"{figures['preemptions']}"
    if figures["cached_tokens"]:
        rows["prompt tokens found, not computed"] = f"{figures['cached_tokens']}"
    slots = f"{figures['replicas']} x {figures['slots']} slots, {figures['policy']}"
    result = Table("", slots)
    for name, value in rows.items():
        result.add_row(name, value)
    result.caption = "\n".join(f"{count} failed: {reason}" for reason, count in figures["refused"].items()) or None
    return result


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(values: dict[str, float | None]) -> str:
    shown = (values[name] for name in ("p50", "p90", "p99"))
    return " / ".join("-" if value is None else f"{value * 1e3:.1f}" for value in shown) + " ms"


if __name__ == "__main__":
    sys.exit(main())
