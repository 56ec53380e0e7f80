"""Determinism on a tiny model: one result of each request, what two would look like, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from scripts import check_determinism

CHECKPOINT = Path(__file__).parent.parent / "data/llama_tied_gqa4"
TINY = ["--model", str(CHECKPOINT), "--slots", "3", "--max-len", "64", "--chunk-sizes", "16"]
FEW = ["--schedules", "6", "--requests", "5", "--prompt", "30", "--answer", "6", "--repeat", "2"]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_one_result_of_each_request(dtype, capsys):
    assert check_determinism.main([*TINY, *FEW, "--dtype", dtype, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    on = figures["deterministic"]["on"]
    assert on["distinct_results"] == on["distinct_tokens"] == [1] * 5
    assert (on["furthest_logprob"], on["failed"]) == (0, 0)
    assert set(figures["deterministic"]) == set(figures["cost"]["tokens_per_s"]) == {"on", "off"}
    assert all(len(speeds) == 2 for speeds in figures["cost"]["tokens_per_s"].values())


@pytest.mark.parametrize("what", ["logprob", "token", "failure"])
def test_a_result_that_is_not_the_same_is_told(what, monkeypatch, capsys):
    """Of one request, in one schedule, with `deterministic` on."""
    real, calls = check_determinism.serve, []

    def serve(engine, requests, draw):
        outputs = real(engine, requests, draw)
        calls.append(engine)
        if len(calls) == 3:
            at = next(place for place, output in enumerate(outputs) if output.id == "request 1")
            one = outputs[at].logprobs[0]
            changed = {
                "logprob": {
                    "logprobs": [dataclasses.replace(one, logprob=one.logprob - 0.5), *outputs[at].logprobs[1:]]
                },
                "token": {"token_ids": [*outputs[at].token_ids[:-1], 319]},
                "failure": {"finish_reason": "error", "error": "it broke"},
            }[what]
            outputs[at] = dataclasses.replace(outputs[at], **changed)
        return outputs

    monkeypatch.setattr(check_determinism, "serve", serve)
    assert check_determinism.main([*TINY, *FEW, "--json", "-"]) == 1
    shown = capsys.readouterr()
    figures = json.loads(shown.out)["deterministic"]["on"]
    assert figures["distinct_results"] == ([1] * 5 if what == "failure" else [1, 2, 1, 1, 1])
    assert figures["distinct_tokens"] == ([1, 2, 1, 1, 1] if what == "token" else [1] * 5)
    assert figures["furthest_logprob"] == pytest.approx(0.5 if what == "logprob" else 0)
    assert ("it broke" in shown.err) is (what == "failure") is bool(figures["failed"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prompt", "60", "--answer", "5"], "more than max_len 64"),
        (["--schedules", "0"], "schedules must be at least 1"),
        (["--no-deterministic"], "deterministic cannot be off"),
        (["--max-queue", "9"], "max_queue 9"),
    ],
)
def test_refusals(arguments, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        check_determinism.main([*TINY, *FEW, *arguments])
    assert ended.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.replace("│", " ").split())
