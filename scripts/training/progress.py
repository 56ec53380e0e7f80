"""How far training is, on stderr: a bar on a terminal, now and then a line elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from scripts.display import PLAIN_S


class TrainDisplay:
    """`update` is called after every step with its line of the log."""

    def __init__(self, console: Console, done: int, steps: int) -> None:
        self._console, self._steps, self._next = console, steps, time.perf_counter() + PLAIN_S
        self._bar = None
        if console.is_terminal:
            columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
            self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> "TrainDisplay":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, line: dict[str, Any]) -> None:
        share = "" if line["mfu"] is None else f", {line['mfu']:.0%} MFU"
        text = f"loss {line['loss']:.4f}, {line['tokens_per_s']:.0f} tokens/s{share}"
        if self._bar is not None:
            self._bar.update(self._task, completed=line["step"], description=text)
        elif time.perf_counter() > self._next:
            self._next = time.perf_counter() + PLAIN_S
            self._console.print(f"step {line['step']} of {self._steps}: {text}")
