"""Figures of serving, computed by hand."""

import numpy as np
import pytest

from scripts.metrics import Served, request_metrics, summary


def test_one_request():
    one = Served("a", arrival=10.0, tokens=[12.0, 12.5, 14.0], end=14.25, prompt_tokens=7)
    found = request_metrics(one)
    assert (found.ttft_s, found.tpot_s, found.latency_s) == (2.0, 1.0, 4.25)
    assert found.itl_s.tolist() == [0.5, 1.5]
    assert found.in_time


def test_too_few_tokens_have_no_times():
    single = request_metrics(Served("a", 0.0, [3.0], 3.0, 1, tpot_slo_s=0.001))
    assert (single.ttft_s, single.tpot_s, len(single.itl_s)) == (3.0, None, 0)
    assert single.in_time  # as in vLLM: there is no time between tokens that could be too long
    none = request_metrics(Served("a", 0.0, [], 2.0, 1, "failed"))
    assert (none.ttft_s, none.tpot_s, none.latency_s, none.in_time) == (None, None, 2.0, False)


@pytest.mark.parametrize(
    ("ttft", "tpot", "kept"),
    [
        (2.0, 1.0, True),
        (1.99, 1.0, False),
        (2.0, 0.99, False),
        (None, 1.0, True),
        (None, 0.5, False),
        (2.0, None, True),
    ],
)
def test_objectives_are_met_up_to_the_limit(ttft, tpot, kept):
    one = Served("a", 0.0, [2.0, 3.0, 4.0], 4.0, 1, ttft_slo_s=ttft, tpot_slo_s=tpot)
    assert request_metrics(one).in_time is kept


def test_a_run():
    served = [
        Served("a", 1.0, np.array([2.0, 3.0, 4.0]), 4.0, 10, ttft_slo_s=1.0),
        Served("b", 2.0, [5.0, 5.5], 5.5, 20, ttft_slo_s=2.0),  # late
        Served("c", 2.0, [3.0, 9.0], 9.0, 30, "cancelled"),
        Served("d", 3.0, [4.0], 11.0, 40, "failed"),
    ]
    found = summary(served)
    assert (found["requests"], found["completed"], found["failed"], found["cancelled"]) == (4, 2, 1, 1)
    assert found["duration_s"] == 10.0  # from 1 to 11
    assert (found["prompt_tokens"], found["generated_tokens"]) == (60, 7)  # not those of d
    assert found["requests_per_s"] == 0.2
    assert found["generated_tokens_per_s"] == 0.7
    assert found["total_tokens_per_s"] == 6.7
    assert found["goodput_per_s"] == 0.1  # a alone
    assert found["ttft_s"] == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}
    assert found["tpot_s"]["mean"] == 0.75
    assert found["itl_s"]["p50"] == 1.0  # of 1, 1 and 0.5
    assert found["latency_s"]["mean"] == 3.25


def test_without_objectives_there_is_no_goodput():
    assert summary([Served("a", 0.0, [1.0], 1.0, 1)])["goodput_per_s"] is None


def test_nothing_was_served():
    found = summary([])
    assert found["requests_per_s"] is None
    assert found["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    failed = summary([Served("a", 1.0, [], 1.0, 5, "failed")])
    assert (failed["failed"], failed["generated_tokens_per_s"]) == (1, None)
