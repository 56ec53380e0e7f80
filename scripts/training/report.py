"""What a run came to, as numbers for JSON and as a table for a person."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table


def figures_of(lines: Sequence[Mapping[str, Any]], baselines: Mapping[str, float] | None) -> dict[str, Any]:
    """From the log of all processes that worked on the run. Speeds are medians over steps.

    `tokens` are those that counted, `computed_tokens` prompts too, and neither has padding.
    """
    steps = [line for line in lines if "tokens_per_s" in line]
    evaluations = [line for line in lines if "evaluation_loss" in line]
    best = min(evaluations, key=lambda line: line["evaluation_loss"], default=None)
    shares = [line["mfu"] for line in steps if line["mfu"] is not None]
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "epochs": steps[-1]["epoch"] if steps else 0.0,
        "tokens": sum(line["tokens"] for line in steps),
        "computed_tokens": sum(line["computed_tokens"] for line in steps),
        "loss": float(np.mean([line["loss"] for line in steps[-20:]])) if steps else None,
        "best_step": best and best["step"],
        "evaluation_loss": best and best["evaluation_loss"],
        "bits_per_byte": best and best["bits_per_byte"],
        "last_evaluation_loss": evaluations[-1]["evaluation_loss"] if evaluations else None,
        "baselines": dict(baselines) if baselines else None,
        "tokens_per_s": float(np.median([line["tokens_per_s"] for line in steps])) if steps else None,
        "mfu": float(np.median(shares)) if shares else None,
    }


def figures_table(figures: Mapping[str, Any]) -> Table:
    """A line per figure."""
    table = Table("", "", show_header=False)
    table.add_row("steps, epochs, tokens", f"{figures['steps']}, {figures['epochs']:.2f}, {figures['tokens']}")
    if figures["loss"] is not None:
        table.add_row("training loss, mean of the last 20 steps", f"{figures['loss']:.4f} nats a token")
    if figures["evaluation_loss"] is not None:
        best = f"{figures['evaluation_loss']:.4f} (step {figures['best_step']})"
        table.add_row("evaluation loss, the best", f"{best}, {figures['bits_per_byte']:.3f} bits per byte")
        for name, loss in (figures["baselines"] or {}).items():
            below = f"{loss:.4f}, {loss - figures['evaluation_loss']:.4f} above the model's"
            table.add_row(f"the same by {name} counts", below)
    if figures["tokens_per_s"] is not None:
        share = "" if figures["mfu"] is None else f", {figures['mfu']:.0%} of the rate of a matrix product (MFU)"
        table.add_row("tokens per second, median", f"{figures['tokens_per_s']:.0f}{share}")
    table.add_row("seconds of this process", f"{figures['seconds']:.1f}")
    return table
