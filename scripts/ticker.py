"""How many of a workload's requests have ended, shown on stderr while it is served."""

import time

from rich.console import Console
from rich.status import Status

from scripts.display import LIVE_S, PLAIN_S


class Ticker:
    """One live line on a terminal, now and then a plain line elsewhere: `update` may be called after every turn."""

    def __init__(self, console: Console, text: str, total: int) -> None:
        self._console, self._text, self._total = console, text, total
        self._status = Status("", console=console) if console.is_terminal else None
        self._next = time.perf_counter() + (0.0 if console.is_terminal else PLAIN_S)

    def __enter__(self) -> "Ticker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, ended: int, at: float) -> None:
        """`at`: seconds on the clock of the requests."""
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + (PLAIN_S if self._status is None else LIVE_S)
        text = f"{self._text}: {ended}/{self._total} requests, at {at:.1f} s"
        if self._status is None:
            self._console.print(text)
        else:
            self._status.update(text)
            self._status.start()
