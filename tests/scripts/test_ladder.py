"""The ladder on a tiny model: its stages, figures that are added up by hand, the mask, what it shows and refuses."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from batching import Engine, EngineConfig, Output, Request, SamplingParams
from model.checkpoint import load
from pallas_kernels.attention.reference import attend
from scripts import command, ladder
from scripts.command import Refused
from scripts.ladder import STAGES, run_stage, stages_for
from scripts.ladder_picture import MAX_LEN, SLOTS, counts, example_turn, mask

CHECKPOINT = Path(__file__).parent.parent / "data/llama_tied_gqa4"
TINY = ["--model", str(CHECKPOINT), "--slots", "3", "--chunk", "16"]
FEW = ["--requests", "5", "--prompt", "4", "30", "--answer", "1", "6", "--repeat", "2"]
NAMES = [stage.name for stage in STAGES]
PROMPTS, ANSWERS = (5, 20, 9, 3), (4, 2, 1, 3)  # tokens of the workload that is done by hand


@pytest.fixture(scope="module")
def engines():
    """With one slot, and with three; turns of 16 prompt rows or of a whole batch of the prompts by hand."""
    model = load(CHECKPOINT).model
    return tuple(Engine(model, EngineConfig(slots, 24, (16, 64), checks=True)) for slots in (1, 3))


def requests_of(prompts=PROMPTS, answers=ANSWERS, ignore_eos=True):
    params = [SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=ignore_eos) for answer in answers]
    pairs = enumerate(zip(prompts, params, strict=True))
    return [
        Request(prompt_ids=[3 + 7 * at + i for i in range(length)], params=one, id=f"r{at}")
        for at, (length, one) in pairs
    ]


def served(engines, stage, requests):
    return run_stage(engines[stage.batched], stage, requests, 16)


def test_every_stage_changes_one_thing():
    """Beside its name and its reason."""
    assert STAGES[0] == ladder.Stage(STAGES[0].name, STAGES[0].what)
    for before, after in pairwise(STAGES):
        changed = [f.name for f in dataclasses.fields(after) if getattr(before, f.name) != getattr(after, f.name)]
        assert len(changed) == 3, changed
        assert set(changed) >= {"name", "what"}


@pytest.mark.parametrize(
    ("prefix", "stages"), [("0", NAMES[:-1]), pytest.param("4", NAMES[:-1], marks=pytest.mark.slow), ("17", NAMES)]
)
def test_all_stages_run_and_give_the_same_tokens(prefix, stages, tmp_path, capsys):
    """With prefix reuse where prompts share enough."""
    lengths = [*FEW[:2], "--prompt", "17", "30", *FEW[5:]]
    assert ladder.main([*TINY, *lengths, "--prefix", prefix, "--json", str(tmp_path / "x.json")]) == 0
    figures = json.loads((tmp_path / "x.json").read_text())
    assert [one["name"] for one in figures["stages"]] == stages
    for one in figures["stages"]:
        assert one["different"] == []
        assert one["compiled_in_window"] == 0
        assert one["slots"] == (3 if one["batched"] else 1)
        speed = one["tokens_per_s"]
        assert 0 < speed["lowest"] <= speed["median"] <= speed["highest"]
        assert one["rows"] == sum(one[f"{kind}_rows"] for kind in ("needed", "recomputed", "padding"))
        for name, value in one["per_token"].items():
            assert value * one["generated_tokens"] == pytest.approx(one[name])
        assert bool(one["recomputed_rows"]) is not one["cache"]
        assert bool(one["cached_tokens"]) is one["prefix_reuse"]
    shown = capsys.readouterr().err
    assert all(f"{number} {name}" in shown for number, name in enumerate(stages, start=1))
    assert "5 of 5" in shown


def test_rows_by_hand(engines):
    """Prompts of 5, 20, 9, 3 tokens, answers of 4, 2, 1, 3; 3 slots; turns of 16 prompt rows from `chunked` on."""
    requests = requests_of()
    needed = sum(PROMPTS) + sum(ANSWERS) - len(PROMPTS)
    work = {stage.name: counts(served(engines, stage, requests), requests) for stage in STAGES}
    assert {one["generated_tokens"] for one in work.values()} == {10}
    assert {one["needed_rows"] for one in work.values()} == {needed} == {43}
    live = {name: one["live_rows"] for name, one in work.items()}
    squares = sum(prompt + k for prompt, answer in zip(PROMPTS, ANSWERS, strict=True) for k in range(answer))
    assert live == dict.fromkeys(NAMES, needed) | {"no cache": squares}
    assert work["no cache"]["recomputed_rows"] == squares - needed
    turns = {name: one["turns"] for name, one in work.items()}
    # A token a turn. With three slots: a turn for three prompts, three to decode, a turn for the fourth, two to decode.
    assert (turns["no cache"], turns["KV cache"], turns["static batch"]) == (10, 10, 7)
    # Of the rectangle of 3 x 20, 16 rows a turn hold 10 tokens in 34, the last 4; then as before.
    assert turns["chunked prefill"] == 10
    # 34 prompt rows in turns of 16, 16 and 2; the first prompt ends in the first turn, but nobody decodes yet.
    assert turns["ragged rows"] == 3 + 3 + 1 + 2
    # The third request ends with its prompt, and the fourth has its slot in the next turn; then three turns decode.
    assert turns["dynamic"] == 3 + 1 + 3
    # The first request decodes beside the others' prompts; the fourth's three tokens take three turns more.
    assert turns["continuous"] == 3 + 1 + 2
    idle = {name: one["idle_slots"] for name, one in work.items()}
    assert (idle["no cache"], idle["KV cache"]) == (0, 0)
    # Three decode turns with 2, 1, 1 of 3 slots busy, then three turns with 1.
    assert idle["static batch"] == 1 + 2 + 2 + 3 * 2


def test_the_rectangle_and_the_list(engines):
    """Of 3 slots: rows of the static batch are what the longest prompt and the longest answer need, or more."""
    requests = requests_of()
    rows = {stage.name: counts(served(engines, stage, requests), requests) for stage in STAGES}
    rectangle = 3 * 20 + 3 * 3 + 1 * 3 + 1 * 2
    assert rows["static batch"]["rows"] >= rows["chunked prefill"]["rows"] >= rectangle
    assert rectangle > rows["ragged rows"]["rows"] >= 43


def test_an_answer_that_ends_early_does_so_in_every_stage(engines, monkeypatch):
    """At a token that becomes the end of text for this test."""
    requests = requests_of()
    whole = served(engines, STAGES[0], requests).tokens
    end = frozenset({whole[0][1]})
    for engine in engines:
        monkeypatch.setattr(engine, "eos_ids", end)
        monkeypatch.setattr(engine, "_intake", dataclasses.replace(engine._intake, eos_ids=end))
    requests = requests_of(ignore_eos=False)
    runs = [served(engines, stage, requests).tokens for stage in STAGES]
    cut = [tokens[: tokens.index(*end) + 1] if end & set(tokens) else tokens for tokens in whole]
    assert len(cut[0]) <= 2
    assert all(run == cut for run in runs)


def test_prefix_reuse_needs_prompts_that_begin_alike():
    alone, alike = requests_of(), requests_of()
    alike.append(Request(prompt_ids=[*alike[1].prompt_ids[:17], 1], params=alike[1].params))
    assert [stage.name for stage in stages_for(alone)] == NAMES[:-1]
    assert [stage.name for stage in stages_for(alike)] == NAMES


def test_other_tokens_are_told(monkeypatch, capsys):
    """Of one request, in the second run of one stage."""
    real, runs = ladder.run_stage, []

    def run(engine, stage, requests, chunk):
        result = real(engine, stage, requests, chunk)
        runs.append(stage.name)
        if runs.count("dynamic") == 2 and stage.name == "dynamic":
            result.tokens[3][-1] += 1
        return result

    monkeypatch.setattr(ladder, "run_stage", run)
    assert ladder.main([*TINY, *FEW, "--json", "-"]) == 1
    shown = capsys.readouterr()
    different = {one["name"]: one["different"] for one in json.loads(shown.out)["stages"]}
    assert different == {name: [] for name in NAMES[:-1]} | {"dynamic": ["r3"]}
    assert "error: dynamic: other tokens of r3" in shown.err
    assert runs == NAMES[:-1] * 2


def test_the_turn_that_is_drawn():
    """A decode row, the end of a prompt that an earlier turn began, two whole prompts, and padding."""
    turn, _ = example_turn()
    rows = turn.plan.rows
    assert rows.slots.tolist() == [0] + [1] * 4 + [2] * 5 + [3] * 8 + [SLOTS] * 2
    assert rows.positions.tolist()[:-2] == [6, *range(14, 18), *range(5), *range(8)]
    assert [one.id for one in turn.sampled] == ["a", "b", "c", "d"]


def test_the_mask_is_block_diagonal_and_causal():
    """As of four texts one after the other, of which each row sees its own up to itself; and as attention has it."""
    turn, _ = example_turn()
    rows, expected, row = turn.plan.rows, np.zeros((20, SLOTS * MAX_LEN), bool), 0
    for slot, (start, end) in enumerate([(6, 7), (14, 18), (0, 5), (0, 8)]):
        for position in range(start, end):
            for key in range(position + 1):
                expected[row, slot * MAX_LEN + key] = True
            row += 1
    found = mask(rows, SLOTS, MAX_LEN)
    assert (found == expected).all()

    columns = SLOTS * MAX_LEN  # equal scores, and values that tell the keys apart
    values = np.eye(columns, dtype=np.float32).reshape(SLOTS, 1, MAX_LEN, columns)
    out = attend(
        jnp.zeros((20, 1, columns)),
        (jnp.zeros((SLOTS, 1, MAX_LEN, columns)), jnp.asarray(values)),
        jnp.asarray(rows.slots),
        jnp.asarray(rows.positions),
        num_decode=0,
        window=None,
        soft_cap=None,
        scale=1.0,
    )
    assert ((np.asarray(out)[:, 0] > 0) == expected).all()


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_the_picture(name, tmp_path):
    pytest.importorskip("matplotlib")
    assert ladder.main([*TINY, *FEW, "--picture", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        (
            [{"id": "a", "prompt_tokens": 20, "max_tokens": 3}, {"id": "b", "prompt_ids": [5, 6], "max_tokens": 2}],
            0,
            "",
        ),
        ([{"id": "a", "prompt_ids": [5, 6], "max_tokens": 2}, {"id": "b"}], 1, "line 2"),
        ([{"id": "a", "prompt_tokens": 2, "max_tokens": 2, "arrival_s": 1.0}], 2, "a: all requests are there"),
        ([{"id": "a", "prompt_ids": [5, 320], "max_tokens": 2}], 2, "320"),
        ([{"id": "a", "prompt_ids": [5], "max_tokens": 2, "temperature": 0.5}], 2, "temperature 0"),
        ([{"id": "a", "prompt_tokens": 400, "max_tokens": 9999}], 2, "positions"),
    ],
)
def test_a_workload(lines, status, reason, tmp_path, capsys):
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ladder.main([*TINY, "--workload", str(path), "--repeat", "1"]) == status
    assert reason in capsys.readouterr().err


def test_a_request_that_fails(engines, monkeypatch):
    """Nothing that it gave is compared."""
    failed = Output("r0", [], None, "error", error="it broke")
    monkeypatch.setattr(engines[1], "generate", lambda requests: [failed])
    with pytest.raises(Refused, match="r0: it broke"):
        served(engines, STAGES[2], requests_of())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--slots", "1"], "slots must be at least 2"),
        (["--repeat", "0"], "repeat must be at least 1"),
        (["--prompt", "9", "4"], "prompt must be two rising numbers"),
        (["--answer", "0", "4"], "answer must be two rising numbers"),
        (["--prefix", "5"], "prefix 5 exceeds the shortest prompt, 4"),
        (["--chunk", "7"], "multiples of 16"),
        (["--picture", "x.txt"], ".png or .svg"),
    ],
)
def test_refusals(arguments, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        ladder.main([*TINY, *FEW, *arguments])
    assert ended.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_what_cannot_be_written_is_known_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(ladder, "make_engine", lambda *_: pytest.fail("loads the model"))
    assert ladder.main([*TINY, *FEW, "--json", "no-such-folder/x.json"]) == 2
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert ladder.main([*TINY, *FEW, "--picture", "x.svg"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
