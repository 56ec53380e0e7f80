"""Check a device: is attention right there, does a model generate with it, and how fast is it? One prepared run.

First the correctness of every number over small awkward cases, then a small model through the whole engine beside the
portable implementation, then the main cases of scripts.bench_attention, ours before other libraries'. Each group of
steps runs in a process of its own. A step that hangs is ended with its process, one that breaks it is named, and a new
process goes on with the next step. The JSON is written anew after every step: a run that is cut off still tells.

Exit status: 0; 1 if something was wrong, failed, hung or was not reached; 2 if something could not be run or written;
130 after Ctrl-C.
"""

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from scripts.attention_rivals import RIVALS
from scripts.bench_attention import line, names, write_json
from scripts.command import Report, check_targets, exit_status
from scripts.device_steps import DEVICE_LOST

PARTS = ("correctness", "engine", "bench")
GROUPS = {  # in order: its part, and the seconds that it may take of a budget of 480
    "decode": ("correctness", 110),
    "prefill": ("correctness", 130),
    "engine": ("engine", 130),
    "bench_decode": ("bench", 110),
    "bench_prefill": ("bench", 110),
    "portable": ("correctness", 50),
    "bench_rivals": ("bench", 150),
}
PATIENCE = {"engine": 3.0}  # times `stall_s`: a step of it compiles many programs
START_S = 60  # more than a step may take: importing, finding the device, measuring rates
END_S = 20  # for a process to end
MOST_PROCESSES = 4  # a group


@dataclass(frozen=True)
class Options:
    only: str = ",".join(PARTS)
    """Parts with commas between."""
    items: str = "*"
    """Of which steps, by patterns with commas between, such as decode/h128_*."""
    budget_s: float = 480.0
    """Seconds for everything. What is not reached by then is named."""
    stall_s: float = 60.0
    """Seconds that one step may take before it counts as hanging."""
    json: str | None = None
    """Where everything goes, as one JSON object; - is stdout."""

    def __post_init__(self) -> None:
        for part in names(self.only):
            if part not in PARTS:
                raise ValueError(f"{part!r} is not one of {', '.join(PARTS)}")
        if not (self.budget_s > 0 and self.stall_s > 0):
            raise ValueError("budget_s and stall_s must be positive")


class Group:
    """One group's steps: what is known of them so far, and the processes that run them, one after the other."""

    def __init__(self, name: str, command: Sequence[str], on_event) -> None:
        self.name, self.command, self.on_event = name, list(command), on_event
        self.planned: list[str] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.trouble: list[str] = []  # that belongs to no step

    def run(self, patterns: Sequence[str], seconds: float, stall_s: float) -> None:
        """Until all steps are done, or the seconds are over."""
        end = time.monotonic() + seconds
        for _ in range(MOST_PROCESSES):
            before = len(self.results)
            more = self._one_process(patterns, end, stall_s)
            if not more or time.monotonic() > end:
                break
            if len(self.results) == before:
                break  # it ends before it comes to a step
        for item in self.planned:
            if item not in self.results:
                self._result(item, "not run", "the time was over" if time.monotonic() > end else "the process ended")

    def _one_process(self, patterns: Sequence[str], end: float, stall_s: float) -> bool:
        """Whether another is needed for the steps that are left."""
        request = {"group": self.name, "patterns": list(patterns), "skip": list(self.results)}
        with tempfile.TemporaryFile("w+") as errors:
            call = [*self.command, json.dumps(request)]
            process = subprocess.Popen(
                call, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=Path(__file__).parents[1]
            )
            lines: queue.Queue[str | None] = queue.Queue()
            reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
            reader.start()
            try:
                return self._follow(process, lines, errors, end, stall_s)
            finally:
                process.kill()
                reader.join(END_S)
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    self.trouble.append("a process could not be ended")

    def _follow(self, process: subprocess.Popen, lines: "queue.Queue[str | None]", errors, end, stall_s) -> bool:
        current, allowed = None, stall_s + START_S
        while True:
            left = end - time.monotonic()
            try:
                text = lines.get(timeout=max(0.01, min(allowed, left)))
            except queue.Empty:
                over = left <= allowed
                status, reason = ("not run", "the time was over") if over else ("hang", f"nothing for {allowed:.0f} s")
                if current is not None:
                    self._result(current, status, reason + " in it" * over)
                elif not over:
                    self.trouble.append(f"{reason} before a step started")
                return not over and current is not None
            if text is None:
                return self._ended(process, errors, current)
            event = _event(text)
            if event["event"] == "plan":
                self.planned += [item for item in event["items"] if item not in self.planned]
            elif event["event"] == "start":
                current, allowed = event["item"], stall_s
            elif event["event"] == "result":
                self.results[event.pop("item")] = event
                current = None
            self.on_event(self, event, current)

    def _ended(self, process: subprocess.Popen, errors, current: str | None) -> bool:
        try:
            status = process.wait(END_S)
        except subprocess.TimeoutExpired:
            status = 0 if current is None else None  # it has told all, and hangs in ending
        if status in (0, DEVICE_LOST):
            return status == DEVICE_LOST
        errors.seek(0)
        reason = f"the process ended with status {status}: " + " ".join(errors.read()[-1500:].split())
        if current is None:
            self.trouble.append(reason)
            return False
        self._result(current, "crash", reason)
        return True

    def _result(self, item: str, status: str, reason: str) -> None:
        self.results[item] = {"event": "result", "status": status, "reason": reason}
        self.on_event(self, self.results[item], item)


def _read(stream, lines: "queue.Queue[str | None]") -> None:
    with stream:
        for text in stream:
            lines.put(text)
    lines.put(None)


def _event(text: str) -> dict[str, Any]:
    """What else a library prints is not one."""
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    return event if isinstance(event, dict) and "event" in event else {"event": "noise"}


def check(
    options: Options, report: Report, command: Sequence[str] = (sys.executable, "-m", "scripts.device_steps")
) -> int:
    """Run the groups, show what is found as it comes. The exit status."""
    check_targets({}, {"--json": options.json})
    start, groups = time.monotonic(), []
    result: dict[str, Any] = {"machine": {}, "complete": False, "groups": {}}

    def on_event(group: Group, event: dict[str, Any], item: str | None) -> None:
        if event["event"] == "info":
            if not result["machine"]:
                report(", ".join(f"{key} {value}" for key, value in event.items() if key != "event"))
            result["machine"] = {key: value for key, value in event.items() if key != "event"}
        elif event["event"] == "result":
            done = next(reversed(group.results))
            report(f"{time.monotonic() - start:5.0f} s  {step_line(done, group.results[done])}")
            result["groups"][group.name] = {"results": group.results, "trouble": group.trouble}
            write_json(options.json, result, done=False)

    for name, (part, seconds) in GROUPS.items():
        if part in names(options.only):
            left = start + options.budget_s - time.monotonic()
            groups.append(Group(name, command, on_event))
            if left > 0:
                stall_s = options.stall_s * PATIENCE.get(name, 1.0)
                groups[-1].run(names(options.items), min(left, seconds * options.budget_s / 480), stall_s)
            else:
                groups[-1].trouble.append("not reached: the time was over")
            result["groups"][name] = {"results": groups[-1].results, "trouble": groups[-1].trouble}
    result["complete"], result["took_s"] = True, time.monotonic() - start
    write_json(options.json, result, done=True)
    for text in summary(groups):
        report(text)
    return int(any(group.trouble or any(map(is_bad, group.results.items())) for group in groups))


def is_bad(step: tuple[str, dict[str, Any]]) -> bool:
    """What a rival cannot do is no fault of ours."""
    item, found = step
    if found["status"] in ("hang", "crash", "not run"):
        return True
    return found["status"] in ("wrong", "error") and item.rpartition(":")[2] not in RIVALS


def step_line(item: str, found: dict[str, Any]) -> str:
    """One step, in one line."""
    if "case" in found:
        return line(found)
    shown = f"{item:48} {found['status']:8}"
    for key, text in (("error", "error {:.1e}"), ("compile_s", "compiled in {:.1f} s"), ("took_s", "{:.1f} s")):
        shown += "  " + text.format(found[key]) if isinstance(found.get(key), float) else ""
    for key in ("worst_margin", "median_apart", "same_tokens", "tokens", "flops_per_s", "bytes_per_s"):
        shown += f"  {key} {found[key]:.4g}" if key in found else ""
    return shown + (f"  {found['reason'][:300]}" if found.get("reason") else "")


def summary(groups: Sequence[Group]) -> list[str]:
    """Counts of each group, then what was not well, then each case with everyone's time."""
    lines = ["", "summary"]
    for group in groups:
        counts: dict[str, int] = {}
        for found in group.results.values():
            counts[found["status"]] = counts.get(found["status"], 0) + 1
        worst = max((found["error"] for found in group.results.values() if "error" in found), default=None)
        text = ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing"
        lines.append(f"{group.name:14} {text}" + (f"; worst error {worst:.1e}" if worst is not None else ""))
        lines += [f"  {text[:600]}" for text in group.trouble]
    for group in groups:
        for item, found in group.results.items():
            if found["status"] not in ("ok", "cannot"):
                lines.append(f"  {item}: {found['status']}: {found.get('reason', '')[:160]}")
    return lines + bench_lines([found for group in groups for found in group.results.values() if "case" in found])


def bench_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line a case: microseconds of each, and ours against the roofline first."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case and row["status"] == "ok"]
        lines += [f"{case:40}" + "".join(f"  {_short(row)}" for row in mine)] if mine else []
    return lines


def _short(row: dict[str, Any]) -> str:
    return f"{row['implementation']} {row['s'] * 1e6:.1f} us {row['share_of_roofline']:.0%} of {row['bound']}"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = tyro.cli(Options, prog="python -m scripts.device_check", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def run(_: Report) -> int:
        return check(options, lambda text: print(text, flush=True))

    return exit_status(run, console)


if __name__ == "__main__":
    sys.exit(main())
