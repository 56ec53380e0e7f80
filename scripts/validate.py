"""The simulator against the engine: the cost of a turn is fitted to one workload, and others are served both ways."""

import dataclasses
import random
import statistics
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
from scripts.step_cost import StepCost
from scripts.step_fit import TurnRecord, TurnRecorder, fit, residuals
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
    """Fit the cost of a turn to one workload, serve others on the engine and by the simulator, and compare.

    The machine's own speed may drift by more than a simulation is off. So every other workload is served between two
    runs of the one that the cost is fitted to, and all of it several times.
    """

    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    requests: int = 40
    """Of each workload."""
    repeat: int = 3
    """How often every workload is served."""
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
        for name in ("requests", "repeat"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
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


@dataclass
class Case:
    """A workload and an engine that differ from what the cost was fitted to, and how that went."""

    name: str
    lengths: Lengths
    slots: int
    policy: str = "continuous"
    run_ahead: int = 0
    load: float = 1.0  # times that of the options
    items: Sequence[Item] = ()
    runs: list["Run"] = field(default_factory=list)


class Run(NamedTuple):
    """Summaries of a workload that was served both ways, and how far off the cost of its turns alone is."""

    real: dict[str, Any]
    simulated: dict[str, Any]
    turns_alone: dict[str, float] | None = None


def recorded(
    engine: Engine, items: Sequence[Item], on_progress: Callable[[int, float], None]
) -> tuple[list[Served], list[TurnRecord]]:
    """How a workload went. With turns in flight the records mean nothing. Raises Refused if nothing could be served."""
    engine.scheduler.prefixes.forget()
    recorder = engine.on_turn = TurnRecorder(engine.config.slots)
    try:
        served = serve_items(engine, items, on_wake=recorder.wake, on_progress=on_progress)
    finally:
        engine.on_turn = None
    if not (records := recorder.records()):
        raise Refused("no request of the workload could be served")
    return served, records


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
    start = time.perf_counter()
    draw = random.Random(options.seed)
    fitted, *cases = make_cases(options, draw)
    engine, _ = make_engine(options.model, options.engine, console)
    engines = {fitted.slots: engine}
    for slots in {case.slots for case in cases} - {fitted.slots}:
        engines[slots] = Engine(engine.runner.model, dataclasses.replace(options.engine, slots=slots))
    for one in engines.values():
        warm_up(one)
    ran = [_recorded(fitted, engine, console)]
    cost = fit(ran[0][1], about(options.model, engine))
    for case in cases:
        case.items = arrivals(case, options, draw, cost, engines[case.slots])
    for case in cases * options.repeat:
        real, records = _recorded(case, engines[case.slots], console)
        ran.append(_recorded(fitted, engine, console))
        (served, before), (_, after) = ran[-2:]
        cost = fit(before + after, cost.about)
        alone = None if case.run_ahead else residuals(cost, records)["all"]
        case.runs.append(Run(summary(real), summary(simulated(case, cost, engines[case.slots])), alone))
        fitted.runs.append(Run(summary(served), summary(simulated(fitted, cost, engine))))
    everything = [record for _, records in ran for record in records]
    cost = fit(everything, cost.about)
    shown = [compared(one) for one in (fitted, *cases)]
    return system_figures(options.model, engine) | {
        "requests": options.requests,
        "repeat": options.repeat,
        "load": options.load,
        "residuals": residuals(cost, everything),
        "cost": cost.to_json(),
        "cases": shown,
        "met": all(one["met"] for case in shown[1:] for one in case["compared"]),
        "seconds": time.perf_counter() - start,
    }


def make_cases(options: Validation, draw: random.Random) -> list[Case]:
    """First the one that the cost is fitted to. Answers have 16 of 512 tokens at least: the time per token of a shorter
    one is that of a few turns, which depend on who came a moment earlier.
    """
    limit, slots = options.engine.max_len, options.engine.slots
    usual = Lengths((max(1, limit // 128), limit // 4), (max(2, limit // 32), limit // 8))
    long = Lengths((limit // 5, limit // 2), (max(2, limit // 32), limit // 16))
    fitted_to = users(draw, options.requests, slots + 2, usual)
    return [
        Case("as measured", usual, slots, items=fitted_to),
        Case("half the rate", usual, slots, load=0.5),
        Case("long prompts", long, slots, run_ahead=1),
        Case("half the slots", usual, slots // 2),
        Case("static", usual, slots, policy="static", run_ahead=1),
    ]


def arrivals(case: Case, options: Validation, draw: random.Random, cost: StepCost, engine: Engine) -> list[Item]:
    """Its requests, at a rate that the engine can keep up with."""
    at_once = dataclasses.replace(case, items=poisson(draw, options.requests, case.lengths, None))
    capacity = summary(simulated(at_once, cost, engine))["requests_per_s"]
    return poisson(draw, options.requests, case.lengths, options.load * case.load * capacity)


def _recorded(case: Case, engine: Engine, console: Console) -> tuple[list[Served], list[TurnRecord]]:
    engine.reconfigure(policy=case.policy, run_ahead=case.run_ahead)
    with Ticker(console, case.name, len(case.items)) as ticker:
        return recorded(engine, case.items, ticker.update)


def compared(case: Case) -> dict[str, Any]:
    """What the engine took and what simulations of it say: medians of the runs, and of their ratios.

    `itself`: how far the engine's own runs are from each other, as a share of their median.
    """
    rows = []
    for label, figure, percentile, most in COMPARED:
        pairs = [
            [one[figure] if percentile is None else one[figure][percentile] for one in run[:2]] for run in case.runs
        ]
        there, here = (statistics.median(one) for one in zip(*pairs, strict=True))
        off = sorted(here / there - 1 for there, here in pairs)
        real = [there for there, _ in pairs]
        rows.append(
            {
                "figure": label,
                "real": there,
                "simulated": here,
                "off": statistics.median(off),
                "lowest": off[0],
                "highest": off[-1],
                "itself": (max(real) - min(real)) / there,
                "met": abs(statistics.median(off)) <= most,
            }
        )
    how = {"name": case.name, "slots": case.slots, "policy": case.policy, "run_ahead": case.run_ahead}
    return how | {"compared": rows, "runs": [run._asdict() for run in case.runs]}


def simulated(case: Case, cost: StepCost, engine: Engine) -> list[Served]:
    """Its requests by an engine that is set like this one, with the case's policy."""
    config = engine.config
    setup = Setup(engine.runner.shapes, config.max_len, config.max_queue, case.run_ahead, config.prefix_reuse)
    vocabulary = engine.model_config.vocab_size if config.prefix_reuse else None
    return Fleet(case.items, [Replica(setup, cost, make_policy(case.policy))], RoundRobin(), vocabulary).run()


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
    table = Table("", "", "engine", "runs differ by", "simulated", "off", "lowest, highest", "")
    for case in figures["cases"]:
        settings = f"{case['slots']} slots, {case['run_ahead']} ahead"
        names = iter((case["name"], settings))
        for one in case["compared"]:
            off = f"{one['off']:+.1%}", f"{one['lowest']:+.1%}, {one['highest']:+.1%}"
            real, here = f"{one['real']:.4g}", f"{one['simulated']:.4g}"
            met = "" if one["met"] else "missed"
            table.add_row(next(names, ""), one["figure"], real, f"{one['itself']:.1%}", here, *off, met)
        if alone := [run["turns_alone"] for run in case["runs"] if run["turns_alone"] is not None]:
            seconds, off = (statistics.median(one[name] for one in alone) for name in ("mean_s", "total_off"))
            table.add_row("", "a turn, s", f"{seconds:.4g}", "", f"{seconds * (1 + off):.4g}", f"{off:+.1%}", "", "")
        table.add_section()
    how = f"medians of {figures['repeat']}; the first case is what the cost was fitted to"
    table.caption = f"{how}; {figures['seconds']:.0f} s in all"
    return table
