"""Seconds of one call of `slot_attention` on a case, after a check that its result is right.

A call is timed in a chain: each call's result is the next one's query, so that no call can overlap or be dropped and
nothing else runs between them. Where a call is short, several are compiled into one program, and programs follow each
other without waiting, so that the host's launches stay out. The calls take turns over slots of a cache that is larger
than the device's own caches.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import choose_implementation, slot_attention
from scripts.attention_cases import Case
from scripts.attention_inputs import Inputs, make_inputs, tolerance, worst_error
from scripts.limits import Limits, Work, measure_limits, seconds

TARGET_S = 0.02  # of one timing: many calls where they are short
LONG_S = 1.0  # what is slower is timed once
SHORT_S = 3e-4  # what would be faster at the roofline is compiled as a chain
CHAIN = 16  # calls of it
MOST_COPIES = 512


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def default_size() -> str:
    return "quick" if on_cpu() else "main"


def default_dtype() -> str:
    return "float32" if on_cpu() else "bfloat16"


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def rotated_bytes() -> int:
    """Cache that the calls take turns over: several times any last-level cache."""
    return (1 << 27) if on_cpu() else (1 << 29)


def free_bytes() -> float:
    """Memory of the device that is not taken, as far as it tells."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return float("inf")


def measure_rates() -> Limits:
    """On an accelerator a large bfloat16 product of random numbers, and a copy, read and written; else as a turn's."""
    if on_cpu():
        return measure_limits()
    size, links = 8192, 8
    keys = jax.random.split(jax.random.key(0))
    square = jax.random.normal(keys[0], (size, size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (size, size), jnp.bfloat16) * size**-0.5

    def products(x, weight):
        for _ in range(links):
            x = x @ weight
        return x

    source, add = jnp.ones((1 << 28,), jnp.float32), jax.jit(lambda x: x + 1)

    def copies(x):
        for _ in range(links):
            x = add(x)
        return x

    copy_s = min(seconds(copies, source, tries=5)) / links
    product_s = min(seconds(jax.jit(products), square, weight, tries=5)) / links
    return Limits(2 * size**3 / product_s, 2 * source.nbytes / copy_s)


def figures(taken: Sequence[float], work: Work, limits: Limits) -> dict[str, Any]:
    """Rates of the median, and which share of the nearer limit it reaches."""
    middle = statistics.median(taken)
    shares = {
        "share_of_memory_rate": work.bytes / middle / limits.bytes_per_s,
        "share_of_matrix_rate": work.flops / middle / limits.flops_per_s,
    }
    return {
        "s": middle,
        "s_range": [min(taken), max(taken)],
        "gb_per_s": work.bytes / middle / 1e9,
        "tflop_per_s": work.flops / middle / 1e12,
        **shares,
        "bound": "memory" if work.bytes / limits.bytes_per_s > work.flops / limits.flops_per_s else "matrix",
        "share_of_roofline": max(shares.values()),
    }


def time_launches(launch: Callable[[int], Any], repeat: int) -> list[float]:
    """Seconds of one of the programs that `launch(n)` runs and waits for, several times over."""
    launch(1)
    start = time.perf_counter()
    launch(1)
    once = time.perf_counter() - start
    if once > LONG_S:
        return [once]
    count = max(1, min(2000, round(TARGET_S / once)))
    launch(count)
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        launch(count)
        taken.append((time.perf_counter() - start) / count)
    return taken


class Problem(NamedTuple):
    """A case on the device, and the program that runs `chain` calls of it.

    `run(q, cache, slots, positions)`, slots of each call, gives the result of the last call and of the first.
    """

    inputs: Inputs
    run: Callable[..., tuple[jax.Array, jax.Array]]
    chain: int


def chain_of(work: Work, limits: Limits) -> int:
    """Calls a program: one on a CPU, whose launches are short, and one where even at the roofline a call is long."""
    least = max(work.flops / limits.flops_per_s, work.bytes / limits.bytes_per_s)
    return 1 if on_cpu() or least > SHORT_S else CHAIN


def prepare(case: Case, implementation: str, dtype: str, copies: int, chain: int) -> Problem:
    inputs = make_inputs(case, implementation=implementation, dtype=dtype, copies=copies)
    # No array is in a closure: JAX may keep those.
    how = {"num_decode": inputs.num_decode, "implementation": implementation}
    options = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.scale}

    @jax.jit
    def attend(q, cache, slots, positions):
        return slot_attention(q, cache, slots, positions, **how, **options)

    @jax.jit
    def run(q, cache, slots, positions):
        first = q = attend(q, cache, slots[0], positions)
        for later in slots[1:]:
            q = attend(q, cache, later, positions)
        return q, first

    return Problem(inputs, run, chain)


def turns_of(problem: Problem) -> list[tuple[jax.Array, ...]]:
    """The slots of each program's calls, so that all copies take their turn. The first call is of copy 0."""
    slots, chain = [jnp.asarray(one) for one in problem.inputs.slots], problem.chain
    return [
        tuple(slots[(group * chain + at) % len(slots)] for at in range(chain))
        for group in range(-(-len(slots) // chain))
    ]


def time_problem(problem: Problem, repeat: int) -> list[float]:
    """Seconds a call, several times over."""
    (q, cache, _, positions, _), run, chain = problem
    turns, positions = turns_of(problem), jnp.asarray(positions)

    def launch(count: int) -> None:
        x = q
        for index in range(count):
            x, _ = run(x, cache, turns[index % len(turns)], positions)
        jax.block_until_ready(x)

    return [taken / chain for taken in time_launches(launch, repeat)]


def copies_of(read_bytes: float) -> int:
    """Copies of a case that reads so many bytes."""
    return max(1, min(MOST_COPIES, int(rotated_bytes() / read_bytes)))


def outcome(case: Case, dtype: str, implementation: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` gives, or why there is nothing: no case stops the others."""
    start = time.perf_counter()
    what = {"case": case.name, "kind": case.kind, "implementation": implementation, "dtype": dtype}
    what |= case.work(np.dtype(jnp.dtype(dtype)).itemsize)._asdict()
    try:
        found = run()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        full = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
        found = {"status": "does not fit" if full else "error", "reason": text[:2000]}
    return what | found | {"took_s": time.perf_counter() - start}


def measure(case: Case, implementation: str, dtype: str, limits: Limits, repeat: int) -> dict[str, Any]:
    """The figures of an implementation on a case. Only a right result is timed."""

    def run() -> dict[str, Any]:
        try:
            kind = jnp.dtype(dtype)
            choose_implementation(implementation, dtype=kind, cache_dtype=kind, **case.head_sizes)
        except ValueError as error:
            return {"status": "cannot", "reason": str(error)}
        itemsize = jnp.dtype(dtype).itemsize
        copies = copies_of(case.work(itemsize).bytes)
        needed = 2.5 * copies * case.cache_bytes(itemsize)  # the cache, and what making it takes
        if needed > free_bytes():
            return {"status": "does not fit", "reason": f"{needed / 1e9:.1f} GB of {free_bytes() / 1e9:.1f} GB"}
        work = case.work(itemsize)
        # The portable forms are many kernels a call, and slow to compile many times over.
        chain = 1 if implementation in ("xla", "reference") else chain_of(work, limits)
        problem = prepare(case, implementation, dtype, copies, chain)
        inputs = problem.inputs
        _, out = problem.run(inputs.q, inputs.cache, turns_of(problem)[0], jnp.asarray(inputs.positions))
        error, allowed = worst_error(case, inputs, out), tolerance(dtype, jax.default_backend(), implementation)
        checked = {"error": error, "allowed_error": allowed}
        if not error <= allowed:
            return {"status": "wrong", "reason": f"off by {error:.2g} of the largest value", **checked}
        taken = time_problem(problem, repeat)
        how = {"copies": copies, "calls_a_program": chain}
        return {"status": "ok", **checked, **figures(taken, work, limits), **how}

    return outcome(case, dtype, implementation, run)
