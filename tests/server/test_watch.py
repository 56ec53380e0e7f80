"""What the server tells of itself: every metric of a scripted run."""

import itertools
from types import SimpleNamespace

import httpx2
import numpy as np
import pytest
from prometheus_client import generate_latest, parser

from batching import Output, SamplingParams
from batching.plan import NOT_FINITE
from batching.request import Metrics
from scripts.server.watch import FIRST, NEXT, ROWS, WHOLE, Watch
from tests.batching.fake import alone
from tests.batching.fake_engine import fake_engine, letters, prompt_of, request_of
from tests.server.servers import LIMIT, Running, Steps, post, read_all


def told(source: Watch | str) -> dict[str, float]:
    """By name, with the labels that are not the model's."""
    text = source if isinstance(source, str) else generate_latest(source.registry).decode()
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("carousel:"):
                assert sample.labels["model_name"] == "tiny"
                more = [value for key, value in sorted(sample.labels.items()) if key != "model_name"]
                found[":".join([sample.name.removeprefix("carousel:"), *more])] = sample.value
    return found


class Script:
    """An engine on a clock that ticks when it is looked at, and what a server does with what the engine brings."""

    def __init__(self, monkeypatch, slots=2, **config):
        self.engine = fake_engine(slots, tokenizer=letters(), run_ahead=1, **config)
        clock = itertools.count(1000).__next__
        self.engine.scheduler.clock = clock
        monkeypatch.setattr("batching.intake.time", SimpleNamespace(monotonic=clock))
        self.watch = Watch(self.engine, "tiny")
        self.outputs: list[Output] = []
        self.plans = []
        run = self.engine.run

        def ran(turn):
            self.plans.append(turn)
            return run(turn)

        self.engine.run = ran

    def send(self, request):
        def deliver(delta):
            if delta.output is not None:
                self.outputs.append(delta.output)
                self.watch.ended(delta.output, request.params)

        return self.engine.subscribe(self.engine.prepare([request]), deliver)

    def finish(self):
        while self.engine.unfinished:
            self.engine.step()

    def histogram(self, name, values, edges):
        """Whether exactly these values were observed."""
        now, values = told(self.watch), np.array(values, float)
        assert now[f"{name}_count"] == len(values)
        assert now[f"{name}_sum"] == pytest.approx(values.sum())
        for edge in edges:
            assert now[f"{name}_bucket:{float(edge)}"] == (values <= edge).sum()
        assert now[f"{name}_bucket:+Inf"] == len(values)


def test_a_scripted_run(monkeypatch):
    script = Script(monkeypatch)
    prompts = {"a": prompt_of(5, 1), "b": prompt_of(40, 2), "c": prompt_of(40, 2), "d": prompt_of(3, 4)}
    for (name, prompt), tokens in zip(prompts.items(), (4, 7, 2, 9), strict=True):
        leave = script.send(request_of(name, prompt, max_tokens=tokens, temperature=0))
    script.engine.step()
    now = told(script.watch)
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (2, 2)
    assert now["kv_cache_usage_perc"] == sum(one.computed for one in script.engine.scheduler.running) / (2 * 64)
    while len(script.engine.scheduler.waiting):
        script.engine.step()
    script.engine.step()
    leave()  # the client of d: its end is told to nobody
    script.finish()
    a, b, c = (next(one for one in script.outputs if one.id == name) for name in "abc")
    metrics = [one.metrics for one in (a, b, c)]
    assert [len(one.tokens) for one in metrics] == [4, 7, 2]

    now = told(script.watch)
    assert now["request_success_total:length"] == 3
    assert now["request_success_total:abort"] == 1
    assert now["request_success_total:stop"] == now["request_success_total:error"] == 0
    assert now["prefix_cache_hits_total"] == c.cached_tokens == 39
    assert now["generation_tokens_total"] == script.engine.stats.generated_tokens
    d = now["generation_tokens_total"] - 13  # of the one that was given up, as far as it came
    assert now["prompt_tokens_total"] == now["prefix_cache_queries_total"] == 85 + (3 if d else 0)
    assert (now["num_requests_running"], now["num_requests_waiting"], now["kv_cache_usage_perc"]) == (0, 0, 0)

    script.histogram("e2e_request_latency_seconds", [one.end - one.arrival for one in metrics], WHOLE)
    script.histogram("request_queue_time_seconds", [one.admission - one.arrival for one in metrics], WHOLE)
    script.histogram("request_prefill_time_seconds", [one.tokens[0] - one.admission for one in metrics], WHOLE)
    script.histogram("request_decode_time_seconds", [one.tokens[-1] - one.tokens[0] for one in metrics], WHOLE)
    script.histogram("request_inference_time_seconds", [one.tokens[-1] - one.admission for one in metrics], WHOLE)
    means = [np.diff(one.tokens).mean() for one in metrics]
    script.histogram("request_time_per_output_token_seconds", means, NEXT)
    script.histogram("request_prompt_tokens", [5, 40, 40], (1, 2, 5, 10, 20, 50))
    script.histogram("request_generation_tokens", [4, 7, 2], (1, 2, 5, 10, 20, 50))
    script.histogram("request_params_max_tokens", [4, 7, 2], (1, 2, 5, 10, 20, 50))
    script.histogram("request_params_n", [1, 1, 1], (1, 2, 5, 10, 20))
    assert "request_prompt_tokens_bucket:100.0" not in now  # no slot is so long


def test_first_and_further_tokens(monkeypatch):
    script = Script(monkeypatch)
    for name, tokens in (("a", 6), ("b", 1), ("c", 3)):
        script.send(request_of(name, prompt_of(9, ord(name)), max_tokens=tokens))
    script.finish()
    assert script.engine.stats.wasted_rows == 0
    metrics = [one.metrics for one in script.outputs]
    script.histogram("time_to_first_token_seconds", [one.tokens[0] - one.arrival for one in metrics], FIRST)
    gaps = np.concatenate([np.diff(one.tokens) for one in metrics])
    assert len(gaps) == 7
    script.histogram("inter_token_latency_seconds", gaps, NEXT)


def test_a_row_that_was_wasted_brings_no_token(monkeypatch):
    """Which token ends the text is seen a turn late."""
    tokens = alone(prompt_of(9, 1), 6)
    script = Script(monkeypatch)
    script.send(request_of("a", prompt_of(9, 1), max_tokens=40, stop_token_ids=[tokens[-1]]))
    script.finish()
    assert script.engine.stats.wasted_rows > 0
    script.histogram("inter_token_latency_seconds", np.diff(script.outputs[0].metrics.tokens), NEXT)


def test_turns_and_rows(monkeypatch):
    script = Script(monkeypatch, slots=4)
    for index in range(6):
        script.send(request_of(str(index), prompt_of(3 + 7 * index, index), max_tokens=5))
    script.finish()
    now, plans = told(script.watch), script.plans
    rows, live_rows = sum(len(one.plan.rows.tokens) for one in plans), sum(one.plan.live_rows for one in plans)
    assert now["turns_total"] == len(plans)
    script.histogram("iteration_tokens_total", [turn.plan.live_rows for turn in plans], ROWS)
    assert now["rows_total"] == rows
    assert now["padding_rows_total"] == rows - live_rows > 0
    assert now["padding_row_share"] == pytest.approx(1 - live_rows / rows)
    assert now["busy_slots_total"] == sum(turn.busy for turn in plans)
    assert now["busy_slot_share"] == pytest.approx(sum(turn.busy for turn in plans) / len(plans) / 4)
    assert now["slots"] == 4
    stats = script.engine.stats
    assert now["turn_seconds_total"] == stats.wall_s > now["host_seconds_total"] == stats.host_s > 0
    assert now["device_wait_share"] == pytest.approx(now["device_wait_seconds_total"] / now["turn_seconds_total"])
    assert now["wasted_rows_total"] == stats.wasted_rows


def test_ends_of_other_kinds(monkeypatch):
    script = Script(monkeypatch)
    script.send(request_of("stops", [5], stop_token_ids=list(range(97))))
    script.send(request_of("cancelled", [6], max_tokens=50))
    gone = script.send(request_of("gone before it had a slot", [7], max_tokens=50))
    script.engine.step()
    script.engine.cancel("cancelled")
    gone()
    gone()  # a second time changes nothing
    script.finish()
    run = script.engine.run

    def broken(turn):
        sampled = run(turn)
        sampled.tokens[:] = NOT_FINITE
        return sampled

    script.engine.run = broken
    script.send(request_of("fails", [8], max_tokens=50))
    script.finish()
    now = told(script.watch)
    assert {reason: now[f"request_success_total:{reason}"] for reason in ("stop", "length", "abort", "error")} == {
        "stop": 1, "length": 0, "abort": 2, "error": 1,
    }  # fmt: skip
    assert (
        now["e2e_request_latency_seconds_count"] == now["request_prompt_tokens_count"] == 1
    )  # of what came to its end
    assert not script.watch._open


def test_an_end_that_was_not_read_is_one_too(monkeypatch):
    """The client goes away when its answer is complete, before anybody takes it from the engine."""
    script = Script(monkeypatch)
    leave = script.engine.subscribe(script.engine.prepare([request_of("a", [5], max_tokens=2)]), lambda delta: None)
    script.finish()
    leave()
    assert told(script.watch)["request_success_total:abort"] == 1


def test_what_an_output_says(monkeypatch):
    """Scored prompts, several samples, slots that were lost."""
    watch = Script(monkeypatch).watch
    params = SamplingParams(n=3, max_tokens=40)
    times = Metrics(arrival=1.0, admission=1.5, tokens=[2.0, 3.0], end=3.0, preemptions=2)
    for index in range(3):
        watch.ended(Output("x", [1, 2], "", "length", None, 7, 2, index=index, metrics=times), params)
    scored = Output("y", [], "", "length", None, 11, 0, metrics=Metrics(1.0, 1.5, [], 2.0))
    watch.ended(scored, SamplingParams(max_tokens=0, prompt_logprobs=0))
    asked = SamplingParams(temperature=0, max_tokens=40)
    watch.ended(Output("z", [1, 2], "", "cancelled", None, 7, 2, metrics=times), asked, copies=5)  # told five times
    watch.refused(404)
    watch.refused(404)
    watch.refused(503)
    now = told(watch)
    assert now["num_preemptions_total"] == 8
    assert (now["request_params_n_count"], now["request_params_n_sum"]) == (3, 9)
    assert (now["request_params_max_tokens_count"], now["request_params_max_tokens_sum"]) == (3, 80)
    assert now["prompt_tokens_total"] == 11  # the others' came with their turns
    assert now["prefix_cache_queries_total"] == 0  # and this one was not looked for
    assert (now["request_decode_time_seconds_count"], now["e2e_request_latency_seconds_count"]) == (3, 4)
    assert (now["http_refusals_total:404"], now["http_refusals_total:503"]) == (2, 1)


def test_nothing_is_looked_for_without_prefix_reuse(monkeypatch):
    script = Script(monkeypatch, prefix_reuse=False)
    for name in "ab":
        script.send(request_of(name, prompt_of(30), max_tokens=2))
    script.finish()
    now = told(script.watch)
    assert (now["prompt_tokens_total"], now["prefix_cache_queries_total"], now["prefix_cache_hits_total"]) == (60, 0, 0)


# Over HTTP.


def ask(server, **fields) -> bytes:
    with server.connect() as sock:
        sock.sendall(post("/v1/completions", {"prompt": [5], "max_tokens": 3} | fields, "Connection: close"))
        return read_all(sock)


def test_metrics_of_a_server():
    engine = fake_engine(slots=2, tokenizer=letters())
    steps = Steps(engine)
    with Running(engine) as server, httpx2.Client(base_url=server.url, timeout=LIMIT) as http:
        steps.allowed.release(100)
        ask(server), ask(server, stream=True), ask(server, temperature=9e99), http.get("/nothing")
        steps = Steps(engine)  # from here on nothing moves
        sock = server.connect()
        sock.sendall(post("/v1/completions", {"prompt": [5], "max_tokens": 30}))
        steps.waiting.wait(LIMIT)
        assert told(http.get("/metrics").text)["num_requests_running"] == 1
        sock.close()
        server.wait(lambda: server.app.engine._calls)
        steps.go_on()
        server.wait(server.idle)
        reply = http.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        now = told(reply.text)
        assert (now["request_success_total:length"], now["request_success_total:abort"]) == (2, 1)
        assert (now["http_refusals_total:400"], now["http_refusals_total:404"]) == (1, 1)
        assert now["time_to_first_token_seconds_count"] in (2, 3)
        assert "process_open_fds" in reply.text


def test_scored_prompts_are_not_looked_for(server):
    """What lm-eval sends."""
    with httpx2.Client(base_url=server.url, timeout=LIMIT) as http:

        def counts() -> np.ndarray:
            now = told(http.get("/metrics").text)
            return np.array([now[name] for name in ("prompt_tokens_total", "prefix_cache_queries_total")])

        before = counts()
        http.post("/v1/completions", json={"prompt": [70] * 20, "max_tokens": 1})
        middle = counts()
        for max_tokens in (0, 1):
            fields = {"prompt": [71] * 30, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
            assert http.post("/v1/completions", json=fields).status_code == 200
        assert (middle - before).tolist() == [20, 20]
        assert (counts() - middle).tolist() == [60, 0]
