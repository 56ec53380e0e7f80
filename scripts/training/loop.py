"""The loop: batches in order, updates, evaluations, checkpoints, and a clean end whatever ends it."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from model.config import ModelConfig
from scripts.limits import linear_work
from scripts.training.checkpoints import UNKNOWN, Checkpoints
from scripts.training.data import Packed, Packer, Position
from scripts.training.folder import Log
from scripts.training.lora import Lora
from scripts.training.progress import TrainDisplay
from scripts.training.step import Batch, StepFigures, Trainer, TrainState


@dataclass(frozen=True)
class Intervals:
    """In steps, 0 for never; what happens at an interval happens after the last step too."""

    steps: int  # in all
    evaluate: int
    save: int  # besides a save whenever an evaluation is due
    sample: int

    def __post_init__(self) -> None:
        for name in ("evaluate", "save", "sample"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}_every must be at least 0, not {getattr(self, name)}")

    def due(self, name: Literal["evaluate", "save", "sample"], step: int) -> bool:
        every = getattr(self, name)
        return every > 0 and (step % every == 0 or step == self.steps)


class Evaluation(NamedTuple):
    """`batches` are evaluated one after the other; `bytes_per_token`: of text, of the tokens that count in them."""

    batches: Sequence[Batch]
    bytes_per_token: float


class Ending(NamedTuple):
    reason: Literal["done", "stopped", "not finite"]
    step: int  # updates made


class Loop:
    """One run of training, from wherever its state is."""

    def __init__(
        self,
        trainer: Trainer,
        packer: Packer,
        evaluation: Evaluation | None,
        checkpoints: Checkpoints,
        log: Log,
        intervals: Intervals,
        *,
        accumulate: int = 1,
        flops_per_s: float | None = None,
        sample: Callable[[TrainState], list[dict[str, Any]]] | None = None,
        console: Console,
    ) -> None:
        """`flops_per_s`: of which MFU is a share. `sample`: texts of the model as it is."""
        self.trainer, self.packer, self.evaluation = trainer, packer, evaluation
        self.checkpoints, self.log, self.intervals = checkpoints, log, intervals
        self.accumulate, self.flops_per_s, self.sample, self.console = accumulate, flops_per_s, sample, console

    def run(self, state: TrainState, position: Position) -> Ending:
        """Until the last step, a signal, or a loss that is not finite: that state is not saved.

        Raises Refused where a checkpoint cannot be written.
        """
        step, saved = int(state.step), None
        with stop_asked() as asked, TrainDisplay(self.console, step, self.intervals.steps) as display:
            while step < self.intervals.steps and not asked():
                taken, after = self._take(position)
                start = time.perf_counter()
                state, figures = self.trainer.step(state, [one.batch for one in taken])
                if not figures.finite:
                    self._not_finite(step + 1, position, taken, figures)
                    self.checkpoints.wait()
                    return Ending("not finite", step)
                step, position = step + 1, after
                line = self._step_line(step, position, taken, figures, time.perf_counter() - start)
                self.log.write(line)
                display.update(line)
                loss = self._evaluate(step, state)
                # Before the save: what is killed in between is done again, samples too.
                if self.sample is not None and self.intervals.due("sample", step):
                    self._samples(step, state)
                if any(self.intervals.due(one, step) for one in ("save", "evaluate")) or step == self.intervals.steps:
                    self.checkpoints.save(state, position, UNKNOWN if loss is None else loss)
                    saved = step
            if step < self.intervals.steps and step not in (saved, *self.checkpoints.steps):
                self.checkpoints.save(state, position)
            self.checkpoints.wait()
        return Ending("done" if step == self.intervals.steps else "stopped", step)

    def _take(self, position: Position) -> tuple[list[Packed], Position]:
        """The batches of one step, and what they leave."""
        taken = []
        for _ in range(self.accumulate):
            taken.append(self.packer.batch(position))
            position = taken[-1].after
        return taken, position

    def _step_line(
        self, step: int, position: Position, taken: list[Packed], figures: StepFigures, seconds: float
    ) -> dict[str, Any]:
        flops = sum(training_flops(self.trainer.config, one.batch, self.trainer.lora) for one in taken)
        computed = sum(int((one.batch.segments < self.packer.length).sum()) for one in taken)
        return {
            "step": step,
            "loss": figures.loss,
            "tokens": figures.tokens,
            "computed_tokens": computed,
            "seconds": seconds,
            "tokens_per_s": computed / seconds,
            "mfu": None if self.flops_per_s is None else flops / seconds / self.flops_per_s,
            "grad_norm": figures.grad_norm,
            "learning_rate": figures.learning_rate,
            "epoch": position.epoch + position.index / len(self.packer.starts),
        }

    def _evaluate(self, step: int, state: TrainState) -> float | None:
        """The loss on what is held out, if it is time."""
        if self.evaluation is None or not self.intervals.due("evaluate", step):
            return None
        start = time.perf_counter()
        sums = np.sum([self.trainer.evaluate(state, batch) for batch in self.evaluation.batches], axis=0)
        loss = float(sums[0] / sums[1])
        per_byte = loss / math.log(2) / self.evaluation.bytes_per_token
        line = {"step": step, "evaluation_loss": loss, "bits_per_byte": per_byte, "tokens": int(sums[1])}
        self.log.write(line | {"seconds": time.perf_counter() - start})
        self.console.print(f"step {step}: evaluation loss {loss:.4f}, {per_byte:.3f} bits per byte")
        return loss if math.isfinite(loss) else None

    def _samples(self, step: int, state: TrainState) -> None:
        assert self.sample is not None
        samples = self.sample(state)
        self.log.write({"step": step, "samples": samples})
        for one in samples:
            self.console.print(f"  {one['prompt']!r} ... {one['text']!r}", markup=False)

    def _not_finite(self, step: int, position: Position, taken: list[Packed], figures: StepFigures) -> None:
        pieces = [piece for one in taken for piece in one.pieces]
        documents = self.packer.where(pieces)
        self.log.write(
            {
                "step": step,
                "not_finite": {"loss": str(figures.loss), "grad_norm": str(figures.grad_norm)},
                "position": position._asdict(),
                "documents": documents,
            }
        )
        shown = ", ".join(documents[:8]) + (f" and {len(documents) - 8} more" if len(documents) > 8 else "")
        self.console.print(
            f"step {step}: loss {figures.loss}, norm of the gradients {figures.grad_norm}: not finite, not applied. "
            f"The batch begins at piece {position.index} of epoch {position.epoch}, of {shown}",
            markup=False,
        )


def training_flops(config: ModelConfig, batch: Batch, lora: Lora | None = None) -> float:
    """Of a step on a batch without its padding: each product forward, and as much for the gradient of either factor.

    A matrix without an adapter is frozen and has no gradient; adapters themselves are small, and not counted.
    """
    real = batch.segments < batch.tokens.shape[1]
    rows = float(real.sum())
    work = {name: one.flops for name, one in linear_work(config, rows, 4).items()}
    products = {"qkv": work["QKV"], "o": work["output"], "gate_up": work["MLP"] * 2 / 3, "down": work["MLP"] / 3}
    products["head"] = 2.0 * rows * config.width * config.vocab_size
    flops = sum(one * (3 if lora is None or name in lora.targets else 2) for name, one in products.items())
    for layer in config.layers:
        keys = np.minimum(batch.positions[real] + 1, layer.window or batch.tokens.shape[1]).sum()
        flops += 3 * 4.0 * config.num_heads * config.head_dim * float(keys)
    return flops


@contextmanager
def stop_asked() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came, which end the run after a step; a second one ends the process at once."""
    asked: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_signal(number: int, _frame: Any) -> None:
        asked.append(number)
        signal.signal(number, before[number])  # type: ignore[arg-type]

    try:
        for number in before:
            signal.signal(number, on_signal)
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
