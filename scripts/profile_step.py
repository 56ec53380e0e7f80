"""Profile one turn: where its time goes, part by part, and how near each part is to what the machine can do.

Each part runs over all layers as a program of its own, on the shapes, weights and cache of the whole step, and is timed
in turns with it; host is planning before the step and interpreting its tokens after it. What the parts do not explain
is shown as such: on the device parts may overlap or be fused.

Exit status: 0; 2 if something could not be run or written; 130 after Ctrl-C.
"""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.plan import FROM_DEVICE, BatchPlan, Chunk, build_plan
from batching.step import settings_of
from model.layers import normed
from model.logits import init_sampling
from model.sampling import sample
from model.transformer import Transformer
from scripts.command import check_matplotlib, check_picture, check_targets, exit_status, naming, write_json
from scripts.figures import system_figures
from scripts.limits import Limits, Work, attention_work, dense, linear_work, measure_limits
from scripts.startup import make_engine


@dataclass(frozen=True)
class Options:
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    rows: int = 16
    """Decode rows of the turn, one a slot."""
    length: int = 256
    """Tokens that each of them attends to."""
    chunk: int = 0
    """Prompt tokens of one more slot in the same turn."""
    behind: int = 0
    """Tokens of that prompt that are in the cache already."""
    repeat: int = 15
    """Times that the turn and each part are timed, in turns; the medians count."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout."""
    picture: str | None = None
    """Where a picture goes: a .png or .svg file; needs matplotlib."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=lambda: EngineConfig(prefix_reuse=False))
    """How requests are served."""

    def __post_init__(self) -> None:
        slots, most = self.engine.slots, self.engine.max_len
        if not 0 <= self.rows <= slots - (self.chunk > 0):
            raise ValueError(f"rows must be in 0 .. {slots - (self.chunk > 0)} with {slots} slots, not {self.rows}")
        if not 1 <= self.length <= most or not 0 <= self.behind + self.chunk <= most:
            raise ValueError(f"length, and behind + chunk, must fit in max_len {most}")
        if self.rows + self.chunk < 1 or min(self.chunk, self.behind) < 0 or self.repeat < 1:
            raise ValueError("a turn needs rows or a chunk, and repeat at least 1")
        if self.chunk > max(self.engine.chunk_sizes) or self.rows > self.engine.max_queue:
            raise ValueError("chunk must fit in the largest of chunk_sizes, and rows in max_queue")
        check_picture(self.picture)


def make_plan(engine: Engine, options: Options) -> BatchPlan:
    """The turn that is profiled."""
    decode = [Chunk(slot, options.length - 1, (FROM_DEVICE,), True) for slot in range(options.rows)]
    tokens = tuple(position % 97 + 3 for position in range(options.chunk))
    prefill = [Chunk(options.rows, options.behind, tokens, True)] if tokens else []
    return build_plan(engine.scheduler.shapes, decode, prefill)


def parts_of(engine: Engine, plan: BatchPlan) -> dict[str, Callable[[], Any]]:
    """Name -> a function that runs that part over all layers and waits for it."""
    graph, weights, rows = engine.runner.graph, engine.runner.weights, jax.tree.map(jnp.asarray, plan.rows)
    T, config = len(plan.rows.tokens), engine.model_config
    dtype = weights[0].dtype
    hidden = jax.random.normal(jax.random.key(0), (T, config.width), dtype)
    heads = jax.random.normal(jax.random.key(1), (T, config.num_heads, config.head_dim), dtype)
    kv = jax.random.normal(jax.random.key(2), (T, config.num_kv_heads, config.head_dim), dtype)
    logits = jax.random.normal(jax.random.key(3), (len(plan.rows.sample_rows), config.vocab_size), jnp.float32)
    how = {"num_decode": plan.num_decode, "implementation": engine.runner.attention}

    def part(run: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
        program = jax.jit(lambda weights, *inputs: run(graph.model(weights), *inputs))
        return lambda: jax.block_until_ready(program(weights, *inputs))

    def qkv(model: Transformer, x):
        rotations = model.rotations(rows.positions)
        for layer in model.layers:
            rotation = rotations[layer.attention.layer.rope]
            q, _, _ = layer.attention.project(normed(layer.input_norm, x), rotation)
            x = x + 1e-30 * q[:, 0, :1]  # so that layers come one after the other, as they do in the step
        return x

    def output(model: Transformer, x, out):
        for layer in model.layers:
            x = x + normed(layer.post_attention_norm, layer.attention.o(out + 1e-30 * x[:, :1]))
        return x

    def mlp(model: Transformer, x):
        for layer in model.layers:
            x = x + normed(layer.post_mlp_norm, layer.mlp(normed(layer.mlp_norm, x)))
        return x

    @functools.partial(jax.jit, donate_argnums=1)
    def attend(weights, cache, q):
        written = []
        for layer, layer_cache in zip(graph.model(weights).layers, cache, strict=True):
            out, layer_cache = layer.attention.attend(q, kv, kv, layer_cache, rows.slots, rows.positions, **how)
            q = q + 1e-30 * out.reshape(q.shape)
            written.append(layer_cache)
        return q, tuple(written)

    def attention() -> None:
        out, cache = attend(weights, engine.runner.state.cache, heads)
        engine.runner.state = replace(engine.runner.state, cache=cache)
        jax.block_until_ready(out)

    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    def take_all(weights, state, rows):
        return state, rows.tokens + 1

    def launch() -> None:
        engine.runner.state, tokens = take_all(weights, engine.runner.state, plan.rows)
        np.asarray(tokens)

    state = init_sampling(engine.config.slots, config.vocab_size)

    def sampling(model: Transformer, logits):
        positions = rows.positions[rows.sample_rows] + 1
        return sample(logits, settings_of(rows), state, rows.sample_slots, positions)

    return {
        "nothing": part(lambda model, tokens: tokens + 1, rows.tokens),
        "launch": launch,
        "embedding": part(lambda model, tokens: model.embed.weight[...][jnp.maximum(tokens, 0)], rows.tokens),
        "QKV": part(qkv, hidden),
        "attention": attention,
        "output": part(output, hidden, heads.reshape(T, -1)),
        "MLP": part(mlp, hidden),
        "head": part(lambda model, x: model.unembed(x[rows.sample_rows]), hidden),
        "sampling": part(sampling, logits),
    }


def work_of(engine: Engine, plan: BatchPlan) -> dict[str, Work]:
    """Flops and bytes of each part for the rows that are live: what padding costs counts as time lost."""
    config, live = engine.model_config, plan.rows.slots < engine.config.slots
    itemsize = engine.runner.weights[0].dtype.itemsize
    cache_itemsize = jax.tree.leaves(engine.runner.state.cache)[0].dtype.itemsize
    sampled = int((plan.rows.sample_slots < engine.config.slots).sum())
    return linear_work(config, plan.live_rows, itemsize) | {
        "attention": attention_work(config, plan.rows.slots[live], plan.rows.positions[live], cache_itemsize),
        "head": dense(sampled, config.width, config.vocab_size, itemsize),
        "embedding": Work(0.0, float(itemsize * config.width * plan.live_rows)),
        "sampling": Work(0.0, 4.0 * sampled * config.vocab_size),
    }


def host_seconds(engine: Engine, options: Options) -> float:
    """Planning and interpreting a turn of so many decode rows: the median over turns of real requests."""
    params = SamplingParams(max_tokens=min(12, engine.config.max_len), temperature=0.0, ignore_eos=True)
    for _ in range(max(options.rows, 1)):
        engine.submit(Request(prompt_ids=[3], params=params))
    taken = []
    while engine.scheduler.unfinished:
        start = time.perf_counter()
        turn = engine.scheduler.plan()
        planned = time.perf_counter() - start
        assert turn is not None
        sampled = turn.fetch(engine.run(turn))
        start = time.perf_counter()
        engine.finish(turn, sampled)
        taken.append(planned + time.perf_counter() - start)
    engine.step()  # takes the outputs away
    return statistics.median(taken[2:] or taken)


def profile(engine: Engine, options: Options) -> dict[str, Any]:
    """Seconds of the turn and of its parts."""
    plan, limits = make_plan(engine, options), measure_limits()
    program, parts = engine.runner.programs[plan.shape], parts_of(engine, plan)

    def step() -> None:
        engine.runner.state, sampled = program(engine.runner.weights, engine.runner.state, plan.rows)
        np.asarray(sampled.tokens)

    host = host_seconds(engine, options)
    taken: dict[str, list[float]] = {name: [] for name in ("step", *parts)}
    for _ in range(options.repeat + 1):
        for name, run in {"step": step, **parts}.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in taken.items()}
    turn = medians.pop("step") + host
    nothing = medians.pop("nothing")  # a program that does nothing: in the time of every part
    launch = medians["launch"]  # one that does nothing but take and give back all that the step does
    medians = {name: max(taken_s - nothing, 0.0) for name, taken_s in medians.items()} | {"launch": launch}
    work = work_of(engine, plan)
    rows = {
        name: figures(taken_s, work.get(name, Work()), turn, limits, too_short=launch / 10)
        for name, taken_s in (medians | {"host": host}).items()
    }
    return {
        "shape": {"rows": options.rows, "length": options.length, "chunk": options.chunk, "behind": options.behind},
        "program_rows": len(plan.rows.tokens),
        "live_rows": plan.live_rows,
        "turn_s": turn,
        "accounted": sum(row["s"] for row in rows.values()) / turn,
        "limits": limits._asdict(),
        "parts": rows,
    }


def figures(taken_s: float, work: Work, turn: float, limits: Limits, *, too_short: float) -> dict[str, float]:
    """`too_short`: seconds below which a part is lost in a launch's noise: it has a time, but its rates are 0."""
    rate = 0.0 if taken_s < too_short else 1 / taken_s
    return {
        "s": taken_s,
        "share": taken_s / turn,
        "flops": work.flops,
        "bytes": work.bytes,
        "share_of_matrix_rate": work.flops * rate / limits.flops_per_s,
        "share_of_memory_rate": work.bytes * rate / limits.bytes_per_s,
    }


def table(result: dict[str, Any]) -> Table:
    """A line a part."""
    shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items() if value)
    title = f"{shape}: {result['turn_s'] * 1e3:.1f} ms, {result['accounted']:.0%} of it in the parts"
    shown = Table("part", "ms", "share", "GFLOP/s", "of matrix rate", "GB/s", "of memory rate", title=title)
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, row in result["parts"].items():
        cells = [f"{row['s'] * 1e3:.2f}", f"{row['share']:.1%}"]
        for amount, share in (("flops", "share_of_matrix_rate"), ("bytes", "share_of_memory_rate")):
            cells += [f"{row[amount] / row['s'] / 1e9:.1f}", f"{row[share]:.0%}"] if row[share] else ["", ""]
        shown.add_row(name, *cells)
    limits = result["limits"]
    shown.caption = f"limits: {limits['flops_per_s'] / 1e9:.0f} GFLOP/s, {limits['bytes_per_s'] / 1e9:.0f} GB/s"
    return shown


def draw(result: dict[str, Any], path: str) -> None:
    """Bars of the parts, with the time that each would take at the machine's limits drawn inside."""
    from matplotlib.figure import Figure

    names, rows = list(result["parts"]), list(result["parts"].values())
    limits = result["limits"]
    least = [max(row["flops"] / limits["flops_per_s"], row["bytes"] / limits["bytes_per_s"]) * 1e3 for row in rows]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [row["s"] * 1e3 for row in rows], color="#9bb8d3", label="measured")
    axes.barh(names, least, height=0.45, color="#1f4e79", label="at the machine's matrix or memory rate")
    axes.invert_yaxis()
    shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items() if value)
    axes.set(xlabel="milliseconds", title=f"one turn: {shape} ({result['turn_s'] * 1e3:.1f} ms)")
    axes.legend(loc="lower right")
    with naming(path):
        figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.profile_step", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return exit_status(lambda _: show(options, console), console)


def show(options: Options, console: Console) -> int:
    """Load, time, show. The exit status."""
    check_matplotlib(options.picture)
    model = options.model if os.path.isfile(options.model) else None
    check_targets({"--model": model}, {"--json": options.json, "--picture": options.picture})
    engine, _ = make_engine(options.model, options.engine, console)
    with console.status("timing"):
        result = profile(engine, options)
    console.print(table(result))
    write_json(options.json, system_figures(options.model, engine) | result)
    if options.picture is not None:
        draw(result, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
