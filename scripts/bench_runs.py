"""What a benchmark runs: workloads, read from their files, engines on the same weights, and one run on one of these."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from batching import Engine, EngineConfig, Output, Request, SamplingParams
from batching.plan import BatchPlan
from batching.policies import FACTS, make_policy
from scripts.bench_report import Configuration, Ran
from scripts.command import Refused, Report
from scripts.display import CompileDisplay, RunDisplay
from scripts.fleet import facts
from scripts.jobs import Job, read_jobs, serve
from scripts.limits import Work
from scripts.metrics import Outcome, Served
from scripts.open_loop import serve_items
from scripts.profile_step import work_of
from scripts.startup import CompileCounts, make_engine
from scripts.timeline import Compilations
from scripts.traces import Item, numbered, parsed, read_workload, token_hash


@dataclass(frozen=True)
class Workload:
    """A file of requests: `items`, or `jobs` as of scripts.generate."""

    name: str
    items: Sequence[Item]
    jobs: Sequence[Job]
    bad: int  # lines that are no request

    @property
    def requests(self) -> int:
        return len(self.items) + len(self.jobs)

    def as_items(self) -> list[Item]:
        """Raises Refused for a request that is more than tokens and a length."""
        return [*self.items, *(as_item(job) for job in self.jobs)]


def as_item(job: Job) -> Item:
    """Raises Refused."""
    request = job.request
    assert request is not None
    own, length = request.params, request.params.max_tokens or 0
    plain = SamplingParams(
        temperature=own.temperature, max_tokens=length or 1, ignore_eos=own.ignore_eos, seed=own.seed
    )
    if not own.greedy or request.prompt_ids is None or replace(own, temperature=0.0) != plain:
        raise Refused(f"{job.where}: only prompt_ids, max_tokens, temperature 0 and ignore_eos can be given here")
    ids = tuple(request.prompt_ids)
    return Item(job.id, length, prompt_ids=ids, ignore_eos=own.ignore_eos, priority=request.priority)


def read(path: Path, report: Report) -> Workload:
    """Seeds are drawn here, once for all runs. Raises Refused if no line of it is a request."""
    bad: list[str] = []

    def told(text: str) -> None:
        bad.append(text)
        report(f"{path.name}: {text}")

    first = next(numbered(path), (1, b""))[1]
    items: list[Item] = []
    jobs: list[Job] = []
    if is_item(first):
        items = read_workload(path, told)
    else:
        lines = [(f"line {number}", line) for number, line in enumerate(path.read_bytes().splitlines(), start=1)]
        for job in read_jobs(lines, {}, told):
            if job.request is not None:
                seed = secrets.randbits(32) if job.request.params.seed is None else job.request.params.seed
                request = replace(job.request, params=replace(job.request.params, seed=seed))
                jobs.append(Job(job.where, job.id, request))
    if not items and not jobs:
        raise Refused(f"{path} has no request that can be served")
    return Workload(path.name, items, jobs, len(bad))


def is_item(line: bytes) -> bool:
    try:
        Item.from_json(parsed(line))
    except ValueError:
        return False
    return True


def make_engines(
    model: str, configs: Sequence[EngineConfig], policies: Sequence[str], console: Console
) -> dict[str, tuple[Engine, dict[str, Any]]]:
    """By what tells them apart, on the same weights, with what they took to start.

    Raises Refused if one cannot be made, or takes one of the policies.
    """
    made = [make_engine(model, configs[0], console)]
    made += [further_engine(made[0][0], config, console) for config in configs[1:]]
    varied = [name for name in ("slots", "chunk_sizes", "attention") if len({getattr(c, name) for c in configs}) > 1]
    for engine, _ in made:
        for policy in policies:
            try:
                engine.reconfigure(policy=policy)
            except ValueError as error:
                raise Refused(str(error)) from error
    labels = [", ".join(described(config, name) for name in varied) for config in configs]
    return dict(zip(labels, made, strict=True))


def described(config: EngineConfig, name: str) -> str:
    if name == "slots":
        return f"{config.slots} slots"
    if name == "chunk_sizes":
        return f"chunks of {' and '.join(map(str, config.chunk_sizes))}"
    return f"attention {config.attention}"


def further_engine(first: Engine, config: EngineConfig, console: Console) -> tuple[Engine, dict[str, Any]]:
    """On the weights of the first. Raises Refused."""
    start = time.monotonic()
    with CompileCounts() as counts, CompileDisplay(console) as display:

        def on_compile(done: int, of: int, seconds: float) -> None:
            counts.add(done, seconds)
            display.show(done, of, counts.seconds)

        try:
            engine = Engine(
                first.runner.model, config, tokenizer=first.tokenizer, eos_ids=first.eos_ids, on_compile=on_compile
            )
        except ValueError as error:
            raise Refused(str(error)) from error
    taken = {"load_s": time.monotonic() - start - counts.seconds, "compile_s": counts.seconds}
    return engine, taken | {"programs": counts.programs, "programs_cached": counts.cached}


def run_once(engine: Engine, workload: Workload, configuration: Configuration, policy: str, console: Console) -> Ran:
    """Serve all of it. The engine is idle, and finds no prefixes of earlier runs."""
    engine.reconfigure(policy=policy)
    engine.scheduler.prefixes.forget()
    engine.reset_stats()
    plans: list[BatchPlan] = []
    engine.on_turn = lambda turn, _: plans.append(turn.plan)
    try:
        with RunDisplay(console, engine, configuration.label, workload.requests) as display, Compilations() as compiled:
            served, outputs = serve_workload(engine, workload, policy, display.update)
    finally:
        engine.on_turn = None
    by_name = {sample_name(output): output for output in outputs}
    return judged(
        configuration,
        served,
        engine_failures(by_name, wanted_tokens(workload)),
        {name: output.token_ids for name, output in by_name.items()},
        workload,
        stats=engine.stats,
        work=sum((part for plan in plans for part in work_of(engine, plan).values()), Work()),
        compiled=tuple(name for name, _, _ in compiled.events),
    )


def serve_workload(
    engine: Engine, workload: Workload, policy: str, on_turn: Callable[[int], None]
) -> tuple[list[Served], list[Output]]:
    """How every request, and every sample of one, ended."""
    outputs: list[Output] = []
    if workload.items:
        return serve_items(
            engine, workload.items, on_progress=lambda ended, _: on_turn(ended), on_output=outputs.append
        ), outputs
    jobs = [Job(job.where, job.id, for_policy(job, policy)) for job in workload.jobs]
    start = time.monotonic()
    serve(engine, jobs, report=lambda _: None, on_turn=on_turn, asked_to_stop=lambda: False)
    outputs += [output for job in jobs for output in job.samples]
    return [as_served(output, start) for output in outputs], outputs


def for_policy(job: Job, policy: str) -> Request:
    assert job.request is not None
    return replace(job.request, **FACTS | facts(job.request, make_policy(policy)))


def sample_name(output: Output) -> str:
    return f"{output.id}#{output.index}" if output.index else output.id


def as_served(output: Output, start: float) -> Served:
    """A request that was there at the start of the run, also if the queue had no room for it yet."""
    metrics, name = output.metrics, sample_name(output)
    if metrics is None or metrics.end is None:  # refused
        return Served(name, start, (), start, 0, "failed")
    outcome: Outcome = "failed" if output.finish_reason == "error" else "completed"
    return Served(name, start, metrics.tokens, metrics.end, output.prompt_tokens, outcome)


def wanted_tokens(workload: Workload) -> dict[str, int]:
    """Of the requests that nothing but their length may end, how many tokens they must have."""
    wanted = {item.id: item.max_tokens for item in workload.items if item.ignore_eos}
    for job in workload.jobs:
        assert job.request is not None
        params = job.request.params
        constrained = (params.json_schema, params.regex, params.choice) != (None, None, None)
        if params.max_tokens and params.ignore_eos and not (params.stop or params.stop_token_ids or constrained):
            wanted[job.id] = params.max_tokens
    return wanted


def engine_failures(outputs: Mapping[str, Output], wanted: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Those of requests that failed or ended early: the kind and the reason."""
    failures = {}
    for name, output in outputs.items():
        least = wanted.get(output.id, 0)
        if output.finish_reason == "error":
            failures[name] = "error", output.error or "no reason was given"
        elif output.completion_tokens < least:
            failures[name] = "early end", f"{output.completion_tokens} tokens, {least} were asked for"
    return failures


def judged(
    configuration: Configuration,
    served: Sequence[Served],
    failures: Mapping[str, tuple[str, str]],
    tokens: Mapping[str, Sequence[int]],
    workload: Workload,
    **more: Any,
) -> Ran:
    """A run, with what is in `failures` marked as failed and the other tokens compared with what is expected."""
    marked = [replace(one, outcome="failed") if one.id in failures else one for one in served]
    hashes = {one.id: token_hash(tokens[one.id]) for one in marked if one.outcome == "completed" and one.id in tokens}
    expected = {item.id: item.expected for item in workload.items if item.expected is not None}
    unexpected = [name for name, found in hashes.items() if expected.get(name, found) != found]
    return Ran(configuration, marked, dict(failures), hashes, unexpected, **more)


def check_served(runs: Sequence[Ran]) -> None:
    """Raises Refused if a workload's first run served nothing: the others would not either."""
    last = runs[-1]
    first = next(run for run in runs if run.configuration.workload == last.configuration.workload)
    if first is last and not any(one.outcome == "completed" for one in last.served):
        reason = next(iter(last.failures.values()), ("", ""))[1]
        raise Refused(f"no request of {last.configuration.workload} could be served: {reason}")
