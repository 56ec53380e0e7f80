"""A run's log as a picture: loss on top, speed below."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.command import naming

# Colours that all eyes tell apart (Okabe and Ito, 2008).
TRAINED, HELD_OUT, SPEED = "#0072B2", "#D55E00", "#009E73"
COUNTED = {"unigram": "#999999", "trigram": "#555555"}


def draw(lines: Sequence[Mapping[str, Any]], baselines: Mapping[str, float] | None, path: Path) -> None:
    """`baselines`: losses of models that count, drawn as lines."""
    from matplotlib.figure import Figure

    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "evaluation_loss" in line]
    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    at = np.array([line["step"] for line in steps])
    losses = np.array([line["loss"] for line in steps])
    top.plot(at, losses, color=TRAINED, alpha=0.3, linewidth=0.8)
    top.plot(at, smoothed(losses), color=TRAINED, linewidth=1.8, label="training")
    if evaluations:
        last = evaluations[-1]["evaluation_loss"]
        ends = ([line["step"] for line in evaluations], [line["evaluation_loss"] for line in evaluations])
        top.plot(*ends, "o-", color=HELD_OUT, markersize=4, label=f"held out (last {last:.3f})")
    for name, loss in (baselines or {}).items():
        top.axhline(loss, color=COUNTED[name], linestyle="--", linewidth=1.2)
        top.text(at[-1], loss, f"{name} {loss:.3f}", color=COUNTED[name], ha="right", va="bottom", fontsize=10)
    # The first few steps fall from far above, and would press all others together.
    highest = max([*losses[min(len(losses) - 1, len(losses) // 30) :].tolist(), *(baselines or {}).values()])
    top.set(ylabel="loss, nats a token", ylim=(None, 1.1 * highest))
    top.legend(frameon=False, fontsize=10, loc="center right", bbox_to_anchor=(1, 0.62))
    bottom.plot(at, [line["tokens_per_s"] for line in steps], color=SPEED, linewidth=1)
    bottom.set(ylabel="tokens/s", xlabel="step", ylim=(0, None))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    with naming(str(path)):
        figure.savefig(path, dpi=150)


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of up to a fiftieth of them before each."""
    width = max(1, len(values) // 50)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    first = np.maximum(0, np.arange(1, len(values) + 1) - width)
    last = np.arange(1, len(values) + 1)
    return (sums[last] - sums[first]) / (last - first)
