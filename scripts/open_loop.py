"""A workload on a real engine: requests come when they come, whether or not the engine keeps up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from batching import Engine, Output, QueueFull, Request
from scripts.fleet import Arrival, Arrivals, facts
from scripts.metrics import Outcome, Served
from scripts.traces import Item


def serve_items(
    engine: Engine,
    items: Sequence[Item],
    *,
    on_wake: Callable[[], None] = lambda: None,
    on_progress: Callable[[int, float], None] = lambda ended, at: None,
    on_output: Callable[[Output], None] = lambda output: None,
) -> list[Served]:
    """How every request ended, by when; times are in seconds from the start.

    What the engine refuses, for a full queue too, has failed. `on_wake` is called when a request comes after
    the engine had nothing to do, `on_progress` after every turn with how many have ended and the time, and
    `on_output` with what came of a request, or why it was refused.
    """
    run = _Run(engine, items, on_output)
    while run.arrivals.next_at is not None or engine.unfinished:
        while run.arrivals.next_at is not None and run.arrivals.next_at <= run.now():
            run.submit(run.arrivals.pop())
        if engine.unfinished:
            for output in engine.step():
                run.end(output)
            on_progress(len(run.served), run.now())
        elif run.arrivals.next_at is not None:
            time.sleep(max(0.0, run.arrivals.next_at - run.now()))
            on_wake()
    return run.served


class _Run:
    def __init__(self, engine: Engine, items: Sequence[Item], on_output: Callable[[Output], None]) -> None:
        self.arrivals, self.served = Arrivals(items), list[Served]()
        self._engine, self._vocabulary, self._on_output = engine, engine.model_config.vocab_size, on_output
        self._items = {item.id: item for item in items}
        self._at: dict[str, float] = {}  # arrivals of those that were submitted
        self._prompts: dict[str, Sequence[int]] = {}
        # Made before the clock starts, where that can be.
        whole = [one for one in items if not one.continues]
        self._requests = {one.id: self._request(one, ()) for one in whole}
        self._start = time.monotonic()

    def _request(self, item: Item, before: Sequence[int]) -> Request:
        request = item.request(self._vocabulary, before)
        return replace(request, **facts(item, self._engine.scheduler.policy))

    def now(self) -> float:
        return time.monotonic() - self._start

    def submit(self, arrival: Arrival) -> None:
        item = arrival.item
        request = self._requests.get(item.id) or self._request(item, arrival.before)
        self._at[item.id], self._prompts[item.id] = arrival.at, request.prompt_ids or ()
        try:
            self._engine.submit(request)
        except (ValueError, QueueFull) as error:
            self._on_output(Output(item.id, [], None, "error", error=str(error)))
            self._report(item.id, (), arrival.at, "failed", ())

    def end(self, output: Output) -> None:
        self._on_output(output)
        metrics, reason = output.metrics, output.finish_reason
        assert metrics is not None
        assert metrics.end is not None
        outcome: Outcome = "failed" if reason == "error" else "cancelled" if reason == "cancelled" else "completed"
        times = [token - self._start for token in metrics.tokens]
        self._report(output.id, times, metrics.end - self._start, outcome, output.token_ids)

    def _report(self, name: str, times: Sequence[float], end: float, outcome: Outcome, answer: Sequence[int]) -> None:
        item, prompt = self._items[name], self._prompts[name]
        self.arrivals.ended(name, end, lambda: (*prompt, *answer))
        slos = item.ttft_slo_s, item.tpot_slo_s
        self.served.append(Served(name, self._at[name], times, end, len(prompt), outcome, *slos))
