"""Every compiled program of an engine, made before the first request."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from batching.plan import PlanShapes
from batching.step import EngineState, ModelGraph, step

Program = Callable[..., tuple[EngineState, jax.Array]]


def compile_programs(
    graph: ModelGraph,
    weights: tuple[jax.Array, ...],
    state: EngineState,
    shapes: PlanShapes,
    implementation: str,
    on_compile: Callable[[int, int, float], None] | None = None,
) -> dict[tuple[int, int], Program]:
    """(decode rows, chunk rows) -> compiled step. Calls `on_compile` with (done, of, seconds of the last)."""
    use_persistent_cache()
    programs: dict[tuple[int, int], Program] = {}
    wanted = shapes.all()
    if on_compile is not None:
        on_compile(0, len(wanted), 0.0)
    for done, (num_decode, chunk) in enumerate(wanted, start=1):
        start = time.perf_counter()
        lowered = step.lower(
            weights,
            state,
            shapes.empty(num_decode, chunk),
            graph=graph,
            num_decode=num_decode,
            implementation=implementation,
        )
        programs[num_decode, chunk] = lowered.compile()
        if on_compile is not None:
            on_compile(done, len(wanted), time.perf_counter() - start)
    return programs


def use_persistent_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX was told of another place already."""
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(base).expanduser() / "carousel" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
