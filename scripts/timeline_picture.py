"""Timelines to look at: a trace for ui.perfetto.dev or chrome://tracing, and a picture of who had which slot when."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from batching.sequence import SequenceState
from scripts.command import naming, opened
from scripts.timeline import Compilations, Kind, Record, Span, Timeline

HOST, DEVICE, GAP, SLOT = 1, 2, 3, 10  # tracks of a run: slots follow one another
FIRST_TID = 1000  # of a run's tracks, times the run's number: nowhere else the same
# Colours that all eyes tell apart (Okabe and Ito, 2008).
PREFILL, PREFILL_ROOM, DECODE, WAIT, IDLE = "#D55E00", "#F6CDAE", ("#0072B2", "#56B4E9"), "#EDE29A", "#F3F3F3"
LIVE, PADDING, QUEUE = "#444444", "#BDBDBD", "#CC79A7"


def write_trace(target: str, timelines: Sequence[Timeline], compilations: Compilations | None = None) -> None:
    """One process a run, with tracks for the slots, the host and the device, counters, and its requests."""
    with opened(target) as file:
        json.dump(trace(timelines, compilations), file)
        file.write("\n")


def trace(timelines: Sequence[Timeline], compilations: Compilations | None = None) -> dict[str, Any]:
    """A JSON object of the Trace Event Format.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    compiled = [] if compilations is None else compilations.events
    starts = [begin for _, begin, _ in compiled]
    starts += [one.times.plan for timeline in timelines for one in timeline.turns[:1]]
    starts += [one.metrics.arrival for timeline in timelines for one in timeline.requests]
    events = _Events(min(starts, default=0.0))
    if compiled:
        events.track(1, 0, "compilation", "XLA")
        for name, begin, end in sorted(compiled, key=lambda one: one[1]):
            events.span(1, 0, name, "compile", begin, end)
    for pid, timeline in enumerate(timelines, start=2):
        _add_run(events, pid, timeline)
    return {
        "traceEvents": events.names + sorted(events.events, key=lambda one: one["ts"]),
        "displayTimeUnit": "ms",
        "otherData": {"runs": [timeline.summary() for timeline in timelines]},
    }


class _Events:
    """Of a trace, in microseconds from `zero` on."""

    def __init__(self, zero: float) -> None:
        self.names: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._zero = zero

    def track(self, pid: int, track: int, process: str, thread: str) -> None:
        """Names it. Processes and tracks are shown in the order of their numbers."""
        for kind, name, order in (("process", process, pid), ("thread", thread, track)):
            for key, args in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": order})):
                self.names.append({"name": key, "ph": "M", "pid": pid, "tid": _tid(pid, track), "args": args})

    def span(self, pid: int, track: int, name: str, cat: str, begin: float, end: float, **args: Any) -> None:
        dur = round(self._micros(end) - self._micros(begin), 3)
        self.add("X", pid, track, name, begin, cat=cat, dur=dur, args=args)

    def add(self, phase: str, pid: int, track: int, name: str, at: float, **fields: Any) -> None:
        place = {"pid": pid, "tid": _tid(pid, track)}
        self.events.append({"name": name, "ph": phase, "ts": self._micros(at), **place, **fields})

    def _micros(self, at: float) -> float:
        return round((at - self._zero) * 1e6, 3)


def _tid(pid: int, track: int) -> int:
    return FIRST_TID * pid + track


def _add_run(events: _Events, pid: int, timeline: Timeline) -> None:
    tracks = {HOST: "host", DEVICE: "device (at most)", GAP: "device waits for the host (at most)"}
    tracks |= {SLOT + slot: f"slot {slot}" for slot in range(timeline.slots)}
    for track, name in tracks.items():
        events.track(pid, track, f"run {pid - 1}: {timeline.name}", name)
    told = 0.0
    for number, record in enumerate(timeline.turns, start=1):
        _add_turn(events, pid, number, record, told)
        told = record.times.launched
        _add_counters(events, pid, record.times.committed - record.wall_s, record)
    if timeline.turns:
        _add_counters(events, pid, timeline.turns[-1].times.committed, None)
    spans = timeline.spans()
    for span in spans:
        _add_span(events, pid, timeline, span)
    by_request = sorted(spans, key=lambda one: (one.request, one.first))
    held = {request: list(those) for request, those in groupby(by_request, key=lambda one: one.request)}
    for index, sequence in enumerate(timeline.requests):
        _add_request(events, pid, f"{pid}.{index}", sequence, timeline, held.get(index, []))


def _add_turn(events: _Events, pid: int, number: int, record: Record, told: float) -> None:
    """`told`: when the device was told of the turn before it: it did not wait for this one until then."""
    times = record.times
    for name, begin, end in (
        ("plan", times.plan, times.launch),
        ("launch", times.launch, times.launched),
        ("wait for the device", times.wait, times.ready),
        ("commit", times.ready, times.committed),
    ):
        events.span(pid, HOST, name, "host", begin, end, turn=number)
    rows = {"rows": record.rows, "live_rows": record.live_rows, "tokens": record.tokens}
    events.span(pid, DEVICE, f"turn {number}", "device", record.begin, times.ready, **rows)
    if record.gap_s > 0:
        begin = max(times.launched - record.gap_s, told)
        events.span(pid, GAP, "wait", "gap", begin, times.launched, turn=number)
    for copy in record.copies:
        name = f"{copy.length} rows from slot {copy.source}"
        events.add("i", pid, SLOT + copy.target, name, record.begin, s="t", cat="copy", args=copy._asdict())


def _add_counters(events: _Events, pid: int, at: float, record: Record | None) -> None:
    """As they are in a turn, or after the last one."""
    live, rows = (0, 0) if record is None else (record.live_rows, record.rows)
    speed = record.tokens / record.wall_s if record is not None and record.wall_s else 0.0
    for name, values in {
        "busy": {"slots": 0 if record is None else len(record.cells)},
        "waiting": {"requests": 0 if record is None else record.waiting},
        "rows": {"live": live, "padding": rows - live},
        "generated": {"tokens per second": speed},
    }.items():
        events.add("C", pid, HOST, name, at, args=values)


def _add_span(events: _Events, pid: int, timeline: Timeline, span: Span) -> None:
    turns = {"turns": span.last - span.first + 1, "first_turn": span.first + 1}
    rows = {} if span.kind == Kind.WAIT else {"position": span.start, "rows": span.rows}
    name = f"{label(timeline.requests[span.request])}: {span.kind}"
    if span.kind == Kind.PREFILL:
        name += f" {span.start}..{span.start + span.rows - 1}"
    request = label(timeline.requests[span.request])
    events.span(pid, SLOT + span.slot, name, span.kind, span.begin, span.end, request=request, **rows, **turns)


def _add_request(
    events: _Events, pid: int, key: str, sequence: SequenceState, timeline: Timeline, spans: Sequence[Span]
) -> None:
    """From arrival to end, and within it when it was queued and when it had a slot."""
    metrics, name, turns = sequence.metrics, label(sequence), timeline.turns
    until = max(turns[-1].times.committed if turns else 0.0, metrics.arrival)
    end = until if metrics.end is None else metrics.end
    fields: dict[str, Any] = {"id": key, "cat": "request"}

    def phase(what: str, begin: float, end: float) -> None:
        events.add("b", pid, HOST, what, begin, **fields)
        events.add("e", pid, HOST, what, end, **fields)

    args = {"prompt_tokens": len(sequence.prompt), "generated_tokens": len(sequence.output)}
    events.add("b", pid, HOST, name, metrics.arrival, **fields, args=args | {"finish_reason": sequence.finish_reason})
    now = metrics.arrival
    for slot, first, last in holds(spans):
        begin, left = turns[first].times.plan, turns[last].times.committed
        begin = max(now, begin)
        if sequence.slot is not None and last == spans[-1].last:
            left = end  # what ends keeps its `slot`; what loses it does not
        phase("queued", now, begin)
        now = min(max(begin, left), end)
        phase(f"slot {slot}", begin, now)
    if sequence.slot is None:
        phase("queued", now, end)
    if metrics.first_token is not None:
        events.add("n", pid, HOST, "first token", metrics.first_token, **fields)
    events.add("e", pid, HOST, name, end, **fields)


def holds(spans: Iterable[Span]) -> list[tuple[int, int, int]]:
    """(slot, first turn, last turn) of a request's stays in slots, of its spans in the order of time."""
    stays: list[tuple[int, int, int]] = []
    for span in spans:
        if stays and stays[-1][0] == span.slot and stays[-1][2] == span.first - 1:
            stays[-1] = (span.slot, stays[-1][1], span.last)
        else:
            stays.append((span.slot, span.first, span.last))
    return stays


def label(sequence: SequenceState) -> str:
    """Its id, and which of the request's samples it is where there are several."""
    return sequence.id if sequence.params.n == 1 else f"{sequence.id}#{sequence.index}"


def draw(timelines: Sequence[Timeline], path: str) -> None:
    """The runs below one another on one scale of time, as a .png or .svg file; needs matplotlib."""
    from matplotlib.figure import Figure

    heights = [min(max(0.16 * timeline.slots, 0.8), 4.0) for timeline in timelines]
    figure = Figure(figsize=(9, sum(heights) + 2.1 * len(heights) + 0.4), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=[height + 2.1 for height in heights])
    longest = max(
        (one.turns[-1].times.committed - one.turns[0].times.plan for one in timelines if one.turns), default=1
    )
    for (part,), timeline, height in zip(parts, timelines, heights, strict=True):
        slots, rows, queue = part.subplots(3, 1, sharex=True, height_ratios=[height, 0.6, 0.4])
        figures = timeline.summary()
        _draw_slots(slots, timeline, longest)
        _draw_steps(rows, timeline, [one.rows for one in timeline.turns], PADDING)
        _draw_steps(rows, timeline, [one.live_rows for one in timeline.turns], LIVE)
        _draw_steps(queue, timeline, [one.waiting for one in timeline.turns], QUEUE)
        # On a scale of logarithms a turn that is half padding looks the same whatever its size.
        rows.set_yscale("log", base=8)
        rows.set(ylabel="rows\n(log)", ylim=(0.7, None))
        marks = [8**power for power in range(6) if 8**power <= rows.get_ylim()[1]]
        rows.set_yticks(marks, [str(one) for one in marks])
        rows.minorticks_off()
        queue.set(ylabel="queue", xlabel="seconds", xlim=(0, longest))
        queue.set_ylim(0, 1.08 * max((one.waiting for one in timeline.turns), default=0) or 1)
        queue.yaxis.get_major_locator().set_params(integer=True, nbins=2)
        part.suptitle(
            f"{timeline.name}: {figures['tokens']} tokens in {figures['turns']} turns, {figures['wall_s']:.1f} s; "
            f"{figures['busy_share']:.0%} of the slots busy",
            x=0.02,
            ha="left",
            fontsize=10,
        )
    figure.legend(handles=_legend(), loc="outside upper center", ncols=4, fontsize=8.5, frameon=False)
    with naming(path):
        figure.savefig(path, dpi=150)


def _draw_slots(axes: Any, timeline: Timeline, longest: float) -> None:
    """`longest`: seconds of the longest run."""
    from matplotlib.collections import PolyCollection

    zero = timeline.turns[0].times.plan if timeline.turns else 0.0
    boxes: dict[str, list[Any]] = {}
    marks: list[Span] = []
    tint = 0
    for span in timeline.spans():
        if not marks or (marks[-1].slot, marks[-1].request) != (span.slot, span.request):
            tint ^= 1  # who follow one another in a slot are told apart
            marks.append(span)
        colours = [(PREFILL_ROOM, 1.0), (PREFILL, min(1.0, span.rows / timeline.chunk))]
        if span.kind != Kind.PREFILL:
            colours = [(WAIT if span.kind == Kind.WAIT else DECODE[tint], 1.0)]
        left, right, bottom = span.begin - zero, span.end - zero, span.slot + 0.42
        for colour, share in colours:
            top = bottom - 0.84 * share
            boxes.setdefault(colour, []).append([(left, bottom), (right, bottom), (right, top), (left, top)])
    for colour, those in boxes.items():
        axes.add_collection(PolyCollection(those, facecolors=colour, linewidths=0))
    low, high = [one.slot - 0.48 for one in marks], [one.slot + 0.48 for one in marks]
    axes.vlines([one.begin - zero for one in marks], low, high, colors="black", lw=1)
    axes.set(ylim=(timeline.slots - 0.4, -0.6), ylabel="slot")
    axes.set_yticks(range(0, timeline.slots, max(1, timeline.slots // 8)))
    if not timeline.turns:
        return
    took = timeline.turns[-1].times.ready - zero
    axes.axvspan(0, took, color=IDLE, lw=0, zorder=0)
    step = nice_step(len(timeline.turns), round(12 * took / longest))
    numbers = range(step, len(timeline.turns) + 1, step)
    top = axes.secondary_xaxis("top")
    top.set_xticks([timeline.turns[number - 1].begin - zero for number in numbers], [str(one) for one in numbers])
    top.tick_params(labelsize=8)
    axes.text(-0.008, 1.02, "turn", transform=axes.transAxes, ha="right", va="bottom", fontsize=8)


def _draw_steps(axes: Any, timeline: Timeline, values: list[int], colour: str) -> None:
    """A value a turn, from when it was planned until the next one was."""
    if timeline.turns:
        zero = timeline.turns[0].times.plan
        at = [one.begin - zero for one in timeline.turns] + [timeline.turns[-1].times.ready - zero]
        axes.stairs(values, at, fill=True, color=colour, lw=0)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {"prefill, as high as its chunk is full": PREFILL, "decode (tints: one request and the next)": DECODE[0]}
    kinds |= {"has the slot, no row in the turn": WAIT, "idle": IDLE, "rows computed: live": LIVE, "padding": PADDING}
    patches = [Patch(facecolor=colour, edgecolor="#808080", lw=0.4, label=name) for name, colour in kinds.items()]
    return [
        *patches,
        Patch(facecolor=QUEUE, label="requests that wait"),
        Line2D([], [], color="black", label="next request"),
    ]


def nice_step(turns: int, marks: int) -> int:
    """Between turns that are marked, of which there are at most so many, or one."""
    steps = (step * 10**power for power in range(9) for step in (1, 2, 5))
    return next(step for step in steps if step * max(marks, 1) >= turns)
