"""Workloads for the study of schedulers: made up from a seed, or converted from a public trace.

    python -m scripts.workloads sharegpt --requests 200 --arrivals poisson --rate 4 --out w.jsonl
    python -m scripts.workloads convert --format azure --trace AzureLLMInferenceTrace_code.csv --first 500 --out w.jsonl

The same arguments give the same file, byte for byte. scripts/traces.py says what a line means.

Exit status: 0; 2 if something could not be read or written, or does not fit; 130 after Ctrl-C.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import subcommand

from scripts import generators
from scripts.generators import Generated, Options, Session, labelled, scheduled
from scripts.traces import Format, Item, Report, read_trace, read_workload, token_hash, workload_text, write_workload

__all__ = ["Convert", "Item", "make", "read_trace", "read_workload", "token_hash", "with_history", "write_workload"]


@dataclass(frozen=True, kw_only=True)
class Convert(Options):
    """A public trace: Azure's of LLM inference, BurstGPT, or Mooncake. Malformed rows are shown and left out."""

    trace: Path
    """The file, as it was published."""
    format: Format
    """Whose it is."""
    start_s: float = 0.0
    """Leave out what arrives in the trace's first so many seconds; this time becomes 0."""
    first: int | None = None
    """Then take so many requests, the earliest."""
    speed: float = 1.0
    """2 makes them arrive at twice the rate."""

    def sessions(self, report: Report) -> list[Session]:
        items = [item for item in read_trace(self.format, self.trace, report) if item.arrival_s >= self.start_s]
        if not items:
            raise ValueError(f"{self.trace} has no request from {self.start_s} s on")
        times = [round((item.arrival_s - self.start_s) / self.speed, 6) for item in items]
        return [[replace(item, arrival_s=time)] for item, time in zip(items, times, strict=True)][: self.first]


Command = (
    Annotated[generators.Fixed, subcommand("fixed")]
    | Annotated[generators.Uniform, subcommand("uniform")]
    | Annotated[generators.Lognormal, subcommand("lognormal")]
    | Annotated[generators.ShareGPT, subcommand("sharegpt")]
    | Annotated[generators.LongDocument, subcommand("long-document")]
    | Annotated[generators.SharedPrefix, subcommand("shared-prefix")]
    | Annotated[generators.MultiTurn, subcommand("multi-turn")]
    | Annotated[Convert, subcommand("convert")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    from scripts.command import Refused, check_targets, exit_status, opened  # which import JAX

    options: Options = tyro.cli(
        tyro.conf.OmitSubcommandPrefixes[Command], prog="python -m scripts.workloads", description=__doc__, args=argv
    )
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def run(report: Report) -> int:
        check_targets({"--trace": str(getattr(options, "trace", "-"))}, {"--out": options.out})
        try:
            items = make(options, report)
        except ValueError as error:
            raise Refused(str(error)) from None
        with opened(options.out) as file:
            file.write(workload_text(items))
        console.print(table(items))
        return 0

    return exit_status(run, console)


def make(options: Options, report: Report = print) -> list[Item]:
    """The requests that the options describe, in the order of their lines.

    `report` is told what was left out or shortened. Raises ValueError if something does not fit, or is no trace.
    """
    sessions = [[scaled(item, options.scale) for item in session] for session in options.sessions(report)]
    if options.max_len is not None:
        sessions = fitted(sessions, options.max_len, options.clip, report)
    if isinstance(options, Generated):
        sessions = scheduled(sessions, options)
    return labelled([item for session in sessions for item in session], options)


def resized(item: Item, prompt: int, answer: int, prefix: int, block: int) -> Item:
    """With other lengths; what the prompt is too short for is cut off its end."""
    fields = {"prompt_tokens": prompt, "max_tokens": answer, "prefix_tokens": min(prefix, prompt)}
    return replace(item, **fields, block_tokens=block, blocks=item.blocks[: -(-prompt // block)])


def scaled(item: Item, by: float) -> Item:
    """With all lengths times `by`, those of prefixes and blocks as well: prompts share as large a part as before."""

    def times(tokens: int) -> int:
        return max(1, round(tokens * by)) if tokens else 0

    if item.blocks:
        block = times(item.block_tokens)
        prompt = max(1, round(item.length * block / item.block_tokens))
        return resized(item, prompt, times(item.max_tokens), 0, block)
    return resized(item, times(item.length), times(item.max_tokens), times(item.prefix_tokens), item.block_tokens)


def fitted(sessions: Iterable[Session], max_len: int, clip: bool, report: Report) -> list[Session]:
    """The sessions in slots of `max_len` positions; an answer's last token needs none.

    With `clip` the longer of prompt and answer gives way, down to half of the room, and a conversation ends when its
    slot is full; both are counted and reported. Raises ValueError without it if something does not fit.
    """
    result, cut, left_out, longest = [], 0, 0, 0
    for session in sessions:
        turns, history = [], 0
        for item in session:
            room, wanted = max_len + 1 - history, item.length + item.max_tokens
            longest = max(longest, history + wanted - 1)
            if clip and room < 2:
                left_out += len(session) - len(turns)
                break
            if wanted > room:
                cut += 1
                if clip:
                    answer = min(item.max_tokens, max(room // 2, room - item.length))
                    prompt = min(item.length, room - answer)
                    item = resized(item, prompt, answer, item.prefix_tokens, item.block_tokens)
            turns.append(item)
            history += item.length + item.max_tokens
        result.append(turns)
    if cut and not clip:
        raise ValueError(f"{cut} requests do not fit in max_len {max_len}, the longest needs {longest}: scale or clip")
    if cut or left_out:
        report(f"{cut} requests were shortened to fit in max_len {max_len}, and {left_out} later turns left out")
    return result


def with_history(items: Iterable[Item]) -> list[int]:
    """Tokens of each whole prompt, with the conversation that it continues."""
    prompts: dict[str, int] = {}
    whole: dict[str, int] = {}  # of each conversation up to and with the answer
    for item in items:
        history = whole[item.after] if item.continues and item.after is not None else 0
        prompts[item.id] = history + item.length
        whole[item.id] = prompts[item.id] + item.max_tokens
    return list(prompts.values())


def table(items: Sequence[Item]) -> Table:
    """What a person wants to know of a workload before running it."""
    result = Table("tokens", "p50", "p90", "largest", "sum")
    lengths = {"prompts": with_history(items), "answers": [item.max_tokens for item in items]}
    for name, of in lengths.items():
        half, most = np.percentile(of, (50, 90))
        result.add_row(name, f"{half:.0f}", f"{most:.0f}", f"{max(of)}", f"{sum(of)}")
    open_loop = [item.arrival_s for item in items if item.after is None]
    last, waiting = max(open_loop), len(items) - len(open_loop)
    rate = f", {len(open_loop) / last:.3g} a second" if last > 0 else ""
    result.caption = f"requests: {len(items)}; {len(open_loop)} of them arrive within {last:.6g} s{rate}"
    result.caption += f"; {waiting} wait for another to end" if waiting else ""
    return result


if __name__ == "__main__":
    sys.exit(main())
