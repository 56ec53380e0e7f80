"""What a run cost, as numbers for JSON and as tables for a person."""

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from rich.table import Table

from batching import Engine, Output
from scripts.jobs import Run


def run_figures(run: Run, first: Run) -> dict[str, Any]:
    """Figures of a run; `different` lists the requests whose tokens are not those of the first run.

    Requests that failed are counted apart, and their tokens and times are in no figure but the turns they took.
    """
    good = [output for output in run.outputs if output.finish_reason != "error"]
    whole = [output for output in first.outputs if output.finish_reason != "error"]
    expected = {(output.id, output.index): output.token_ids for output in whole}
    metrics = [output.metrics for output in good if output.metrics is not None]
    generated = generated_tokens(run)
    return {
        "policy": run.policy,
        "requests": len(good),
        "failed_requests": len(failures(run)),
        "finish_reasons": dict(Counter(output.finish_reason for output in run.outputs)),
        "prompt_tokens": run.stats.prompt_tokens - sum(output.prompt_tokens for output in failures(run)),
        "cached_tokens": run.stats.cached_tokens - sum(output.cached_tokens for output in failures(run)),
        "generated_tokens": generated,
        "wall_s": run.wall_s,
        "generated_tokens_per_s": generated / run.wall_s,
        "ratio_to_first": generated / run.wall_s * first.wall_s / max(generated_tokens(first), 1),
        "turns": run.stats.turns,
        "busy_share": run.stats.busy_share,
        "padding_share": run.stats.padding_share,
        "wasted_rows": run.stats.wasted_rows,
        "preemptions": run.stats.preemptions,
        "host_s_per_turn": run.stats.host_s / max(run.stats.turns, 1),
        "gap_share": run.stats.gap_share,
        "ttft_s": percentiles(m.tokens[0] - m.arrival for m in metrics if m.tokens),
        "tpot_s": percentiles((m.tokens[-1] - m.tokens[0]) / (len(m.tokens) - 1) for m in metrics if len(m.tokens) > 1),
        "different": [one.id for one in good if one.token_ids != expected.get((one.id, one.index))],
    }


def failures(run: Run) -> list[Output]:
    """What the engine accepted and could not finish. Its prompt was computed: only then are there logits to fail on."""
    return [output for output in run.outputs if output.finish_reason == "error"]


def generated_tokens(run: Run) -> int:
    """Of the requests that did not fail."""
    return run.stats.generated_tokens - sum(output.completion_tokens for output in failures(run))


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    known = list(values)
    return {f"p{p}": float(np.percentile(known, p)) if known else None for p in (50, 90)}


def system_figures(model: str, engine: Engine) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "model": model,
        "engine": asdict(engine.config),
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def runs_table(runs: Sequence[dict[str, Any]]) -> Table:
    """One column per run, one line per figure."""
    rows = {
        "requests": lambda r: f"{r['requests']}",
        "prompt tokens": lambda r: f"{r['prompt_tokens']}",
        "generated tokens": lambda r: f"{r['generated_tokens']}",
        "wall time": lambda r: f"{r['wall_s']:.2f} s",
        "generated tokens per second": lambda r: f"{r['generated_tokens_per_s']:.1f}",
        "turns": lambda r: f"{r['turns']}",
        "busy slots, mean": lambda r: f"{r['busy_share']:.0%}",
        "rows that were padding": lambda r: f"{r['padding_share']:.0%}",
        "the host's work, a turn": lambda r: f"{r['host_s_per_turn'] * 1e3:.2f} ms",
        "of the time, the device waited for it": lambda r: f"{r['gap_share']:.1%}",
        "time to first token, p50 / p90": lambda r: _pair(r["ttft_s"]),
        "time per output token, p50 / p90": lambda r: _pair(r["tpot_s"]),
    }
    if len(runs) > 1:
        rows["speed against " + runs[0]["policy"]] = lambda r: f"{r['ratio_to_first']:.2f} x"
        rows["same tokens"] = lambda r: f"{r['requests'] - len(r['different'])} of {r['requests']}"
    if any(run["cached_tokens"] for run in runs):
        rows["prompt tokens found, not computed"] = lambda r: f"{r['cached_tokens']}"
    if any(run["failed_requests"] for run in runs):
        rows["failed requests"] = lambda r: f"{r['failed_requests']}"
    table = Table("")
    for run in runs:
        table.add_column(run["policy"], justify="right")
    for name, show in rows.items():
        table.add_row(name, *(show(run) for run in runs))
    return table


def _pair(values: dict[str, float | None]) -> str:
    scale, unit, digits = (1, "s", 2) if max(value or 0 for value in values.values()) >= 1 else (1000, "ms", 1)
    return " / ".join("-" if value is None else f"{value * scale:.{digits}f}" for value in values.values()) + f" {unit}"
