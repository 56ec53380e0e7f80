"""The simulator against the engine: the cost of a turn is fitted to one workload, and others are served both ways."""

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from batching import Engine, EngineConfig
from batching.policies import make_policy
from scripts.command import Refused
from scripts.figures import system_figures
from scripts.fleet import Fleet, RoundRobin
from scripts.jobs import warm_up
from scripts.metrics import Served, summary
from scripts.open_loop import serve_items
from scripts.replica import Replica, Setup
from scripts.startup import make_engine
from scripts.step_cost import FittedCost, StepCost
from scripts.step_fit import TurnRecord, TurnRecorder, fit, residuals, residuals_table
from scripts.ticker import Ticker
from scripts.traces import Item

# What is compared, where it is in a summary, and how far off a simulation may be. Times are in seconds.
COMPARED = (
    ("tokens/s", "generated_tokens_per_s", None, 0.10),
    ("TTFT p50", "ttft_s", "p50", 0.10),
    ("TTFT p99", "ttft_s", "p99", 0.20),
    ("TPOT p50", "tpot_s", "p50", 0.10),
    ("TPOT p99", "tpot_s", "p99", 0.20),
)


@dataclass(frozen=True)
class Validation:
    """Fit the cost of a turn to one workload, serve others on the engine and by the simulator, and compare."""

    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    requests: int = 40
    """Of each workload."""
    load: float = 0.6
    """Requests arrive at this share of the rate that the engine is thought to keep up with."""
    seed: int = 0
    """Of the workloads."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(
        default_factory=lambda: EngineConfig(slots=8, max_len=512, chunk_sizes=(64,), prefix_reuse=False, run_ahead=0)
    )
    """How requests are served; policy, run_ahead and slots are varied."""

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"requests must be at least 1, not {self.requests}")
        if not 0 < self.load < 1:
            raise ValueError(f"load must be above 0 and below 1, not {self.load}")
        if self.engine.slots < 2 or self.engine.max_len < 32:
            raise ValueError("slots must be at least 2 and max_len at least 32: they are divided")
        if self.engine.run_ahead or self.engine.policy != "continuous":
            raise ValueError("run_ahead must be 0 and the policy continuous where the cost is measured")


class Lengths(NamedTuple):
    """Ranges, in tokens."""

    prompt: tuple[int, int]
    answer: tuple[int, int]


class Case(NamedTuple):
    """A workload and an engine that differ from what the cost was fitted to."""

    name: str
    lengths: Lengths
    slots: int
    policy: str = "continuous"
    run_ahead: int = 0
    load: float = 1.0  # times that of the options


class Measured(NamedTuple):
    cost: FittedCost
    records: list[TurnRecord]
    residuals: dict[str, Any]
    served: list[Served]
    engine: Engine


def measured_cost(
    model: str, config: EngineConfig, items: Sequence[Item], console: Console, on_progress: Callable[[int, float], None]
) -> Measured:
    """Serve a workload one turn at a time, and fit. Raises Refused if nothing could be served."""
    engine, _ = make_engine(model, config, console)
    warm_up(engine)
    recorder = TurnRecorder(config.slots)
    engine.on_turn = recorder
    try:
        served = serve_items(engine, items, on_wake=recorder.wake, on_progress=on_progress)
    finally:
        engine.on_turn = None
    records = recorder.records()
    if not records:
        raise Refused("no request of the workload could be served")
    cost = fit(records, about(model, engine))
    return Measured(cost, records, residuals(cost, records), served, engine)


def about(model: str, engine: Engine) -> dict[str, Any]:
    """What a simulation takes its defaults from, and what a person wants to know of a cost."""
    config = engine.config
    names = ("policy", "slots", "max_len", "chunk_sizes", "max_queue", "run_ahead", "prefix_reuse")
    known = {name: getattr(config, name) for name in names} | {"chunk_sizes": list(config.chunk_sizes)}
    system = {name: one for name, one in system_figures(model, engine).items() if name != "engine"}
    block_q, vocabulary = engine.runner.shapes.block_q, engine.model_config.vocab_size
    return system | known | {"block_q": block_q, "vocabulary": vocabulary}


def validate(options: Validation, console: Console) -> dict[str, Any]:
    """The figures of every case.

    What the cost is fitted to are requests of as many users as there are slots, and two more, each waiting for an
    answer before asking on: few and many rows, prompts beside answers. `turns_alone`: how far off the cost of turns is
    in a case where they do not overlap; what a simulation is off beyond that is its own fault.
    """
    start, limit = time.perf_counter(), options.engine.max_len
    usual = Lengths((max(1, limit // 128), limit // 4), (2, limit // 10))
    long = Lengths((limit // 5, limit // 2), (2, limit // 16))
    draw = random.Random(options.seed)
    fitted_to = users(draw, options.requests, options.engine.slots + 2, usual)
    with Ticker(console, "measuring", len(fitted_to)) as ticker:
        measured = measured_cost(options.model, options.engine, fitted_to, console, ticker.update)
    console.print(residuals_table(measured.residuals))
    engines = {options.engine.slots: measured.engine}
    slots = options.engine.slots
    cases = [
        Case("half the rate", usual, slots, load=0.5),
        Case("long prompts", long, slots, run_ahead=1),
        Case("half the slots", usual, slots // 2),
        Case("static", usual, slots, policy="static", run_ahead=1),
    ]
    itself = [compare("as measured", measured.served, fitted_to, measured.cost, measured.engine)]
    shown = [*itself, *(run_case(case, options, draw, measured, engines, console) for case in cases)]
    return system_figures(options.model, measured.engine) | {
        "requests": options.requests,
        "load": options.load,
        "residuals": measured.residuals,
        "cost": measured.cost.to_json(),
        "cases": shown,
        "met": all(one["met"] for case in shown[1:] for one in case["compared"]),
        "seconds": time.perf_counter() - start,
    }


def run_case(
    case: Case,
    options: Validation,
    draw: random.Random,
    measured: Measured,
    engines: dict[int, Engine],
    console: Console,
) -> dict[str, Any]:
    """Serve it both ways. An engine of other slots is made when it is needed first."""
    if case.slots not in engines:
        config = dataclasses.replace(options.engine, slots=case.slots)
        engines[case.slots] = Engine(measured.engine.runner.model, config)
        warm_up(engines[case.slots])
    engine = engines[case.slots]
    engine.reconfigure(policy=case.policy, run_ahead=case.run_ahead)
    engine.scheduler.prefixes.forget()
    at_once = poisson(draw, options.requests, case.lengths, None)
    capacity = summary(simulated(at_once, measured.cost, engine))["requests_per_s"]
    items = poisson(draw, options.requests, case.lengths, options.load * case.load * capacity)
    recorder = engine.on_turn = TurnRecorder(case.slots)
    with Ticker(console, case.name, len(items)) as ticker:
        real = serve_items(engine, items, on_wake=recorder.wake, on_progress=ticker.update)
    engine.on_turn = None
    alone = None if case.run_ahead else residuals(measured.cost, recorder.records())["all"]
    return compare(case.name, real, items, measured.cost, engine) | {"turns_alone": alone}


def compare(name: str, real: Sequence[Served], items: Sequence[Item], cost: StepCost, engine: Engine) -> dict[str, Any]:
    """What the engine took, and what a simulation of it says."""
    figures = {"real": summary(real), "simulated": summary(simulated(items, cost, engine))}
    compared = []
    for label, figure, percentile, most in COMPARED:
        there, here = (one[figure] if percentile is None else one[figure][percentile] for one in figures.values())
        off = None if not there or here is None else here / there - 1
        met = off is not None and abs(off) <= most
        compared.append({"figure": label, "real": there, "simulated": here, "off": off, "met": met})
    config = engine.config
    how = {"slots": config.slots, "policy": config.policy, "run_ahead": config.run_ahead}
    return {"name": name} | how | {"compared": compared} | figures


def simulated(items: Sequence[Item], cost: StepCost, engine: Engine) -> list[Served]:
    """The items by an engine that is set like this one."""
    config = engine.config
    setup = Setup(engine.runner.shapes, config.max_len, config.max_queue, config.run_ahead, config.prefix_reuse)
    vocabulary = engine.model_config.vocab_size if config.prefix_reuse else None
    return Fleet(items, [Replica(setup, cost, make_policy(config.policy))], RoundRobin(), vocabulary).run()


def poisson(draw: random.Random, count: int, lengths: Lengths, per_s: float | None) -> list[Item]:
    """Requests at such a rate, or all at once."""
    items, at = [], 0.0
    for index in range(count):
        at += 0.0 if per_s is None else draw.expovariate(per_s)
        prompt, answer = draw.randint(*lengths.prompt), draw.randint(*lengths.answer)
        items.append(Item(f"r{index}", answer, at, prompt_tokens=prompt, seed=index))
    return items


def users(draw: random.Random, count: int, most: int, lengths: Lengths) -> list[Item]:
    """Requests of users who each ask again once answered. Some ask more often than others, so their number falls."""
    last: dict[int, str] = {}
    items = []
    for item in poisson(draw, count, lengths, None):
        (user,) = draw.choices(range(most), weights=range(1, most + 1))
        items.append(dataclasses.replace(item, after=last.get(user)))
        last[user] = item.id
    return items


def validation_table(figures: dict[str, Any]) -> Table:
    """A line per case and figure."""
    table = Table("", "", "engine", "simulated", "off", "")
    for case in figures["cases"]:
        settings = f"{case['slots']} slots, {case['run_ahead']} ahead"
        names = iter((case["name"], settings))
        for one in case["compared"]:
            off = "-" if one["off"] is None else f"{one['off']:+.1%}"
            values = ("-" if one[name] is None else f"{one[name]:.4g}" for name in ("real", "simulated"))
            table.add_row(next(names, ""), one["figure"], *values, off, "" if one["met"] else "missed")
        if (alone := case.get("turns_alone")) is not None:
            seconds = alone["mean_s"], alone["mean_s"] * (1 + alone["total_off"])
            table.add_row("", "a turn, s", *(f"{one:.4g}" for one in seconds), f"{alone['total_off']:+.1%}", "")
        table.add_section()
    table.caption = f"the first case is what the cost was fitted to; {figures['seconds']:.0f} s in all"
    return table
