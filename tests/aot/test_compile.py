"""What is true of every kernel and of the step once they are compiled for an accelerator.

No register goes to memory, the cache is never copied, and it is written in place. Compiled alone says already that the
blocks fit shared memory or VMEM.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from batching.plan import PlanShapes
from batching.step import copy_prefix, init_state, split_model, step
from model.config import ModelConfig
from model.kv_cache import init_cache
from model.transformer import Transformer
from pallas_kernels.attention import IMPLEMENTATIONS, LayerCache, slot_attention, write_rows
from pallas_kernels.attention.tuning import MEASURED
from tests.aot import report
from tests.aot.ptxas import dumped_kernels
from tests.aot.targets import GPUS, TARGETS, compile_for, copies, device_kind

SLOTS, ROWS, KV_HEADS = 16, 4096, 2  # a cache next to which blocks and partial results are small
DTYPE = jnp.bfloat16
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 8)  # query heads a KV head
CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())

pytestmark = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture(autouse=True)
def block_sizes(target, monkeypatch):
    """Kernels ask for the block sizes of JAX's own device, here a nameless one: give them the target's."""
    for (name, kind, *rest), sizes in list(MEASURED.items()):
        if kind == device_kind(target):
            monkeypatch.setitem(MEASURED, (name, "", *rest), sizes)


def implementation_for(target: str, head_dim: int, dtype: Any = DTYPE, heads: int = 1, kv_heads: int = 1) -> str:
    """The one that is written for `target`; skips the test where it does not take such heads."""
    name = "mosaic_gpu" if target in GPUS else "mosaic_tpu"
    if reason := IMPLEMENTATIONS[name].unsupported(dtype, dtype, head_dim, heads, kv_heads):
        pytest.skip(reason)
    return name


def compile_and_report(target: str, case: str, fn: Any, *args: Any, **how: Any) -> Any:
    """The compiled program, noted for the table and known not to spill."""
    with dumped_kernels() as kernels:
        compiled = compile_for(target, fn, *args, **how)
    report.add(target, case, compiled, kernels)
    assert [use for use in kernels if use.spilled] == []
    return compiled


def rows_of(kind: str, implementation: str) -> tuple[int, int]:
    """(rows, decode rows of them): one a slot, or a few blocks of prompts."""
    return (SLOTS, SLOTS) if kind == "decode" else (4 * IMPLEMENTATIONS[implementation].block_q, 0)


def layer_cache(implementation: str, head_dim: int, dtype: Any = DTYPE, kv_heads: int = KV_HEADS) -> LayerCache:
    sizes = {"slots": SLOTS, "max_len": ROWS, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    return jax.eval_shape(partial(init_cache, layers=1, implementation=implementation, **sizes))[0]


def heads_of(rows: int, heads: int, head_dim: int, dtype: Any = DTYPE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, heads, head_dim), dtype)


def indices(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows,), jnp.int32)


def assert_never_copied(compiled: Any, cache: Any) -> None:
    """No instruction copies an array of the cache, nor is there memory for one."""
    leaves = jax.tree.leaves(cache)
    assert [line for shape in {leaf.shape for leaf in leaves} for line in copies(compiled, shape)] == []
    assert compiled.memory_analysis().temp_size_in_bytes < nbytes(leaves[0])


def assert_in_place(compiled: Any, cache: Any) -> None:
    """The result's cache is the argument's memory."""
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(map(nbytes, jax.tree.leaves(cache)))


def nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_attention(target, kind, group, head_dim):
    check_attention(target, kind, group, head_dim, f"{kind} H={head_dim} G={group}")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_attention_with_window_and_soft_cap(target, kind, head_dim):
    """Both cost registers. The window is traced, as where layers that differ in it share a program."""
    check_attention(target, kind, 4, head_dim, f"{kind} H={head_dim} G=4 window, soft cap", window=True, soft_cap=30.0)


def check_attention(target, kind, group, head_dim, case, *, window=False, soft_cap=None):
    implementation = implementation_for(target, head_dim)
    rows, num_decode = rows_of(kind, implementation)
    cache = layer_cache(implementation, head_dim)

    def attend(q, cache, slots, positions, window):
        how = {"num_decode": num_decode, "implementation": implementation, "soft_cap": soft_cap}
        return slot_attention(q, cache, slots, positions, window=window, **how)

    traced = jax.ShapeDtypeStruct((), jnp.int32) if window else None
    q = heads_of(rows, group * KV_HEADS, head_dim)
    compiled = compile_and_report(target, case, attend, q, cache, indices(rows), indices(rows), traced)
    assert_never_copied(compiled, cache)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_write(target, kind, head_dim):
    check_write(target, kind, head_dim, KV_HEADS, DTYPE, f"write {kind} H={head_dim}")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_other_dtypes(target, kind, head_dim, dtype):
    check_write(target, kind, head_dim, KV_HEADS, dtype, f"write {kind} H={head_dim} {jnp.dtype(dtype)}", group=4)


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["decode", "chunk"])
def test_many_kv_heads(target, kind, head_dim, dtype, kv_heads):
    """All of whose rows are written together on a TPU, and of decode rows read together."""
    name = f"write {kind} H={head_dim} K={kv_heads} {jnp.dtype(dtype)}"
    check_write(target, kind, head_dim, kv_heads, dtype, name)


def check_write(target, kind, head_dim, kv_heads, dtype, case, *, group=1):
    """With the attention that reads the rows: some XLAs refuse a TPU program that does nothing but write."""
    implementation = implementation_for(target, head_dim, dtype, group * kv_heads, kv_heads)
    rows, num_decode = rows_of(kind, implementation)
    cache = layer_cache(implementation, head_dim, dtype, kv_heads)
    new = heads_of(rows, kv_heads, head_dim, dtype)
    q = heads_of(rows, group * kv_heads, head_dim, dtype)
    how = {"num_decode": num_decode, "implementation": implementation}

    def write_and_attend(cache, q, k, v, slots, positions):
        cache = write_rows(cache, k, v, slots, positions, **how)
        return cache, slot_attention(q, cache, slots, positions, **how)

    arguments = cache, q, new, new, indices(rows), indices(rows)
    compiled = compile_and_report(target, case, write_and_attend, *arguments, donate_argnums=0)
    assert_never_copied(compiled, cache)
    assert_in_place(compiled, cache)


@pytest.mark.parametrize("chunk", [0, 256])
def test_step(target, chunk):
    """The whole turn of a model of 30 layers: what XLA does to the cache between the kernels."""
    config = ModelConfig.from_hf(CONFIGS["HuggingFaceTB/SmolLM2-135M"])
    implementation = implementation_for(target, config.head_dim)
    graph, weights = split_model(nnx.eval_shape(lambda: Transformer(config, dtype=DTYPE, rngs=nnx.Rngs(0))))
    sizes = {"slots": SLOTS, "max_len": ROWS, "cache_dtype": DTYPE, "implementation": implementation}
    state = jax.eval_shape(partial(init_state, config, **sizes))
    shapes = PlanShapes.choose(SLOTS, [256], IMPLEMENTATIONS[implementation].block_q)
    compiled = compile_and_report(
        target,
        f"step of 30 layers, {SLOTS} decode rows, {chunk} of chunks",
        step,
        *(weights, state, shapes.empty(SLOTS, chunk)),
        static={"graph": graph, "num_decode": SLOTS, "implementation": implementation},
    )
    assert_never_copied(compiled, state.cache)
    assert_in_place(compiled, state.cache)


def test_copy_of_a_prefix(target):
    """From slot to slot, in all layers of the same model: a block of rows at a time, of one array after the other."""
    config = ModelConfig.from_hf(CONFIGS["HuggingFaceTB/SmolLM2-135M"])
    implementation = implementation_for(target, config.head_dim)
    sizes = {"slots": SLOTS, "max_len": ROWS, "cache_dtype": DTYPE, "implementation": implementation}
    state, number = jax.eval_shape(partial(init_state, config, **sizes)), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_and_report(target, "copy of a prefix", copy_prefix, state, number, number, number)
    assert_never_copied(compiled, state.cache)
    assert_in_place(compiled, state.cache)
