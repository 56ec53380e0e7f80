"""The interpreters' race detectors on every Mosaic kernel, and on copies of them that lack a wait."""

import contextlib
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels.attention import write_rows
from tests.cases import CASES
from tests.pallas_kernels.interpreters import INTERPRETERS, found_races, interpreted, reset
from tests.pallas_kernels.test_attention import TOLERANCE, build, expected, laid_out, program

# The GPU interpreter multiplies in NumPy, which warns of the NaN in rows that the masks then exclude.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

MIXED = next(case for case in CASES if case.name == "mixed")
CHUNK_WAIT = "                    plgpu.barrier_wait(v_raw)\n"
CHUNK_NEXT = "                    plgpu.commit_smem()\n                    plgpu.barrier_arrive(v_full"

# Module, what runs it, and passages that give way to others: data is read before it is waited for, if ever.
PLANTED = [
    ("mosaic_gpu_decode", "attend", {"plgpu.barrier_wait(smem.k_barriers.at[stage])": "pass"}),
    ("mosaic_gpu_chunk", "attend", {CHUNK_WAIT: "", CHUNK_NEXT: CHUNK_WAIT + CHUNK_NEXT}),
    ("mosaic_tpu_attend", "attend", {"copies(tile, group, block, stage, lambda copy: copy.wait())": "pass"}),
    ("mosaic_tpu_write", "write", {"copies(unit, wait, back=False)": "pass"}),
]


def attend(name):
    inputs = build(MIXED, "bfloat16", name)
    return inputs, np.asarray(program(MIXED, name)(*inputs), np.float64)


def write(name):
    q, cache, slots, positions = build(MIXED, "bfloat16", name)
    new = q[:, : MIXED.kv_heads]
    how = {"num_decode": len(MIXED.decode), "implementation": name}
    jax.block_until_ready(write_rows(laid_out(cache, name), new, new, slots, positions, **how))


@pytest.mark.parametrize("name", INTERPRETERS)
def test_no_races(name, monkeypatch):
    interpreted(name, monkeypatch, detect_races=True)
    inputs, out = attend(name)
    right = expected(MIXED, *inputs)
    np.testing.assert_allclose(out, right, rtol=0, atol=TOLERANCE["bfloat16"] * max(1.0, np.abs(right).max()))
    assert not found_races(name)
    write(name)
    assert not found_races(name)


@pytest.mark.parametrize(("name", "what", "passages"), PLANTED, ids=[case[0] for case in PLANTED])
def test_a_planted_race_is_found(name, what, passages, monkeypatch):
    """So that the check can fail: a copy of the kernel that reads before its data is there."""
    module = importlib.import_module(f"pallas_kernels.attention.{name}")
    source = Path(module.__file__).read_text()
    for right, wrong in passages.items():
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    exec(compile(source, module.__file__, "exec"), copy := {"__name__": module.__name__})
    for function in ("attend", "write", "decode", "chunk"):
        if hasattr(module, function):
            monkeypatch.setattr(module, function, copy[function])
    implementation = name.rpartition("_")[0]
    # A TPU copy that nobody waits for would never happen in the other mode.
    eager = {"dma_execution_mode": "eager"} if implementation == "mosaic_tpu" else {}
    interpreted(implementation, monkeypatch, detect_races=True, **eager)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # that a barrier went round without being waited for
        {"attend": attend, "write": write}[what](implementation)
    assert found_races(implementation)
    reset(implementation)
