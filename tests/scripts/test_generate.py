"""The command line: lines of JSON in, lines of JSON out, exit statuses, and a run of a real model."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.display import RunDisplay
from scripts.generate import Options, input_lines, main
from scripts.jobs import Job, OrderedWriter, read_jobs

ROOT = Path(__file__).parent.parent.parent
TINY = ["--model", str(ROOT / "tests/data/llama_tied_gqa4"), "--slots", "2", "--max-len", "32", "--chunk-sizes", "16"]

GOOD = [
    {"id": "one", "prompt_ids": [1, 5, 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True},
    {"id": "two", "prompt_ids": list(range(3, 30)), "max_tokens": 4, "seed": 7, "ignore_eos": True},
    {"id": "three", "prompt_ids": [8], "max_tokens": 9, "temperature": 0.7, "seed": 2**63, "ignore_eos": True},
    {"id": "four", "prompt_ids": [4, 4], "max_tokens": 1, "temperature": 0},
]
BAD = {  # line -> a part of the reason
    '{"prompt_ids": [1,': "JSON",
    '"a text"': "JSON object",
    "[]": "JSON object",
    '{"prompt_ids": [1], "max_token": 3}': "max_token",
    '{"max_tokens": 3}': "exactly one",
    '{"prompt_ids": [1], "prompt": "x"}': "exactly one",
    '{"prompt_ids": []}': "0 tokens",
    '{"prompt_ids": "12"}': "list of integers",
    '{"prompt_ids": [1.5]}': "1.5",
    '{"prompt_ids": [320]}': "320",
    '{"prompt_ids": [-1]}': "-1",
    '{"prompt_ids": [1], "stop_token_ids": [5000]}': "5000",
    '{"prompt_ids": [1], "temperature": -1}': "temperature",
    '{"prompt_ids": [1], "temperature": NaN}': "temperature",
    '{"prompt_ids": [1], "temperature": 1%s}' % ("0" * 400): "temperature must be finite",
    '{"prompt_ids": [1], "max_tokens": 0}': "max_tokens",
    '{"prompt_ids": [1], "max_tokens": 33}': "33",
    '{"prompt_ids": %s}' % ([1] * 33): "33 tokens",
    '{"prompt_ids": [1], "id": 3}': "id",
    '{"prompt_ids": [1], "id": "one"}': "'one'",
    '{"prompt": "a text"}': "tokenizer",
    '{"messages": [{"role": "user", "content": "a text"}]}': "tokenizer",
    '{"messages": 5}': "list",
    '{"messages": [5]}': "message 0",
    '{"prompt_ids": [1], "max_tokens": 3, "max_tokens": 4}': "'max_tokens' is given more than once",
    '{"messages": [{"role": "user", "content": "a", "content": "b"}]}': "'content' is given more than once",
    "[" * 100_000: "nested too deep",
    '{"prompt": "\xff"}': "UTF-8",
}


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_bytes("\n".join(lines).encode("latin-1"))  # a character above 127 is not UTF-8 then
    return str(path)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_good_lines(tmp_path, capsys):
    lines = [json.dumps(GOOD[0]), "", *map(json.dumps, GOOD[1:]), "  "]
    out, figures = tmp_path / "out.jsonl", tmp_path / "figures.json"
    arguments = ["--prompts", write_lines(tmp_path / "in.jsonl", lines), "--out", str(out), "--json", str(figures)]
    assert main([*TINY, *arguments, "--compare", "static", "continuous"]) == 0

    outputs = read_lines(out)
    assert [output["id"] for output in outputs] == ["one", "two", "three", "four"]
    assert [len(output["token_ids"]) for output in outputs] == [6, 4, 9, 1]
    assert {output["finish_reason"] for output in outputs} == {"length"}
    assert [output["prompt_tokens"] for output in outputs] == [3, 27, 1, 2]
    assert len(outputs[2]["metrics"]["tokens"]) == 9

    figures = json.loads(figures.read_text())
    assert [run["policy"] for run in figures["runs"]] == ["continuous", "static", "continuous"]
    for run in figures["runs"]:
        assert (run["requests"], run["prompt_tokens"], run["generated_tokens"]) == (4, 33, 20)
        assert run["different"] == []
        assert 0 < run["busy_share"] <= 1
        assert 0 <= run["padding_share"] < 1
        assert 0 <= run["gap_share"] <= 1
        assert 0 < run["host_s_per_turn"] * run["turns"] < 2 * run["wall_s"]
        assert run["ttft_s"]["p50"] <= run["ttft_s"]["p90"] < run["wall_s"]
    assert figures["start_up"]["programs"] >= 2
    assert figures["start_up"]["first_token_s"] > figures["start_up"]["compile_s"] > 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "4 of 4" in shown.err


def test_bad_lines_between_good_ones(tmp_path, capsys):
    good = [json.dumps(request) for request in GOOD]
    lines = [good[0], *BAD, *good[1:]]
    out = tmp_path / "out.jsonl"
    assert main([*TINY, "--prompts", write_lines(tmp_path / "in.jsonl", lines), "--out", str(out)]) == 1

    outputs, shown = read_lines(out), capsys.readouterr().err.splitlines()
    assert len(outputs) == len(lines)
    assert [output["id"] for output in outputs if output["finish_reason"] == "length"] == [
        "one",
        "two",
        "three",
        "four",
    ]
    for number, (output, reason) in enumerate(zip(outputs[1:], BAD.values(), strict=False), start=2):
        assert output["finish_reason"] == "error", lines[number - 1]
        assert output["token_ids"] == []
        assert reason in output["error"]
        assert sum(line.startswith(f"line {number}: ") for line in shown) == 1


def test_more_requests_than_the_queue_holds_and_defaults(tmp_path, monkeypatch, capsys):
    lines = [json.dumps({"prompt_ids": [token], "id": str(token)}) for token in range(3, 10)]
    lines.append('{"prompt_ids": [1], "id": "own", "max_tokens": 2}')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    defaults = ["--max-queue", "2", "--max-tokens", "3", "--temperature", "0", "--ignore-eos"]
    assert main([*TINY, "--prompts", "-", "--out", "-", *defaults]) == 0
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [output["id"] for output in outputs] == [*map(str, range(3, 10)), "own"]
    assert [output["completion_tokens"] for output in outputs] == [3] * 7 + [2]


def test_text_for_a_person(tmp_path, capsys):
    assert main([*TINY, "--prompts", write_lines(tmp_path / "in.jsonl", [json.dumps(GOOD[0])])]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("[one] 3 token ids (3 + 6 tokens, length)\n    [")
    assert "generated tokens per second" in shown.err
    assert "start-up" in shown.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prompts", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--out", "no-such-folder/out.jsonl"], "no-such-folder"),
        (["--json", "."], "directory"),
        (["--out", "-", "--json", "-"], "--json and --out are the same"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--max-len", "4096"], "4096"),
        (["--timeline", "no-such-folder/x.json"], "no-such-folder"),
        (["--timeline", "x.json", "--json", "x.json"], "--timeline and --json are the same"),
        (["--picture", "no-such-folder/x.png"], "no-such-folder"),
        (["--profile", "/dev/null"], "/dev/null"),
    ],
)
def test_what_cannot_be_run(arguments, reason, capsys):
    assert main(["a prompt", *TINY, *arguments]) == 2
    assert reason in "".join(capsys.readouterr().err.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--slots", "0"],
        ["--chunk-sizes", "7"],
        ["--dtype", "int4"],
        ["--max-tokens", "0"],
        ["--compare", "fastest"],
        ["--chat"],
        ["--picture", "picture.txt"],
        ["--profile", "x", "--profile-turns", "20:10"],
        ["--profile", "x", "--profile-turns", "0:3"],
        ["--profile", "x", "--profile-turns", "ten"],
        ["--profile-turns", "1:2"],
    ],
)
def test_options_without_a_meaning(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, *arguments])
    assert stopped.value.code == 2


def test_the_input_is_not_overwritten(tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [json.dumps(GOOD[0])])
    assert main([*TINY, "--prompts", path, "--out", path]) == 2
    assert json.loads(Path(path).read_text()) == GOOD[0]


def test_figures_on_stdout_alone(tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [json.dumps(GOOD[0])])
    assert main([*TINY, "--prompts", path, "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["runs"][0]["generated_tokens"] == 6
    assert "[one] 3 token ids" in shown.err


def test_every_output_can_be_told_from_the_others(tmp_path, capsys):
    lines = [
        '{"prompt_ids": [1], "max_tokens": 1}',
        '{"prompt_ids": [2], "max_tokens": 1, "id": "line-5"}',
        '{"prompt_ids": [3], "max_tokens": 1, "id": "line-1"}',
        "not JSON",
        '{"prompt_ids": [4], "max_tokens": 1}',
        '{"prompt_ids": [], "id": "six"}',
        '{"prompt_ids": [4], "max_tokens": 1, "id": "six"}',
    ]
    assert main([*TINY, "--prompts", write_lines(tmp_path / "in.jsonl", lines), "--out", "-"]) == 1
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ids = ["line-1", "line-5", "line-1", "line-4", "line-5", "six", "six"]
    assert [output["id"] for output in outputs] == ids
    for index in (2, 4, 6):
        assert outputs[index]["error"] == f"the id '{ids[index]}' is that of an earlier line"
    assert [outputs[index]["finish_reason"] for index in (0, 1)] == ["length", "length"]


def test_an_id_that_cannot_be_printed(tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [r'{"prompt_ids": [1], "max_tokens": 1, "id": "a\ud800b"}'])
    assert main([*TINY, "--prompts", path]) == 0
    assert capsys.readouterr().out.startswith("[a?b] 1 token ids")


def test_ctrl_c_keeps_what_ended(tmp_path, monkeypatch, capsys):
    def press(self: RunDisplay, ended: int) -> None:
        if ended:
            os.kill(os.getpid(), 2)

    monkeypatch.setattr(RunDisplay, "update", press)
    out = tmp_path / "out.jsonl"
    lines = [json.dumps(request) for request in (*GOOD, {"id": "five", "prompt_ids": [2], "max_tokens": 30})]
    arguments = ["--prompts", write_lines(tmp_path / "in.jsonl", lines), "--out", str(out), "--compare", "static"]
    assert main([*TINY, *arguments, "--max-queue", "1"]) == 130
    outputs = {output["id"]: output for output in read_lines(out)}
    assert list(outputs) == ["one", "two", "three", "four", "five"]
    assert outputs["one"]["finish_reason"] == "length"
    assert outputs["five"]["finish_reason"] == "cancelled"


def test_the_writer_keeps_input_order_and_loses_nothing():
    jobs = read_jobs([(f"line {n}", b'{"prompt_ids": [1]}') for n in range(4)], {}, print)
    file = io.StringIO()
    writer = OrderedWriter(jobs, file)

    def ids() -> list[str]:
        return [json.loads(line)["id"] for line in file.getvalue().splitlines()]

    def end(job: Job) -> None:
        job.fail("for the test", lambda _: None)
        writer.advance()

    end(jobs[1])
    assert ids() == []
    end(jobs[0])
    assert ids() == [jobs[0].id, jobs[1].id]
    end(jobs[3])
    writer.close()
    assert ids() == [jobs[0].id, jobs[1].id, jobs[3].id]


def test_built_in_prompts_are_requests_of_many_lengths():
    jobs = read_jobs(input_lines(Options()), {}, pytest.fail)
    requests = [job.request for job in jobs if job.request is not None]
    assert len(requests) == 24
    assert {request.params.temperature for request in requests} == {0.0}
    lengths = [request.params.max_tokens or 0 for request in requests]
    assert min(lengths) == 4
    assert max(lengths) == 200


def test_positional_prompts_as_text_and_as_chat():
    text, chat = (
        read_jobs(input_lines(Options(prompt=("Hello", "Bye"), chat=chat)), {}, pytest.fail) for chat in (False, True)
    )
    assert [job.request.prompt for job in text if job.request] == ["Hello", "Bye"]
    assert [job.request.id for job in text if job.request] == ["prompt-1", "prompt-2"]
    assert [job.request.messages for job in chat if job.request] == [
        [{"role": "user", "content": "Hello"}],
        [{"role": "user", "content": "Bye"}],
    ]


def test_a_real_model_in_a_process_of_its_own(tmp_path):
    """SmolLM2-135M: raw text and chat, a slot taken again, the token ids that another implementation gives."""
    cases = {case["text"]: case for case in json.loads((ROOT / "tests/data/smollm2_135m_instruct.json").read_text())}
    wanted = [case for text, case in cases.items() if "Paris" in text or "Red Planet" in text]
    assert len(wanted) == 3
    lines = []
    for case in wanted:
        prompt = {"prompt" if case["kind"] == "text" else "messages": case["input"]}
        lines.append(json.dumps(prompt | {"max_tokens": len(case["greedy"]), "temperature": 0}))
    arguments = ["--prompts", write_lines(tmp_path / "in.jsonl", lines), "--out", "-", "--slots", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.generate", *arguments, "--max-len", "128", "--chunk-sizes", "32"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    outputs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [output["token_ids"] for output in outputs] == [case["greedy"] for case in wanted]
    for output, case in zip(outputs, wanted, strict=True):
        assert output["text"] == case["text"].removesuffix("<|im_end|>")
