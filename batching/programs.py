"""Every compiled program of an engine, made before the first request."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from batching.plan import PlanShapes, Sampled
from batching.step import EngineState, ModelGraph, copy_prefix, step
from model.logits import SamplingState, SlotRows, set_masks, set_slot

Program = Callable[..., tuple[EngineState, Sampled]]


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


def compile_copy(state: EngineState) -> Callable[..., EngineState]:
    """(state, source, target, length) -> state, with the rows of a prefix copied from slot to slot."""
    use_persistent_cache()
    number = np.int32(0)
    return copy_prefix.lower(state, number, number, number).compile()


class SamplingPrograms(NamedTuple):
    """What writes the sampling state between turns. The state is donated."""

    set_slot: Callable[..., SamplingState]  # (state, slot, SlotRows)
    set_masks: Callable[..., SamplingState]  # (state, slots [B], masks [B, W])


def compile_sampling(state: SamplingState) -> SamplingPrograms:
    use_persistent_cache()
    B, W = state.mask.shape
    shapes = {name: np.zeros(getattr(state, name).shape[1:], getattr(state, name).dtype) for name in SlotRows._fields}
    rows = SlotRows(**shapes)
    slots, masks = np.zeros(B, np.int32), np.zeros((B, W), np.uint32)
    return SamplingPrograms(
        jax.jit(set_slot, donate_argnums=0).lower(state, np.int32(0), rows).compile(),
        jax.jit(set_masks, donate_argnums=0).lower(state, slots, masks).compile(),
    )


def use_persistent_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX was told of another place already."""
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(base).expanduser() / "carousel" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
