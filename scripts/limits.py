"""What the machine can do, measured, and what a model asks of it, counted."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig


class Limits(NamedTuple):
    """Rates of this machine in this process: a large float32 matrix product, and reading a large matrix once."""

    flops_per_s: float
    bytes_per_s: float


def measure_limits() -> Limits:
    """The best of a few tries, so that a neighbour's work does not make our share look larger than it is."""
    wide = jnp.ones((1 << 15, 1 << 12), jnp.float32)
    row = jnp.ones((1 << 12,), jnp.float32)
    read = jax.jit(lambda matrix, row: matrix @ row)
    return Limits(matrix_rate(jnp.float32), wide.nbytes / min(seconds(read, wide, row, tries=8)))


def matrix_rate(dtype: Any) -> float:
    """Operations a second of a large matrix product."""
    square = jnp.ones((2048, 2048), dtype)
    return 2 * 2048**3 / min(seconds(jax.jit(jnp.dot), square, square, tries=8))


def seconds(run: Callable[..., Any], *args: Any, tries: int) -> list[float]:
    """Seconds of each of `tries` calls that wait for the device, after one that is not counted."""
    taken = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append(time.perf_counter() - start)
    return taken[1:]


class Work(NamedTuple):
    """Operations, and bytes that have to be read or written at least once."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: float) -> "Work":
        return Work(self.flops * count, self.bytes * count)


def dense(rows: float, inputs: int, outputs: int, itemsize: int) -> Work:
    """A product of `rows` rows with one weight matrix, read once."""
    return Work(2.0 * rows * inputs * outputs, float(itemsize * inputs * outputs))


def linear_work(config: ModelConfig, rows: float, itemsize: int) -> dict[str, Work]:
    """Of one turn's dense products over all layers, by part. Mixtures of experts: as if each expert were read."""
    N, K, H, D, F = config.num_heads, config.num_kv_heads, config.head_dim, config.width, config.mlp_width
    layers = len(config.layers)
    mlp = Work()
    for layer in config.layers:
        if layer.moe:
            one = dense(rows, D, 3 * config.moe_intermediate_size, itemsize)
            mlp += Work(one.flops * config.experts_per_token, one.bytes * config.num_experts)
        else:
            mlp += dense(rows, D, 3 * F, itemsize)
    return {
        "QKV": dense(rows, D, (N + 2 * K) * H, itemsize).times(layers),
        "output": dense(rows, N * H, D, itemsize).times(layers),
        "MLP": mlp,
    }


def attention_work(config: ModelConfig, slots: np.ndarray, positions: np.ndarray, itemsize: int) -> Work:
    """Of one turn over all layers: every row against its live keys, each slot's live keys and values read once."""
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    work = Work()
    for layer in config.layers:
        seen = np.minimum(positions + 1, layer.window or np.iinfo(np.int32).max)
        last, first = {}, {}
        for slot, position, keys in zip(slots.tolist(), positions.tolist(), seen.tolist(), strict=True):
            last[slot] = max(last.get(slot, 0), position + 1)
            first[slot] = min(first.get(slot, position + 1), position + 1 - keys)
        rows_read = sum(last[slot] - first[slot] for slot in last)
        work += Work(4.0 * N * H * float(seen.sum()), 2.0 * K * H * itemsize * rows_read)
    return work


def request_flops(config: ModelConfig, prompt: int, generated: int) -> float:
    """Of a request served alone without waste: the head on sampled rows only, attention over live keys."""
    rows = prompt + generated - 1
    linear = sum(work.flops for work in linear_work(config, rows, 4).values())
    attention = attention_work(config, np.zeros(rows, np.int32), np.arange(rows), 4).flops
    return linear + attention + 2.0 * generated * config.width * config.vocab_size
