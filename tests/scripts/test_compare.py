"""Comparing result files: figures computed by hand, what is kept apart, what a page holds, and what is refused."""

import hashlib
import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.bench_report import Configuration, Ran, all_figures
from scripts.compare import Options, main, pareto, read_all
from scripts.metrics import Served

RESULTS = Path(__file__).parent.parent / "data/results"
H200, SERVER, CPU, OTHER, ATTENTION, TINY = (
    str(RESULTS / f"{name}.json") for name in ("h200", "server", "cpu", "other_model", "attention", "tiny")
)
WORKLOAD = "workload_64.jsonl"


def read(*results: str, **more):
    """Sources, groups by model and workload, and what was skipped."""
    sources, groups, skipped = read_all(Options(results, **more), lambda _: None)
    return sources, {(group.key.model, group.key.workload): group for group in groups}, skipped


def changed(tmp_path: Path, path: str, change, name: str = "changed.json") -> str:
    """A copy of a file after `change(data)`."""
    data = json.loads(Path(path).read_text())
    change(data)
    (tmp_path / name).write_text(json.dumps(data))
    return str(tmp_path / name)


def written(tmp_path: Path, form: str, *argv: str) -> tuple[int, str]:
    target = tmp_path / "report"
    return main([*argv, f"--{form}", str(target)]), target.read_text()


def markdown(tmp_path: Path, *argv: str) -> tuple[int, str]:
    return written(tmp_path, "markdown", *argv)


def page(tmp_path: Path, *argv: str) -> tuple[int, str]:
    pytest.importorskip("matplotlib")
    return written(tmp_path, "html", *argv)


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([], []),
        ([(1, 1)], [0]),
        ([(3, 30), (1, 10), (2, 20)], [1, 2, 0]),  # from the lowest latency on
        ([(1, 10), (2, 9), (2, 11), (3, 11)], [0, 2]),  # worse in both, and as fast with a higher latency
        ([(1, 10), (1, 12), (2, 12)], [1]),
        ([(1, 10), (1, 10)], [0, 1]),  # neither beats the other
    ],
)
def test_pareto_frontiers_by_hand(points, kept):
    assert pareto(points) == kept


def test_the_cost_of_a_million_tokens_by_hand():
    """1800 an hour are 0.5 a second, and a million tokens take 111.1 seconds at 9000 a second."""
    rows = read(H200, price=("NVIDIA H200=1800",))[1]["smollm2-135m-instruct", WORKLOAD].rows
    assert rows[0].cost == pytest.approx({"median": 0.5e6 / 9000, "lowest": 0.5e6 / 10800, "highest": 0.5e6 / 8100})
    assert rows[3].problems
    assert rows[3].cost is None


def test_a_price_of_a_file_goes_before_that_of_its_machine():
    sources, _, _ = read(H200, ATTENTION, CPU, price=("NVIDIA H200=2", "h200.json=3", f"{CPU}=0.5"))
    assert [one.price for one in sources] == [3, 2, 0.5]


def test_frontiers_are_of_each_machine_and_without_what_went_wrong():
    group = read(H200, SERVER, CPU)[1]["smollm2-135m-instruct", WORKLOAD]

    def tags(measure):
        return {machine: [row.tag for row in rows] for machine, rows in group.frontiers(measure).items()}

    cpu, server = "AMD EPYC 9B45, 16 cores", "server at http://localhost:8000"
    assert tags("tpot_s.p99") == {"NVIDIA H200": ["2", "1", "3"], server: ["5"], cpu: ["6"]}
    assert tags("ttft_s.p99") == {"NVIDIA H200": ["3"], server: ["5"], cpu: ["6"]}
    bad = {row.tag: row.problems[0] for row in group.rows if row.problems}
    assert bad["4"] == "other tokens than the workload expects: w03"
    assert bad == {"4": bad["4"], "7": "w07 failed: <script>alert(1)</script> | no *room*"}
    group = read(H200, SERVER, machine=("server.json=NVIDIA H200",))[1]["smollm2-135m-instruct", WORKLOAD]
    assert tags("tpot_s.p99") == {"NVIDIA H200": ["2", "1", "5", "3"]}


def test_models_and_workloads_are_never_mixed(tmp_path):
    """Also workloads of one name with other requests, or with other prompts."""

    def longer(data):
        for run in data["runs"]:
            run["figures"]["prompt_tokens"] = 9000

    paths = [changed(tmp_path, CPU, longer, "longer.json")]
    paths += [changed(tmp_path, CPU, lambda data: data["workloads"][WORKLOAD].update(requests=63), "fewer.json")]
    _, groups, skipped = read_all(Options((H200, CPU, OTHER, *paths)), lambda _: None)
    assert not skipped
    counts = {tuple(group.key): [Path(row.source.path).name for row in group.rows] for group in groups}
    smol, other = "smollm2-135m-instruct", "other/model <script>alert(2)</script>"
    assert counts == {
        (smol, WORKLOAD, 64, 0, 8498): ["h200.json"] * 4 + ["cpu.json"] * 2,
        (smol, "chat.jsonl", 64, 0, 5000): ["h200.json"],
        (other, WORKLOAD, 64, 0, 8498): ["other_model.json"] * 2,
        (smol, WORKLOAD, 64, 0, 9000): ["longer.json"] * 2,
        (smol, WORKLOAD, 63, 0, 8498): ["fewer.json"] * 2,
    }
    status, text = markdown(tmp_path, H200, OTHER)
    assert status == 0
    parts = text.split("\n## ")
    assert [part.count("| continuous") for part in parts] == [0, 2, 1, 1, 0]
    assert "H200" not in parts[3]


def test_what_compiled_or_failed_in_one_run_of_several(tmp_path):
    def spoil(data):
        data["runs"][0]["compiled"], data["runs"][1]["failed_because"] = ["step"], {}

    rows = read(changed(tmp_path, CPU, spoil))[1]["smollm2-135m-instruct", WORKLOAD].rows
    assert [row.problems for row in rows] == [["compiled in the window: step"], ["1 requests failed"]]
    assert [row.point("ttft_s.p99") for row in rows] == [None, None]


def test_what_the_benchmark_makes_is_read(tmp_path):
    served = [Served("a", 0.0, [0.5, 1.0], 1.0, 7), Served("b", 0.0, [1.0, 2.0], 2.0, 8)]
    runs = [Ran(Configuration("w.jsonl", "one", details={"slots": 2}), served, {}, {"a": "x"}, [])]
    figures = json.loads(json.dumps(all_figures(runs, [])))
    about = {"workloads": {"w.jsonl": {"requests": 2, "bad_lines": 0}}, "limits": [], "machine": {}}
    made = figures | about | {"model": "m", "device": "TPU v5e", "platform": "tpu"}
    (tmp_path / "made.json").write_text(json.dumps(made))
    row = read(str(tmp_path / "made.json"))[1]["m", "w.jsonl"].rows[0]
    assert (row.source.machine, row.details["slots"], row.problems) == ("TPU v5e", 2, [])
    assert row.median("generated_tokens_per_s") == 2
    assert row.median("ttft_s.p50") == 0.75


def test_every_figure_is_traced_to_its_file(tmp_path):
    status, text = markdown(tmp_path, H200, TINY, ATTENTION)
    assert status == 0
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("|  |", "| ---"))]
    cited = [re.search(r"\| \\\[(\d+)\\\] \|", line) for line in rows if not line.startswith("| case")]
    assert all(cited)
    assert {one[1] for one in cited if one} == {"1", "2", "3"}
    for path in (H200, TINY, ATTENTION):
        (line,) = [line for line in rows if hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] in line]
        assert Path(path).name in line
    for told in ("0123456789abcdef0123456789abcdef01234567 | 2026-11-30", "slots 2, ", r'"max\_len": 64'):
        assert told in text
    _, text = page(tmp_path, H200, TINY)
    assert re.search('href="#source-2".*<tr id="source-2">', text, re.DOTALL)


class Tags(HTMLParser):
    """Every tag with its attributes; what is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(tmp_path):
    status, text = page(tmp_path, H200, SERVER, CPU, OTHER, ATTENTION, TINY)
    assert status == 0
    tags = Tags(text).seen
    names = {tag for tag, _ in tags}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "image", "foreignobject", "base"}
    for _, attributes in tags:
        assert not {name for name in attributes if name.startswith("on")} | ({"src", "srcset"} & attributes.keys())
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert not re.search(r"@import|url\((?!#)", text)
    assert set(re.findall(r"https?://[^\s<>&]*", text)) == {"http://localhost:8000"}, "a name, in a text"
    assert sum(tag == "svg" for tag, _ in tags) == 9  # frontiers of 4 groups, their rooflines, and attention's
    defined = {attributes["id"] for _, attributes in tags if "id" in attributes}
    assert {one["xlink:href"][1:] for _, one in tags if "xlink:href" in one} <= defined
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= defined
    assert "default-src 'none'" in text


def test_names_are_text(tmp_path):
    evil = '<script>alert("x")</script><img src=x onerror=y>$x^$ & | [a](b) `c`'

    def rename(data):
        data["model"] = data["device"] = data["date"] = data["versions"]["carousel"] = evil
        data["workloads"][evil] = data["workloads"].pop("chat.jsonl")
        for one in (*data["configurations"], *data["runs"]):
            one["workload"] = one["workload"].replace("chat.jsonl", evil)
            one["label"] += evil
        data["configurations"][0]["policy"] = data["engine"]["slots"] = evil
        data["runs"][2]["failed_because"] = {evil: evil}

    def rename_case(data):
        data["device"] = data["dtype"] = evil
        for one in data["cases"]:
            one["case"] = one["implementation"] = one["dtype"] = one["reason"] = evil

    paths = [changed(tmp_path, H200, rename, "<b>.json"), changed(tmp_path, ATTENTION, rename_case)]
    status, text = page(tmp_path, *paths)
    assert status == 0
    tags = Tags(text).seen
    assert not {"script", "img", "b"} & {tag for tag, _ in tags}
    assert not [attributes for _, attributes in tags if "onerror" in attributes]
    assert text.count("&lt;script&gt;") > 20
    status, text = markdown(tmp_path, *paths)
    assert not re.search(r"<script|<img|<b>|(?<!\\)\[a|(?<!\\)`", text)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, "a name has made a column"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "not a result of"),
        ('{"policies": {}, "runs": []}', "not a result of"),
        ("\x00\xff", "Error"),
        ('{"more": "\\ud800", ' + Path(CPU).read_text()[1:], "UnicodeEncodeError"),
        (lambda data: data["configurations"][0].update(slots=float("nan")), "ValueError"),
        (lambda data: data["workloads"][WORKLOAD].update(requests=-1), "-1 is no figure"),
        (lambda data: data.update(runs=[]), "ValueError"),
        (lambda data: data["configurations"][0]["medians"]["ttft_s"]["p99"].update(median="1"), "'1' is no figure"),
        (lambda data: data["runs"][0].pop("figures"), "KeyError: 'figures'"),
        (lambda data: data.update(limits=3), "TypeError"),
        (lambda data: data.update(workloads={}), "KeyError"),
        (lambda data: data.update(versions=3), "TypeError"),
        (Path(H200).read_text(), "the same as"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_read_is_named_and_skipped(content, told, tmp_path, capsys):
    path = tmp_path / "bad.json"
    if callable(content):
        changed(tmp_path, CPU, content, path.name)
    elif content is not None:
        path.write_text(content, encoding="latin-1")
    status, text = markdown(tmp_path, H200, str(path))
    assert status == 1
    assert told in capsys.readouterr().err
    assert "bad.json" in text
    assert "priority, 64 slots" in text
    if told != "the same as":
        assert main([str(path)]) == 2
        assert "no file is left" in capsys.readouterr().err


@pytest.mark.parametrize("price", ["h200.json", "=2", "h200.json=", "h200.json=x", "h200.json=0", "a=-1", "a=inf"])
def test_prices_that_are_none(price, capsys):
    with pytest.raises(SystemExit) as ended:
        main([H200, "--price", price])
    assert ended.value.code == 2
    assert "price" in capsys.readouterr().err


def test_refusals(tmp_path, capsys, monkeypatch):
    assert main([CPU]) == 0
    assert capsys.readouterr().out.startswith("# Serving compared\n")
    assert main([H200, "--price", "H100=2"]) == 2
    assert "no such file or machine: H100; machines are NVIDIA H200" in capsys.readouterr().err
    assert main([H200, "--machine", "NVIDIA H200=A"]) == 2
    assert main([H200, "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert main([H200, "--markdown", H200]) == 2
    assert "are the same" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([H200, "--html", str(tmp_path / "x.html")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_results_of_a_device_check(tmp_path):
    cases = json.loads(Path(ATTENTION).read_text())["cases"]
    found = {"limits": {"status": "ok", "flops_per_s": 6e14, "bytes_per_s": 4e12}}
    found |= {str(index): one for index, one in enumerate(cases)}
    check = {"machine": {"device": "NVIDIA H200", "platform": "gpu"}, "complete": False}
    check["groups"] = {"bench_decode": {"results": found, "trouble": []}}
    (tmp_path / "check.json").write_text(json.dumps(check))
    status, text = markdown(tmp_path, str(tmp_path / "check.json"))
    assert status == 0
    shown = "| 320.0 µs | 3125 | 78.1% | 25 | 4.2% | ok |", "wrong: off by 0.3", "600,000 | 4,000"
    for told in ("## Attention on NVIDIA H200", "cut off", *shown):
        assert told in text
