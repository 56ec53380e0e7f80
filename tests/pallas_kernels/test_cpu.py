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
def matmul():
    if reason := cpu.unavailable():
        pytest.skip(reason)
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


def test_which_products_it_takes():
    if reason := cpu.unavailable():
        pytest.skip(reason)
    wide, half = jnp.zeros((128, 60)), jnp.zeros((128, 60), jnp.bfloat16)
    assert all(cpu.takes_matmul(wide[:rows], wide) for rows in (1, 2, 64, 65))
    assert not cpu.takes_matmul(half[:4], half)
    assert not cpu.takes_matmul(wide[:4], half)


def test_without_a_compiler_another_implementation_serves(monkeypatch, afresh):
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    what = {"dtype": jnp.float32, "cache_dtype": jnp.float32, "head_dim": 64, "heads": 4, "kv_heads": 2}
    assert choose_implementation(None, **what) == "xla"
    with pytest.raises(ValueError, match="'cpu' cannot run here: it needs a C\\+\\+ compiler"):
        choose_implementation("cpu", **what)
    assert not cpu.takes_matmul(jnp.zeros((4, 64)), jnp.zeros((64, 64)))


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch, tmp_path, afresh):
    (tmp_path / "broken.cc").write_text("this is not C++")
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = cpu.unavailable()
    assert reason is not None
    assert "do not compile or load" in reason or "needs a C++ compiler" in reason
    assert not list(tmp_path.rglob("*.so"))
