"""Generate: prompts in, answers out, all of them served side by side.

Prompts come from the command line, from a file with one JSON request per line, or from both; without any, two dozen
built-in ones show what continuous batching does. Results go to stdout or --out, progress and figures to stderr.

A line without an id has that of its place: line-1, line-2, ...; prompt-1, ... on the command line.

Exit status: 0; 1 if a request ended with an error; 2 if something could not be run or written, such as a model that
does not load, a cache that does not fit into memory, or a full disk or closed pipe; 130 after Ctrl-C.
"""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import tyro
from rich.console import Console

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.policies import make_policy
from scripts import STARTED
from scripts.command import (
    STDOUT,
    Report,
    check_matplotlib,
    check_picture,
    check_targets,
    exit_status,
    opened,
    say,
    write_json,
)
from scripts.display import RunDisplay
from scripts.figures import run_figures, runs_table, system_figures
from scripts.jobs import Job, OrderedWriter, Run, again, interruptible, read_jobs, run_policy, warm_up
from scripts.prompts import PROMPTS
from scripts.startup import make_engine, start_up_line
from scripts.timeline import Compilations, Timeline, TurnProfile
from scripts.timeline_picture import draw, write_trace


@dataclass(frozen=True)
class Options:
    prompt: tyro.conf.Positional[tuple[str, ...]] = ()
    """Texts to continue."""
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """The positional prompts are messages of a user, put through the model's chat template."""
    prompts: str | None = None
    """Requests as JSON Lines, the sampling fields at top level; - is stdin."""
    out: str | None = None
    """Where outputs go as JSON Lines, in input order; - is stdout."""
    compare: tuple[str, ...] = ()
    """Further policies to run the same requests under afterwards, in the same process, for a table of both."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout, and answers for a person then go to stderr."""
    timeline: str | None = None
    """Where a trace of all turns goes, a .json file for ui.perfetto.dev; - is stdout, as for --json."""
    picture: str | None = None
    """Where a picture of who had which slot when goes: a .png or .svg file; needs matplotlib."""
    profile: str | None = None
    """A folder for JAX's profile of some turns of the first run."""
    profile_turns: str | None = None
    """The first and the last of them, counted from 1; 10:20 if they are not given."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)
    """How requests are served."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingParams] = field(default_factory=SamplingParams)
    """For requests that do not say otherwise. The built-in ones are greedy."""

    def __post_init__(self) -> None:
        for policy in self.compare:
            make_policy(policy)
        if self.chat and not self.prompt:
            raise ValueError("--chat is for prompts on the command line; a line of --prompts has messages instead")
        check_picture(self.picture)
        if self.profile is None and self.profile_turns is not None:
            raise ValueError("--profile-turns needs a folder, --profile")
        self.turn_profile()

    @property
    def stdout_taken(self) -> bool:
        return STDOUT in (self.json, self.timeline)

    def turn_profile(self) -> TurnProfile | None:
        return None if self.profile is None else TurnProfile(self.profile, self.profile_turns or "10:20")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status. `argv`: the command line without the program's name."""
    options = tyro.cli(Options, prog="python -m scripts.generate", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def run(report: Report) -> int:
        model = options.model if os.path.isfile(options.model) else None
        targets = {name: getattr(options, name) for name in ("out", "json", "timeline", "picture")}
        check_matplotlib(options.picture)
        check_targets(
            {"--prompts": options.prompts, "--model": model}, {f"--{name}": path for name, path in targets.items()}
        )
        if options.profile is not None:
            os.makedirs(options.profile, exist_ok=True)
        return answer(options, read_jobs(input_lines(options), asdict(options.sampling), report), console, report)

    return exit_status(run, console)


def input_lines(options: Options) -> list[tuple[str, bytes]]:
    """(where, JSON of a request) of everything that is asked for. Raises OSError if it cannot be read."""
    lines: list[tuple[str, bytes]] = []
    for number, text in enumerate(options.prompt, start=1):
        fields = {"messages": [{"role": "user", "content": text}]} if options.chat else {"prompt": text}
        lines.append((f"prompt {number}", json.dumps(fields).encode()))
    if options.prompts is not None:
        data = sys.stdin.buffer.read() if options.prompts == "-" else Path(options.prompts).read_bytes()
        lines += [(f"line {number}", line) for number, line in enumerate(data.splitlines(), start=1)]
    if not options.prompt and options.prompts is None:
        lines = [(f"built-in {number}", json.dumps(fields).encode()) for number, fields in enumerate(PROMPTS, start=1)]
    return lines


def answer(options: Options, jobs: list[Job], console: Console, report: Report) -> int:
    """Load, serve, show. The exit status."""
    with Compilations() as compilations:
        engine, start_up = make_engine(options.model, options.engine, console)
    timelines = None if options.timeline is None and options.picture is None else []
    profile = options.turn_profile()
    with interruptible() as asked_to_stop:
        serving = Serving(engine, console, report, asked_to_stop, timelines)
        if options.compare:
            warm_up(engine)
        with results(options, jobs) as writer, nullcontext() if profile is None else profile.of(engine):
            runs = [serving.run(options.engine.policy, jobs, writer)]
        for policy in options.compare:
            if not asked_to_stop():
                runs.append(serving.run(policy, again(jobs)))
        stopped = asked_to_stop()
    conclude(options, engine, runs, start_up, console)
    write_timelines(options, timelines or [], compilations, report)
    if profile is not None:
        few = f"no profile: the run had {profile.launched} turns, and --profile-turns starts at {profile.first}"
        report(f"profile: {options.profile}" if profile.done else few)
    failed = any(job.output is not None and job.output.finish_reason == "error" for job in jobs)
    return 130 if stopped else int(failed)


@dataclass(frozen=True)
class Serving:
    """What every run needs beside its jobs."""

    engine: Engine
    console: Console
    report: Report
    asked_to_stop: Callable[[], bool]
    timelines: list[Timeline] | None = None  # of the runs, if they are wanted

    def run(self, policy: str, jobs: list[Job], writer: OrderedWriter | None = None) -> Run:
        total = sum(job.output is None for job in jobs)
        with RunDisplay(self.console, self.engine, policy, total) as display, self.recording(policy):

            def on_turn(ended: int) -> None:
                display.update(ended)
                if writer is not None:
                    writer.advance()

            how = {"report": self.report, "on_turn": on_turn, "asked_to_stop": self.asked_to_stop}
            return run_policy(self.engine, policy, jobs, **how)

    def recording(self, policy: str) -> AbstractContextManager[Timeline | None]:
        if self.timelines is None:
            return nullcontext()
        self.timelines.append(Timeline(policy))
        return self.timelines[-1].recording(self.engine)


@contextmanager
def results(options: Options, jobs: list[Job]) -> Iterator[OrderedWriter | None]:
    """Where results go. JSON Lines are written as requests end, text for a person afterwards; so too after an error."""
    text = options.out is None or (options.out != STDOUT and sys.stdout.isatty())
    with ExitStack() as stack:
        if text:
            stack.callback(print_answers, jobs, sys.stderr if options.stdout_taken else sys.stdout)
        if options.out is None:
            yield None
            return
        writer = OrderedWriter(jobs, stack.enter_context(opened(options.out)))
        stack.callback(writer.close)
        yield writer


def print_answers(jobs: list[Job], file: TextIO) -> None:
    """The first words of each prompt and its answer."""
    for job in jobs:
        if job.request is None:
            continue
        for output in job.samples:
            answer = output.error or (str(output.token_ids) if output.text is None else output.text.strip())
            ended = f"{output.prompt_tokens} + {output.completion_tokens} tokens, {output.finish_reason}"
            shown = textwrap.indent(answer, "    ")
            say(f"[{job.id}] {first_words(job.request)} ({ended})\n{shown}\n", file)


def first_words(request: Request) -> str:
    if request.prompt_ids is not None:
        return f"{len(request.prompt_ids)} token ids"
    text = request.prompt if request.messages is None else str(request.messages[-1].get("content"))
    return textwrap.shorten(text or "", 72, placeholder=" ...")


def conclude(options: Options, engine: Engine, runs: list[Run], start_up: dict[str, Any], console: Console) -> None:
    """The closing table, and the same as JSON."""
    firsts = [output.metrics.tokens[0] for output in runs[0].outputs if output.metrics and output.metrics.tokens]
    start_up |= {"first_token_s": min(firsts) - STARTED if firsts else None}
    figures = [run_figures(run, runs[0]) for run in runs]
    console.print(runs_table(figures))
    for run in figures[1:]:
        if run["different"]:
            console.print(f"{run['policy']}: other tokens than {figures[0]['policy']} in {', '.join(run['different'])}")
    console.print(start_up_line(start_up))
    write_json(options.json, system_figures(options.model, engine) | {"start_up": start_up, "runs": figures})


def write_timelines(options: Options, timelines: list[Timeline], compilations: Compilations, report: Report) -> None:
    """As a trace and as a picture, where they are asked for."""
    if options.timeline is not None:
        write_trace(options.timeline, timelines, compilations)
        if options.timeline != STDOUT:
            report(f"timeline: {options.timeline}, for ui.perfetto.dev")
    if options.picture is not None:
        draw(timelines, options.picture)
        report(f"picture: {options.picture}")


if __name__ == "__main__":
    sys.exit(main())
