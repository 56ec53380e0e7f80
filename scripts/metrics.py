"""What serving felt like, from when requests arrived and when their tokens came: one definition for all runs.

The definitions are those of vLLM's `bench serve`: time to first token (TTFT) from the arrival, time per output token
(TPOT) as the mean after the first, inter-token latency (ITL) of every consecutive pair, latency from arrival to end.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

PERCENTILES = (50, 90, 99)
Outcome = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that has ended. Times are seconds on one clock, wherever that starts."""

    id: str
    arrival: float
    tokens: Sequence[float] | np.ndarray  # when each came, rising
    end: float
    prompt_tokens: int
    outcome: Outcome = "completed"
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


class RequestMetrics(NamedTuple):
    """Seconds; None where the request has too few tokens for it to mean anything."""

    ttft_s: float | None
    tpot_s: float | None
    itl_s: np.ndarray  # of each token but the first
    latency_s: float
    in_time: bool  # it completed, and met the objectives it has


def request_metrics(served: Served) -> RequestMetrics:
    """A request of one token has no TPOT and meets any objective for it."""
    tokens = np.asarray(served.tokens, np.float64)
    count = len(tokens)
    ttft = float(tokens[0] - served.arrival) if count else None
    tpot = float(tokens[-1] - tokens[0]) / (count - 1) if count > 1 else None
    in_time = (
        served.outcome == "completed"
        and (served.ttft_slo_s is None or (ttft is not None and ttft <= served.ttft_slo_s))
        and (served.tpot_slo_s is None or tpot is None or tpot <= served.tpot_slo_s)
    )
    return RequestMetrics(ttft, tpot, np.diff(tokens), served.end - served.arrival, in_time)


def summary(requests: Iterable[Served]) -> dict[str, Any]:
    """Figures of a run, for JSON. Latencies are of requests that completed; others are counted apart.

    Rates are per second from the first arrival to the last end; tokens of requests that failed are in none of them.
    `goodput_per_s`: requests that met their objectives; None where no request has any.
    """
    served = list(requests)
    metrics = [request_metrics(one) for one in served]
    done = [one for one, its in zip(metrics, served, strict=True) if its.outcome == "completed"]
    outcomes = Counter(one.outcome for one in served)
    kept = [one for one in served if one.outcome != "failed"]
    duration = max(one.end for one in served) - min(one.arrival for one in served) if served else 0.0
    generated, prompts = sum(len(one.tokens) for one in kept), sum(one.prompt_tokens for one in kept)
    objectives = any(one.ttft_slo_s is not None or one.tpot_slo_s is not None for one in served)
    return {
        "requests": len(served),
        "completed": outcomes["completed"],
        "failed": outcomes["failed"],
        "cancelled": outcomes["cancelled"],
        "prompt_tokens": prompts,
        "generated_tokens": generated,
        "duration_s": duration,
        "requests_per_s": per_second(len(done), duration),
        "generated_tokens_per_s": per_second(generated, duration),
        "total_tokens_per_s": per_second(prompts + generated, duration),
        "goodput_per_s": per_second(sum(one.in_time for one in metrics), duration) if objectives else None,
        "ttft_s": spread([one.ttft_s for one in done if one.ttft_s is not None]),
        "tpot_s": spread([one.tpot_s for one in done if one.tpot_s is not None]),
        "itl_s": spread(np.concatenate([one.itl_s for one in done]) if done else ()),
        "latency_s": spread([one.latency_s for one in done]),
    }


def per_second(count: float, duration: float) -> float | None:
    return count / duration if duration > 0 else None


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Mean and percentiles, interpolated linearly; None of nothing."""
    names = ["mean", *(f"p{p}" for p in PERCENTILES)]
    if not len(values):
        return dict.fromkeys(names)
    return dict(zip(names, [float(np.mean(values)), *np.percentile(values, PERCENTILES).tolist()], strict=True))
