"""Tuning with made-up times: which candidates are tried, which is chosen, and where there is nothing to tune."""

import json
import math

import pytest

from pallas_kernels.attention import IMPLEMENTATIONS
from pallas_kernels.attention import tuning as table
from pallas_kernels.attention.tuning import DEFAULTS, MEASURED, Tuning, tuning
from scripts import attention_timing, tune_attention
from scripts.attention_cases import Case
from scripts.limits import Limits

DEVICE = {"device": "Some GPU", "platform": "gpu", "jax": "0", "python": "3"}
KEY = ("mosaic_gpu", "Some GPU", "bfloat16", 128)
USED = Tuning(128, 2, 128, 2)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A GPU whose times depend on the block sizes alone."""
    monkeypatch.setitem(DEFAULTS, ("mosaic_gpu", 128), USED)
    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_gpu", IMPLEMENTATIONS["mosaic_gpu"]._replace(unavailable=lambda: None))
    monkeypatch.setattr(attention_timing, "machine", lambda: DEVICE)
    monkeypatch.setattr(attention_timing, "measure_rates", lambda: Limits(1e12, 1e12))
    seen = []

    def measure(case: Case, implementation, dtype, limits, repeat):
        one = tuning(implementation, DEVICE["device"], dtype, case.head_dim)
        seen.append((case.kind, one))
        if case.kind == "prefill" and one.chunk_stages > 3:
            return {"case": case.name, "status": "error", "reason": "shared memory"}
        seconds = one.decode_stages * 1e-6 if case.kind == "decode" else 1e-3 / one.chunk_block_k
        if one.decode_block_k == 64 and case.kind == "decode":
            seconds *= 0.5
        return {"case": case.name, "status": "ok", "s": seconds}

    monkeypatch.setattr(attention_timing, "measure", measure)
    return seen


def run(tmp_path, *arguments):
    target = tmp_path / "figures.json"
    status = tune_attention.main(["--head-dims", "128", "--json", str(target), *arguments])
    return status, json.loads(target.read_text())


def test_the_best_of_each_part(tmp_path, device, capsys):
    status, figures = run(tmp_path)
    assert status == 0
    assert figures["complete"]
    (entry,) = figures["entries"]
    assert entry["key"] == list(KEY)
    assert entry["found"] == {"decode_block_k": 64, "decode_stages": 2, "chunk_block_k": 128, "chunk_stages": 2}
    assert entry["text"].strip() == '("mosaic_gpu", "Some GPU", "bfloat16", 128): Tuning(64, 2, 128, 2),'
    assert device[0] == ("decode", USED)
    assert len(entry["tried"]) == 2 * 2 * 5
    assert {one.chunk_block_k for kind, one in device if kind == "decode"} == {128}
    assert {one.decode_block_k for kind, one in device if kind == "prefill"} == {128}
    out = [one for one in entry["tried"] if one["score"] is None]
    assert {one["chunk_stages"] for one in out} == {4, 5, 6}
    assert all(len(one["cases"]) == 1 for one in out), "goes on after the first case that fails"
    assert KEY not in MEASURED
    shown = capsys.readouterr().err
    assert "shared memory" in shown
    assert entry["text"] in shown
    assert "50%" in shown


def tried(*scores):
    return [{"score": score} for score in scores]


def test_the_entry_in_use_stays_unless_another_is_clearly_faster():
    for scores, chosen in (
        ((0.0, math.log(0.99)), 0),
        ((0.0, math.log(0.97)), 1),
        ((0.0, 1.0, None), 0),
        ((None, 1.0, 0.5), 2),
    ):
        candidates = tried(*scores)
        assert tune_attention.best(candidates) is candidates[chosen]
    assert tune_attention.best(tried(None, None)) is None
    assert tune_attention.best([]) is None


def test_nothing_works(tmp_path, monkeypatch, capsys):
    failed = {"status": "wrong", "reason": "off"}
    monkeypatch.setattr(attention_timing, "measure", lambda case, *_: failed | {"case": case.name})
    status, figures = run(tmp_path)
    assert status == 1
    assert figures["entries"][0]["found"] == figures["entries"][0]["used"]
    assert "none works" in capsys.readouterr().err


def test_a_candidate_that_breaks_the_device_ends_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune_attention, "device_lives", lambda: False)
    status, figures = run(tmp_path)
    assert status == 2
    assert not figures["complete"]
    assert "nothing runs on the device any more" in capsys.readouterr().err
    (entry,) = figures["entries"]
    assert [one["score"] is None for one in entry["tried"]].index(True) == len(entry["tried"]) - 1
    assert figures["trying"]["chunk_stages"] == 4


def test_a_block_that_a_tpu_would_cut_is_tried_once_as_it_would_run():
    """Of 8 MB for keys and values of 128 lanes each: 4 buffers of 2048 rows of a head, or of 512 of 8 heads."""
    used = Tuning(512, 2, 512, 2)
    for part, dtype, H in (("decode", "bfloat16", 128), ("chunk", "float32", 256)):
        key = ("mosaic_tpu", "Some TPU", dtype, H)
        tried = tune_attention.candidates(key, part, used)
        sizes = [(getattr(one, f"{part}_block_k"), getattr(one, f"{part}_stages")) for one in tried]
        assert tried[0] == used
        assert len(set(sizes)) == len(sizes)
        assert all(tune_attention.as_run(key, part, one) == one for one in tried[1:])
    assert len(tune_attention.candidates(("mosaic_tpu", "Some TPU", "bfloat16", 128), "decode", used)) < 12


def test_a_budget_that_is_over(tmp_path):
    status, figures = run(tmp_path, "--budget-s", "1e-9")
    assert status == 0
    assert not figures["complete"]
    assert figures["entries"][0]["tried"] == []


def test_the_table_takes_what_was_measured_before_the_defaults(monkeypatch):
    assert tuning(*KEY) == USED
    assert tuning("mosaic_gpu", "Some GPU", "bfloat16", 112) == USED
    with tune_attention.trying(KEY, Tuning(1, 2, 3, 4)):
        with tune_attention.trying(KEY, Tuning(5, 6, 7, 8)):
            assert tuning(*KEY) == Tuning(5, 6, 7, 8)
        assert tuning(*KEY) == Tuning(1, 2, 3, 4)
        assert tuning("mosaic_gpu", "Another GPU", "bfloat16", 128) == USED
    assert tuning(*KEY) == USED
    with pytest.raises(ValueError, match="no block sizes for a head dim of 512"):
        tuning("mosaic_gpu", "Some GPU", "bfloat16", 512)


def test_entries_of_the_table_are_sound():
    for key, one in [*table.DEFAULTS.items(), *table.MEASURED.items()]:
        assert key[0] in IMPLEMENTATIONS
        assert min(one.decode_stages, one.chunk_stages) >= 2
        if key[0] == "mosaic_gpu":
            assert 128 % one.decode_block_k == 128 % one.chunk_block_k == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--head-dims", "64,x"], "head_dims must be positive numbers"),
        (["--head-dims", ""], "head_dims must be positive numbers"),
        (["--implementation", "xla"], "implementation must be one of mosaic_gpu, mosaic_tpu"),
        (["--repeat", "0"], "repeat must be at least 1"),
    ],
)
def test_options_that_cannot_be(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        tune_attention.main(arguments)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert reason in " ".join((shown.out + shown.err).replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--json", "no-such-folder/x.json"], "no-such-folder/x.json"),
        (["--implementation", "mosaic_tpu"], "nothing to tune here: mosaic_tpu: "),
        (["--head-dims", "512"], "no block sizes for a head dim of 512"),
    ],
)
def test_what_cannot_be_is_known_before_anything_is_tried(arguments, reason, monkeypatch, capsys):
    monkeypatch.setattr(attention_timing, "measure", lambda *_: pytest.fail("goes on"))
    assert tune_attention.main(arguments) == 2
    assert reason in capsys.readouterr().err
