"""What the stages of scripts.ladder come to: figures, tables, and a picture with the mask of one ragged turn."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table

from batching import Request
from batching.config import EngineStats
from batching.params import SamplingParams
from batching.plan import PlanShapes, Rows, Sampled
from batching.policies import Continuous
from batching.request import Metrics
from batching.scheduler import Scheduler
from batching.sequence import SequenceState
from batching.turn import Turn
from scripts.bench_report import spread_over
from scripts.command import naming

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scripts.ladder import Stage

# Colours that all eyes tell apart (Okabe and Ito, 2008).
SPEED, NEEDED, RECOMPUTED, PADDING = "#0072B2", "#0072B2", "#D55E00", "#C6C6C6"
REQUESTS = {"a": "#0072B2", "b": "#E69F00", "c": "#009E73", "d": "#CC79A7"}
SLOTS, MAX_LEN = 4, 18  # of the turn that is drawn
PAST = 0.45  # strength of the colour of keys that earlier turns computed


@dataclass(frozen=True)
class Served:
    """What one run of a stage gave and took."""

    tokens: list[list[int]]  # by request
    wall_s: float
    longest_turn_s: float  # from the end of one turn to that of the next
    stats: EngineStats
    compiled: int


def prompt_of(request: Request) -> tuple[int, ...]:
    assert request.prompt_ids is not None
    return tuple(request.prompt_ids)


def counts(served: Served, requests: Sequence[Request]) -> dict[str, Any]:
    """Of rows, and of slots summed over turns; `per_token` is of generated tokens."""
    stats, generated = served.stats, sum(map(len, served.tokens))
    pairs = zip(requests, served.tokens, strict=True)
    needed = sum(len(prompt_of(request)) + len(tokens) - 1 for request, tokens in pairs) - stats.cached_tokens
    work = {
        "needed_rows": needed,
        "recomputed_rows": stats.live_rows - needed,
        "padding_rows": stats.rows - stats.live_rows,
        "idle_slots": stats.turns * stats.slots - stats.busy_slots,
    }
    per_token = {name: value / generated for name, value in work.items()}
    totals = {"generated_tokens": generated, "turns": stats.turns, "rows": stats.rows, "live_rows": stats.live_rows}
    return {**totals, "cached_tokens": stats.cached_tokens, **work, "per_token": per_token}


def stage_figures(stage: "Stage", runs: Sequence[Served], first: Served, requests: Sequence[Request]) -> dict[str, Any]:
    """`different`: requests of which a run has other tokens than the first run of the first stage."""
    known = [(request.id, tokens) for request, tokens in zip(requests, first.tokens, strict=True)]
    speeds = [sum(map(len, run.tokens)) / run.wall_s for run in runs]
    return {
        **asdict(stage),
        "policy": stage.policy.__name__,
        "slots": runs[0].stats.slots,
        "tokens_per_s": spread_over(speeds),
        "longest_turn_s": spread_over([run.longest_turn_s for run in runs]),
        **counts(runs[0], requests),
        "different": [name for at, (name, own) in enumerate(known) if any(run.tokens[at] != own for run in runs)],
        "compiled_in_window": sum(run.compiled for run in runs),
    }


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """A line a stage: how fast it was, and what its rows were."""
    stages, requests = figures["stages"], figures["requests"]
    base = stages[0]["tokens_per_s"]["median"]
    fast, rows = (
        Table(Column("stage", no_wrap=True), *(Column(name, justify="right", no_wrap=True) for name in names))
        for names in (
            ("tokens/s", "from .. to", "x", "longest", "same"),
            ("turns", "rows", "live", "needed", "again", "padding", "idle"),
        )
    )
    fast.title = f"{requests} requests of {figures['prompt_tokens']} prompt tokens"
    fast.caption = "longest: a turn; same: requests with the same tokens as in stage 1"
    rows.caption = "needed, again (recomputed), padding, idle: rows, and slots in turns, a generated token"
    for number, one in enumerate(stages, start=1):
        name, speed, longest = f"{number} {one['name']}", one["tokens_per_s"], one["longest_turn_s"]["median"]
        cells = [f"{speed['median']:.1f}", f"{speed['lowest']:.1f} .. {speed['highest']:.1f}"]
        cells += [f"{speed['median'] / base:.1f}", f"{longest * 1e3:.0f} ms"]
        fast.add_row(name, *cells, f"{requests - len(one['different'])} of {requests}")
        totals = (f"{one[key]}" for key in ("turns", "rows", "live_rows"))
        rows.add_row(name, *totals, *(f"{value:.2f}" for value in one["per_token"].values()))
    return [fast, rows]


def example_turn() -> tuple[Turn, PlanShapes]:
    """A turn as the scheduler plans it: a decode row of a, the rest of b's prompt, all of c's and of d's."""
    shapes = PlanShapes.choose(SLOTS, (16,), block_q=1)
    scheduler = Scheduler(shapes=shapes, max_len=MAX_LEN, policy=Continuous(), max_queue=SLOTS)

    def submit(name: str, tokens: int) -> None:
        params = SamplingParams(max_tokens=1 + MAX_LEN - tokens, temperature=0.0)
        scheduler.submit(SequenceState(name, tuple(range(tokens)), params, 0, frozenset(), Metrics(0.0)))

    submit("a", 6)
    submit("b", 18)  # of these, the turn has room for 14
    first = scheduler.plan()
    assert first is not None
    scheduler.commit(first, Sampled(np.zeros(SLOTS, np.int32)))
    submit("c", 5)
    submit("d", 8)
    turn = scheduler.plan()
    assert turn is not None
    return turn, shapes


def mask(rows: Rows, slots: int, max_len: int) -> np.ndarray:
    """[T, slots * max_len]: whether a row attends to a cache row, slot by slot. A padding row attends to none."""
    own = rows.slots[:, None, None] == np.arange(slots)[:, None]
    before = np.arange(max_len) <= rows.positions[:, None, None]
    return (own & before).reshape(len(rows.slots), slots * max_len)


def draw(figures: Mapping[str, Any], path: str) -> None:
    """Bars of the stages above, the mask below."""
    from matplotlib.figure import Figure

    stages = figures["stages"]
    figure = Figure(figsize=(9, 3.6 + 0.3 * len(stages)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(0.9 + 0.3 * len(stages), 2.9))
    top, bottom = parts
    speeds, rows = top.subplots(1, 2, sharey=True)
    draw_speeds(speeds, stages)
    draw_rows(rows, stages)
    draw_mask(bottom.subplots())
    with naming(path):
        figure.savefig(path, dpi=150)


def draw_speeds(axes: "Axes", stages: Sequence[Mapping[str, Any]]) -> None:
    """The median, from the lowest to the highest, and the ratio to the first stage."""
    speeds = [one["tokens_per_s"] for one in stages]
    medians = [one["median"] for one in speeds]
    spread = [[one["median"] - one["lowest"] for one in speeds], [one["highest"] - one["median"] for one in speeds]]
    places = range(len(stages))
    axes.barh(places, medians, color=SPEED, alpha=0.75, xerr=spread, capsize=3, ecolor="#222222")
    for place, one in enumerate(speeds):
        text = f"  {one['median']:.0f}  ({one['median'] / medians[0]:.1f} x)"
        axes.text(one["highest"], place, text, va="center", fontsize=9)
    axes.set(xlim=(0, 1.38 * max(one["highest"] for one in speeds)))
    axes.set_xlabel("generated tokens per second (line: lowest to highest)")
    axes.set_yticks(places, [f"{place + 1}  {one['name']}" for place, one in enumerate(stages)])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def draw_rows(axes: "Axes", stages: Sequence[Mapping[str, Any]]) -> None:
    """Stacked. A stage with many times the rows of all others runs out of the picture: its number says how far."""
    totals = [one["rows"] / one["generated_tokens"] for one in stages]
    end = min(max(totals), 1.5 * max(totals[1:], default=totals[0]))
    left = np.zeros(len(stages))
    kinds = {"needed": NEEDED, "recomputed": RECOMPUTED, "padding": PADDING}
    for kind, colour in kinds.items():
        widths = np.array([one["per_token"][f"{kind}_rows"] for one in stages])
        axes.barh(range(len(stages)), widths, left=left, color=colour, label=kind, alpha=0.85, edgecolor="white")
        left += widths
    for place, total in enumerate(totals):
        beyond = total > end
        text = f"{total:.1f} \N{RIGHTWARDS ARROW}" if beyond else f"{total:.1f}"
        style: dict[str, Any] = {"ha": "right", "color": "white", "weight": "bold"} if beyond else {}
        axes.annotate(
            text, (min(total, end * 1.18), place), (-4 if beyond else 4, 0), textcoords="offset points", va="center",
            fontsize=9, **style,
        )  # fmt: skip
    axes.set(xlabel="rows computed per generated token", xlim=(0, end * 1.18))
    axes.tick_params(labelleft=False)
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def draw_mask(axes: "Axes") -> None:
    """Rows of the turn against rows of the cache, coloured by request; keys of earlier turns are paler."""
    from matplotlib.colors import to_rgb

    turn, shapes = example_turn()
    rows, owners = turn.plan.rows, list(REQUESTS)
    seen = mask(rows, shapes.slots, MAX_LEN)
    live = rows.slots < shapes.slots
    new = np.zeros((shapes.slots, MAX_LEN), bool)
    new[rows.slots[live], rows.positions[live]] = True
    pixels = np.ones((*seen.shape, 3))
    for row, column in np.argwhere(seen):
        slot, position = divmod(int(column), MAX_LEN)
        strength = 1.0 if new[slot, position] else PAST
        pixels[row, column] = 1 - strength * (1 - np.array(to_rgb(REQUESTS[owners[slot]])))
    T, columns = seen.shape
    axes.imshow(pixels, aspect="auto", interpolation="none", extent=(0, columns, T, 0))
    axes.vlines(range(columns + 1), 0, T, color="#DDDDDD", linewidth=0.4)
    axes.hlines(range(T + 1), 0, columns, color="#DDDDDD", linewidth=0.4)
    axes.vlines(range(0, columns + 1, MAX_LEN), 0, T, color="#444444", linewidth=1.2)
    ticks = [(start + len(own) / 2, label(owners, slot, own, rows)) for slot, start, own in groups(rows)]
    axes.hlines([start for _, start, _ in groups(rows)], 0, columns, color="#444444", linewidth=0.8)
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks])
    centres = [MAX_LEN * (slot + 0.5) for slot in range(shapes.slots)]
    axes.set_xticks(centres, [f"slot {slot}: {name}" for slot, name in enumerate(owners)])
    axes.tick_params(length=0)
    axes.set_title("one turn: which keys each row attends to (pale: computed in earlier turns)", fontsize=10)


def groups(rows: Rows) -> list[tuple[int, int, list[int]]]:
    """(slot, first row, rows) of what lies together in a turn."""
    found = [(slot, list(those)) for slot, those in groupby(range(len(rows.slots)), key=lambda row: rows.slots[row])]
    return [(int(slot), those[0], those) for slot, those in found]


def label(owners: Sequence[str], slot: int, own: Sequence[int], rows: Rows) -> str:
    if slot == len(owners):
        return "padding"
    start, end = int(rows.positions[own[0]]), int(rows.positions[own[-1]])
    return f"{owners[slot]}: decode, {start}" if len(own) == 1 else f"{owners[slot]}: prompt, {start} to {end}"
