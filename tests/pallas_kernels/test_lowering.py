"""Every Mosaic kernel, and the whole step, lowers for its platform on a machine that has neither.

Lowering finds blocks that the hardware has no layout for, unknown operations and, for GPUs, too much shared memory.
"""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from batching.plan import PlanShapes
from batching.step import init_state, split_model, step
from model.config import ModelConfig
from model.kv_cache import init_cache
from model.transformer import Transformer
from pallas_kernels.attention import IMPLEMENTATIONS, slot_attention, write_rows

PLATFORMS = {"mosaic_gpu": "cuda", "mosaic_tpu": "tpu"}
SLOTS, ROWS, KV_HEADS = 8, 1024, 2  # of which a GPU has several splits, whatever the head dim
CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())

pytestmark = pytest.mark.parametrize("name", PLATFORMS)


def lower(name, function, *args):
    """The exported module's text."""
    return jax.export.export(function, platforms=[PLATFORMS[name]])(*args).mlir_module()


def kernels_in(text):
    return len(re.findall(r"custom_call @(?:tpu_custom_call|mosaic_gpu_v2)\b", text))


def kernels_of(name, chunks):
    """On a GPU attention of decode rows and the sum of their splits, then of chunks; on a TPU a write too, of each."""
    return (2 + chunks) if name == "mosaic_gpu" else 2 * (1 + chunks)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_kernels_lower(name, head_dim, group):
    """Decode rows, chunks and writes in one program, with a traced window and a soft cap."""
    dtype, T = jnp.bfloat16, SLOTS + 2 * IMPLEMENTATIONS[name].block_q
    size = {"slots": SLOTS, "max_len": ROWS, "kv_heads": KV_HEADS, "head_dim": head_dim, "dtype": dtype}
    (cache,) = jax.eval_shape(functools.partial(init_cache, layers=1, implementation=name, **size))
    q, kv = (jax.ShapeDtypeStruct((T, heads, head_dim), dtype) for heads in (KV_HEADS * group, KV_HEADS))
    index, window = jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    how = {"num_decode": SLOTS, "implementation": name}

    @jax.jit
    def run(cache, q, kv, slots, positions, window):
        cache = write_rows(cache, kv, kv, slots, positions, **how)
        return cache, slot_attention(q, cache, slots, positions, window=window, soft_cap=30.0, **how)

    assert kernels_in(lower(name, run, cache, q, kv, index, index, window)) == kernels_of(name, True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("chunk", [0, 128])
def test_the_step_lowers(name, chunk, dtype):
    """A model of 30 layers."""
    config = ModelConfig.from_hf(CONFIGS["HuggingFaceTB/SmolLM2-135M"])
    if reason := IMPLEMENTATIONS[name].unsupported(
        dtype, dtype, config.head_dim, config.num_heads, config.num_kv_heads
    ):
        pytest.skip(reason)
    graph, weights = split_model(nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0))))
    size = {"slots": SLOTS, "max_len": ROWS, "cache_dtype": dtype, "implementation": name}
    state = jax.eval_shape(functools.partial(init_state, config, **size))
    rows = PlanShapes.choose(SLOTS, [128], IMPLEMENTATIONS[name].block_q).empty(SLOTS, chunk)
    static = {"graph": graph, "num_decode": SLOTS, "implementation": name}
    run = jax.jit(lambda weights, state, rows: step(weights, state, rows, **static))
    text = lower(name, run, weights, state, rows)
    assert kernels_in(text) == kernels_of(name, chunk > 0)  # of the one function that all layers are
    assert text.count("call @run_layer") == 30
