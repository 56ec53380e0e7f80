"""The C++ kernels: what they compute, and what happens where they cannot be had."""

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


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (16, 4), (577, 100), (1536, 36), (61, 8200)])
def test_few_rows_matmul(inputs, outputs):
    """Against float64; and bitwise the same for a row whatever the number of rows and its place among them."""
    if reason := cpu.unavailable():
        pytest.skip(reason)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(70, inputs)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(outputs, inputs)) * inputs**-0.5, jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    out = np.asarray(jax.jit(cpu.few_rows_matmul)(x, weight))
    # A sum of 1536 products in a row: its roundings of 2**-24 add up to some 1e-6 on values of size one.
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    for first, rows in ((0, 1), (5, 1), (30, 2), (3, 3), (7, 8), (9, 17), (20, 33), (5, 49), (6, 64)):
        some = np.asarray(jax.jit(cpu.few_rows_matmul)(x[first : first + rows], weight))
        np.testing.assert_array_equal(some, out[first : first + rows])


def test_which_products_it_takes():
    if reason := cpu.unavailable():
        pytest.skip(reason)
    wide, half = jnp.zeros((128, 60)), jnp.zeros((128, 60), jnp.bfloat16)
    assert [rows for rows in (1, 2, 64, 65) if cpu.takes_few_rows(wide[:rows], wide)] == [2, 64]
    assert not cpu.takes_few_rows(half[:4], half)


def test_without_a_compiler_another_implementation_serves(monkeypatch, afresh):
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    assert choose_implementation(None) == "xla"
    with pytest.raises(ValueError, match="'cpu' cannot run here: it needs a C\\+\\+ compiler"):
        choose_implementation("cpu")
    assert not cpu.takes_few_rows(jnp.zeros((4, 64)), jnp.zeros((64, 64)))


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch, tmp_path, afresh):
    (tmp_path / "broken.cc").write_text("this is not C++")
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = cpu.unavailable()
    assert reason is not None
    assert "do not compile or load" in reason or "needs a C++ compiler" in reason
    assert not list(tmp_path.rglob("*.so"))
