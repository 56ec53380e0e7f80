"""Continuous batching derived step by step: one workload, served by stages of the same code that each change one thing.

From no cache at all, over the KV cache, static batches, chunked prefill, ragged rows and dynamic batches, to continuous
batching in lock-step and a turn ahead; and prefix reuse where prompts begin alike. For each stage its speed, its turns
and what its rows were. Every stage must give the same tokens.

A row is needed if it computes a token's keys and values for the first time: a request needs its prompt's and all but
the last of its answer's, less what it finds in a slot. What was computed before, or for a request that had ended, is
recomputed; the rest is padding, of the policy's rectangle or up to the next compiled program. A slot is idle in a turn
if nobody has it: where rows are a flat list that costs no row, in a rectangle it is one of the padding rows.

Requests are all there at the start, and are greedy; a workload is a file as of scripts.benchmark. Priorities and
objectives are not looked at by any stage. Stages run in turns; compilation and a warm-up lie outside.

Exit status: 0; 1 if stages gave different tokens, something compiled during a run, or a line of the workload is no
request; 2 if something could not be run or written; 130 after Ctrl-C.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from batching import Engine, EngineConfig, Request
from batching.policies import Continuous, Decision, Dynamic, Policy, Static, View
from batching.prefix import WORTHWHILE, common
from batching.turn import Turn, TurnTimes
from scripts.bench_report import machine, versions
from scripts.bench_runs import further_engine, read
from scripts.command import Refused, Report, check_matplotlib, check_picture, check_targets, exit_status, write_json
from scripts.display import tracked
from scripts.figures import system_figures
from scripts.jobs import warm_up
from scripts.ladder_picture import Served, draw, prompt_of, stage_figures, tables
from scripts.startup import make_engine
from scripts.timeline import Compilations
from scripts.traces import Item


@dataclass(frozen=True)
class Options:
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    workload: str | None = None
    """A file of requests; without it, the next five say what they are."""
    requests: int = 8
    """Made up of random tokens."""
    prompt: tuple[int, int] = (16, 160)
    """Fewest and most tokens of a prompt."""
    answer: tuple[int, int] = (4, 24)
    """Fewest and most tokens of an answer."""
    prefix: int = 0
    """Tokens that all prompts begin with."""
    seed: int = 0
    """Of these requests."""
    slots: int = 4
    """Of the stages that batch."""
    chunk: int = 64
    """Most prompt tokens a turn, from chunked prefill on."""
    repeat: int = 2
    """Runs of each stage."""
    dtype: str = EngineConfig.dtype
    """Of weights and activations. Below float32, programs of other sizes may round to other tokens."""
    attention: str | None = None
    """An implementation of attention; without it the first that runs here."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout."""
    picture: str | None = None
    """Where a picture goes: a .png or .svg file; needs matplotlib."""

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("repeat", 1), ("slots", 2), ("prefix", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("prompt", "answer"):
            fewest, most = getattr(self, name)
            if not 1 <= fewest <= most:
                raise ValueError(f"{name} must be two rising numbers of at least 1, not {fewest} {most}")
        if self.prefix > self.prompt[0]:
            raise ValueError(f"prefix {self.prefix} exceeds the shortest prompt, {self.prompt[0]}")
        self.config(self.slots, 1, (self.chunk,))
        check_picture(self.picture)

    def config(self, slots: int, max_len: int, chunk_sizes: tuple[int, ...]) -> EngineConfig:
        """Raises ValueError."""
        same: dict[str, Any] = {"dtype": self.dtype, "attention": self.attention}
        return EngineConfig(slots=slots, max_len=max_len, chunk_sizes=chunk_sizes, **same)


class Ragged:
    """As `Static`, but of rows and not a rectangle: a batch is formed when all slots are free, and nobody joins it."""

    preempts = False

    def decide(self, view: View) -> Decision:
        if view.free == view.slots:
            admit = view.waiting[: view.free]
            return Decision(admit=admit, prefill=admit)
        return Decision(prefill=view.prefilling, decode=not view.prefilling)


class Chunked:
    """Another policy, whose turns have at most so many prompt rows."""

    preempts = False

    def __init__(self, policy: Policy, rows: int) -> None:
        self.policy, self.rows = policy, rows

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(view)
        return replace(decision, prefill_rows=min(decision.prefill_rows, self.rows))


@dataclass(frozen=True)
class Stage:
    """A way to serve. `what` changes against the stage before, and why."""

    name: str
    what: str
    cache: bool = False  # else every token is a request of its own, whose prompt is all that comes before it
    batched: bool = False  # else there is one slot
    chunked: bool = False  # else a prompt, or a batch of them, is computed in one turn
    policy: Callable[[], Policy] = Static  # with one slot: one request after the other
    run_ahead: int = 0
    prefix_reuse: bool = False


def stages_in_order() -> Iterator[Stage]:
    """Each is the one before it, with one field changed."""
    stage = Stage("no cache", "each token is computed from the whole text before it: rows grow with its square")
    yield stage
    for name, change, what in (
        ("KV cache", {"cache": True}, "keys and values are kept: a token is one row, for which all weights are read"),
        ("static batch", {"batched": True}, "requests share that reading, as a rectangle: prompts are padded, and "
         "rows of members that ended are kept"),
        ("chunked prefill", {"chunked": True}, "few prompt rows a turn: no turn is long, however long a prompt is"),
        ("ragged rows", {"policy": Ragged}, "a flat list of rows and no rectangle: none is between prompts, none is of "
         "who has ended"),
        ("dynamic", {"policy": Dynamic}, "a freed slot is taken before the whole batch has ended; decoding waits while "
         "those prompts are computed"),
        ("continuous", {"policy": Continuous}, "prompt and decode rows share a turn: nobody waits, and turns are full"),
        ("run-ahead", {"run_ahead": 1}, "a turn is launched before the last one's tokens are read: the device need not "
         "wait for the host"),
        ("prefix reuse", {"prefix_reuse": True}, "rows of a prompt that some slot holds are not computed again"),
    ):  # fmt: skip
        stage = replace(stage, name=name, what=what, **change)
        yield stage


STAGES = tuple(stages_in_order())


def stages_for(requests: Sequence[Request]) -> tuple[Stage, ...]:
    """With prefix reuse if two prompts have so much in common that it does anything."""
    prompts = sorted(prompt_of(request) for request in requests)
    shared = any(common(one, other, len(one)) >= WORTHWHILE for one, other in pairwise(prompts))
    return tuple(stage for stage in STAGES if shared or not stage.prefix_reuse)


def make_items(options: Options) -> list[Item]:
    dice = random.Random(options.seed)
    lengths = [(dice.randint(*options.prompt), dice.randint(*options.answer)) for _ in range(options.requests)]
    same: dict[str, Any] = {"prefix_tokens": options.prefix, "prefix_seed": options.seed}
    return [
        Item(f"r{index}", answer, prompt_tokens=prompt, seed=options.seed + 1 + index, **same)
        for index, (prompt, answer) in enumerate(lengths)
    ]


def read_items(path: str, report: Report) -> tuple[list[Item], int]:
    """And how many lines are no request. Raises Refused for one that must wait for its time or for another."""
    workload = read(Path(path), report)
    items = workload.as_items()
    for item in items:
        if item.after is not None or item.arrival_s > 0:
            raise Refused(f"{item.id}: all requests are there at the start, arrival_s and after cannot be given here")
    return items, workload.bad


def make_engines(options: Options, items: Sequence[Item], console: Console) -> tuple[Engine, Engine]:
    """With one slot, and with many; on the same weights. Raises Refused."""
    longest = max(item.length for item in items)
    total = max(item.length + item.max_tokens for item in items)
    whole, batch = (-(-rows // options.chunk) * options.chunk for rows in (total, options.slots * longest))
    many, _ = make_engine(options.model, options.config(options.slots, total, (options.chunk, batch)), console)
    one, _ = further_engine(many, replace(options.config(1, total, (whole,)), prefix_reuse=False), console)
    for engine in (one, many):
        warm_up(engine)
        for shape, program in engine.runner.programs.items():  # each once, on padding
            padding = engine.runner.shapes.empty(*shape)
            engine.runner.state, sampled = program(engine.runner.weights, engine.runner.state, padding)
            np.asarray(sampled.tokens)
    return one, many


def run_stage(engine: Engine, stage: Stage, requests: Sequence[Request], chunk: int) -> Served:
    """On an idle engine, which finds no prefixes of earlier runs. Raises Refused if a request fails."""
    engine.reconfigure(run_ahead=stage.run_ahead, prefix_reuse=stage.prefix_reuse)
    engine.scheduler.policy = Chunked(stage.policy(), chunk) if stage.chunked else stage.policy()
    engine.scheduler.prefixes.forget()
    engine.reset_stats()
    turns: list[float] = []
    last = -1.0

    def on_turn(_: Turn, times: TurnTimes) -> None:
        nonlocal last
        turns.append(times.committed - max(times.plan, last))
        last = times.committed

    serve = generate if stage.cache else recompute
    engine.on_turn = on_turn
    try:
        with Compilations() as compilations:
            start = time.perf_counter()
            tokens = serve(engine, requests)
            wall_s = time.perf_counter() - start
    finally:
        engine.on_turn = None
    return Served(tokens, wall_s, max(turns), engine.stats, len(compilations.events))


def generate(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    outputs = engine.generate(requests)
    for output in outputs:
        if output.finish_reason == "error":
            raise Refused(f"{output.id}: {output.error}")
    return [output.token_ids for output in outputs]


def recompute(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """One request after the other, token by token: each is the first token after all that comes before it."""
    answers = []
    for request in requests:
        answer: list[int] = []
        while len(answer) < (request.params.max_tokens or 0):
            if answer and answer[-1] in engine.eos_ids and not request.params.ignore_eos:
                break
            params = replace(request.params, max_tokens=1)
            answer += generate(engine, [replace(request, prompt_ids=[*prompt_of(request), *answer], params=params)])[0]
        answers.append(answer)
    return answers


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.ladder", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda report: ladder(options, console, report), console)


def ladder(options: Options, console: Console, report: Report) -> int:
    """Load, run, show. The exit status."""
    check_matplotlib(options.picture)
    model = options.model if os.path.isfile(options.model) else None
    inputs = {"--workload": options.workload, "--model": model}
    check_targets(inputs, {"--json": options.json, "--picture": options.picture})
    items, bad = (make_items(options), 0) if options.workload is None else read_items(options.workload, report)
    one, many = make_engines(options, items, console)
    try:
        requests = [item.request(many.model_config.vocab_size) for item in items]
    except ValueError as error:
        raise Refused(str(error)) from error
    stages = stages_for(requests)
    runs: dict[Stage, list[Served]] = {stage: [] for stage in stages}
    for _, stage in tracked(list(product(range(options.repeat), stages)), "stages", console):
        runs[stage].append(run_stage(many if stage.batched else one, stage, requests, options.chunk))
    first = runs[stages[0]][0]
    shown = [stage_figures(stage, own, first, requests) for stage, own in runs.items()]
    totals = {"requests": len(requests), "prompt_tokens": sum(len(prompt_of(request)) for request in requests)}
    figures = {"machine": machine(), "versions": versions()} | system_figures(options.model, many) | totals
    figures |= {"options": asdict(options), "bad_lines": bad, "stages": shown}
    for table in tables(figures):
        console.print(table)
    for number, stage in enumerate(shown, start=1):
        report(f"{number} {stage['name']}: {stage['what']}")
    wrong = [f"{one['name']}: other tokens of {', '.join(one['different'])}" for one in shown if one["different"]]
    wrong += [f"{one['name']}: a program was compiled during a run" for one in shown if one["compiled_in_window"]]
    for line in wrong:
        report(f"error: {line}")
    write_json(options.json, figures)
    if options.picture is not None:
        draw(figures, options.picture)
    return int(bool(wrong or bad))


if __name__ == "__main__":
    sys.exit(main())
