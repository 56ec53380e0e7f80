"""A workload as a file, one request a line, and the public traces of real services turned into such workloads.

A line is a JSON object with the fields of `Item`; those that have their default are left out:

    {"id": "r0", "max_tokens": 80, "arrival_s": 0.25, "prompt_tokens": 300, "seed": 7, "prefix_tokens": 200}
    {"id": "r1", "max_tokens": 40, "arrival_s": 3.0, "after": "r0", "continues": true, "prompt_tokens": 30, "seed": 8}

Prompts are drawn from seeds, not stored, so that one file serves models of any vocabulary. Nothing here needs JAX.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from batching import Request

Report = Callable[[str], None]  # shows one line to the person
Format = Literal["azure", "burstgpt", "mooncake"]
Rule = tuple[Callable[[Any], bool], str]  # whether a value is allowed, and how a message says that

COUNT: Rule = (lambda value: type(value) is int and value >= 1, "an integer of at least 1")
SEED: Rule = (lambda value: type(value) is int and value >= 0, "an integer of at least 0")
SEEDS: Rule = (lambda value: isinstance(value, tuple | list) and all(map(SEED[0], value)), "integers of at least 0")
FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
TEXT: Rule = (lambda value: isinstance(value, str) and value != "", "a string that is not empty")
TIME: Rule = (lambda value: type(value) in (int, float) and 0 <= value < 1e15, "a number of at least 0")
LIMIT: Rule = (lambda value: TIME[0](value) and value > 0, "a number above 0")
HASH: Rule = (lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{16}", value)), "16 hex digits")
RULES: dict[str, Rule] = {"arrival_s": TIME, "expected": HASH, "priority": (lambda v: type(v) is int, "an integer")}
RULES |= dict.fromkeys(("max_tokens", "prompt_tokens", "block_tokens", "predicted_tokens"), COUNT)
RULES |= dict.fromkeys(("seed", "prefix_tokens", "prefix_seed"), SEED) | dict.fromkeys(("prompt_ids", "blocks"), SEEDS)
RULES |= dict.fromkeys(("id", "after", "user"), TEXT) | dict.fromkeys(("continues", "ignore_eos"), FLAG)
RULES |= dict.fromkeys(("ttft_slo_s", "tpot_slo_s"), LIMIT)
KEPT_AS: dict[Rule, Callable[[Any], Any]] = {SEEDS: tuple, TIME: float, LIMIT: float}


@dataclass(frozen=True)
class Item:
    """One request of a workload. Raises ValueError for a value that has no meaning.

    The prompt is given as `prompt_ids` or drawn: `blocks` of `block_tokens` tokens, each from a seed of its own, or
    `prefix_tokens` from `prefix_seed`, and the rest of its `prompt_tokens` from `seed`. Equal seeds give equal tokens,
    also where fewer of them are taken: requests share prefixes exactly.
    """

    id: str
    max_tokens: int  # of the answer: exactly so many with `ignore_eos`
    arrival_s: float = 0.0  # seconds from the start of the run; with `after`, from that request's end: think time
    after: str | None = None  # id of the request, on an earlier line, that must have ended: closed loops, conversations
    continues: bool = False  # the prompt begins with the prompt and the answer of `after`: the next turn
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    seed: int = 0
    prefix_tokens: int = 0
    prefix_seed: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: int = 512  # the last block may be cut by the end of the prompt
    ignore_eos: bool = True
    user: str | None = None
    priority: int = 0  # lower is more urgent
    ttft_slo_s: float | None = None  # deadline of the first token, in seconds after the arrival
    tpot_slo_s: float | None = None  # deadline of the mean time per output token after the first
    predicted_tokens: int | None = None  # what a predictor of lengths says of the answer
    expected: str | None = None  # `token_hash` of the right answer

    def __post_init__(self) -> None:
        for one in fields(self):
            value, rule = getattr(self, one.name), RULES[one.name]
            if value is None and one.default is None:
                continue
            if not rule[0](value):
                raise ValueError(f"{one.name} must be {rule[1]}, not {value!r}")
            if rule in KEPT_AS:
                object.__setattr__(self, one.name, KEPT_AS[rule](value))
        if (self.prompt_ids is None) == (self.prompt_tokens is None):
            raise ValueError("give exactly one of prompt_ids and prompt_tokens")
        if self.length == 0 or (self.prompt_ids and (self.blocks or self.prefix_tokens)):
            raise ValueError("prompt_ids must hold at least one token, and nothing is drawn beside it")
        if self.prefix_tokens > (0 if self.blocks else self.length):
            raise ValueError(f"prefix_tokens {self.prefix_tokens} exceeds the prompt, or is beside blocks")
        if (len(self.blocks) - 1) * self.block_tokens >= self.length:
            raise ValueError(f"{len(self.blocks)} blocks of {self.block_tokens} tokens exceed {self.length} tokens")
        if self.after == self.id:
            raise ValueError(f"after is the request itself: {self.id!r}")
        if self.continues and self.after is None:
            raise ValueError("continues needs after")

    @property
    def length(self) -> int:
        """Tokens of the prompt, without those of `after` that it may continue."""
        return len(self.prompt_ids) if self.prompt_ids is not None else self.prompt_tokens or 0

    def prompt(self, vocabulary: int, before: Sequence[int] = ()) -> tuple[int, ...]:
        """Token ids below `vocabulary`, the same on every machine.

        `before`: the prompt and the answer of `after` where this one continues it. Raises ValueError if they are
        missing or out of place, and for given ids that are no tokens.
        """
        if (len(before) > 0) != self.continues:
            raise ValueError(f"{self.id}: before must hold tokens where, and only where, a request continues another")
        own = self.prompt_ids if self.prompt_ids is not None else self._drawn(vocabulary)
        if max(own) >= vocabulary:
            raise ValueError(f"{self.id}: token {max(own)} is not in a vocabulary of {vocabulary}")
        return (*before, *own)

    def _drawn(self, vocabulary: int) -> list[int]:
        parts = [(seed, self.block_tokens) for seed in self.blocks] or [(self.prefix_seed, self.prefix_tokens)]
        parts.append((self.seed, max(0, self.length - sum(count for _, count in parts))))
        drawn = [np.random.Generator(np.random.PCG64(s)).integers(vocabulary, size=n) for s, n in parts]
        return np.concatenate(drawn)[: self.length].tolist()

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their default."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_json(cls, line: Any) -> "Item":
        """Raises ValueError, naming a field that is unknown or missing."""
        if not isinstance(line, dict):
            raise ValueError(f"a request is a JSON object, not {type(line).__name__}")
        if unknown := sorted(set(line) - set(RULES)):
            raise ValueError(f"fields that are not supported: {unknown}; supported are {sorted(RULES)}")
        if missing := [one.name for one in fields(cls) if one.default is MISSING and one.name not in line]:
            raise ValueError(f"fields that are missing: {missing}")
        return cls(**line)

    def request(self, vocabulary: int, before: Sequence[int] = (), priority: bool = False) -> "Request":
        """Greedy, for an engine. `priority`: hand on the priority, which needs a policy that looks at it."""
        from batching import Request, SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)
        urgency = self.priority if priority else 0
        return Request(prompt_ids=self.prompt(vocabulary, before), params=params, id=self.id, priority=urgency)


def token_hash(ids: Sequence[int]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the ids as little-endian int32."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:16]


def workload_text(items: Iterable[Item]) -> str:
    """The file of a workload, byte for byte the same for the same items. Raises ValueError if it is none."""
    seen: dict[str, str] = {}
    for item in items:
        check_place(item, seen)
        seen[item.id] = json.dumps(item.to_json()) + "\n"
    return "".join(seen.values())


def write_workload(path: str | Path, items: Iterable[Item]) -> None:
    """Raises ValueError, before it writes, for ids that occur twice and an `after` that is no earlier item."""
    Path(path).write_text(workload_text(items), encoding="utf-8", newline="\n")


def read_workload(path: str | Path, report: Report | None = None) -> list[Item]:
    """The requests of a file, in its order.

    `report` is told of each line that is bad, and the others are read; without it they raise one ValueError.
    """
    problems: list[str] = []
    items: dict[str, Item] = {}
    for number, line in numbered(path):
        try:
            item = Item.from_json(parsed(line))
            check_place(item, items)
            items[item.id] = item
        except ValueError as error:
            (report or problems.append)(f"line {number}: {error}")
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    return [*items.values()]


def check_place(item: Item, earlier: Iterable[str]) -> None:
    """Raises ValueError if an item cannot stand behind those of the ids `earlier`."""
    if item.id in earlier:
        raise ValueError(f"the id {item.id!r} is that of an earlier line")
    if item.after is not None and item.after not in earlier:
        raise ValueError(f"after names {item.after!r}, which is no request of an earlier line")


def numbered(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.strip()


def parsed(line: bytes) -> Any:
    """Raises ValueError, saying why, for what is not JSON, and for an object with a key that is there twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"a key is given more than once: {[key for key, _ in pairs]}")
        return dict(pairs)

    try:
        return json.loads(line, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


def read_trace(form: Format, path: str | Path, report: Report) -> list[Item]:
    """The requests of a public trace in the order of their arrival, the first at 0 s.

    azure: github.com/Azure/AzurePublicDataset, of 2023 (Splitwise, ISCA 2024; times without a zone, to seven digits of
    a second) and of 2024 (DynamoLLM, HPCA 2025; times with a zone).
    burstgpt: github.com/HPMLL/BurstGPT (arXiv 2401.17644), with and without the columns of sessions, which become
    users. Requests that had failed, whose answer has 0 tokens, are counted and left out.
    mooncake: github.com/kvcache-ai/Mooncake, FAST25-release/traces. Each of `hash_ids` stands for 512 tokens and all
    before them; it becomes the seed of a block, so prompts share what they shared in the trace, and nothing else.

    `report` is told of each malformed row, and the others are read. Raises ValueError if the file is of another format.
    """
    needed, as_item = FORMATS[form]
    lines, items, failed = numbered(path), [], 0
    first = next(numbered(path), (1, b""))[1]
    names = None if form == "mooncake" else cells(next(lines, (1, b""))[1])
    with contextlib.suppress(ValueError):
        needed = needed - set(row_of(first, names))
    if needed:
        raise ValueError(f"{path} is no {form} trace: its first line lacks {', '.join(sorted(needed))}")
    for number, line in lines:
        try:
            item = as_item(row_of(line, names), number)
            failed += item is None
            items += [] if item is None else [item]
        except ValueError as error:
            report(f"line {number}: {error}")
    if failed:
        report(f"{failed} requests that had failed are left out")
    items.sort(key=lambda item: item.arrival_s)
    return [replace(item, arrival_s=round(item.arrival_s - items[0].arrival_s, 6)) for item in items]


def cells(line: bytes) -> list[str]:
    """Of a row of CSV; none of these traces has quotes."""
    return [cell.strip() for cell in line.decode("utf-8-sig", errors="replace").split(",")]


def row_of(line: bytes, names: Sequence[str] | None) -> Mapping[str, Any]:
    """A row of CSV with columns of these names, or without them one of Mooncake's, of JSON."""
    row = parsed(line) if names is None else dict(zip(names, cells(line), strict=False))
    if not isinstance(row, dict) or (len(cells(line)) != len(names) if names else not row.keys() >= MOONCAKE):
        raise ValueError(f"this is no row: {line[:80].decode(errors='replace')}")
    return row


def count(row: Mapping[str, Any], name: str) -> int:
    """A number of tokens, of a cell or of JSON."""
    value = row[name]
    number: Any = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,12}", value) else value
    if not COUNT[0](number):
        raise ValueError(f"{name} must be {COUNT[1]}, not {value!r}")
    return number


def azure_item(row: Mapping[str, Any], line: int) -> Item:
    when = datetime.fromisoformat(row["TIMESTAMP"])
    time_s = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    prompt, answer = count(row, "ContextTokens"), count(row, "GeneratedTokens")
    return Item(f"line-{line}", answer, time_s, prompt_tokens=prompt, seed=line)


def burstgpt_item(row: Mapping[str, Any], line: int) -> Item | None:
    """None for a request that had failed."""
    time_s, user = float(row["Timestamp"]), row.get("Session ID") or None
    if row["Response tokens"] == "0":
        return None
    prompt, answer = count(row, "Request tokens"), count(row, "Response tokens")
    return Item(f"line-{line}", answer, time_s, prompt_tokens=prompt, seed=line, user=user)


def mooncake_item(row: Mapping[str, Any], line: int) -> Item:
    prompt, answer, blocks = count(row, "input_length"), count(row, "output_length"), row["hash_ids"]
    if not isinstance(blocks, list) or len(blocks) != -(-prompt // Item.block_tokens):
        raise ValueError(f"hash_ids must be a list of one id for each 512 of {prompt} tokens")
    if not TIME[0](row["timestamp"]):
        raise ValueError(f"timestamp must be {TIME[1]}, not {row['timestamp']!r}")
    return Item(f"line-{line}", answer, row["timestamp"] / 1e3, prompt_tokens=prompt, seed=line, blocks=tuple(blocks))


MOONCAKE = {"timestamp", "input_length", "output_length", "hash_ids"}
FORMATS: dict[Format, tuple[set[str], Callable[[Mapping[str, Any], int], Item | None]]] = {
    "azure": ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, azure_item),
    "burstgpt": ({"Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"}, burstgpt_item),
    "mooncake": (MOONCAKE, mooncake_item),
}
