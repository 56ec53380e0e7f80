"""The cost of a turn: what is counted of a plan, fits that find a planted cost, and files."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from batching.plan import FROM_DEVICE, Chunk, PlanShapes, build_plan
from batching.prefix import Copy
from batching.turn import Turn, TurnTimes
from model.config import ModelConfig
from scripts.step_cost import FittedCost, HostCost, Line, RooflineCost, Shape, TurnLoad, load_cost, load_of
from scripts.step_fit import TurnRecord, TurnRecorder, fit, predicted, residuals, residuals_table

CONFIG = Path(__file__).parent.parent / "data/llama_tied_gqa4/config.json"
SHAPES = {Shape(0, 4, 4): Line(0.010, 1e-5), Shape(0, 8, 8): Line(0.014, 2e-5), Shape(0, 72, 8): Line(0.070, 4e-5)}
HOST = HostCost(Line(1e-3, 1e-5), Line(5e-4, 0.0), Line(2e-4, 3e-5))


def turn_of(block_q=1, slots=4, copies=()):
    """Slots 0 and 2 decode at positions 5 and 9, slot 1 has four prompt rows from position 3."""
    shapes = PlanShapes.choose(slots, (16,), block_q)
    decode = [Chunk(0, 5, (FROM_DEVICE,), True), Chunk(2, 9, (FROM_DEVICE,), True)]
    plan = build_plan(shapes, decode, [Chunk(1, 3, (7, 7, 7, 7), False)])
    return Turn(plan, (), busy=3, copies=copies)


def planted(shape, cache_tokens, sampled=1, copied=0, copy_s=0.0):
    load = TurnLoad(*shape, shape.rows, cache_tokens, cache_tokens, sampled, copied)
    host = (line.at(sampled) for line in HOST[:3])
    return TurnRecord(load, SHAPES[shape].at(cache_tokens) + copied * copy_s, *host)


def records(count=40, **how):
    draw = random.Random(0)
    return [planted(shape, draw.randint(1, 5000), draw.randint(1, 4), **how) for shape in SHAPES for _ in range(count)]


@pytest.mark.parametrize(("block_q", "shape"), [(1, (0, 8, 4)), (16, (4, 16, 4))])
def test_what_is_counted_of_a_turn(block_q, shape):
    found = load_of(turn_of(block_q, copies=(Copy(0, 1, 3), Copy(0, 2, 5))), slots=4)
    assert found.shape == shape
    assert (found.live_rows, found.sampled, found.copied) == (6, 0, 8)
    assert found.cache_tokens == 6 + 10 + (4 + 5 + 6 + 7)
    assert found.read_tokens == 6 + 10 + 7


def test_a_planted_cost_is_found():
    cost = fit(records())
    assert set(cost.programs) == set(SHAPES)
    for shape, line in SHAPES.items():
        assert cost.programs[shape] == pytest.approx(line, rel=1e-6)
    for found, line in zip(cost.host[:3], HOST[:3], strict=True):
        assert found == pytest.approx(line, rel=1e-6, abs=1e-12)
    assert residuals(cost, records())["all"]["p90_off"] == pytest.approx(0, abs=1e-6)


def test_copies_cost_what_the_turns_are_off():
    cost = fit([*records(), *(planted(shape, 700, copied=rows, copy_s=2e-4) for shape in SHAPES for rows in (16, 64))])
    assert cost.copy_s == pytest.approx(2e-4)
    assert cost.programs[Shape(0, 4, 4)] == pytest.approx(SHAPES[Shape(0, 4, 4)], rel=1e-6)
    load = TurnLoad(0, 4, 4, 4, 100, 100, 4, copied=10)
    assert predicted(cost, load) == pytest.approx(0.010 + 1e-3 + 10 * 2e-4)


def test_a_program_that_was_seen_with_copies_alone_has_a_cost():
    shape = Shape(0, 4, 4)
    assert fit([planted(shape, 100, copied=16, copy_s=0.0)]).programs[shape].at(100) == pytest.approx(0.011)


def test_noise_leaves_the_total():
    draw = random.Random(1)
    noisy = [one._replace(seconds=one.seconds * draw.lognormvariate(0, 0.3)) for one in records(200)]
    cost = fit(noisy)
    for program in residuals(cost, noisy)["programs"]:
        assert program["total_off"] == pytest.approx(0, abs=1e-9)
    for shape, line in SHAPES.items():
        assert predicted(cost, TurnLoad(*shape, 4, 2500, 2500, 1)) == pytest.approx(line.at(2500) * 1.046, rel=0.1)


def test_turns_that_get_faster_cost_nothing_a_token():
    shape = Shape(0, 4, 4)
    falling = [planted(shape, tokens)._replace(seconds=1.0 - tokens / 1e4) for tokens in range(1, 1001)]
    assert fit(falling).programs[shape] == pytest.approx((0.94995, 0.0))


def test_few_turns_share_a_slope():
    rare = Shape(0, 8, 8)
    some = [one for one in records() if one.load.shape == Shape(0, 4, 4)]
    cost = fit([*some, TurnRecord(TurnLoad(*rare, 8, 1000, 1000, 1), 0.05, 0.0, 0.0, 0.0)])
    assert cost.programs[rare] == pytest.approx((0.04, 1e-5), rel=1e-6)


def test_a_program_that_was_not_measured_lies_between_its_neighbours():
    cost = FittedCost({Shape(0, 4, 4): Line(1.0, 0.1), Shape(0, 8, 8): Line(3.0, 0.3)})
    assert cost.line(TurnLoad(0, 6, 4, 6, 0, 0, 1)) == pytest.approx((2.0, 0.2))
    plane = FittedCost(cost.programs, row_s=0.5)
    assert plane.line(TurnLoad(0, 12, 8, 6, 0, 0, 1)) == pytest.approx((5.0, 0.3))  # 0.5 s each beyond the last
    assert plane.line(TurnLoad(0, 2, 2, 2, 0, 0, 1)) == pytest.approx((0.0, 0.1))
    head = FittedCost({Shape(0, 8, 8): Line(3.0, 0.3)}, head_s=0.25)
    assert head.line(TurnLoad(0, 8, 4, 6, 0, 0, 1)) == pytest.approx((2.0, 0.3))  # four rows of the head less


def test_decode_programs_are_guessed_from_decode_programs():
    cost = FittedCost({Shape(4, 0, 4): Line(1.0), Shape(16, 0, 16): Line(3.0), Shape(4, 12, 4): Line(9.0)})
    assert cost.line(TurnLoad(10, 0, 10, 8, 0, 0, 8)) == pytest.approx((2.0, 0.0))
    assert cost.line(TurnLoad(16, 16, 16, 8, 0, 0, 8)) == pytest.approx((9.0, 0.0))


def test_nothing_was_measured():
    with pytest.raises(ValueError, match="no turn was measured"):
        fit([])


def test_times_of_a_turn_are_told_apart():
    recorder = TurnRecorder(slots=4)
    recorder(turn_of(), TurnTimes(plan=1.0, launch=1.5, launched=1.75, wait=1.75, ready=4.0, committed=4.5))
    recorder(turn_of(), TurnTimes(plan=5.0, launch=5.5, launched=5.75, wait=5.75, ready=8.0, committed=8.25))
    first, second = recorder.records()
    assert first[1:] == (2.5, 0.5, 0.25, 0.5)
    assert second[1:] == (2.5, 1.0, 0.25, 0.25)  # with what the host did since the first
    assert TurnRecord.from_json(json.loads(json.dumps(first.to_json()))) == first


def test_residuals_by_hand():
    shape = Shape(0, 4, 4)
    cost = FittedCost({shape: Line(1.0)})
    turns = [planted(shape, 1)._replace(seconds=seconds) for seconds in (0.5, 1.0, 2.0)]
    found = residuals(cost, turns)
    assert found["programs"] == [found["all"] | shape._asdict()]
    assert (found["all"]["median_off"], found["all"]["total_off"]) == (0.5, pytest.approx(3 / 3.5 - 1))
    assert found["all"]["turns"] == 3
    assert residuals_table(found).row_count == 2


def test_files_give_back_the_cost(tmp_path):
    cost = fit(records(), {"slots": 8, "model": "m"})
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(cost.to_json()))
    assert load_cost(path) == cost


@pytest.mark.parametrize("config", [str(CONFIG), "beside.json", json.loads(CONFIG.read_text())])
def test_rooflines_by_hand(tmp_path, config):
    (tmp_path / "beside.json").write_text(CONFIG.read_text())
    path = tmp_path / "cost.json"
    known = {"kind": "roofline", "config": config, "flops_per_s": 1e9, "bytes_per_s": 1e9, "itemsize": 4}
    path.write_text(json.dumps(known | {"overhead_s": 0.5, "host": {"plan": [0.25, 0.5]}, "about": {"slots": 3}}))
    cost = load_cost(path)
    assert isinstance(cost, RooflineCost)
    assert cost.host.plan.at(2) == 1.25
    assert cost.about == {"slots": 3}
    # 64 wide, 8 and 2 heads of 8, MLP 160, 3 layers, vocabulary 320
    weights = 3 * (64 * 96 + 64 * 64 + 3 * 64 * 160)
    few = cost.line(TurnLoad(0, 1, 1, 1, 100, 100, 1))
    assert few.constant == pytest.approx(0.5 + 4 * (weights + 64 * 320) / 1e9)  # bytes: each weight once
    many = cost.line(TurnLoad(0, 100, 10, 100, 100, 100, 1))
    assert many.constant == pytest.approx(0.5 + 2 * (100 * weights + 10 * 64 * 320) / 1e9)  # operations
    assert few.slope == pytest.approx(4 * 8 * 8 * 3 / 1e9)  # 768 operations a position, against 384 bytes
    copied = cost.line(TurnLoad(0, 1, 1, 1, 100, 100, 1, copied=10))
    assert copied.constant - few.constant == pytest.approx(2 * 10 * 384 / 1e9)


def test_rows_of_a_chunk_read_the_cache_once():
    cost = RooflineCost(ModelConfig.from_hf(json.loads(CONFIG.read_text())), 1e12, 1e9, itemsize=4)
    assert cost.line(TurnLoad(0, 4, 4, 4, 400, 400, 4)).at(400) - cost.line(TurnLoad(0, 4, 4, 4, 1, 1, 4)).at(
        0
    ) == pytest.approx(400 * 384 / 1e9)
    chunk = cost.line(TurnLoad(0, 4, 4, 4, 400, 100, 1))
    assert chunk.slope * 400 == pytest.approx(100 * 384 / 1e9)


FITTED = {"kind": "fitted", "row_s": 0, "head_s": 0, "copy_s": 0}
PROGRAM = {"decode_rows": 0, "chunk_rows": 4, "head_rows": 4, "constant_s": 1, "per_token_s": 0}
PEAK = {"kind": "roofline", "config": str(CONFIG), "flops_per_s": 1, "bytes_per_s": 1}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no JSON", "Expecting value"),
        ([], '"kind" must be'),
        ({"kind": "guess"}, '"kind" must be'),
        (FITTED, "'programs' is missing"),
        (FITTED | {"programs": []}, "programs is empty"),
        (FITTED | {"programs": [{k: v for k, v in PROGRAM.items() if k != "head_rows"}]}, "'head_rows' is missing"),
        (FITTED | {"programs": [PROGRAM], "host": {"planning": [1, 0]}}, "host has ['planning']"),
        (FITTED | {"programs": [PROGRAM], "host": {"plan": 1}}, "host.plan must be two numbers"),
        (FITTED | {"programs": [PROGRAM], "host": {"shared": 1}}, "host.shared must be true or false, not 1"),
        (FITTED | {"programs": [PROGRAM | {"constant_s": -1}]}, "must be finite and at least 0"),
        (FITTED | {"programs": [PROGRAM | {"constant_s": None}]}, "must be finite and at least 0"),
        (FITTED | {"programs": [PROGRAM], "copy_s": float("nan")}, "must be finite and at least 0"),
        (PEAK | {"flops_per_s": 0}, "must be above 0"),
        (PEAK | {"config": {"model_type": "unheard-of"}}, "unheard-of"),
        (PEAK | {"overhead_s": "long"}, "must be finite and at least 0"),
    ],
)
def test_files_that_hold_no_cost_are_refused(tmp_path, value, reason):
    path = tmp_path / "cost.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(ValueError, match=r"cost\.json") as refused:
        load_cost(path)
    assert reason in str(refused.value)


def test_a_turn_of_many_rows_is_counted_exactly():
    """Sums that an int32 does not hold."""
    shapes = PlanShapes.choose(1, (65536,), 1)
    plan = build_plan(shapes, [], [Chunk(0, 100_000, np.zeros(65536, np.int32), True)])
    found = load_of(Turn(plan, (), busy=1), slots=1)
    assert found.cache_tokens == sum(range(100_001, 165_537))
