"""The C++ kernels: what they compute, and what happens where they cannot be had."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu
from pallas_kernels.attention import choose_implementation


@pytest.fixture
def afresh():
    """The kernels are looked for anew, in the test and after it."""
    cpu.unavailable.cache_clear()
    yield
    cpu.unavailable.cache_clear()


@pytest.fixture
def kernels():
    if reason := cpu.unavailable():
        pytest.skip(reason)


@pytest.fixture
def matmul(kernels):
    return jax.jit(cpu.matmul)


# Inputs: parts of 128 that are transposed by eights. Outputs: tiles of 6 to 16, groups of 48. Rows: vectors of 8 or 16,
# panels of 16 to 64. One of each is whole, the others have something left over.
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (16, 5), (128, 48), (577, 100), (1536, 36), (61, 8200)])
def test_matmul(matmul, inputs, outputs):
    """Against float64; and bitwise the same for a row whatever the number of rows and its place among them."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(581, inputs)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(outputs, inputs)) * inputs**-0.5, jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    out = np.asarray(matmul(x, weight))
    # A sum of 1536 products in a row: its roundings of 2**-24 add up to some 1e-6 on values of size one.
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    places = ((0, 1), (5, 1), (580, 1), (30, 2), (3, 3), (7, 8), (9, 17), (20, 33), (5, 49), (6, 64), (37, 65))
    for first, rows in (*places, (123, 128), (51, 200), (5, 576)):
        some = np.asarray(matmul(x[first : first + rows], weight))
        np.testing.assert_array_equal(some, out[first : first + rows], err_msg=f"{rows} rows from {first} on")


@pytest.mark.parametrize("rows", [2, 17, 65, 200])
def test_matmul_keeps_a_row_from_its_neighbours(matmul, rows):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 70)).astype(np.float32)
    weight = jnp.asarray(rng.normal(size=(50, 70)), jnp.float32)
    for row in {0, rows // 2, rows - 1}:
        alone = np.full_like(x, np.nan)
        alone[row] = x[row]
        out = np.asarray(matmul(jnp.asarray(alone), weight))
        np.testing.assert_array_equal(out[row], np.asarray(matmul(jnp.asarray(x), weight))[row])
        assert np.isnan(np.delete(out, row, axis=0)).all()


def test_matmul_when_many_run_at_once(matmul):
    """Threads of XLA's pool and callers wait for one another only for what has begun; scratch is each call's own."""
    rng = np.random.default_rng(2)
    weight = jnp.asarray(rng.normal(size=(300, 200)), jnp.float32)
    xs = [jnp.asarray(rng.normal(size=(90, 200)), jnp.float32) for _ in range(16)]
    expected = [np.asarray(matmul(x, weight)) for x in xs]
    with ThreadPoolExecutor(8) as threads:
        outs = list(threads.map(lambda x: np.asarray(matmul(x, weight)), xs * 10))
    np.testing.assert_array_equal(outs, expected * 10)


def test_which_products_it_takes(kernels):
    wide, half = jnp.zeros((128, 60)), jnp.zeros((128, 60), jnp.bfloat16)
    assert all(cpu.takes_matmul(wide[:rows], wide) for rows in (1, 2, 64, 65))
    assert not cpu.takes_matmul(half[:4], half)
    assert not cpu.takes_matmul(wide[:4], half)


def check_rows(run, x, expected, error):
    """Against float64, to `error` and a few roundings; NaN for rows of NaN alone; and bitwise the same for a row
    whatever the number of rows, its place among them and its neighbours."""
    out = np.asarray(run(x))
    # Of float32 and of bfloat16.
    relative = 2**-8 if x.dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=relative, atol=error)
    for first, rows in ((0, 1), (580, 1), (3, 3), (9, 17), (20, 33), (6, 64), (51, 200), (5, 576)):
        some = np.asarray(run(x[first : first + rows]))
        np.testing.assert_array_equal(some, out[first : first + rows], err_msg=f"{rows} rows from {first} on")
    alone = np.asarray(run(jnp.full_like(x, jnp.nan).at[7].set(x[7])))
    np.testing.assert_array_equal(alone[7], out[7])
    assert np.isnan(np.delete(np.asarray(alone, np.float32), 7, axis=0)).all()


# Widths: four vectors of 8 or 16 at a time, then single ones, then what is left. Rows: from 2**15 numbers on they are
# shared out over the threads.
WIDTHS = pytest.mark.parametrize("width", [1, 64, 100, 577])
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: jnp.dtype(dtype).name)


@WIDTHS
@DTYPES
def test_norm(kernels, width, dtype):
    rng = np.random.default_rng(3)
    x, weight = jnp.asarray(rng.normal(size=(581, width)) / 9, dtype), jnp.asarray(rng.normal(size=width), dtype)
    wide, factors = np.asarray(x, np.float64), 1 + np.asarray(weight, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * factors
    run = jax.jit(lambda x: cpu.norm(x, weight, lambda x, weight: jnp.zeros_like(x), eps=1e-3, offset=1.0))
    # Values up to ten, of a few roundings to 2**-24 each.
    check_rows(run, x, expected, 5e-6)
    heads = x[:580].reshape(20, 29, width)
    np.testing.assert_array_equal(run(heads), run(x)[:580].reshape(heads.shape))


@WIDTHS
@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(kernels, width, dtype, activation):
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(581, 2 * width)) * 4, dtype).at[0, 0].set(-1e4).at[1, 0].set(1e4)
    gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
    inner = gate if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    expected = gate * (1 + np.tanh(inner / 2)) / 2 * up
    run = jax.jit(lambda x: cpu.gated(x, activation, lambda x: jnp.zeros((len(x), width), dtype)))
    # Products up to 100, of a few roundings to 2**-24 each.
    check_rows(run, x, expected, 3e-5)


@WIDTHS
def test_sum_exp(kernels, width):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(581, width)).astype(np.float32) * 30
    x -= x.max(axis=-1, keepdims=True)
    x[rng.random(x.shape) < 0.1] = -np.inf
    x[3] = -np.inf
    run = jax.jit(cpu.sum_exp)
    # Sums of up to 3, of values that are right to 2**-23.
    check_rows(run, jnp.asarray(x), np.exp(x.astype(np.float64)).sum(axis=-1), 2e-6)
    blocks = x[:580].reshape(20, 29, width)
    np.testing.assert_array_equal(run(blocks), run(x)[:580].reshape(20, 29))


def test_which_rows_it_takes(kernels):
    wide, half, other = (jnp.zeros((3, 8), dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
    assert cpu.takes_norm(wide, wide[0])
    assert cpu.takes_norm(half, half[0])
    assert not cpu.takes_norm(other, other[0])
    assert not cpu.takes_norm(wide, half[0])
    assert cpu.takes_gated(wide, "silu")
    assert cpu.takes_gated(half, "gelu_tanh")
    assert not cpu.takes_gated(wide, "gelu")
    assert not cpu.takes_gated(other, "silu")
    assert cpu.rows_invariant(jnp.float32)
    assert not cpu.rows_invariant(jnp.bfloat16)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_program_for_another_platform_has_none_of_them(kernels, platform):
    def run(x):
        normed = cpu.norm(x, x[0], lambda x, weight: x * weight[None, :], eps=1e-6, offset=0.0)
        return cpu.sum_exp(cpu.gated(cpu.matmul(normed, x), "silu", lambda x: x[:, 4:]))

    check = [jax.export.DisabledSafetyCheck.custom_call(target) for target in cpu.HANDLERS]
    exported = jax.export.export(jax.jit(run), platforms=[platform], disabled_checks=check)(jnp.zeros((8, 8)))
    assert exported.mlir_module().count("@carousel_") == (4 if platform == "cpu" else 0)


def test_without_a_compiler_another_implementation_serves(monkeypatch, afresh):
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    what = {"dtype": jnp.float32, "cache_dtype": jnp.float32, "head_dim": 64, "heads": 4, "kv_heads": 2}
    assert choose_implementation(None, **what) == "xla"
    with pytest.raises(ValueError, match="'cpu' cannot run here: it needs a C\\+\\+ compiler"):
        choose_implementation("cpu", **what)
    x = jnp.zeros((4, 64))
    assert not cpu.takes_matmul(x, x)
    assert not cpu.takes_norm(x, x[0])
    assert not cpu.takes_gated(x, "silu")
    assert not cpu.rows_invariant(jnp.float32)
    np.testing.assert_array_equal(jax.jit(cpu.sum_exp)(x), 64)


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch, tmp_path, afresh):
    (tmp_path / "broken.cc").write_text("this is not C++")
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = cpu.unavailable()
    assert reason is not None
    assert "do not compile or load" in reason or "needs a C++ compiler" in reason
    assert not list(tmp_path.rglob("*.so"))
