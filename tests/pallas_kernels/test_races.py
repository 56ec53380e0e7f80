"""The interpreters' race detectors on every Mosaic kernel, and on copies of them that lack a wait."""

import contextlib
import dataclasses
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels.attention import write_rows
from tests.cases import CASES, LONG_CASES
from tests.pallas_kernels.interpreters import INTERPRETERS, Races, interpreted, reset
from tests.pallas_kernels.test_attention import TOLERANCE, build, expected, laid_out, program

# The GPU interpreter multiplies in NumPy, which warns of the NaN in rows that the masks then exclude.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

MIXED = next(case for case in CASES if case.name == "mixed")
CHUNK_WAIT = "                    plgpu.barrier_wait(v_raw)\n"
CHUNK_NEXT = "                    plgpu.commit_smem()\n                    plgpu.barrier_arrive(v_full"

KEYS_WAIT = "copies(tile, group, block, stage, lambda copy: copy.wait())"
ROWS_WAIT = "copies(unit, wait, back=False)"
LONG = {case.name: case for case in LONG_CASES}
RUNS = [
    *(
        ("attend", MIXED),
        ("attend", dataclasses.replace(MIXED, chunks=())),
        ("attend", dataclasses.replace(MIXED, decode=())),
    ),
    *(("attend", LONG["long_decode_window"]), ("attend", LONG["long_chunk_window"])),
    *(
        ("write", MIXED),
        ("write", dataclasses.replace(MIXED, chunks=())),
        ("write", dataclasses.replace(MIXED, decode=())),
    ),
]

# Module, what runs it on which case, passages that give way to others, and of its kernels those that then race: data is
# read before it is waited for, if ever.
PLANTED = [
    ("mosaic_gpu_decode", "attend", MIXED, {"plgpu.barrier_wait(smem.k_barriers.at[stage])": "pass"}, [True, False]),
    (
        "mosaic_gpu_decode",
        "attend",
        LONG["long_decode_window"],
        {"plgpu.barrier_wait(smem.o_barriers.at[stage])": "pass"},
        [False, True],
    ),
    ("mosaic_gpu_chunk", "attend", MIXED, {CHUNK_WAIT: "", CHUNK_NEXT: CHUNK_WAIT + CHUNK_NEXT}, [False, True]),
    ("mosaic_tpu_attend", "attend", MIXED, {KEYS_WAIT: f"tokens == 1 or {KEYS_WAIT}"}, [True, False]),
    ("mosaic_tpu_attend", "attend", MIXED, {KEYS_WAIT: f"tokens > 1 or {KEYS_WAIT}"}, [False, True]),
    ("mosaic_tpu_write", "write", MIXED, {ROWS_WAIT: f"tokens == 1 or {ROWS_WAIT}"}, [True, False]),
    ("mosaic_tpu_write", "write", MIXED, {ROWS_WAIT: f"tokens > 1 or {ROWS_WAIT}"}, [False, True]),
]


def attend(name, case):
    inputs = build(case, "bfloat16", name)
    out, right = np.asarray(program(case, name)(*inputs), np.float64), expected(case, *inputs)
    np.testing.assert_allclose(out, right, rtol=0, atol=TOLERANCE["bfloat16"] * max(1.0, np.abs(right).max()))


def write(name, case):
    q, cache, slots, positions = build(case, "bfloat16", name)
    new = q[:, : case.kv_heads]
    how = {"num_decode": len(case.decode), "implementation": name}
    jax.block_until_ready(write_rows(laid_out(cache, name), new, new, slots, positions, **how))


def kernels_of(name, what, case):
    """Of a program: one for decode rows and one for chunks; a GPU writes with none, and may have to sum splits."""
    if name == "mosaic_gpu":
        return 0 if what == "write" else bool(case.decode) * (1 + (case.rows > 512)) + bool(case.chunks)
    return bool(case.decode) + bool(case.chunks)


@pytest.mark.parametrize(
    ("what", "case"),
    RUNS,
    ids=[f"{what}-{case.name}-{bool(case.decode):d}{bool(case.chunks):d}" for what, case in RUNS],
)
@pytest.mark.parametrize("name", INTERPRETERS)
def test_no_races(name, what, case, monkeypatch):
    if (name, what) == ("mosaic_gpu", "write"):
        pytest.skip("XLA writes")
    races = Races(name, monkeypatch)
    interpreted(name, monkeypatch, detect_races=True)
    {"attend": attend, "write": write}[what](name, case)
    assert races.found == [False] * kernels_of(name, what, case)


@pytest.mark.parametrize(
    ("name", "what", "case", "passages", "racing"),
    PLANTED,
    ids=[f"{one[0]}-{index}" for index, one in enumerate(PLANTED)],
)
def test_a_planted_race_is_found(name, what, case, passages, racing, monkeypatch):
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
    races = Races(implementation, monkeypatch)
    interpreted(implementation, monkeypatch, detect_races=True, **eager)
    with contextlib.suppress(jax.errors.JaxRuntimeError, AssertionError):  # a barrier that nobody waited for; values
        {"attend": attend, "write": write}[what](implementation, case)
    assert any(races.found)
    assert all(may for may, found in zip(racing, races.found, strict=False) if found)
    reset(implementation)
