"""Parts of a layer against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import layers
from model.kv_cache import ROWS_MULTIPLE, cache_bytes, init_cache
from pallas_kernels import cpu
from pallas_kernels.attention import write_rows

GROUPED = [layers._grouped_matmul_blocks, layers._grouped_matmul_ragged]


@pytest.mark.parametrize("product", GROUPED)
@pytest.mark.parametrize(
    "counts", [(5, 0, 1, 34), (0, 0, 0, 40), (40, 0, 0, 0), (16, 16, 8, 0), (10, 10, 10, 10), (1, 0, 0, 0)]
)
def test_grouped_matmul(product, counts):
    rng = np.random.default_rng(0)
    rows, experts = sum(counts), len(counts)
    x = rng.normal(size=(rows, 24)).astype(np.float32)
    weights = rng.normal(size=(experts, 10, 24)).astype(np.float32)
    expert = np.repeat(np.arange(experts), counts)
    expected = np.einsum("ri,roi->ro", x.astype(np.float64), weights[expert].astype(np.float64))
    out = jax.jit(product)(jnp.asarray(x), jnp.asarray(weights), jnp.asarray(counts))
    # 24 products of size one in float32.
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_grouped_matmul_multiplies_chosen_rows_only():
    """By the program: its one product is of a block of rows with one expert's weights, not of all with all."""
    x, weights, counts = jnp.zeros((256, 64)), jnp.zeros((32, 64, 64)), jnp.full(32, 8)
    text = jax.jit(layers._grouped_matmul_blocks).lower(x, weights, counts).as_text()
    names = ("stablehlo.dot_general", "@carousel_matmul")
    products = [line for line in text.splitlines() if any(name in line for name in names)]
    assert len(products) == 1, "one product, of one block with one expert's weights, inside the loop"
    assert "tensor<64x64xf32>" in products[0]
    assert "tensor<16x64xf32>" in products[0]


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 200])
def test_matmul_is_the_same_product_in_either_form(rows):
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(rows, 48)).astype(np.float32), rng.normal(size=(20, 48)).astype(np.float32)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    # 48 products of size one in float32.
    np.testing.assert_allclose(layers.matmul(jnp.asarray(x), jnp.asarray(weight)), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(monkeypatch, offset, kernels):
    if not kernels:
        monkeypatch.setattr(cpu, "unavailable", lambda: "not in this test")
    rng = np.random.default_rng(2)
    norm = layers.RMSNorm(32, eps=1e-3, offset=offset, dtype=jnp.float32)
    np.testing.assert_array_equal(norm.weight[...] + offset, 1.0)
    weight = rng.normal(size=32).astype(np.float32)
    norm.weight = nnx.Param(jnp.asarray(weight))
    x = rng.normal(size=(5, 3, 32)) * 0.05
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * (offset + weight)
    # Values of size one, rounded a few times to 2**-24.
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_gated(monkeypatch, activation, kernels):
    if not kernels:
        monkeypatch.setattr(cpu, "unavailable", lambda: "not in this test")
    x = np.random.default_rng(3).normal(size=(5, 40)) * 3
    gate, up = x[:, :20], x[:, 20:]
    tanh = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
    erf = np.vectorize(math.erf)(gate / np.sqrt(2))
    factor = {"silu": 1 / (1 + np.exp(-gate)), "gelu_tanh": (1 + tanh) / 2, "gelu": (1 + erf) / 2}[activation]
    out = layers.gated(jnp.asarray(x, jnp.float32), activation)
    # Products up to 40, rounded a few times to 2**-24.
    np.testing.assert_allclose(out, gate * factor * up, rtol=0, atol=2e-5)


def test_cache_layouts():
    """Rows fill whole blocks; what is stored is the same in both layouts."""
    size = {"layers": 1, "slots": 3, "max_len": 100, "kv_heads": 2, "head_dim": 4, "dtype": jnp.float32}
    ((k, v),) = split = init_cache(**size, implementation="xla")
    assert k.shape == v.shape == (3, 2, ROWS_MULTIPLE, 4)
    ((kv,),) = init_cache(**size, implementation="mosaic_tpu")
    assert kv.shape == (3, 2, ROWS_MULTIPLE, 128)
    ((kv,),) = fused = init_cache(**size, implementation="mosaic_gpu")
    assert kv.shape == (3, 2, ROWS_MULTIPLE, 8)
    assert cache_bytes(split) == cache_bytes(fused) == 2 * 3 * 2 * ROWS_MULTIPLE * 4 * 4


def test_write_drops_what_is_past_the_end():
    (cache,) = init_cache(
        layers=1, slots=3, max_len=100, kv_heads=2, head_dim=4, dtype=jnp.float32, implementation="xla"
    )
    new = jnp.ones((2, 2, 4))
    at = jnp.asarray([2, 0]), jnp.asarray([99, ROWS_MULTIPLE])
    k, v = write_rows(cache, new, -new, *at, num_decode=2, implementation="xla")
    assert k.sum() == -v.sum() == k[2, :, 99].sum() == 8
