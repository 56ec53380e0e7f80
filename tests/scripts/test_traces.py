"""What a line of a workload means, what is wrong with lines that are none, and what becomes of public traces."""

import json
import subprocess
import sys
import time
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.traces import FORMATS, RULES, Item, read_trace, read_workload, token_hash, workload_text, write_workload

TRACES = Path(__file__).parent.parent / "data/traces"

counts, seeds, texts = st.integers(1, 10**9), st.integers(0, 2**64), st.text(min_size=1)


@st.composite
def items(draw) -> Item:
    def maybe(values):
        return draw(st.none() | values)

    after = maybe(texts)
    extra = {name: maybe(counts if name == "predicted_tokens" else texts) for name in ("predicted_tokens", "user")}
    extra |= {name: maybe(st.floats(1e-6, 1e6)) for name in ("ttft_slo_s", "tpot_slo_s")}
    if draw(st.booleans()):
        extra["prompt_ids"] = tuple(draw(st.lists(seeds, min_size=1, max_size=5)))
    else:
        length = extra["prompt_tokens"] = draw(st.integers(1, 2000))
        extra |= {"seed": draw(seeds), "prefix_seed": draw(seeds)}
        if draw(st.booleans()):
            extra["prefix_tokens"] = draw(st.integers(0, length))
        else:
            block = extra["block_tokens"] = draw(st.integers(length // 5 + 1, 2000))
            extra["blocks"] = tuple(draw(st.lists(seeds, max_size=-(-length // block))))
    return Item(
        id=draw(texts.filter(lambda text: text != after)),
        max_tokens=draw(counts),
        arrival_s=draw(st.floats(0, 1e9)),
        after=after,
        continues=after is not None and draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        priority=draw(st.integers()),
        expected=maybe(st.from_regex(r"[0-9a-f]{16}", fullmatch=True)),
        **extra,
    )


def drawn(**given) -> Item:
    return Item("a", 1, **({"prompt_tokens": 8} | given))


@settings(deadline=None)
@given(items())
def test_an_item_survives_its_line(item):
    assert Item.from_json(json.loads(json.dumps(item.to_json()))) == item


@settings(deadline=None)
@given(st.lists(items(), max_size=4, unique_by=lambda item: item.id))
def test_a_workload_survives_its_file(tmp_path_factory, made):
    known = [item for item in made if item.after is None]
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    write_workload(path, known)
    assert read_workload(path) == known
    assert path.read_bytes() == workload_text(known).encode()


def test_a_line_has_what_differs_from_the_defaults():
    item = Item("r1", 40, arrival_s=3, after="r0", continues=True, prompt_tokens=30, blocks=(1,))
    assert list(item.to_json()) == ["id", "max_tokens", "arrival_s", "after", "continues", "prompt_tokens", "blocks"]
    assert '"arrival_s": 3.0, "after": "r0", "continues": true' in json.dumps(item.to_json())
    assert Item("r1", 40, prompt_ids=[1, 2]).prompt_ids == (1, 2)  # type: ignore


def test_every_field_has_a_rule():
    assert set(RULES) == {one.name for one in fields(Item)}
    assert [one.name for one in fields(Item) if one.default is MISSING] == ["id", "max_tokens"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"id": ""}, "id must be a string that is not empty, not ''"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, not 0"),
        ({"max_tokens": True}, "max_tokens must be an integer of at least 1, not True"),
        ({"arrival_s": -0.5}, "arrival_s must be a number of at least 0, not -0.5"),
        ({"arrival_s": float("inf")}, "arrival_s must be a number of at least 0, not inf"),
        ({"arrival_s": float("nan")}, "arrival_s must be a number of at least 0, not nan"),
        ({"arrival_s": 10**400}, "arrival_s must be a number of at least 0, not 1000"),
        ({"after": "a"}, "after is the request itself: 'a'"),
        ({"continues": 1, "after": "b"}, "continues must be true or false, not 1"),
        ({"continues": True}, "continues needs after"),
        ({"prompt_ids": [1]}, "give exactly one of prompt_ids and prompt_tokens"),
        ({"prompt_tokens": None}, "give exactly one of prompt_ids and prompt_tokens"),
        ({"prompt_tokens": None, "prompt_ids": []}, "prompt_ids must hold at least one token"),
        ({"prompt_tokens": None, "prompt_ids": [1, -2]}, r"prompt_ids must be integers of at least 0, not \[1, -2\]"),
        ({"prompt_tokens": None, "prompt_ids": [1, 2], "blocks": [3]}, "nothing is drawn beside it"),
        ({"prompt_tokens": None, "prompt_ids": [1, 2], "prefix_tokens": 1}, "nothing is drawn beside it"),
        ({"seed": -1}, "seed must be an integer of at least 0, not -1"),
        ({"prefix_tokens": 9}, "prefix_tokens 9 exceeds the prompt"),
        ({"prefix_tokens": 3, "blocks": [1]}, "prefix_tokens 3 exceeds the prompt, or is beside blocks"),
        ({"blocks": [1, 2, 3], "block_tokens": 4}, "3 blocks of 4 tokens exceed 8 tokens"),
        ({"priority": "high"}, "priority must be an integer, not 'high'"),
        ({"ttft_slo_s": 0}, "ttft_slo_s must be a number above 0, not 0"),
        ({"tpot_slo_s": True}, "tpot_slo_s must be a number above 0, not True"),
        ({"expected": "xyz"}, "expected must be 16 hex digits, not 'xyz'"),
        ({"temperature": 1}, r"fields that are not supported: \['temperature'\]; supported are \['after'"),
    ],
)
def test_values_without_a_meaning(given, message):
    with pytest.raises(ValueError, match=message):
        Item.from_json({"id": "a", "max_tokens": 1, "prompt_tokens": 8} | given)


def test_lines_that_are_no_objects_or_lack_a_field():
    with pytest.raises(ValueError, match="a request is a JSON object, not list"):
        Item.from_json([])
    with pytest.raises(ValueError, match=r"fields that are missing: \['id', 'max_tokens'\]"):
        Item.from_json({"prompt_tokens": 3})


def test_prompts_are_the_same_on_every_machine_and_in_every_version():
    prompt = drawn(prompt_tokens=1000, seed=7, prefix_tokens=100, prefix_seed=9).prompt(49152)
    assert (len(prompt), prompt[:3], token_hash(prompt)) == (1000, (20719, 42774, 47237), "a71cb33dc24f7fb7")
    assert token_hash([1, 2]) == token_hash(np.array([1, 2])) == "34fb5c825de7ca4a"  # sha256 of 0100000002000000


@settings(deadline=None)
@given(seeds, st.integers(1, 300), st.integers(1, 300), st.sampled_from([2, 100, 49152, 2**33]))
def test_equal_seeds_share_exactly_their_prefix(seed, short, long, vocabulary):
    first = drawn(prompt_tokens=short + 20, prefix_tokens=short, prefix_seed=seed, seed=1).prompt(vocabulary)
    second = drawn(prompt_tokens=long + 20, prefix_tokens=long, prefix_seed=seed, seed=2).prompt(vocabulary)
    shared = min(short, long)
    assert first[:shared] == second[:shared]
    assert first[shared:] != second[shared:]
    assert all(0 <= token < vocabulary for token in first)


def test_blocks_are_drawn_each_by_its_seed():
    whole = drawn(prompt_tokens=10, blocks=(5, 6, 7), block_tokens=4).prompt(1000)
    assert len(whole) == 10
    assert whole[:8] == drawn(prompt_tokens=8, blocks=(5, 6), block_tokens=4).prompt(1000)
    assert whole[8:] == drawn(prompt_tokens=2, blocks=(7,), block_tokens=4).prompt(1000)
    assert (
        drawn(prompt_tokens=7, blocks=(5,), block_tokens=4, seed=3).prompt(1000)[4:] == drawn(seed=3).prompt(1000)[:3]
    )


def test_a_turn_begins_with_what_was_said_before():
    turn = drawn(after="b", continues=True)
    assert turn.prompt(100, [1, 2, 3]) == (1, 2, 3, *drawn().prompt(100))
    with pytest.raises(ValueError, match="a: before must hold tokens where, and only where"):
        turn.prompt(100)
    with pytest.raises(ValueError, match="a: before must hold tokens where, and only where"):
        drawn().prompt(100, [1])


def test_given_tokens_must_be_of_the_vocabulary():
    item = Item("a", 1, prompt_ids=(3, 99))
    assert item.prompt(100) == (3, 99)
    assert item.length == 2
    with pytest.raises(ValueError, match="a: token 99 is not in a vocabulary of 99"):
        item.prompt(99)


def test_a_request_is_greedy_and_has_a_priority_only_on_demand():
    request = drawn(priority=-1).request(100)
    assert (request.id, request.prompt_ids, request.priority) == ("a", drawn().prompt(100), 0)
    assert (request.params.temperature, request.params.max_tokens, request.params.ignore_eos) == (0, 1, True)
    assert drawn(priority=-1).request(100, priority=True).priority == -1
    assert not drawn(ignore_eos=False).request(100).params.ignore_eos
    assert drawn(after="b", continues=True).request(100, [1, 2]).prompt_ids[:2] == (1, 2)  # type: ignore


BAD_LINES = b"""{"id": "a", "max_tokens": 1, "prompt_tokens": 8}

{"id": "b", "max_tokens": 1
{"id": "a", "max_tokens": 1, "prompt_tokens": 8}
{"id": "c", "max_tokens": 1, "prompt_tokens": 8, "after": "d"}
{"id": "d", "id": "e", "max_tokens": 1, "prompt_tokens": 8}
{"id": "f\xff", "max_tokens": 1, "prompt_tokens": 8}
{"id": "g", "max_tokens": 1, "prompt_tokens": 8, "arrival_s": NaN}
{"id": "h", "max_tokens": 1, "prompt_tokens": 8, "after": "a"}
"""


def test_bad_lines_are_told_and_the_others_are_read(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(BAD_LINES + b"[" * 100_000)
    told: list[str] = []
    assert [item.id for item in read_workload(path, told.append)] == ["a", "h"]
    expected = [
        "line 3: not JSON: ",
        "line 4: the id 'a' is that of an earlier line",
        "line 5: after names 'd', which is no request of an earlier line",
        "line 6: a key is given more than once: ['id', 'id', 'max_tokens', 'prompt_tokens']",
        "line 7: not JSON: 'utf-8' codec",
        "line 8: arrival_s must be a number of at least 0, not nan",
        "line 10: not JSON: ",
    ]
    assert len(told) == len(expected)
    assert all(message.startswith(start) for message, start in zip(told, expected, strict=True))
    with pytest.raises(ValueError, match=r"w.jsonl: line 3: not JSON.*; line 4: the id"):
        read_workload(path)


def test_what_cannot_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "w.jsonl"
    with pytest.raises(ValueError, match="the id 'a' is that of an earlier line"):
        write_workload(path, [drawn(), drawn()])
    with pytest.raises(ValueError, match="after names 'b'"):
        write_workload(path, [drawn(after="b")])
    assert not path.exists()


def read(form, name: str) -> tuple[list[tuple], list[str]]:
    told: list[str] = []
    items = read_trace(form, TRACES / name, told.append)
    return [(item.id, item.arrival_s, item.length, item.max_tokens) for item in items], told


def test_azure_of_2023():
    items, told = read("azure", "azure_2023.csv")
    assert items[:2] == [("line-2", 0.0, 374, 44), ("line-4", 0.5, 879, 55)]
    assert items[2:] == [("line-3", 2.25, 1396, 109), ("line-11", 10.0, 110, 27)]
    assert told == [
        "line 5: ContextTokens must be an integer of at least 1, not 'oops'",
        "line 6: Invalid isoformat string: 'yesterday'",
        "line 7: ContextTokens must be an integer of at least 1, not '0'",
        "line 8: GeneratedTokens must be an integer of at least 1, not '0'",
        "line 9: this is no row: 2023-11-16 18:15:46.0000000,12",
    ]


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone of this machine cannot be set")
def test_azure_of_2024_and_times_without_a_zone_are_utc(monkeypatch):
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    items, told = read("azure", "azure_2024.csv")
    monkeypatch.undo()
    time.tzset()
    assert items[:2] == [("line-2", 0.0, 2162, 5), ("line-3", 0.99007, 2399, 6)]
    assert (items[2:], told) == ([("line-4", 2.5, 76, 15), ("line-5", 3.0, 10, 2)], [])


def test_burstgpt():
    items, told = read("burstgpt", "burstgpt.csv")
    assert items == [("line-2", 0.0, 472, 18), ("line-3", 40.0, 1087, 230), ("line-5", 113.0, 417, 276)]
    assert told == [
        "line 7: Request tokens must be an integer of at least 1, not '-3'",
        "line 8: could not convert string to float: 'soon'",
        "line 9: arrival_s must be a number of at least 0, not nan",
        "line 10: this is no row: 130,GPT-4,30,8",
        "line 11: Response tokens must be an integer of at least 1, not '8.5'",
        "2 requests that had failed are left out",
    ]


def test_burstgpt_with_sessions():
    items = read_trace("burstgpt", TRACES / "burstgpt_sessions.csv", pytest.fail)
    assert [item.arrival_s for item in items] == [0, 51.5, 82]
    assert [item.user and item.user[:8] for item in items] == ["11111111", None, "11111111"]


def test_mooncake_prompts_share_what_their_hash_ids_share():
    told: list[str] = []
    items = read_trace("mooncake", TRACES / "mooncake.jsonl", told.append)
    assert [(item.arrival_s, item.max_tokens) for item in items] == [(0, 50), (3, 40), (3, 30), (5.999, 3)]
    assert [item.length for item in items] == [1300, 1800, 1024, 28]
    first, second, third, _ = (item.prompt(49152) for item in items)
    assert first == second[:1300]
    assert third[:512] == first[:512]
    assert all(one != other for one, other in zip(third[512:516], first[512:516], strict=True))
    assert [message.partition(":")[0] for message in told] == [f"line {n}" for n in range(5, 12)]
    for message, reason in zip(told, ("one id for each 512", "blocks", "timestamp", "input_length"), strict=False):
        assert reason in message


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [*(path.name for path in sorted(TRACES.iterdir())), "empty", "binary"])
def test_a_file_of_another_format_is_one_error(form, name, tmp_path):
    path = TRACES / name
    if name.startswith(form):
        return
    if not path.exists():
        path = tmp_path / name
        path.write_bytes(b"" if name == "empty" else bytes(range(256)))
    with pytest.raises(ValueError, match=f"{name} is no {form} trace: its first line lacks "):
        read_trace(form, path, pytest.fail)


@pytest.mark.parametrize("module", ["traces", "generators", "workloads"])
def test_jax_is_not_imported(module):
    code = f"import sys, scripts.{module}; assert not {{'jax', 'batching', 'model'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
