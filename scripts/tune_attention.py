"""Tune attention: which block sizes are fastest on this device, to be pasted into pallas_kernels/attention/tuning.py.

For each head dim, decode rows and prompt chunks are tuned apart: every candidate runs the same few cases, checked and
timed as scripts.bench_attention does; one that does not compile, or is wrong, is out. The best has the least geometric
mean of seconds; the entry in use stays unless the best is faster by more than 2 %. The JSON is written anew before
every candidate, which it names as `trying`: that is the one to blame where a device hangs. One that breaks the device,
so that nothing runs in this process any more, ends the tuning.

Exit status: 0; 1 if a candidate was wrong; 2 if something could not be run or written; 130 after Ctrl-C.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Column, Table

from pallas_kernels.attention import IMPLEMENTATIONS, cache_shapes
from pallas_kernels.attention.tuning import MEASURED, Tuning, tuning
from scripts import attention_timing
from scripts.attention_cases import Case
from scripts.bench_attention import names, write_json
from scripts.command import Refused, Report, check_targets, exit_status
from scripts.device_steps import device_lives
from scripts.limits import Limits

BLOCK_K = {"mosaic_gpu": (64, 128), "mosaic_tpu": (128, 256, 512, 1024)}
STAGES = {"mosaic_gpu": (2, 3, 4, 5, 6), "mosaic_tpu": (2, 3, 4)}
FASTER = 0.98  # times the seconds of the entry in use: less than that is noise
PARTS = ("decode", "chunk")


@dataclass(frozen=True)
class Options:
    head_dims: str = "64,128,256"
    """Sizes of heads, with commas between."""
    implementation: str | None = None
    """None: the first that runs here and has block sizes."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of queries and cache."""
    repeat: int = 5
    """Times that each case is timed; the medians count."""
    budget_s: float = 600.0
    """Seconds after which no further candidate is tried."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout."""

    def __post_init__(self) -> None:
        if not names(self.head_dims) or not all(dim.isdigit() and int(dim) > 0 for dim in names(self.head_dims)):
            raise ValueError(f"head_dims must be positive numbers with commas between, not {self.head_dims!r}")
        if self.implementation not in (None, *BLOCK_K):
            raise ValueError(f"implementation must be one of {', '.join(BLOCK_K)}, not {self.implementation!r}")
        if self.repeat < 1 or not self.budget_s > 0:
            raise ValueError("repeat must be at least 1, and budget_s positive")


def cases_of(part: str, H: int) -> list[Case]:
    """What a part is tuned for: four query heads a KV head, in a large batch and behind a long context."""
    if part == "decode":
        uneven = tuple(64 * row + 63 for row in range(64))
        return [
            Case(f"h{H}/decode_64x4096", 32, 8, H, decode=(4095,) * 64),
            Case(f"h{H}/decode_64x64..4096", 32, 8, H, decode=uneven),
        ]
    return [
        Case(f"h{H}/prefill_2048", 32, 8, H, chunks=((0, 2048),)),
        Case(f"h{H}/prefill_512_behind_8192", 32, 8, H, chunks=((8192, 512),)),
    ]


def candidates(key: tuple[str, str, str, int], part: str, used: Tuning) -> list[Tuning]:
    """The entry in use first; the other part stays as it is. Of several that would run alike, one, as it would run."""
    sizes = product(BLOCK_K[key[0]], STAGES[key[0]])
    changed = [replace(used, **{f"{part}_block_k": block_k, f"{part}_stages": stages}) for block_k, stages in sizes]
    alike = {as_run(key, part, used): used}
    for one in changed:
        alike.setdefault(as_run(key, part, one), as_run(key, part, one))
    return list(alike.values())


def as_run(key: tuple[str, str, str, int], part: str, one: Tuning) -> Tuning:
    """With the block that a TPU's memory leaves of the one that is asked for, in the part's cases."""
    implementation, _, dtype, H = key
    if implementation != "mosaic_tpu":
        return one
    from pallas_kernels.attention import mosaic_tpu_attend

    block_k, stages = getattr(one, f"{part}_block_k"), getattr(one, f"{part}_stages")
    rows = []
    for case in cases_of(part, H):
        shapes = cache_shapes(implementation, len(case.segments), case.kv_heads, case.slot_rows, H)
        kv = jax.ShapeDtypeStruct(shapes[0], jnp.dtype(dtype))
        heads = mosaic_tpu_attend.heads_together(kv, stages) if part == "decode" else 1
        rows.append(mosaic_tpu_attend.block_rows(kv, block_k, stages, heads))
    return replace(one, **{f"{part}_block_k": max(rows)})


@contextmanager
def trying(key: tuple[str, str, str, int], candidate: Tuning) -> Iterator[None]:
    """What is traced inside takes the candidate."""
    before = MEASURED.get(key)
    MEASURED[key] = candidate
    try:
        yield
    finally:
        del MEASURED[key]
        if before is not None:
            MEASURED[key] = before


def choose(options: Options) -> str:
    """Raises Refused where nothing has block sizes that can be tuned here."""
    reasons = {name: IMPLEMENTATIONS[name].unavailable() for name in BLOCK_K}
    wanted = [name for name in BLOCK_K if options.implementation in (None, name)]
    for name in wanted:
        if reasons[name] is None:
            return name
    raise Refused("nothing to tune here: " + "; ".join(f"{name}: {reasons[name]}" for name in wanted))


def try_candidate(
    key: tuple[str, str, str, int], part: str, candidate: Tuning, limits: Limits, repeat: int
) -> dict[str, Any]:
    """The rows of its cases up to the first that fails, and its score: the logarithm of the geometric mean."""
    implementation, _, dtype, H = key
    rows = []
    with trying(key, candidate):
        for case in cases_of(part, H):
            rows.append(attention_timing.measure(case, implementation, dtype, limits, repeat))
            if rows[-1]["status"] != "ok":
                return {"part": part, **asdict(candidate), "cases": rows, "score": None}
    score = sum(math.log(row["s"]) for row in rows) / len(rows)
    return {"part": part, **asdict(candidate), "cases": rows, "score": score}


def best(tried: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of one part, the entry in use first. None: none of them works."""
    good = [one for one in tried if one["score"] is not None]
    if not good:
        return None
    fastest, used = min(good, key=lambda one: one["score"]), tried[0]
    keeps = used["score"] is not None and fastest["score"] > used["score"] + math.log(FASTER)
    return used if keeps else fastest


def tune(options: Options, console: Console, report: Report) -> int:
    """Try, show, write. The exit status."""
    check_targets({}, {"--json": options.json})
    implementation, machine, start = choose(options), attention_timing.machine(), time.monotonic()
    limits = attention_timing.measure_rates()
    result: dict[str, Any] = machine | {"limits": limits._asdict(), "complete": True, "entries": []}
    for H in map(int, names(options.head_dims)):
        key = (implementation, machine["device"], options.dtype, H)
        try:
            found = used = tuning(*key)
        except ValueError as error:
            raise Refused(str(error)) from None
        entry: dict[str, Any] = {"key": key, "used": asdict(used), "tried": []}
        result["entries"].append(entry)
        for part in PARTS:
            tried: list[dict[str, Any]] = []
            for candidate in candidates(key, part, used):
                if time.monotonic() - start > options.budget_s:
                    result["complete"] = False
                    break
                result["trying"] = {"key": key, "part": part, **asdict(candidate)}
                write_json(options.json, result, done=False)
                tried.append(try_candidate(key, part, candidate, limits, options.repeat))
                entry["tried"].append(tried[-1])
                report(line(H, tried[-1]))
                if tried[-1]["cases"][-1]["status"] == "error" and not device_lives():
                    result["complete"] = False
                    write_json(options.json, result, done=True)
                    raise Refused("nothing runs on the device any more; the JSON has what was found before")
            if chosen := best(tried):
                found = replace(found, **{name: chosen[name] for name in (f"{part}_block_k", f"{part}_stages")})
        entry["found"] = asdict(found)
        entry["text"] = f"    {key!r}: {text_of(found)},".replace("'", '"')
    result.pop("trying", None)
    write_json(options.json, result, done=True)
    console.print(table(result))
    report("for MEASURED in pallas_kernels/attention/tuning.py:")
    for entry in result["entries"]:
        report(entry["text"])
    return int(any(row["status"] == "wrong" for row in rows_of(result)))


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for entry in result["entries"] for one in entry["tried"] for row in one["cases"]]


def text_of(one: Tuning) -> str:
    return f"Tuning({', '.join(map(str, asdict(one).values()))})"


def line(H: int, one: dict[str, Any]) -> str:
    """A candidate, in one line: microseconds of each case, or why it is out."""
    start = f"h{H} {one['part']:6} block_k {one[one['part'] + '_block_k']:4} stages {one[one['part'] + '_stages']}:"
    shown = [f"{row['s'] * 1e6:.1f} us" if row["status"] == "ok" else row["status"] for row in one["cases"]]
    reason = one["cases"][-1].get("reason", "")[:200] if one["score"] is None else ""
    return " ".join([start, *shown, reason]).rstrip()


def table(result: dict[str, Any]) -> Table:
    """What is in use and what was found, with the time of the second against the first."""
    shown = Table("head dim", "part", "in use", "found", Column("time", justify="right"))
    for entry in result["entries"]:
        for part in PARTS:
            tried = [one for one in entry["tried"] if one["part"] == part]
            chosen, fields = best(tried), (f"{part}_block_k", f"{part}_stages")
            used, found = (" x ".join(str(entry[which][name]) for name in fields) for which in ("used", "found"))
            if chosen is None:
                share = "none works"
            elif tried[0]["score"] is None:
                share = "the one in use does not work"
            else:
                share = f"{math.exp(chosen['score'] - tried[0]['score']):.0%}"
            shown.add_row(str(entry["key"][3]), part, used, found, share)
    shown.caption = f"{result['device']}; keys a block x blocks in flight"
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.tune_attention", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda report: tune(options, console, report), console)


if __name__ == "__main__":
    sys.exit(main())
