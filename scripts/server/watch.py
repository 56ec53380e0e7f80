"""What a server tells of itself: `/metrics` for Prometheus, and the live page.

The metrics have vLLM's names, units and meanings, with `carousel:` before them. OWN_GAUGES and OWN_TOTALS have no
counterpart there: they are the engine's own counts, `batching.config.EngineStats`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batching import Delta, Engine, Output, SamplingParams
from batching.plan import Sampled
from batching.sequence import SequenceState
from batching.turn import Turn, TurnTimes
from scripts.server.connection import Endpoint
from scripts.server.live import Live

PREFIX = "carousel:"
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}  # ours and vLLM's

# Edges of vLLM's buckets.
FIRST = (1e-3, 5e-3, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
LENGTHS = tuple(step * 10**power for power in range(8) for step in (1, 2, 5))  # as far as a slot is long

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to first token.", FIRST),
    "inter_token_latency_seconds": ("From a token to the next.", NEXT),
    "request_time_per_output_token_seconds": ("A request's mean after its first token.", NEXT),
    "e2e_request_latency_seconds": ("From arrival to end.", WHOLE),
    "request_queue_time_seconds": ("From arrival to the first slot.", WHOLE),
    "request_prefill_time_seconds": ("From the first slot to the first token.", WHOLE),
    "request_decode_time_seconds": ("From the first token to the last.", WHOLE),
    "request_inference_time_seconds": ("From the first slot to the last token.", WHOLE),
    "request_prompt_tokens": ("Tokens of a request's prompt.", LENGTHS),
    "request_generation_tokens": ("Tokens that a request generated.", LENGTHS),
    "request_params_max_tokens": ("max_tokens, where a request has it.", LENGTHS),
    "request_params_n": ("Samples that a request asks for.", SAMPLES),
    "iteration_tokens_total": ("Rows of a turn that are not padding.", ROWS),
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts, counted when all of a prompt is in the cache.",
    "prefix_cache_queries": "Of these, those that were looked for among the rows that slots hold.",
    "prefix_cache_hits": "Of these, those that were found, and not computed.",
    "num_preemptions": "Slots that requests lost to more urgent ones, counted when they ended.",
}
GAUGES = {
    "num_requests_running": "Requests that have a slot, a sample each.",
    "num_requests_waiting": "Requests in the queue, a sample each.",
    "kv_cache_usage_perc": "Share of the cache's rows that hold rows of requests with a slot; 1 is all of them.",
}
OWN_GAUGES = {
    "slots": "Slots that there are.",
    "busy_slot_share": "Mean share of slots that a request had, over turns.",
    "padding_row_share": "Share of computed rows that were padding.",
    "device_wait_share": "Of the time with turns, at most so much the device waited for the host.",
}
TOTALS = {"generation_tokens": "Tokens generated."}
OWN_TOTALS = {
    "turns": "Turns launched.",
    "turn_seconds": "Time with turns.",
    "host_seconds": "Time in which the host worked, whether the device was busy or not.",
    "device_wait_seconds": "Of the time with turns, at most so long the device waited for the host.",
    "busy_slots": "Slots that a request had, summed over turns.",
    "rows": "Rows computed, padding included.",
    "padding_rows": "Of these, padding.",
    "wasted_rows": "Rows sampled for requests that had ended when their tokens were read.",
}


class Watch(Collector):
    """Counts what an engine does and how requests end. To be made before the engine's thread starts.

    The engine's stats start afresh. `ended` and `refused` may be called in any thread; ends of which nobody was told,
    since the client had gone, are seen here.
    """

    def __init__(self, engine: Engine, model: str = "carousel") -> None:
        """`model`: the label `model_name` of every metric."""
        self.live = Live(engine)
        self.registry = registry = CollectorRegistry()
        self._engine, self._model, self._lock = engine, model, threading.Lock()
        self._open: set[tuple[str, int]] = set()  # samples that were queued, and nobody was told how they ended
        self._histograms: dict[str, Histogram] = {}
        for name, (text, edges) in HISTOGRAMS.items():
            buckets = [edge for edge in edges if edges is not LENGTHS or edge <= engine.config.max_len]
            family = Histogram(PREFIX + name, text, ["model_name"], registry=registry, buckets=buckets)
            self._histograms[name] = family.labels(model)
        self._counters = {
            name: Counter(PREFIX + name, text, ["model_name"], registry=registry).labels(model)
            for name, text in COUNTERS.items()
        }
        text = "Requests by how they ended, a sample each; abort: cancelled, or the client went away."
        ends = Counter(f"{PREFIX}request_success", text, ["model_name", "finished_reason"], registry=registry)
        self._ends = {reason: ends.labels(model, told) for reason, told in REASONS.items()}
        text = "HTTP answers with a status of 400 and above."
        self._refusals = Counter(f"{PREFIX}http_refusals", text, ["model_name", "status"], registry=registry)
        registry.register(self)
        ProcessCollector(registry=registry)
        self._attach(engine)

    def _attach(self, engine: Engine) -> None:
        """From here on the engine tells of its turns and of who is queued."""
        engine.reset_stats()
        run, subscribe = engine.run, engine.subscribe

        def told_and_run(turn: Turn) -> Sampled:
            self.live.launched(turn)
            return run(turn)

        def told_and_subscribed(
            sequences: Sequence[SequenceState], deliver: Callable[[Delta], None]
        ) -> Callable[[], None]:
            give_up = subscribe(sequences, deliver)
            with self._lock:
                self._open |= {(one.id, one.index) for one in sequences}

            def told_and_given_up() -> None:
                give_up()
                self._left(sequences)

            return told_and_given_up

        engine.run, engine.subscribe, engine.on_turn = told_and_run, told_and_subscribed, self._turn

    def _turn(self, turn: Turn, times: TurnTimes) -> None:
        """In the engine's thread, where the device may be waiting: no more than must be."""
        first, following = (
            self._histograms[name] for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
        )
        count = 0
        for sequence in turn.sampled:
            tokens = sequence.metrics.tokens
            if not tokens or tokens[-1] < times.ready:  # its row was wasted: the turn brought it no token
                continue
            count += 1
            if len(tokens) > 1:
                following.observe(tokens[-1] - tokens[-2])
            else:
                first.observe(tokens[0] - sequence.metrics.arrival)
                self._prefilled(sequence)
        self._histograms["iteration_tokens_total"].observe(turn.plan.live_rows)
        self.live.committed(turn, times, count)

    def _prefilled(self, sequence: SequenceState) -> None:
        """A prompt that is scored is not looked for."""
        self._counters["prompt_tokens"].inc(len(sequence.prompt))
        if self._engine.config.prefix_reuse and sequence.params.prompt_logprobs is None:
            self._counters["prefix_cache_queries"].inc(len(sequence.prompt))
            self._counters["prefix_cache_hits"].inc(sequence.cached)

    def _left(self, sequences: Sequence[SequenceState]) -> None:
        """The client went away: nobody is told how these end."""
        for sequence in sequences:
            with self._lock:
                open_still = (sequence.id, sequence.index) in self._open
                self._open.discard((sequence.id, sequence.index))
            if open_still:
                self._ends["cancelled"].inc()
                self._counters["num_preemptions"].inc(sequence.metrics.preemptions)

    def ended(self, output: Output, params: SamplingParams, copies: int = 1) -> None:
        """Of a sample of a request that was queued, told as so many choices.

        Times and lengths are of those that came to their own end.
        """
        with self._lock:
            self._open.discard((output.id, output.index))
        self._ends[output.finish_reason].inc()
        observed: dict[str, float] = {}
        if output.index == 0:
            observed["request_params_n"] = params.n * copies
            if params.max_tokens is not None:
                observed["request_params_max_tokens"] = params.max_tokens
        if output.metrics is not None:
            self._counters["num_preemptions"].inc(output.metrics.preemptions)
        if output.finish_reason in ("stop", "length"):
            observed |= _durations(output)
            observed["request_prompt_tokens"] = output.prompt_tokens
            observed["request_generation_tokens"] = output.completion_tokens
            if not output.token_ids:  # the prompt was scored, and no turn brought a token
                self._counters["prompt_tokens"].inc(output.prompt_tokens)
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def refused(self, status: int) -> None:
        """Of an HTTP answer with a status of 400 or above."""
        self._refusals.labels(self._model, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """What the engine itself counts, read when somebody asks."""
        scheduler, stats, config = self._engine.scheduler, self._engine.stats, self._engine.config
        held = sum(one.computed for one in list(scheduler.running))
        share = held / (config.slots * config.max_len)
        gauges = (len(scheduler.running), len(scheduler.waiting), share)
        own_gauges = (config.slots, stats.busy_share, stats.padding_share, stats.gap_share)
        seconds = (stats.wall_s, stats.host_s, stats.gap_s)
        rows = (stats.busy_slots, stats.rows, stats.rows - stats.live_rows, stats.wasted_rows)
        for kind, texts, values in (
            (GaugeMetricFamily, GAUGES | OWN_GAUGES, (*gauges, *own_gauges)),
            (CounterMetricFamily, TOTALS | OWN_TOTALS, (stats.generated_tokens, stats.turns, *seconds, *rows)),
        ):
            for (name, text), value in zip(texts.items(), values, strict=True):
                family = kind(PREFIX + name, text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family

    def routes(self) -> list[Route]:
        """`/metrics`, the page at `/`, and its events at `/live`."""
        return [
            Route("/metrics", self._metrics),
            Route("/", self.live.page),
            Route("/live", Endpoint(self.live.events), methods=["GET"]),
        ]

    def close(self) -> None:
        """Nothing more is sent to pages: a server that ends need not wait for them."""
        self.live.close()

    async def _metrics(self, _: Request) -> Response:
        """In the text format alone: in OpenMetrics the library changes names that hold a colon."""
        text = await run_in_threadpool(generate_latest, self.registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def _durations(output: Output) -> dict[str, float]:
    """Of a request that came to its own end, in seconds."""
    metrics = output.metrics
    assert metrics is not None
    assert metrics.end is not None
    assert metrics.admission is not None
    times = {
        "e2e_request_latency_seconds": metrics.end - metrics.arrival,
        "request_queue_time_seconds": metrics.admission - metrics.arrival,
    }
    if metrics.tokens:
        first, last, count = metrics.tokens[0], metrics.tokens[-1], len(metrics.tokens)
        times["request_prefill_time_seconds"] = first - metrics.admission
        times["request_decode_time_seconds"] = last - first
        times["request_inference_time_seconds"] = last - metrics.admission
        if count > 1:
            times["request_time_per_output_token_seconds"] = (last - first) / (count - 1)
    return times
