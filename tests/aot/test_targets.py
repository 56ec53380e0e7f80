"""The checks of compiled programs see what they are for: each is given a program that fails it."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import write_rows
from tests.aot.ptxas import KernelUse, dumped_kernels
from tests.aot.targets import TARGETS, TPUS, compile_for, copies, device_kind

KINDS = {"h200": "NVIDIA H200", "v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}


def normalise(x: jax.Array) -> jax.Array:
    """Rows divided by their sums, one warpgroup a block of 64: a thread holds half of a row's elements twice over."""

    def body(x_ref, o_ref, scratch):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        total = plgpu.layout_cast(x.sum(axis=1), plgpu.Layout.WGMMA.reduce(1))
        scratch[...] = x / jax.lax.broadcast_in_dim(total, x.shape, (0,))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch, o_ref)
        plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, scratch_types=[plgpu.SMEM(x.shape, x.dtype)], kernel_name="normalise")(x)


def kernel_of(columns: int) -> KernelUse:
    with dumped_kernels() as kernels:
        compile_for("h200", normalise, jax.ShapeDtypeStruct((64, columns), jnp.float32))
    (kernel,) = kernels
    return kernel


def test_registers_shared_memory_and_spills():
    small, large = kernel_of(64), kernel_of(768)
    assert (small.name, small.spilled) == ("normalise", 0)
    assert 64 * 64 * 4 <= small.shared <= 64 * 64 * 4 + 2048  # some for the sum
    assert 32 <= small.registers < 255
    assert large.registers == 255
    assert large.spilled > 0


@pytest.mark.parametrize("target", TARGETS)
def test_copies(target):
    x = jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)
    assert copies(compile_for(target, lambda x: jnp.swapaxes(x, 1, 2), x), x.shape) != []
    assert copies(compile_for(target, lambda x: x + 1, x), x.shape) == []


@pytest.mark.parametrize("target", TPUS)
def test_a_scatter_copies_the_cache_on_tpu(target):
    cache = jax.ShapeDtypeStruct((16, 2, 4096, 64), jnp.bfloat16)
    new, at = jax.ShapeDtypeStruct((16, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((16,), jnp.int32)
    write = partial(write_rows, num_decode=16, implementation="xla")
    assert copies(compile_for(target, write, (cache, cache), new, new, at, at, donate_argnums=0), cache.shape) != []


@pytest.mark.parametrize("target", TARGETS)
def test_in_place_and_device(target):
    x = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    program = partial(compile_for, target, lambda x: x + 1, x)
    assert program().memory_analysis().alias_size_in_bytes == 0
    assert program(donate_argnums=0).memory_analysis().alias_size_in_bytes == 128 * 256 * 4
    assert device_kind(target) == KINDS[target]
