"""The page of scripts.compare: what is told, in which order, and that as one HTML file or as Markdown."""

import html
import io
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scripts.bench_report import COLOURS, LINES, MARKERS, quantiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scripts.compare import Group, Row, Source, Spread

MEASURES = {"ttft_s.p99": "time to first token", "tpot_s.p99": "time per output token", "latency_s.p99": "latency"}
SHARES = {"busy slots": "busy_share", "padding": "padding_share", "device waited": "gap_share"}
SHARES |= {f"of the {rate} rate": f"share_of_{rate}_rate" for rate in ("matrix", "memory")}
OF_TURNS = "flops_per_turn", "bytes_per_turn", "share_of_matrix_rate"
DOLLAR = r"\$"  # else matplotlib takes what is between two of them for a formula
KEYS = "color", "marker", "linestyle"
STYLES = [dict[str, Any](zip(KEYS, one, strict=True)) for one in zip(COLOURS, MARKERS, cycle(LINES), strict=False)]
MOST_PANELS = 3  # beside each other
LOG_FROM = 20  # times the lowest, from which an axis is logarithmic
CONFIG = ("repeat", "engine", "options", "server", "server_model", "prompt_ids", "token_ids", "dtype")  # of a file
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 1320px; margin: 2em auto }
h1, h2 { line-height: 1.25; overflow-wrap: anywhere } h2 { border-top: 2px solid; padding-top: 0.6em; margin-top: 2em }
div { overflow-x: auto } svg { max-width: 100%; height: auto } figure { margin: 1em 0 }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: 4px 9px; text-align: left; vertical-align: top; border-bottom: 1px solid #d5d9de }
td { max-width: 30em; overflow-wrap: anywhere } th { background: #f1f3f5; border-bottom: 2px solid #8b949e }
tr.bad td { color: #57606a; background: #f7f3ee } figcaption { color: #444c56; font-size: 13px }
"""


class Line(NamedTuple):
    """Of a table: texts, and numbers of files. `bad`: its figures are not compared with others."""

    cells: Sequence[str | int]
    bad: bool = False


class Grid(NamedTuple):
    head: Sequence[str]
    lines: Sequence[Line]


class Picture(NamedTuple):
    svg: str
    caption: str


Series = dict[str, list[tuple[float, float, str]]]  # FLOP a byte, GFLOP a second, what is written there
Block = str | Grid | Picture  # a text is a paragraph, or after # or ## a heading


def document(sources: "Sequence[Source]", groups: "Sequence[Group]", skipped: Sequence[str], draw: bool) -> list[Block]:
    """Everything that is told, in order; pictures where they are to be drawn."""
    blocks: list[Block] = ["# Serving compared", f"Files: {len(sources)}. Models and workloads are told of apart."]
    if skipped:
        blocks += [Grid(["files that were skipped"], [Line([one], bad=True) for one in skipped])]
    for group in groups:
        blocks += of_group(group, draw)
    for source in (one for one in sources if one.cases):
        blocks += of_attention(source, draw)
    return [*blocks, "## Files, machines and their rates", files(sources)]


def of_group(group: "Group", draw: bool) -> list[Block]:
    key, rows = group.key, group.rows
    prompts = "no run was without failures" if key.prompt_tokens is None else f"{key.prompt_tokens} prompt tokens"
    text = f"{key.requests} requests, {prompts}." + f" {key.bad_lines} lines are no request." * bool(key.bad_lines)
    counts = dict.fromkeys(plain(row.median("generated_tokens")) for row in rows if not row.problems)
    if len(counts) > 1:
        text += f" Not all generated the same number of tokens: {', '.join(counts)}."
    text += " Throughput: generated tokens per second, median (lowest to highest run). Latencies: p50 / p99."
    blocks: list[Block] = [f"## {key.model}, {key.workload}", text]
    if draw and any(row.point(measure) for row in rows for measure in MEASURES):
        blocks += [frontier_picture(group)]
    blocks += [figures(group)]
    if bad := [row for row in rows if row.problems]:
        lines = [Line([row.tag, row.label, "; ".join(row.problems), row.source.number], True) for row in bad]
        blocks += [Grid(["", "in no frontier, without a cost", "because", "file"], lines)]
    if draw and (panels := turn_panels(rows)):
        blocks += [roofline_picture(panels, "A turn's mean work against the rates of its run")]
    return blocks


def figures(group: "Group") -> Grid:
    """A line for each configuration; no column for what none has."""
    on = {name: [row for rows in group.frontiers(name).values() for row in rows] for name in MEASURES}
    head = ["", "machine", "configuration", "throughput", *MEASURES.values(), "goodput, requests per second", *SHARES]
    head += ["prompt tokens found", "cost per million tokens", "on the frontier of", "setting", "file"]
    lines = []
    for row in group.rows:
        cells: list[str | int] = [row.tag, row.source.machine, row.label, ranged(row.figures["generated_tokens_per_s"])]
        for name in MEASURES:
            both = {part: row.figures[f"{name.partition('.')[0]}.{part}"] for part in ("p50", "p99")}
            cells += [quantiles(both) if any(both.values()) else "-"]
        cells += [ranged(row.figures["goodput_per_s"])]
        cells += [plain(row.median(name), "{:.1%}") for name in SHARES.values()]
        cells += [plain(row.median("cached_tokens")), ranged(row.cost)]
        cells += [", ".join(MEASURES[name] for name in MEASURES if row in on[name]) or "-"]
        lines.append(Line([*cells, compact(row.details), row.source.number], bool(row.problems)))
    used = [at for at in range(len(head)) if any(line.cells[at] != "-" for line in lines)]
    return Grid([head[at] for at in used], [line._replace(cells=[line.cells[at] for at in used]) for line in lines])


def of_attention(source: "Source", draw: bool) -> list[Block]:
    """Cases of attention, with what did not work."""
    cut = "" if source.data.get("complete") else ", cut off before its end"
    blocks: list[Block] = [f"## Attention on {source.machine}, {source.path}{cut}"]
    series, lines = {}, []
    for one in source.cases:
        cells: list[str | int] = [str(one[name]) for name in ("case", "implementation", "dtype")]
        if one["status"] == "ok":
            series.setdefault(cells[1], []).append((one["flops"] / max(one["bytes"], 1), one["tflop_per_s"] * 1e3, ""))
            cells += [f"{one['s'] * 1e6:.1f} µs", f"{one['gb_per_s']:.4g}", f"{one['share_of_memory_rate']:.1%}"]
            cells += [f"{one['tflop_per_s']:.3g}", f"{one['share_of_matrix_rate']:.1%}", "ok"]
        else:
            cells += [*"-----", f"{one['status']}: {one.get('reason', '')}"]
        lines.append(Line([*cells, source.number], one["status"] != "ok"))
    if draw and series and source.limits:
        blocks += [roofline_picture([(source, series)], "Cases of attention against the rates of the run")]
    head = ["case", "implementation", "dtype", "time", "GB/s", "of the memory rate", "TFLOP/s", "of the matrix rate"]
    return [*blocks, Grid([*head, "outcome", "file"], lines)]


def files(sources: Sequence["Source"]) -> Grid:
    """Where everything comes from, and what each run measured of its machine."""
    head = ["", "file", "sha256", "written by", "commit", "date", "machine", "price of an hour"]
    lines = []
    for one in sources:
        versions = one.data.get("versions", {})
        known = {name: versions.get(name) or one.data.get(name) for name in ("jax", "python")}
        config = {name: one.data[name] for name in CONFIG if name in one.data} | known
        cells: list[str | int] = [one.number, one.path, one.sha256, one.kind]
        cells += [str(told or "not told") for told in (versions.get("carousel"), one.data.get("date"))]
        rates = [", ".join(plain(limit[at] / 1e9) for limit in one.limits) or "-" for at in (0, 1)]
        cells += [one.machine, plain(one.price, "{:g}"), *rates]
        lines.append(Line([*cells, compact(config)]))
    return Grid([*head, "matrix rate, GFLOP/s", "memory rate, GB/s", "configuration"], lines)


def plain(value: float | None, form: str = "") -> str:
    form = form or ("{:,.0f}" if value and value >= 1000 else "{:.4g}")
    return "-" if value is None else form.format(value)


def ranged(spread: "Spread | None") -> str:
    if spread is None:
        return "-"
    middle, low, high = (plain(spread[name]) for name in ("median", "lowest", "highest"))
    return middle if low == high else f"{middle} ({low} to {high})"


def compact(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()) or "-"


def frontier_picture(group: "Group") -> Picture:
    """Throughput against each latency: what is on a frontier is filled, and its machine's frontier drawn through it."""

    def draw(figure: "Figure") -> None:
        for axes, (measure, name) in zip(figure.subplots(1, 3), MEASURES.items(), strict=True):
            points = [(row, at) for row in group.rows if (at := row.point(measure)) is not None]
            for (machine, best), how in zip(group.frontiers(measure).items(), cycle(STYLES), strict=False):
                ends = np.array([row.point(measure) for row in best], float).reshape(-1, 2)
                axes.plot(*ends.T, drawstyle="steps-post", label=machine.replace("$", DOLLAR), markersize=8, **how)
                for row, at in ((row, at) for row, at in points if row.source.machine == machine):
                    spreads = [one for key in (measure, "generated_tokens_per_s") if (one := row.figures[key])]
                    xerr, yerr = ([[m["median"] - m["lowest"]], [m["highest"] - m["median"]]] for m in spreads)
                    fill = {"markerfacecolor": how["color"] if row in best else "white", "markersize": 8}
                    axes.errorbar(*at, yerr, xerr, elinewidth=1, capsize=2, **how | fill)
                    axes.annotate(row.tag, at, (7, 6), textcoords="offset points")
            for axis, values in zip("xy", zip(*(at for _, at in points), strict=True), strict=False):
                far = 0 < min(values) * LOG_FROM < max(values)
                axes.set(**{f"{axis}scale": "log"} if far else {f"{axis}lim": (0, max(values) * 1.2 or 1)})
            axes.tick_params("x", which="both", rotation=45)
            axes.set(xlabel=f"{name}, p99, seconds", ylabel="generated tokens per second")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=4)

    cited = ", ".join(dict.fromkeys(f"[{row.source.number}]" for row in group.rows))
    text = "Up and left is better. Numbers: lines of the table. Filled: no other point of the machine beats it."
    return Picture(svg(draw, (12, 4.4), f"frontier {group.key}"), f"{text} Bars: lowest to highest run. Files: {cited}")


def turn_panels(rows: Sequence["Row"]) -> list[tuple["Source", Series]]:
    """A panel for each file that measured its machine's rates."""
    panels: dict[Source, Series] = {}
    for row in rows:
        flops, moved, reached = (row.median(name) for name in OF_TURNS)
        if flops and moved and reached and row.source.limits and not row.problems:
            rate = reached * max(one.flops_per_s for one in row.source.limits)
            panels.setdefault(row.source, {"turns": []})["turns"].append((flops / moved, rate / 1e9, row.tag))
    return [*panels.items()]


def roofline_picture(panels: Sequence[tuple["Source", Series]], what: str) -> Picture:
    """Operations a second against operations a byte, under what the two rates allow; each file by itself."""
    shape = -(-len(panels) // MOST_PANELS), min(len(panels), MOST_PANELS)

    def draw(figure: "Figure") -> None:
        for place, (source, series) in enumerate(panels, start=1):
            axes = figure.add_subplot(*shape, place)
            flops, moved = (max(one[at] for one in source.limits) for at in (0, 1))
            places = [x for points in series.values() for x, _, _ in points] + [flops / max(moved, 1)]
            at = [min(places) / 3, places[-1], max(places) * 3]
            axes.loglog(at, [min(x * moved, flops) / 1e9 for x in at], color="black", label="the machine's rates")
            for (name, points), how in zip(series.items(), cycle(STYLES), strict=False):
                xs, ys, _ = zip(*points, strict=True)
                axes.scatter(xs, ys, color=how["color"], marker=how["marker"], label=name.replace("$", DOLLAR))
                for x, y, text in points:
                    axes.annotate(text, (x, y), (6, -12), textcoords="offset points")
            title = f"[{source.number}] {source.machine:.44}".replace("$", DOLLAR)
            axes.set(xlabel="FLOP per byte", ylabel="GFLOP/s", title=title)
            axes.legend()

    cited = ", ".join(f"[{source.number}]" for source, _ in panels)
    return Picture(svg(draw, (1 + 4.4 * shape[1], 3.8 * shape[0]), what + cited), f"{what}. Files: {cited}")


def svg(draw: Callable[["Figure"], None], size: tuple[float, float], name: str) -> str:
    """For a page: without a header, and nothing in it that could be fetched. `name` keeps its ids apart from others."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "axes.formatter.min_exponent": 7, "font.size": 10}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its font lacks: the browser's has them
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(target := io.StringIO(), format="svg", metadata={"Date": None})
    text = target.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"| id="[\w.]+_\d+"', "", text)  # no use here, and ids that all pictures have


def as_html(blocks: Sequence[Block]) -> str:
    """One file."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"  # the browser too sees to it that nothing is fetched
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    body = "\n".join(map(html_block, blocks))
    head += f"<title>Serving compared</title><style>{STYLE}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def html_block(block: Block) -> str:
    match block:
        case str():
            tag = {"# ": "h1", "##": "h2"}.get(block[:2], "p")
            return f"<{tag}>{html.escape(block.lstrip('# '))}</{tag}>"
        case Picture(picture, caption):
            told = html.escape(caption)
            return f'<figure role="img" aria-label="{told}">{picture}<figcaption>{told}</figcaption></figure>'
        case Grid(head, lines):
            names = "".join(f'<th scope="col">{html.escape(one)}</th>' for one in head)
            rows = "\n".join(map(html_line, lines))
            return f"<div><table><thead><tr>{names}</tr></thead>\n<tbody>{rows}</tbody></table></div>"


def html_line(line: Line) -> str:
    link = '<a href="#source-{0}">[{0}]</a>'
    shown = [link.format(one) if isinstance(one, int) else html.escape(one) for one in line.cells]
    how = ' class="bad"' * line.bad + f' id="source-{line.cells[0]}"' * isinstance(line.cells[0], int)
    return f"<tr{how}><td>{'</td><td>'.join(shown)}</td></tr>"


def as_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(filter(None, map(markdown_block, blocks))) + "\n"


def markdown_block(block: Block) -> str:
    match block:
        case str():
            text = block.lstrip("# ")
            return block.removesuffix(text) + escaped(text)
        case Picture():
            return ""
        case Grid(head, lines):
            rows = [head, *([f"[{one}]" if isinstance(one, int) else one for one in line.cells] for line in lines)]
            shown = [f"| {' | '.join(map(escaped, row))} |" for row in rows]
            return "\n".join([shown[0], "| --- " * len(head) + "|", *shown[1:]])


def escaped(text: str) -> str:
    """As Markdown shows it, whatever it is."""
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
