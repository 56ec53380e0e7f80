"""From a name to an engine that is ready, shown as it goes, and what that took."""

import time
from typing import Any

import jax
from rich.console import Console

from batching import Engine, EngineConfig
from scripts import STARTED
from scripts.command import Refused
from scripts.display import CompileDisplay

MB = 1e6
CACHE_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompileCounts:
    """Seconds of compilation, and how many programs came from JAX's persistent cache; counts while it is entered."""

    def __init__(self) -> None:
        self.seconds, self.programs, self.cached = 0.0, 0, 0
        self._last_was_hit = False

    def __enter__(self) -> "CompileCounts":
        jax.monitoring.register_event_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._listen)

    def _listen(self, event: str, **_: Any) -> None:
        if event in (CACHE_ASKED, CACHE_HIT):
            self._last_was_hit = event == CACHE_HIT

    def add(self, done: int, seconds: float) -> None:
        """To be called right after each program: what JAX told last was then about that program."""
        self.seconds += seconds
        self.cached += self._last_was_hit and done > self.programs
        self.programs, self._last_was_hit = done, False


def make_engine(model: str, config: EngineConfig, console: Console) -> tuple[Engine, dict[str, Any]]:
    """Loads and compiles. The dictionary holds the figures of it. Raises Refused, or OSError, if it cannot be."""
    start = time.monotonic()
    with CompileCounts() as counts, CompileDisplay(console) as display:

        def on_compile(done: int, of: int, seconds: float) -> None:
            counts.add(done, seconds)
            display.show(done, of, counts.seconds)

        try:
            engine = Engine.from_pretrained(model, config, progress=True, on_compile=on_compile)
        except (ValueError, OverflowError) as error:  # OverflowError: a size that no machine has
            raise Refused(str(error)) from error
    return engine, {
        "import_s": start - STARTED,
        "load_s": time.monotonic() - start - counts.seconds,
        "compile_s": counts.seconds,
        "programs": counts.programs,
        "programs_cached": counts.cached,
        "attention": engine.runner.attention,
        "model_mb": engine.runner.weight_bytes / MB,
        "cache_mb": engine.runner.cache_bytes / MB,
    }


def start_up_line(figures: dict[str, Any]) -> str:
    first = figures["first_token_s"]
    return (
        f"start-up: import {figures['import_s']:.1f} s, load {figures['load_s']:.1f} s, "
        f"compile {figures['compile_s']:.1f} s ({figures['programs']} programs, {figures['programs_cached']} from the "
        f"persistent cache), first token after {'-' if first is None else f'{first:.1f} s'}; "
        f"model {figures['model_mb']:.0f} MB, cache {figures['cache_mb']:.0f} MB, attention by {figures['attention']}"
    )
