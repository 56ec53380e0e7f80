"""The steps of `scripts.device_check`, in a process of their own: a kernel that hangs or breaks it ends nothing else.

Run with one JSON argument: `group`, `patterns` of the items that are wanted, and `skip`, those that are done. Prints
one JSON object a line: `plan` with the items first, then `start` and `result` of each.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import IMPLEMENTATIONS, choose_implementation, slot_attention, write_rows
from scripts import attention_rivals, attention_timing
from scripts.attention_cases import Case, cases_of, conformance
from scripts.attention_inputs import make_small_inputs, tolerance, worst_error
from scripts.attention_rivals import RIVALS
from scripts.limits import Limits

Step = Callable[[], dict[str, Any]]
OTHER_DTYPES = ("float16", "float32")  # beside bfloat16, for some of the cases
FEW = ("*/h64_group_3_window", "*/h128_group_4_soft_cap")
PORTABLE = ("mixed/h80", "*/h128_group_4_soft_cap")  # what of `xla` is tried
DEVICE_LOST = 3  # exit status


def preferred() -> str:
    """The first implementation that runs on this machine, whatever it supports."""
    return next(name for name, one in IMPLEMENTATIONS.items() if one.unavailable() is None)


def info() -> dict[str, Any]:
    return attention_timing.machine() | {
        "preferred": preferred(),
        "implementations": {name: one.unavailable() or "runs" for name, one in IMPLEMENTATIONS.items()},
        "rivals": {name: bool(importlib.util.find_spec(rival.module)) for name, rival in RIVALS.items()},
    }


def plan(group: str) -> dict[str, Step]:
    """Item -> what runs it, in order."""
    if group in ("decode", "prefill"):
        return dict(_conformance_steps(group, preferred()))
    if group == "portable":
        cases = [case for case in conformance() if any(fnmatchcase(case.name, one) for one in PORTABLE)]
        return {f"{case.name}:xla:bfloat16": _conform(case, "xla", "bfloat16") for case in cases}
    if group == "engine":
        from scripts.device_engine import MODELS, compare_engines  # needs more packages than attention does

        return {f"engine/{name}": lambda name=name: compare_engines(name, preferred()) for name in MODELS}
    return dict(_bench_steps(group))


def _conformance_steps(group: str, name: str) -> Iterator[tuple[str, Step]]:
    cases = [case for case in conformance() if (case.kind == "decode") == (group == "decode")]
    few = [case for case in cases if any(fnmatchcase(case.name, one) for one in FEW)]
    for dtype in ("bfloat16", *OTHER_DTYPES):
        for case in cases if dtype == "bfloat16" else few:
            yield f"{case.name}:{name}:{dtype}", _conform(case, name, dtype)


def _bench_steps(group: str) -> Iterator[tuple[str, Step]]:
    """Of ours, decode or the rest; or of everything that ours is compared with."""
    dtype, limits = attention_timing.default_dtype(), attention_timing.measure_rates()
    yield "limits", lambda: {"status": "ok", **limits._asdict()}
    cases = cases_of(attention_timing.default_size())
    if group == "bench_rivals":
        there = [name for name, rival in RIVALS.items() if rival.unavailable() is None]
        for case in (cases[0], cases[-1]):
            yield f"{case.name}:xla", _bench(attention_timing.measure, case, "xla", dtype, limits)
        for case in _alternating(cases):  # a run may be cut off
            for name in there:
                yield f"{case.name}:{name}", _bench(attention_rivals.measure, case, name, dtype, limits)
        return
    for case in cases:
        if (case.kind == "decode") == (group == "bench_decode"):
            yield f"{case.name}:{preferred()}", _bench(attention_timing.measure, case, preferred(), dtype, limits)


def _alternating(cases: list[Case]) -> list[Case]:
    """Decode and the rest in turns, each in its order."""
    both = [[case for case in cases if (case.kind == "decode") == first] for first in (True, False)]
    return [case for pair in zip_longest(*both) for case in pair if case is not None]


def _bench(measure: Callable[..., dict[str, Any]], case: Case, name: str, dtype: str, limits: Limits) -> Step:
    return lambda: measure(case, name, dtype, limits, 5)


def _conform(case: Case, name: str, dtype: str) -> Step:
    return lambda: conform(case, name, dtype)


def conform(case: Case, name: str, dtype: str) -> dict[str, Any]:
    """Write the rows' own keys and values, attend, compare every number of cache and result, bits of repeats."""
    one, kind = IMPLEMENTATIONS[name], jnp.dtype(dtype)
    try:
        choose_implementation(name, dtype=kind, cache_dtype=kind, **case.head_sizes)
    except ValueError as error:
        return {"status": "cannot", "reason": str(error)}
    inputs = make_small_inputs(case, implementation=name, dtype=dtype)
    whole, (slots,), positions, num_decode = inputs[1:]
    k, v, before = own_rows(whole, slots, positions, case.head_dim)
    how = {"num_decode": num_decode, "implementation": name}
    options = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.scale}

    def run(cache, q, k, v, slots, positions):
        cache = write_rows(cache, k, v, slots, positions, **how)
        return cache, slot_attention(q, cache, slots, positions, **how, **options)

    start = time.perf_counter()
    cache, *rest = jax.device_put((before, inputs.q, k, v, slots, positions))
    program = jax.jit(run, donate_argnums=0).lower(cache, *rest).compile()
    compiled = time.perf_counter()
    after, out = program(cache, *rest)
    written = all(_same(np.asarray(got), right) for got, right in zip(after, whole, strict=True))
    error, allowed = worst_error(case, inputs, out, samples=None), tolerance(dtype, jax.default_backend(), name)
    stable = True
    for _ in range(3):
        after, again = program(after, *rest)
        stable &= _same(np.asarray(again), np.asarray(out))
    memory: Any = program.memory_analysis()
    cache_bytes = sum(array.nbytes for array in whole)
    # On a TPU `xla` may copy the cache, as its scatter does; what is written for a device may not.
    in_place = one.layout == "fused" or attention_timing.on_cpu()
    copied = in_place and memory.temp_size_in_bytes >= cache_bytes
    moved = in_place and memory.alias_size_in_bytes < cache_bytes
    reasons = [
        *([] if written else ["write_rows left another cache than it should"]),
        *([] if error <= allowed else [f"off by {error:.2g} of the largest value, allowed {allowed:.2g}"]),
        *([] if stable else ["the same call gave other bits"]),
        *([f"takes {memory.temp_size_in_bytes} bytes beside a cache of {cache_bytes}"] if copied else []),
        *([f"writes {memory.alias_size_in_bytes} bytes in place of {cache_bytes}"] if moved else []),
    ]
    return {
        "status": "wrong" if reasons else "ok",
        "reason": "; ".join(reasons),
        "error": error,
        "compile_s": compiled - start,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "cache_bytes": cache_bytes,
    }


def own_rows(whole, slots: np.ndarray, positions: np.ndarray, H: int):
    """Keys and values of the rows themselves, sevens for padding; and the cache before they are written: NaN there."""
    arrays = tuple(np.array(array) for array in whole)
    live = slots < arrays[0].shape[0]
    at = (slots[live], slice(None), positions[live])
    taken = np.concatenate([array[at] for array in arrays], -1)[..., : 2 * H]  # [rows, K, 2H]
    own = np.full((len(slots), *taken.shape[1:]), 7, taken.dtype)
    own[live] = taken
    for array in arrays:
        array[at] = np.nan
    return own[..., :H], own[..., H:], arrays


def _same(got: np.ndarray, right: np.ndarray) -> bool:
    return bool(((got == right) | (np.isnan(got) & np.isnan(right))).all())


def device_lives() -> bool:
    """Whether anything runs still: on some devices an illegal access breaks all that follows in the process."""
    try:
        return float(jnp.sum(jnp.ones((8,)))) == 8
    except Exception:
        return False


def run_group(steps: dict[str, Step], wanted: Callable[[str], bool], emit: Callable[[dict[str, Any]], None]) -> int:
    """The exit status: DEVICE_LOST, with the rest not run, where an error left the device unusable."""
    items = [item for item in steps if wanted(item)]
    emit({"event": "plan", "items": items})
    for item in items:
        emit({"event": "start", "item": item})
        start = time.perf_counter()
        try:
            found = steps[item]()
        except Exception as error:
            found = {"status": "error", "reason": " ".join(f"{type(error).__name__}: {error}".split())[:2000]}
        emit({"event": "result", "item": item, "took_s": time.perf_counter() - start, **found})
        if found["status"] == "error" and not device_lives():
            return DEVICE_LOST
    return 0


def main() -> int:
    """The exit status."""
    what = json.loads(sys.argv[1])
    emit_line({"event": "info", **info()})

    def wanted(item: str) -> bool:
        return item not in what["skip"] and any(fnmatchcase(item, one) for one in (*what["patterns"], "limits"))

    return run_group(plan(what["group"]), wanted, emit_line)


def emit_line(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
