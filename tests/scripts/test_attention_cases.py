"""Attention cases: their rows and work by hand, and that the check of a result finds what is wrong, and only that."""

import numpy as np
import pytest

from pallas_kernels.attention import cache_shapes
from scripts.attention_cases import Case, cases_of, conformance, decode, full, mixed, prefill
from scripts.attention_inputs import Inputs, make_inputs, make_small_inputs, tolerance, worst_error
from scripts.limits import Work
from tests.oracle import attention as oracle

CASES = [
    Case("decode", 4, 2, 16, decode=(4, 6, None, 6), window=3),
    Case("prefill", 4, 2, 16, chunks=((0, 20), (0, 20))),
    Case("mixed", 4, 2, 16, decode=(4,), chunks=((3, 5),), soft_cap=2.0),
]


def test_work_by_hand():
    """A key costs 2 products and 2 sums in each of 4 heads of 16; a cache row has 2 KV heads of 2 times 16 numbers."""
    tokens = 2 * 4 * 16 * 2  # bytes of a query and a result of one row in two bytes a number
    assert CASES[0].work(2) == Work(4 * 64 * (3 + 3 + 3), 128 * (3 + 3 + 3) + 3 * tokens)
    assert CASES[1].work(2) == Work(4 * 64 * 2 * 210, 128 * 40 + 40 * tokens)
    assert CASES[2].work(2) == Work(4 * 64 * (5 + 4 + 5 + 6 + 7 + 8), 128 * (5 + 8) + 6 * tokens)
    assert CASES[1].cache_bytes(2) == 2 * 128 * 128


def test_rows_are_laid_out_in_blocks():
    slots, positions, num_decode = CASES[2].lay_out(16)
    assert num_decode == 1
    assert slots.tolist() == [0] + [1] * 5 + [2] * 11
    assert positions[:6].tolist() == [4, 3, 4, 5, 6, 7]
    assert [len(CASES[1].lay_out(block).slots) for block in (1, 16, 64)] == [40, 64, 128]
    assert CASES[0].lay_out(16, np.array([2, 0, 1, 3])).slots.tolist() == [2, 0, 4, 3]


def test_names_tell_cases_apart():
    for cases in (full(), conformance()):
        assert len({case.name for case in cases}) == len(cases)
    assert decode("llama3_8b", 64, 4096).name == "llama3_8b/decode_64x4096"
    ragged = decode("llama3_8b", 64, 100, ragged=True, window=8)
    assert ragged.name == "llama3_8b/decode_64x1..100_window_8"
    assert ragged == decode("llama3_8b", 64, 100, ragged=True, window=8)
    assert 0 <= min(ragged.decode) < max(ragged.decode) < 100
    assert prefill("gemma3_4b", 64, 32, chunks=2).chunks == ((32, 64), (32, 64))
    assert mixed("gemma3_4b", 2, 9, 64, 5).kind == "mixed"
    assert [case.name for case in cases_of("main", ["*/mixed*6", "gemma3_4b/d*"])] == [
        "gemma3_4b/decode_64x4096",
        "llama3_8b/mixed_64x2048_and_2048_behind_4096",
    ]
    with pytest.raises(ValueError, match="no case of size quick is like nothing"):
        cases_of("quick", ["nothing"])


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu", "mosaic_tpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_and_their_check_against_the_loops(case, implementation):
    """What no row reads is NaN, the loops' result is right, and one number that is off anywhere is found."""
    for inputs in (
        make_small_inputs(case, implementation=implementation, dtype="float32"),
        make_inputs(case, implementation=implementation, dtype="float32", copies=2),
    ):
        arrays = [np.asarray(array) for array in inputs.cache]
        assert [one.shape for one in arrays] == cache_shapes(implementation, len(arrays[0]), 2, 128, 16)
        lanes = np.concatenate(arrays, -1)
        k, v, rest = np.split(lanes, (16, 32), -1)
        assert not rest.any()
        assert len(k) == len(case.segments) * len(inputs.slots)
        read = 2 * 16 * int(np.subtract(*reversed(case.readable())).sum())  # KV heads and H of each readable row
        assert np.isfinite(k).sum() == np.isfinite(v).sum() == read * len(inputs.slots)
        for slots in inputs.slots:  # of each copy
            options = {"window": case.window, "soft_cap": case.soft_cap}
            right = oracle(np.asarray(inputs.q), k, v, slots, inputs.positions, **options)
            one = Inputs(inputs.q, inputs.cache, (slots,), inputs.positions, inputs.num_decode)
            assert worst_error(case, one, right, samples=None) < 1e-12
            assert worst_error(case, one, right) < 1e-12
            padding, live = np.flatnonzero(slots == len(k)), np.flatnonzero(slots < len(k))
            for place, wrong, samples in (
                ((live[-1], 3, 15), right.max() * 2, None),
                ((live[0], 0, 0), np.nan, 4),
                ((padding[0], 0, 0), 1e-9, 4),
            ):
                bad = right.copy()
                bad[place] = wrong
                assert worst_error(case, one, bad, samples=samples) > 0.1


def test_only_what_multiplies_float32_in_fewer_bits_is_allowed_to():
    for name, platform, loose in (
        ("mosaic_tpu", "tpu", False),
        ("reference", "tpu", False),
        ("xla", "tpu", True),
        ("jax_nn", "gpu", True),
        ("xla", "cpu", False),
    ):
        assert tolerance("float32", platform, name) == (3 * 2.0**-8 if loose else 2.0**-16)
    assert tolerance("bfloat16", "tpu", "mosaic_tpu") == 3 * 2.0**-8
