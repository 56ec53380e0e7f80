"""Turns of an engine as they are measured, the cost that fits them, and how far off it is."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from batching.turn import Turn, TurnTimes
from scripts.step_cost import FittedCost, HostCost, Line, Shape, StepCost, TurnLoad, load_of

FEW = 8  # turns of a program with which its own slope is not to be trusted
HOST = ("plan_s", "launch_s", "commit_s")


class TurnRecord(NamedTuple):
    """A measured turn: what it computed, and its seconds as `StepCost` and `HostCost` mean them."""

    load: TurnLoad
    seconds: float
    plan_s: float
    launch_s: float
    commit_s: float

    def to_json(self) -> dict[str, Any]:
        return self.load._asdict() | {name: getattr(self, name) for name in self._fields[1:]}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "TurnRecord":
        load = TurnLoad(*(int(line[name]) for name in TurnLoad._fields))
        return cls(load, *(float(line[name]) for name in cls._fields[1:]))


class TurnRecorder:
    """As an engine's `on_turn`, with `run_ahead` 0: keeps every turn. `wake` says that the engine had nothing to do."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._turns: list[tuple[Turn, TurnTimes, float | None]] = []
        self._since: float | None = None  # since when the host has been busy with what leads to the next turn

    def __call__(self, turn: Turn, times: TurnTimes) -> None:
        self._turns.append((turn, times, self._since))
        self._since = times.committed

    def wake(self) -> None:
        self._since = time.monotonic()

    def records(self) -> list[TurnRecord]:
        found = []
        for turn, times, since in self._turns:
            start = times.plan if since is None else since
            host = times.launch - start, times.launched - times.launch, times.committed - times.ready
            found.append(TurnRecord(load_of(turn, self._slots), times.ready - times.launch, *host))
        return found


def fit(records: Sequence[TurnRecord], about: Mapping[str, Any] | None = None) -> FittedCost:
    """By least squares without negative terms: the turns of a program take in sum as long as they took.

    A program with few turns has the slope that all programs share; `about` says where they were measured. Raises
    ValueError where there are no turns.
    """
    if not records:
        raise ValueError("no turn was measured: there is nothing to fit")
    by_shape: dict[Shape, list[TurnRecord]] = {}
    for record in sorted(records, key=lambda one: one.load.copied):
        group = by_shape.setdefault(record.load.shape, [])
        if not record.load.copied or not group:  # what copies take is found from what they are off
            group.append(record)
    shared = _shared_slope(by_shape)
    programs = {shape: _program(group, shared) for shape, group in by_shape.items()}
    plane = _solve([[1.0, s.rows, s.head_rows] for s in programs], [line.constant for line in programs.values()])
    host = HostCost(*(_host_line(records, name) for name in HOST), shared=(about or {}).get("platform") == "cpu")
    cost = FittedCost(programs, host)
    copying = [record for record in records if record.load.copied]
    off = [record.seconds - predicted(cost, record.load) for record in copying]
    copy_s = _solve([[float(record.load.copied)] for record in copying], off)[0] if copying else 0.0
    return FittedCost(programs, host, plane[1], plane[2], copy_s, dict(about or {}))


def predicted(cost: StepCost, load: TurnLoad) -> float:
    return cost.line(load).at(load.cache_tokens)


def _program(group: Sequence[TurnRecord], shared: float) -> Line:
    """Of one program's turns, through their mean."""
    tokens, seconds = (np.array([get(one) for one in group], float) for get in (_tokens, lambda one: one.seconds))
    slope = shared
    if len(group) > FEW and np.ptp(tokens):
        slope = _solve([[1.0, one] for one in tokens], seconds)[1]
    constant = seconds.mean() - slope * tokens.mean()
    if constant < 0:  # a line through the origin
        return Line(0.0, float(seconds.sum() / tokens.sum()))
    return Line(float(constant), float(slope))


def _shared_slope(by_shape: Mapping[Shape, Sequence[TurnRecord]]) -> float:
    """Of lines that have the slope in common, each with a constant of its own."""
    tokens, seconds = [], []
    for group in by_shape.values():
        there = np.array([_tokens(one) for one in group], float)
        taken = np.array([one.seconds for one in group])
        tokens.append(there - there.mean())
        seconds.append(taken - taken.mean())
    x, y = np.concatenate(tokens), np.concatenate(seconds)
    return max(float(x @ y / (x @ x)), 0.0) if (x @ x) else 0.0


def _tokens(record: TurnRecord) -> int:
    return record.load.cache_tokens


def _host_line(records: Sequence[TurnRecord], name: str) -> Line:
    constant, slope = _solve([[1.0, one.load.sampled] for one in records], [getattr(one, name) for one in records])
    return Line(constant, slope)


def _solve(rows: Iterable[Sequence[float]], wanted: Sequence[float] | np.ndarray) -> list[float]:
    """Terms of at least 0 whose sums come closest to what is wanted. Columns are scaled: their units differ by far."""
    from scipy.optimize import nnls  # takes long to import

    matrix = np.array([*rows], float)
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1
    found, _ = nnls(matrix / scale, np.asarray(wanted, float))
    return (found / scale).tolist()


def residuals(cost: StepCost, records: Sequence[TurnRecord]) -> dict[str, Any]:
    """How far predictions are off, in shares of what was measured: of all turns, and of each program's."""
    by_shape: dict[Shape, list[TurnRecord]] = {}
    for record in records:
        by_shape.setdefault(record.load.shape, []).append(record)
    programs = [shape._asdict() | _off(cost, group) for shape, group in sorted(by_shape.items())]
    return {"all": _off(cost, records), "programs": programs}


def _off(cost: StepCost, records: Sequence[TurnRecord]) -> dict[str, float]:
    """`total`: of the sum of all seconds; above 0 where too much is predicted."""
    wanted = np.array([one.seconds for one in records])
    found = np.array([predicted(cost, one.load) for one in records])
    off = np.abs(found / wanted - 1)
    return {
        "turns": len(records),
        "mean_s": float(wanted.mean()),
        "median_off": float(np.median(off)),
        "p90_off": float(np.percentile(off, 90)),
        "total_off": float(found.sum() / wanted.sum() - 1),
    }


def residuals_table(figures: Mapping[str, Any]) -> Table:
    """A line per program."""
    table = Table("rows", "of the head", "turns", "mean ms", "off, median", "off, p90", "in sum")
    for one in [*figures["programs"], figures["all"]]:
        name, head = "all", ""
        if "chunk_rows" in one:
            name, head = f"{one['decode_rows']} + {one['chunk_rows']}", f"{one['head_rows']}"
        shares = (f"{one[name]:.1%}" for name in ("median_off", "p90_off"))
        table.add_row(name, head, f"{one['turns']}", f"{one['mean_s'] * 1e3:.2f}", *shares, f"{one['total_off']:+.1%}")
    return table
