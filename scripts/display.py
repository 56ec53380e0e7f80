"""What a person sees on stderr while it runs: one live line on a terminal, now and then a plain line elsewhere."""

import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress import track
from rich.status import Status
from rich.text import Text

from batching import Engine

LIVE_S, PLAIN_S = 0.1, 5.0  # seconds between updates on a terminal and elsewhere
MOST_CELLS = 64  # slots that are drawn one by one


def tracked[T](items: Sequence[T], text: str, console: Console) -> Iterator[T]:
    """The items, with a bar on a terminal and now and then a line elsewhere."""
    if console.is_terminal:
        yield from track(items, text, console=console, transient=True)
        return
    due = time.perf_counter() + PLAIN_S
    for done, item in enumerate(items):
        if time.perf_counter() > due:
            console.print(f"{text}: {done} of {len(items)}")
            due = time.perf_counter() + PLAIN_S
        yield item


class CompileDisplay:
    """Programs compiled so far: `show` is called as they are."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> "CompileDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, done: int, of: int, seconds: float) -> None:
        """`seconds`: of all so far."""
        text = f"compiled {done} of {of} programs ({seconds:.1f} s)"
        if self._status is None:
            self._console.print(text)
        else:
            self._status.update(text)
            self._status.start()


class RunDisplay:
    """Progress of a run over `total` requests: `update` is called after every turn and draws when it is time."""

    def __init__(self, console: Console, engine: Engine, policy: str, total: int) -> None:
        self._console, self._engine, self._policy, self._total = console, engine, policy, total
        self._start = time.perf_counter()
        self._next = self._start + (0.0 if console.is_terminal else PLAIN_S)
        self._live = None
        if console.is_terminal:
            # Drawn by this thread alone, and what goes to stdout stays there.
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )

    def __enter__(self) -> "RunDisplay":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, ended: int) -> None:
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + (PLAIN_S if self._live is None else LIVE_S)
        speed = self._engine.stats.generated_tokens / max(now - self._start, 1e-9)
        text = f"{self._policy}: {ended}/{self._total} requests, {speed:5.1f} tokens/s, "
        if self._live is None:
            busy, slots = len(self._engine.scheduler.running), self._engine.config.slots
            self._console.print(f"{text}{busy} of {slots} slots busy")
        else:
            self._live.update(Text(text + "slots ").append_text(self._cells()), refresh=True)

    def _cells(self) -> Text:
        """A cell per slot: free, reading its prompt, generating."""
        slots, running = self._engine.config.slots, self._engine.scheduler.running
        if slots > MOST_CELLS:
            return Text(f"{len(running)} of {slots} busy")
        cells = [("·", "dim")] * slots
        for sequence in running:
            if sequence.slot is not None:
                cells[sequence.slot] = ("▒", "yellow") if sequence.prefilling else ("█", "green")
        return Text.assemble("[", *cells, f"] {len(running)}/{slots} busy")
