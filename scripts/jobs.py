"""Requests as lines of JSON: reading them, serving them under a policy, writing what came of them in input order."""

import contextlib
import json
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

from batching import Engine, Output, Request, SamplingParams
from batching.engine import EngineStats
from model.files import unique_keys
from scripts.command import Report


@dataclass
class Job:
    """One line of input and what became of it. `output` is None until it ended; a bad line has no request."""

    where: str  # for messages: "line 3"
    id: str
    request: Request | None = None
    output: Output | None = None  # of several samples the first one's, once all have ended
    samples: list[Output] = field(default_factory=list)  # those that have ended, in order

    def take(self, output: Output) -> None:
        """Of one of its samples."""
        self.samples = sorted([*self.samples, output], key=lambda sample: sample.index)
        if self.request is None or len(self.samples) == self.request.params.n:
            self.output = self.samples[0]

    def end(self, output: Output) -> None:
        """Without the engine."""
        self.samples, self.output = [output], output

    def fail(self, reason: str, report: Report) -> None:
        report(f"{self.where}: {reason}")
        self.end(Output(self.id, [], None, "error", error=reason))


@dataclass(frozen=True)
class Run:
    """What serving the jobs under one policy gave and took."""

    policy: str
    outputs: list[Output]  # of the requests that the engine accepted, in input order
    wall_s: float
    stats: EngineStats


def read_jobs(lines: Iterable[tuple[str, bytes]], defaults: Mapping[str, Any], report: Report) -> list[Job]:
    """Jobs from (where, JSON) pairs; blank ones are skipped, bad ones end as errors at once.

    `defaults`: sampling fields for what a line leaves out.
    """
    jobs: list[Job] = []
    taken: set[str] = set()
    for where, line in lines:
        if not line.strip():
            continue
        job = Job(where, id=where.replace(" ", "-"))
        jobs.append(job)
        try:
            _read(job, line, defaults, taken)
        except UnicodeDecodeError as error:
            job.fail(f"not UTF-8: {error}", report)
        except json.JSONDecodeError as error:
            job.fail(f"not JSON: {error}", report)
        except RecursionError:
            job.fail("lists or objects nested too deep", report)
        except ValueError as error:
            job.fail(str(error), report)
        taken.add(job.id)
    return jobs


def _read(job: Job, line: bytes, defaults: Mapping[str, Any], taken: Set[str]) -> None:
    """Gives the job its request. A line that names no id has that of its place. Raises ValueError."""
    fields = json.loads(line, object_pairs_hook=unique_keys)
    if isinstance(fields, dict):
        given = fields.setdefault("id", job.id)
        if isinstance(given, str) and given:
            job.id = given
    if job.id in taken:
        raise ValueError(f"the id {job.id!r} is that of an earlier line")
    job.request = Request.from_json(fields, defaults)


def serve(
    engine: Engine,
    jobs: Sequence[Job],
    *,
    report: Report,
    on_turn: Callable[[int], None],
    asked_to_stop: Callable[[], bool],
) -> float:
    """Serve the jobs that have no output yet and return the seconds it took; each ends with an output.

    Not by `Engine.stream`, which refuses all requests for a bad one: here a bad one ends alone.
    `on_turn` is called with the number of outputs so far. Once `asked_to_stop` is true, what is left is cancelled.
    """
    todo = [job for job in jobs if job.output is None]
    queued, by_id = deque(todo), {job.id: job for job in todo}
    ended = 0
    start = time.perf_counter()
    while queued or engine.unfinished:
        while queued and has_room(engine, queued[0]):
            job = queued.popleft()
            assert job.request is not None
            try:
                engine.submit(job.request)
            except ValueError as error:
                job.fail(str(error), report)
                ended += 1
        for output in engine.step():
            by_id[output.id].take(output)
            ended += by_id[output.id].output is not None
        on_turn(ended)
        if asked_to_stop():
            while queued:
                job = queued.popleft()
                job.end(Output(job.id, [], None, "cancelled"))
            for job in todo:
                if job.output is None:
                    engine.cancel(job.id)
    return time.perf_counter() - start


def has_room(engine: Engine, job: Job) -> bool:
    """Whether the queue takes all samples of a job, or never can: then the engine says so."""
    samples = 1 if job.request is None else job.request.params.n
    return engine.scheduler.queue_room >= min(samples, engine.config.max_queue)


def run_policy(engine: Engine, policy: str, jobs: Sequence[Job], **how: Any) -> Run:
    """`serve` under a policy, on an engine that is idle. The programs are the same for every policy.

    It finds no prefixes of earlier runs.
    """
    engine.reconfigure(policy=policy)
    engine.scheduler.prefixes.forget()
    engine.reset_stats()
    wall_s = serve(engine, jobs, **how)
    outputs = [one for job in jobs if job.output is not None for one in job.samples if one.metrics is not None]
    return Run(policy, outputs, wall_s, engine.stats)


def again(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that the engine accepted, to be served once more with the seeds they had."""
    copies = []
    for job in jobs:
        if job.request is not None and job.output is not None and job.output.metrics is not None:
            params = replace(job.request.params, seed=job.output.seed)
            copies.append(Job(job.where, job.id, replace(job.request, params=params)))
    return copies


def warm_up(engine: Engine) -> None:
    """A few requests that nobody reads, so that no policy pays for the first touch of programs and memory.

    They end one after the other: the batch shrinks through the sizes of the decode step.
    """
    slots, max_len = engine.config.slots, engine.config.max_len
    tokens = min(8, max_len)
    prompt = [0] * max(1, min(engine.config.chunk_sizes[0], max_len - tokens))
    lengths = [1 + index * tokens // slots for index in range(slots)]
    params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in lengths]
    engine.generate([prompt] * slots, params)


class OrderedWriter:
    """Writes outputs as lines of JSON, each as soon as all before it have ended."""

    def __init__(self, jobs: Sequence[Job], file: TextIO) -> None:
        self._waiting, self._file = deque(jobs), file

    def advance(self) -> None:
        while self._waiting and self._waiting[0].output is not None:
            self._write(self._waiting.popleft())

    def close(self) -> None:
        """Writes what ended, past jobs that did not: after an error there may be some."""
        while self._waiting:
            self._write(self._waiting.popleft())

    def _write(self, job: Job) -> None:
        for output in job.samples:
            self._file.write(json.dumps(asdict(output)) + "\n")
            self._file.flush()


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether Ctrl-C was pressed; pressed again, it raises KeyboardInterrupt as usual."""
    asked = False

    def handler(*_: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
