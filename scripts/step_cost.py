"""How long a turn takes, as a function of what it computes: fitted to measured turns, or from a device's peak rates.

A cost is kept as one JSON object. Fitted, as `python -m scripts.simulate record` writes it, a line per program:

    {"kind": "fitted", "about": {"model": "smollm2-135m-instruct", "slots": 8, ...},
     "row_s": 1e-3, "head_s": 1e-4, "copy_s": 1e-6,
     "host": {"plan": [2e-4, 1e-5], "launch": [1e-4, 0], "commit": [1e-4, 1e-5]},
     "programs": [{"decode_rows": 0, "chunk_rows": 8, "head_rows": 8, "constant_s": 0.02, "per_token_s": 1e-6}, ...]}

Or written by hand for a device that is not here; `config` is a model's config.json or a path to it beside the file:

    {"kind": "roofline", "config": "config.json", "flops_per_s": 9.9e14, "bytes_per_s": 4.8e12, "itemsize": 2,
     "overhead_s": 2e-4, "host": {"plan": [2e-4, 0], "launch": [1e-4, 0], "commit": [1e-4, 0]}}

Each of `host` is [seconds, seconds a sampled row], and `"shared": true` beside them says that the device is the host's
own cores, so that running ahead does not hide a launch. `about` may say how the engine is set, for a simulation's
defaults.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from batching.turn import Turn
from model.config import ModelConfig
from scripts.limits import dense, linear_work

TERMS = ("row_s", "head_s", "copy_s")


class TurnLoad(NamedTuple):
    """What of a turn its cost depends on. The first three are the program's; the others do not count padding."""

    decode_rows: int
    chunk_rows: int
    head_rows: int  # rows that the model's head is computed for
    live_rows: int
    cache_tokens: int  # summed over rows: positions that each attends to
    read_tokens: int  # summed over slots: positions that some row attends to
    sampled: int
    copied: int = 0  # rows copied from slot to slot before the turn

    @property
    def shape(self) -> "Shape":
        return Shape(*self[:3])


class Shape(NamedTuple):
    decode_rows: int
    chunk_rows: int
    head_rows: int

    @property
    def rows(self) -> int:
        return self.decode_rows + self.chunk_rows


class Line(NamedTuple):
    """constant + slope * x"""

    constant: float = 0.0
    slope: float = 0.0

    def at(self, x: float) -> float:
        return self.constant + self.slope * x


class HostCost(NamedTuple):
    """Seconds that the host is busy with a turn, by its sampled rows."""

    plan: Line = Line()  # all it does from one turn's commit to the next one's launch
    launch: Line = Line()
    commit: Line = Line()
    shared: bool = False  # the device is the host's own cores: a launch takes of its time too


NO_HOST = HostCost()


class StepCost(Protocol):
    @property
    def host(self) -> HostCost: ...

    @property
    def about(self) -> Mapping[str, Any]: ...

    def line(self, load: TurnLoad) -> Line:
        """Seconds from the launch of a turn, alone on the device, until its tokens are here, by `cache_tokens`.

        The same for two turns without chunks that differ in these alone.
        """
        ...


def load_of(turn: Turn, slots: int) -> TurnLoad:
    rows = turn.plan.rows
    live = rows.slots < slots
    seen, ends = rows.positions[live].astype(np.int64) + 1, np.zeros(slots, np.int64)
    np.maximum.at(ends, rows.slots[live], seen)
    copied = sum(copy.length for copy in turn.copies)
    read = int(ends.sum())
    head = len(rows.sample_rows)
    return TurnLoad(*turn.plan.shape, head, turn.plan.live_rows, int(seen.sum()), read, len(turn.sampled), copied)


@dataclass(frozen=True)
class FittedCost:
    """A line per program. For a program that was not measured: a plane through all, and what its neighbours are off."""

    programs: Mapping[Shape, Line]
    host: HostCost = NO_HOST
    row_s: float = 0.0  # seconds a row: the plane
    head_s: float = 0.0  # and a head row
    copy_s: float = 0.0  # seconds a copied row
    about: Mapping[str, Any] = field(default_factory=dict)

    def line(self, load: TurnLoad) -> Line:
        found = self.programs.get(load.shape) or self._guess(load.shape)
        return Line(found.constant + self.copy_s * load.copied, found.slope) if load.copied else found

    def _guess(self, shape: Shape) -> Line:
        """Kept once found."""
        if shape not in self._guessed:
            known = sorted(self.programs, key=lambda one: one.rows)
            known = [one for one in known if bool(one.chunk_rows) == bool(shape.chunk_rows)] or known
            at = [one.rows for one in known]
            off = [self.programs[one].constant - self._plane(one) for one in known]
            slopes = [self.programs[one].slope for one in known]
            constant = self._plane(shape) + float(np.interp(shape.rows, at, off))
            self._guessed[shape] = Line(max(constant, 0.0), float(np.interp(shape.rows, at, slopes)))
        return self._guessed[shape]

    def _plane(self, shape: Shape) -> float:
        return self.row_s * shape.rows + self.head_s * shape.head_rows

    @cached_property
    def _guessed(self) -> dict[Shape, Line]:
        return {}

    def to_json(self) -> dict[str, Any]:
        lines = sorted(self.programs.items())
        programs = [shape._asdict() | {"constant_s": line.constant, "per_token_s": line.slope} for shape, line in lines]
        terms = {name: getattr(self, name) for name in TERMS}
        return {"kind": "fitted", "about": dict(self.about), **terms, "host": self.host._asdict(), "programs": programs}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FittedCost":
        programs = {}
        for one in value["programs"]:
            shape = Shape(*(int(one[name]) for name in Shape._fields))
            programs[shape] = Line(*(_number(one[name], name) for name in ("constant_s", "per_token_s")))
        if not programs:
            raise ValueError("programs is empty")
        terms = {name: _number(value[name], name) for name in TERMS}
        return cls(programs, _host(value), **terms, about=dict(value.get("about", {})))


@dataclass(frozen=True)
class RooflineCost:
    """The least a device can take: each part of a turn at its matrix or its memory rate, whichever is slower.

    Mixtures of experts are counted as if each expert were read, sliding windows as if they were as long as the slot.
    """

    config: ModelConfig
    flops_per_s: float
    bytes_per_s: float
    itemsize: int = 2  # bytes of a weight, and of a number in the cache
    overhead_s: float = 0.0  # a turn
    host: HostCost = NO_HOST
    about: Mapping[str, Any] = field(default_factory=dict)

    def line(self, load: TurnLoad) -> Line:
        config, shape = self.config, load.shape
        if shape not in self._dense:
            parts = [*linear_work(config, shape.rows, self.itemsize).values()]
            parts.append(dense(shape.head_rows, config.width, config.vocab_size, self.itemsize))
            self._dense[shape] = self.overhead_s + sum(self._seconds(part.flops, part.bytes) for part in parts)
        layers = len(config.layers)
        flops = 4.0 * config.num_heads * config.head_dim * layers
        read = 2.0 * config.num_kv_heads * config.head_dim * self.itemsize * layers
        share = load.read_tokens / load.cache_tokens if load.cache_tokens else 1.0
        copies = self._seconds(0.0, 2 * read * load.copied)
        return Line(self._dense[shape] + copies, self._seconds(flops, read * share))

    def _seconds(self, flops: float, read: float) -> float:
        return max(flops / self.flops_per_s, read / self.bytes_per_s)

    @cached_property
    def _dense(self) -> dict[Shape, float]:
        return {}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], folder: Path) -> "RooflineCost":
        config = value["config"]
        if isinstance(config, str):
            config = json.loads((folder / config).read_text())
        rates = {name: _number(value[name], name) for name in ("flops_per_s", "bytes_per_s")}
        itemsize, overhead_s = int(value.get("itemsize", 2)), _number(value.get("overhead_s", 0.0), "overhead_s")
        if min(*rates.values(), itemsize) <= 0:
            raise ValueError(f"flops_per_s, bytes_per_s and itemsize must be above 0, not {rates}, {itemsize}")
        terms = {"itemsize": itemsize, "overhead_s": overhead_s, "host": _host(value)}
        return cls(ModelConfig.from_hf(config), **rates, **terms, about=dict(value.get("about", {})))


def load_cost(path: Path) -> FittedCost | RooflineCost:
    """Raises ValueError, naming the file, for one that holds no cost."""
    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict) or value.get("kind") not in ("fitted", "roofline"):
            raise ValueError('"kind" must be "fitted" or "roofline"')
        return FittedCost.from_json(value) if value["kind"] == "fitted" else RooflineCost.from_json(value, path.parent)
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _number(number: Any, name: str) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, not {number!r}")
    return float(number)


def _host(value: Mapping[str, Any]) -> HostCost:
    given = value.get("host", {})
    if unknown := sorted(set(given) - set(HostCost._fields)):
        raise ValueError(f"host has {unknown}; known are {list(HostCost._fields)}")
    lines = {name: line for name, line in given.items() if name != "shared"}
    for name, line in lines.items():
        if not isinstance(line, list | tuple) or len(line) != 2:
            raise ValueError(f"host.{name} must be two numbers, not {line!r}")
    if not isinstance(shared := given.get("shared", False), bool):
        raise ValueError(f"host.shared must be true or false, not {shared!r}")
    found = {name: Line(*(_number(one, f"host.{name}") for one in line)) for name, line in lines.items()}
    return HostCost(**found, shared=shared)
