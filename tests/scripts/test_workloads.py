"""Workloads that are made up: the same again, of the right distributions, well formed; what does not fit is told.

The tests of distributions see one sample each. Where one takes a p-value, it fails for a right distribution with
probability ALARM; where it takes a mean, with that of a normal variable past Z standard errors, 6e-7.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scripts import generators
from scripts.generators import Fixed, Lognormal, LongDocument, MultiTurn, SharedPrefix, ShareGPT, Uniform
from scripts.traces import Item, read_workload, workload_text, write_workload
from scripts.workloads import Convert, fitted, main, make, scaled, with_history

ALARM = 1e-6
Z = 5.0
MANY = 4000
TRACES = Path(__file__).parent.parent / "data/traces"
KINDS = (Fixed, Uniform, Lognormal, ShareGPT, LongDocument, SharedPrefix, MultiTurn)


def make_quietly(options) -> list[Item]:
    return make(options, pytest.fail)


def mean_is(sample, mean: float, deviation: float) -> bool:
    return abs(np.mean(sample) - mean) < Z * deviation / len(sample) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrivals", ["at-once", "poisson", "gamma", "closed"])
def test_the_same_options_give_the_same_file_and_another_seed_another(kind, arrivals, tmp_path):
    options = {"requests": 20, "arrivals": arrivals, "users": 3, "urgent": 0.5, "predict_noise": 0.3}
    first, second, other = (workload_text(make_quietly(kind(**options, seed=seed))) for seed in (3, 3, 4))
    assert first == second != other
    items = make_quietly(kind(**options, seed=3))
    write_workload(tmp_path / "w.jsonl", items)
    assert read_workload(tmp_path / "w.jsonl") == items
    assert len(items) == 20


def test_what_is_drawn_for_one_purpose_leaves_the_others_alone():
    plain = make_quietly(ShareGPT())
    full = make_quietly(
        ShareGPT(arrivals="gamma", users=4, urgent=0.5, predict_noise=0.2, ttft_slo_s=1, tpot_slo_s=0.1)
    )
    assert all(item.ttft_slo_s == 1 and item.tpot_slo_s == 0.1 for item in full)
    left = {"arrival_s": 0.0, "user": None, "priority": 0, "predicted_tokens": None}
    assert [replace(item, **left, ttft_slo_s=None, tpot_slo_s=None) for item in full] == plain


def test_lengths_that_are_uniform():
    items = make_quietly(Uniform(requests=MANY))
    for sample in ([item.length for item in items], [item.max_tokens for item in items]):
        assert (min(sample), max(sample)) >= (100, 1000)
        assert max(sample) <= 1024
        assert mean_is(sample, 562, (925**2 / 12) ** 0.5)
    assert {(i.length, i.max_tokens) for i in make_quietly(Fixed(prompt=5, answer=6))} == {(5, 6)}
    assert len(make_quietly(Uniform())) == 256


@pytest.mark.parametrize(
    ("options", "means"),
    [
        (Lognormal(requests=MANY), None),
        (ShareGPT(requests=MANY), (161.31, 337.99)),
        (LongDocument(requests=MANY), None),
    ],
)
def test_lengths_that_are_lognormal(options, means):
    prompts, answers = options.lengths(options.stream("lengths"))
    normal = stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000)
    for place, (sample, median, sigma) in enumerate(
        [(prompts, options.prompt, options.prompt_sigma), (answers, options.answer, options.answer_sigma)]
    ):
        exact = np.clip(median * np.exp(sigma * normal), options.least, options.most)
        assert mean_is(sample, exact.mean(), exact.std())
        below = np.mean(sample <= median)
        assert abs(below - 0.5) < Z * 0.5 / MANY**0.5 + 0.01  # lengths are whole: some are the median
        assert options.least <= sample.min() <= sample.max() <= options.most
        if means is not None:
            assert exact.mean() == pytest.approx(means[place], rel=0.01)


def test_long_documents_have_the_published_90th_percentiles():
    options = LongDocument()
    for median, sigma, p90 in (
        (options.prompt, options.prompt_sigma, 12985),
        (options.answer, options.answer_sigma, 371),
    ):
        assert median * np.exp(sigma * stats.norm.ppf(0.9)) == pytest.approx(p90, rel=0.01)


def test_arrivals_of_open_loops():
    poisson = np.diff(generators.starts(MANY, Fixed(arrivals="poisson", rate=4.0)), prepend=0)
    assert stats.kstest(poisson, stats.expon(scale=1 / 4).cdf).pvalue > ALARM
    for cv in (0.5, 2.0):
        gaps = np.diff(generators.starts(MANY, Fixed(arrivals="gamma", rate=4.0, cv=cv)), prepend=0)
        gamma = stats.gamma(1 / cv**2, scale=cv**2 / 4)
        assert gamma.mean() == pytest.approx(1 / 4)
        assert gamma.std() == pytest.approx(cv / 4)
        assert stats.kstest(gaps, gamma.cdf).pvalue > ALARM
    items = make_quietly(Fixed(requests=200, arrivals="poisson", rate=4.0))
    assert [item.arrival_s for item in items] == sorted(item.arrival_s for item in items)
    assert {item.arrival_s for item in make_quietly(Fixed())} == {0.0}


def test_each_user_of_a_closed_loop_waits_for_the_last_answer():
    items = make_quietly(Fixed(requests=MANY, arrivals="closed", users=8, think_s=2.0))
    loops: dict[str | None, list[Item]] = {}
    for item in items:
        loops.setdefault(item.user, []).append(item)
    assert len(loops) == 8
    for loop in loops.values():
        assert [item.after for item in loop] == [None, *(item.id for item in loop[:-1])]
    assert not any(item.continues for item in items)
    assert stats.kstest([item.arrival_s for item in items], stats.expon(scale=2.0).cdf).pvalue > ALARM
    hasty = make_quietly(Fixed(arrivals="closed", users=8, think_s=0.0))
    assert {item.arrival_s for item in hasty} == {0.0}


def test_conversations_are_well_formed():
    items = make_quietly(MultiTurn(requests=MANY, arrivals="poisson", users=50, think_s=3.0, turns=4.0))
    at = {item.id: place for place, item in enumerate(items)}
    lengths = []
    for item in items:
        assert item.continues == (item.after is not None)
        if item.after is None:
            lengths.append(0)
        else:
            assert at[item.after] == at[item.id] - 1
            assert items[at[item.after]].user == item.user
        lengths[-1] += 1
    assert mean_is(lengths[:-1], 4, (1 - 1 / 4) ** 0.5 * 4)
    thinking = [item.arrival_s for item in items if item.continues]
    assert stats.kstest(thinking, stats.expon(scale=3.0).cdf).pvalue > ALARM


def test_conversations_in_closed_loops_follow_each_other():
    items = make_quietly(MultiTurn(requests=60, arrivals="closed", users=2))
    said: dict[str, tuple[int, ...]] = {}
    last: dict[str | None, str] = {}
    for item, length in zip(items, with_history(items), strict=True):
        assert item.after == last.get(item.user)
        prompt = item.prompt(100, said[item.after] if item.continues and item.after else ())
        assert len(prompt) == length
        said[item.id] = (*prompt, *([7] * item.max_tokens))
        last[item.user] = item.id


def test_system_prompts_are_shared():
    items = make_quietly(SharedPrefix(requests=40, prefixes=3, prefix=64))
    prompts = [item.prompt(49152) for item in items]
    assert len({prompt[:64] for prompt in prompts}) == 3
    assert len({prompt[64:68] for prompt in prompts}) == 40
    assert all(item.length > 64 for item in items)
    half = [scaled(item, 0.5) for item in items]
    assert len({item.prompt(49152)[:32] for item in half}) == 3
    assert {item.prefix_tokens for item in half} == {32}
    (short,) = fitted([items[:1]], max_len=30, clip=True, report=lambda _: None)[0]
    assert (short.length, short.prefix_tokens, short.max_tokens) == (16, 16, 15)


def test_users_priorities_and_predictions():
    drawn = Counter(generators.owners(MANY, Fixed(users=5, zipf=1.5)))
    shares = 1 / np.arange(1, 6) ** 1.5
    counts = [drawn[f"user-{user}"] for user in range(5)]
    assert stats.chisquare(counts, MANY * shares / shares.sum()).pvalue > ALARM
    items = [Item(f"r{n}", 10**6, prompt_tokens=1) for n in range(MANY)]
    result = generators.labelled(items, Fixed(urgent=0.2, predict_noise=0.5))
    assert mean_is([item.priority for item in result], -0.2, (0.2 * 0.8) ** 0.5)
    assert {item.priority for item in result} == {0, -1}
    guesses = [np.log((item.predicted_tokens or 0) / 1e6) for item in result]
    assert stats.kstest(guesses, stats.norm(scale=0.5).cdf).pvalue > ALARM
    assert {item.predicted_tokens for item in generators.labelled(items, Fixed(predict_noise=0.0))} == {10**6}


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=4)), st.integers(1, 80)
)
def test_what_does_not_fit_is_shortened_and_counted(shapes, max_len):
    sessions = [
        [Item(f"{s}-{t}", answer, prompt_tokens=prompt) for t, (prompt, answer) in enumerate(shape)]
        for s, shape in enumerate(shapes)
    ]
    told: list[str] = []
    kept = fitted(sessions, max_len, clip=True, report=told.append)
    cut = 0
    for before, after in zip(sessions, kept, strict=True):
        chained = [replace(i, after=after[t - 1].id, continues=True) if t else i for t, i in enumerate(after)]
        for item, prompt in zip(after, with_history(chained), strict=True):
            assert prompt + item.max_tokens - 1 <= max_len
        for old, new in zip(before, after, strict=False):
            assert (new.length, new.max_tokens) <= (old.length, old.max_tokens)
            cut += new != old
        assert after
    left_out = sum(map(len, sessions)) - sum(map(len, kept))
    both = f"{cut} requests were shortened to fit in max_len {max_len}, and {left_out} later turns left out"
    assert told == ([both] if cut or left_out else [])
    if told:
        with pytest.raises(
            ValueError, match=rf"requests do not fit in max_len {max_len}, the longest needs \d+: scale"
        ):
            fitted(sessions, max_len, clip=False, report=pytest.fail)
    else:
        assert fitted(sessions, max_len, clip=False, report=pytest.fail) == kept == sessions


def test_a_trace_is_cut_sped_up_and_scaled():
    options = {"trace": TRACES / "azure_2023.csv", "format": "azure", "out": "-"}
    told: list[str] = []
    items = make(Convert(**options, start_s=0.25, first=2, speed=2.0, scale=0.1), told.append)
    assert [(i.id, i.arrival_s, i.length, i.max_tokens) for i in items] == [
        ("line-4", 0.125, 88, 6),
        ("line-3", 1.0, 140, 11),
    ]
    assert len(told) == 5
    with pytest.raises(ValueError, match=r"azure_2023.csv has no request from 11.0 s on"):
        make(Convert(**options, start_s=11.0), told.append)


def test_a_scaled_mooncake_trace_shares_as_before():
    options = {"trace": TRACES / "mooncake.jsonl", "format": "mooncake"}
    items = make(Convert(**options, scale=1 / 16, urgent=1.0), lambda _: None)
    assert [(item.length, item.block_tokens, item.priority) for item in items[:2]] == [(81, 32, -1), (112, 32, -1)]
    first, second, third = (item.prompt(49152) for item in items[:3])
    assert first == second[:81]
    assert third[:32] == first[:32]
    assert third[32:36] != first[32:36]
    short = make(Convert(**options, max_len=600, clip=True), lambda _: None)
    assert [(len(item.blocks), item.length, item.max_tokens) for item in short[:2]] == [(2, 551, 50), (2, 561, 40)]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Fixed, {"requests": 0}, "requests must be finite and above 0, not 0"),
        (Fixed, {"scale": float("inf")}, "scale must be finite and above 0, not inf"),
        (Fixed, {"seed": -1}, "seed must be finite and at least 0, not -1"),
        (Fixed, {"urgent": 1.5}, "urgent must be at most 1, not 1.5"),
        (Fixed, {"cv": 0.0}, "cv must be finite and above 0, not 0.0"),
        (Fixed, {"arrivals": "closed"}, "closed arrivals need users"),
        (Uniform, {"prompt": (5, 4)}, "prompt must be two lengths of at least 1, the shorter first, not 5 4"),
        (Uniform, {"answer": (0, 4)}, "answer must be two lengths of at least 1"),
        (Lognormal, {"least": 9, "most": 8}, "least 9 exceeds most 8"),
        (Lognormal, {"prompt_sigma": -1.0}, "prompt_sigma must be finite and at least 0"),
        (MultiTurn, {"turns": 0.5}, "turns must be at least 1, not 0.5"),
    ],
)
def test_options_without_a_meaning(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_the_command_line(tmp_path, capsys):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    command = ["multi-turn", "--requests", "12", "--arrivals", "closed", "--users", "3", "--seed", "5"]
    assert main([*command, "--out", str(first)]) == main([*command, "--out", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    shown = capsys.readouterr().err
    assert "requests: 12; 3 of them arrive within" in shown
    assert "; 9 wait for another to end" in shown
    assert main(command) == 0
    assert capsys.readouterr().out == first.read_text()
    assert read_workload(first) == make_quietly(MultiTurn(requests=12, arrivals="closed", users=3, seed=5))


def test_the_command_line_converts(tmp_path, capsys):
    out = tmp_path / "w.jsonl"
    command = ["convert", "--format", "burstgpt", "--trace", str(TRACES / "burstgpt.csv"), "--out", str(out)]
    assert main([*command, "--first", "2"]) == 0
    assert [json.loads(line)["prompt_tokens"] for line in out.read_text().splitlines()] == [472, 1087]
    assert "2 requests that had failed are left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["fixed", "--max-len", "100"], "64 requests do not fit in max_len 100, the longest needs 255: scale or clip"),
        (["convert", "--format", "azure", "--trace", str(TRACES / "burstgpt.csv")], "burstgpt.csv is no azure trace"),
        (["convert", "--format", "azure", "--trace", "/missing.csv"], "No such file or directory: '/missing.csv'"),
    ],
)
def test_what_cannot_be_made_is_one_line(command, message, tmp_path, capsys):
    assert main([*command, "--out", str(tmp_path / "w.jsonl")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert not (tmp_path / "w.jsonl").exists()
