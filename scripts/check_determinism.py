"""Is a request's result the same to the last bit, whatever runs beside it? On your own model and machine.

The same requests are served under many random schedules: other orders, arrivals, policies, turns in flight, prefixes
reused or not, and others that come and are cancelled. For each request the distinct results are counted, of its tokens
and of the bits of its logprobs: with EngineConfig(deterministic=True), where there must be one, and without, where the
programs are chosen for speed and sums may be rounded in another order. Then both serve all requests at once, in turns,
for the cost.

Exit status: 0; 1 if a request has more than one result with `deterministic`, or fails; 2 if something could not be run
or written; 130 after Ctrl-C.
"""

import dataclasses
import hashlib
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from batching import Engine, EngineConfig, Output, Request, SamplingParams
from scripts.command import Report, check_targets, exit_status, write_json
from scripts.display import tracked
from scripts.figures import system_figures
from scripts.jobs import warm_up
from scripts.startup import make_engine

STRANGERS = 6  # at most, in a schedule
POLICIES = ("continuous", "static", "dynamic", "prefill_first", "decode_first", "shortest_first")
DRAWS: tuple[dict[str, Any], ...] = (  # how the answers of one request after the other are drawn
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=0.8, top_k=100, top_p=0.9),
    dict(temperature=1.2, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3),
)


@dataclass(frozen=True)
class Options:
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    schedules: int = 64
    """So many ways to serve the same requests."""
    requests: int = 12
    """Greedy ones and others drawn in several ways; a third begin alike."""
    prompt: int = 48
    """Most tokens of a prompt; they are random."""
    answer: int = 16
    """Most tokens of an answer."""
    repeat: int = 3
    """Timed runs with and without, in turns."""
    seed: int = 0
    """Of the requests and of the schedules."""
    json: str | None = None
    """Where all figures go, as one JSON object; - is stdout."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(
        default_factory=lambda: EngineConfig(slots=8, max_len=256, chunk_sizes=(64,), deterministic=True)
    )
    """How requests are served; policy, run_ahead and prefix_reuse are varied."""

    def __post_init__(self) -> None:
        for name in ("schedules", "requests", "prompt", "answer", "repeat"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.prompt + self.answer > self.engine.max_len:
            raise ValueError(f"{self.prompt} + {self.answer} tokens are more than max_len {self.engine.max_len}")
        if self.requests + STRANGERS > self.engine.max_queue:
            raise ValueError(
                f"{self.requests} requests and {STRANGERS} others need more than max_queue {self.engine.max_queue}"
            )
        if self.engine.max_len < 4:
            raise ValueError(f"max_len must be at least 4, not {self.engine.max_len}")
        if not self.engine.deterministic:
            raise ValueError("deterministic cannot be off: this command compares it on and off")


def main(argv: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, prog="python -m scripts.check_determinism", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda report: check(options, console, report), console)


def check(options: Options, console: Console, report: Report) -> int:
    """The exit status."""
    check_targets({}, {"--json": options.json})
    on, _ = make_engine(options.model, options.engine, console)
    off = Engine(on.runner.model, dataclasses.replace(options.engine, deterministic=False))
    requests = make_requests(options, on.model_config.vocab_size)
    engines = {"on": on, "off": off}
    found = {name: distinct(engine, options, requests, console, name) for name, engine in engines.items()}
    cost = measure_cost(engines, options, requests)
    figures = system_figures(options.model, on) | {
        "programs": {name: len(engine.runner.programs) for name, engine in engines.items()},
        "schedules": options.schedules,
        "deterministic": {name: one.figures() for name, one in found.items()},
        "cost": cost,
    }
    console.print(table(figures))
    write_json(options.json, figures)
    for name, one in found.items():
        if one.errors:
            report(f"error: with deterministic {name}, {len(one.errors)} requests failed: {one.errors[0]}")
    return int(max(found["on"].counts) > 1 or bool(found["on"].errors or found["off"].errors))


def make_requests(options: Options, vocabulary: int) -> list[Request]:
    """Prompts of random tokens, answers of random lengths, each with the logprobs of its tokens."""
    draw = random.Random(options.seed)
    trunk = [draw.randrange(vocabulary) for _ in range(options.prompt)]
    requests = []
    for index in range(options.requests):
        length = draw.randint(1, options.prompt)
        shared = length // 2 if index % 3 == 0 else 0
        prompt = [*trunk[:shared], *(draw.randrange(vocabulary) for _ in range(length - shared))]
        params = SamplingParams(
            max_tokens=draw.randint(1, options.answer),
            seed=index,
            **DRAWS[index % len(DRAWS)],
            logprobs=5,
            prompt_logprobs=2 if index % 4 == 3 else None,
            ignore_eos=True,
        )
        requests.append(Request(prompt_ids=prompt, params=params, id=f"request {index}"))
    return requests


@dataclass
class Distinct:
    """The results of each request: what was seen first, and how the others differ from it."""

    results: list[set[str]]  # by request: of tokens and logprobs
    tokens: list[set[tuple[int, ...]]]
    furthest: float = 0.0  # of a logprob from that of the first result, where the tokens are the same
    errors: list[str] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        return [len(one) for one in self.results]

    def figures(self) -> dict[str, Any]:
        return {
            "distinct_results": self.counts,
            "distinct_tokens": [len(one) for one in self.tokens],
            "furthest_logprob": self.furthest,
            "failed": len(self.errors),
        }


def distinct(engine: Engine, options: Options, requests: list[Request], console: Console, name: str) -> Distinct:
    """Serve the requests under every schedule."""
    found = Distinct([set() for _ in requests], [set() for _ in requests])
    first: dict[str, Output] = {}
    draw = random.Random(options.seed + 1)
    for _ in tracked(range(options.schedules), f"schedules with deterministic {name}", console):
        for output in serve(engine, requests, draw):
            index = int(output.id.split()[1])
            if output.finish_reason == "error":
                found.errors.append(f"{output.id}: {output.error}")
                continue
            numbers = logprobs_of(output)
            bits = np.array(output.token_ids, np.int32).tobytes() + numbers.tobytes()
            found.results[index].add(hashlib.sha256(bits).hexdigest())
            found.tokens[index].add(tuple(output.token_ids))
            own = first.setdefault(output.id, output)
            if own.token_ids == output.token_ids:
                found.furthest = max(found.furthest, float(np.abs(numbers - logprobs_of(own)).max(initial=0.0)))
    return found


def logprobs_of(output: Output) -> np.ndarray:
    """Of the tokens, the most probable ones beside them, and of the prompt where they were asked for."""
    told = [*(output.logprobs or ()), *(one for one in output.prompt_logprobs or () if one is not None)]
    return np.array([number for one in told for number in (one.logprob, *one.top_logprobs)], np.float32)


def serve(engine: Engine, requests: list[Request], draw: random.Random) -> list[Output]:
    """The outputs of the requests, under a schedule that `draw` makes up."""
    changes: dict[str, Any] = {"policy": draw.choice(POLICIES), "run_ahead": draw.randint(0, 3)}
    if engine.runner.copies:
        changes["prefix_reuse"] = draw.random() < 0.5
    engine.reconfigure(**changes)
    engine.scheduler.prefixes.forget()
    todo = [(draw.choice([0, draw.randint(0, 30)]), request) for request in requests]
    others = [(draw.randint(0, 30), stranger(draw, engine, index)) for index in range(draw.randint(0, STRANGERS))]
    queue = sorted([*todo, *others], key=lambda one: (one[0], draw.random()))
    cancels = {other.id: step + draw.randint(0, 12) for step, other in others}
    outputs, step = [], 0
    while queue or engine.unfinished:
        while queue and queue[0][0] <= step:
            engine.submit(queue.pop(0)[1])
        for name, at in cancels.items():
            if at == step:
                engine.cancel(name)
        outputs += engine.step()
        step += 1
    return [output for output in outputs if output.id not in cancels]


def stranger(draw: random.Random, engine: Engine, index: int) -> Request:
    """Somebody else, who is there for a while."""
    room = engine.config.max_len
    prompt = [draw.randrange(engine.model_config.vocab_size) for _ in range(draw.randint(1, room - room // 4))]
    return Request(prompt_ids=prompt, params=SamplingParams(max_tokens=room // 4), id=f"stranger {index}")


def measure_cost(engines: dict[str, Engine], options: Options, requests: list[Request]) -> dict[str, Any]:
    """Generated tokens per second with all requests queued at once, on and off in turns."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.reconfigure(policy=options.engine.policy, run_ahead=options.engine.run_ahead, prefix_reuse=False)
        warm_up(engine)
    for _ in range(options.repeat):
        for name, engine in engines.items():
            start = time.perf_counter()
            outputs = engine.generate(requests)
            taken = time.perf_counter() - start
            speeds[name].append(sum(output.completion_tokens for output in outputs) / taken)
    ratio = statistics.median(speeds["on"]) / statistics.median(speeds["off"])
    return {"tokens_per_s": speeds, "ratio": ratio}


def table(figures: dict[str, Any]) -> Table:
    """A column with and one without."""
    both, speeds = figures["deterministic"], figures["cost"]["tokens_per_s"]
    title = f"{figures['schedules']} schedules of {len(both['on']['distinct_results'])} requests"
    shown = Table("deterministic", *both, title=title)
    rows = {
        "programs": lambda name: f"{figures['programs'][name]}",
        "distinct results of a request, at most": lambda name: f"{max(both[name]['distinct_results'])}",
        "requests with more than one": lambda name: f"{sum(one > 1 for one in both[name]['distinct_results'])}",
        "requests with other tokens": lambda name: f"{sum(one > 1 for one in both[name]['distinct_tokens'])}",
        "furthest logprob, same tokens": lambda name: f"{both[name]['furthest_logprob']:.2g}",
        "failed": lambda name: f"{both[name]['failed']}",
        "tokens per second, median": lambda name: f"{statistics.median(speeds[name]):.1f}",
        "lowest and highest": lambda name: f"{min(speeds[name]):.1f} .. {max(speeds[name]):.1f}",
    }
    for label, show in rows.items():
        shown.add_row(label, *(show(name) for name in both))
    shown.caption = f"speed with deterministic: {figures['cost']['ratio']:.2f} x"
    return shown


if __name__ == "__main__":
    sys.exit(main())
