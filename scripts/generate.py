"""Generate: prompts in, answers out, all of them served side by side.

Prompts come from the command line, from a file with one JSON request per line, or from both; without any, two dozen
built-in ones show what continuous batching does. Results go to stdout or --out, progress and figures to stderr.

Exit status: 0; 1 if a request ended with an error; 2 if nothing could be run; 130 after Ctrl-C.
"""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.policies import make_policy
from scripts import STARTED
from scripts.display import RunDisplay
from scripts.figures import run_figures, runs_table, system_figures
from scripts.jobs import Job, OrderedWriter, Report, Run, again, interruptible, read_jobs, run_policy, warm_up
from scripts.prompts import PROMPTS
from scripts.startup import make_engine, start_up_line


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
    """Where the figures go, as one JSON object."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)
    """How requests are served."""
    sampling: tyro.conf.OmitArgPrefixes[SamplingParams] = field(default_factory=SamplingParams)
    """For requests that do not say otherwise. The built-in ones are greedy."""

    def __post_init__(self) -> None:
        for policy in self.compare:
            make_policy(policy)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status. `argv`: the command line without the program's name."""
    options = tyro.cli(Options, prog="python -m scripts.generate", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def report(text: str) -> None:
        console.print(text, markup=False)

    try:
        check_writable(options)
        jobs = read_jobs(input_lines(options), asdict(options.sampling), report)
    except OSError as error:
        report(f"error: {error}")
        return 2
    try:
        return answer(options, jobs, console, report)
    except KeyboardInterrupt:
        return 130


def check_writable(options: Options) -> None:
    """Raises OSError before the model is loaded rather than after the work is done."""
    for path in (options.out, options.json):
        if path not in (None, "-"):
            with open(path, "a"):
                pass
            if options.prompts not in (None, "-") and os.path.samefile(path, options.prompts):
                raise OSError(f"{path} is the input")


def input_lines(options: Options) -> list[tuple[str, bytes]]:
    """(where, JSON of a request) of everything that is asked for. Raises OSError if it cannot be read."""
    lines: list[tuple[str, bytes]] = []
    for number, text in enumerate(options.prompt, start=1):
        fields = {"messages": [{"role": "user", "content": text}]} if options.chat else {"prompt": text}
        lines.append((f"prompt {number}", json.dumps({"id": f"prompt-{number}", **fields}).encode()))
    if options.prompts is not None:
        data = sys.stdin.buffer.read() if options.prompts == "-" else Path(options.prompts).read_bytes()
        lines += [(f"line {number}", line) for number, line in enumerate(data.splitlines(), start=1)]
    if not options.prompt and options.prompts is None:
        lines = [(f"built-in {number}", json.dumps(fields).encode()) for number, fields in enumerate(PROMPTS, start=1)]
    return lines


def answer(options: Options, jobs: list[Job], console: Console, report: Report) -> int:
    """Load, serve, show. The exit status."""
    try:
        engine, start_up = make_engine(options.model, options.engine, console)
    except (OSError, ValueError) as error:
        report(f"error: {error}")
        return 2
    with interruptible() as asked_to_stop:
        serving = Serving(engine, console, report, asked_to_stop)
        if options.compare:
            warm_up(engine)
        with results(options, jobs) as writer:
            runs = [serving.run(options.engine.policy, jobs, writer)]
        for policy in options.compare:
            if not asked_to_stop():
                runs.append(serving.run(policy, again(jobs)))
        stopped = asked_to_stop()
    conclude(options, engine, runs, start_up, console)
    failed = any(job.output is not None and job.output.finish_reason == "error" for job in jobs)
    return 130 if stopped else int(failed)


@dataclass(frozen=True)
class Serving:
    """What every run needs beside its jobs."""

    engine: Engine
    console: Console
    report: Report
    asked_to_stop: Callable[[], bool]

    def run(self, policy: str, jobs: list[Job], writer: OrderedWriter | None = None) -> Run:
        total = sum(job.output is None for job in jobs)
        with RunDisplay(self.console, self.engine, policy, total) as display:

            def on_turn(ended: int) -> None:
                display.update(ended)
                if writer is not None:
                    writer.advance()

            how = {"report": self.report, "on_turn": on_turn, "asked_to_stop": self.asked_to_stop}
            return run_policy(self.engine, policy, jobs, **how)


@contextmanager
def results(options: Options, jobs: list[Job]) -> Iterator[OrderedWriter | None]:
    """Where results go. JSON Lines are written as requests end, text for a person afterwards; so too after an error."""
    text = options.out is None or (options.out != "-" and sys.stdout.isatty())
    with ExitStack() as stack:
        if text:
            stack.callback(print_answers, jobs)
        if options.out is None:
            yield None
            return
        file = sys.stdout if options.out == "-" else stack.enter_context(open(options.out, "w"))
        writer = OrderedWriter(jobs, file)
        stack.callback(writer.close)
        yield writer


def print_answers(jobs: list[Job]) -> None:
    """The first words of each prompt and its answer, on stdout."""
    for job in jobs:
        if job.output is None or job.request is None:
            continue
        output = job.output
        answer = output.error or (str(output.token_ids) if output.text is None else output.text.strip())
        ended = f"{output.prompt_tokens} + {output.completion_tokens} tokens, {output.finish_reason}"
        print(f"[{job.id}] {first_words(job.request)} ({ended})")
        print(textwrap.indent(answer, "    "), end="\n\n")


def first_words(request: Request) -> str:
    if request.prompt_ids is not None:
        return f"{len(request.prompt_ids)} token ids"
    text = request.prompt if request.messages is None else str(request.messages[-1].get("content"))
    # A lone surrogate cannot be printed.
    return textwrap.shorten((text or "").encode(errors="replace").decode(), 72, placeholder=" ...")


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
    if options.json is not None:
        whole = system_figures(options.model, engine) | {"start_up": start_up, "runs": figures}
        Path(options.json).write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
