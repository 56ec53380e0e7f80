"""Train: a model from nothing on a text, or one that is there already on examples.

The folder --out holds everything: checkpoints from which --resume goes on to the bit, a log with a line a step, a
picture, and in the end the best model, which scripts.generate --model takes by the folder's name.
python -m scripts.train export --run FOLDER --out ANOTHER writes that of another step.

Exit status: 0; 1 if loss or gradients are not finite, which stops the run; 2 if something could not be run or written;
130 after Ctrl-C or SIGTERM, with a checkpoint saved.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from flax import nnx
from rich.console import Console

from batching.programs import use_persistent_cache
from scripts.command import Refused, Report, check_targets, exit_status, write_json
from scripts.training.base import Base
from scripts.training.baselines import baselines
from scripts.training.checkpoints import Checkpoints
from scripts.training.data import Packer, held_out, read_documents
from scripts.training.folder import (
    CHECKPOINTS,
    LOG,
    MODEL,
    PICTURE,
    RUN,
    Log,
    check_same,
    claimed,
    export,
    write_atomically,
)
from scripts.training.loop import Loop
from scripts.training.options import Options
from scripts.training.picture import draw
from scripts.training.report import figures_of, figures_table
from scripts.training.setup import (
    beginning,
    check_shape,
    evaluation_of,
    intervals_of,
    make_base,
    make_trainer,
    matrix_rate_of_all,
    run_description,
    sampling,
    stored_run,
)
from scripts.training.step import Trainer
from scripts.training.tokens import tokenise

STATUS = {"done": 0, "stopped": 130, "not finite": 1}


@dataclass(frozen=True)
class Export:
    """Write the model of a step of a run as a folder of its own, with safetensors as Hugging Face has them."""

    run: Path
    """The run's folder."""
    out: Path
    """The new folder."""
    step: int | None = None
    """One of those that have a checkpoint; the best if not given."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status. `argv`: the command line without the program's name."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if argv[:1] == ["export"]:
        asked = tyro.cli(Export, prog="python -m scripts.train export", args=argv[1:])
        return exit_status(lambda report: _refusing(lambda: export_step(asked, report)), console)
    options = tyro.cli(Options, prog="python -m scripts.train", description=__doc__, args=argv)
    return exit_status(lambda report: _refusing(lambda: train(options, console, report)), console)


def _refusing(run: Callable[[], int]) -> int:
    try:
        return run()
    except ValueError as error:
        raise Refused(str(error)) from error


def train(options: Options, console: Console, report: Report) -> int:
    """The exit status. Raises Refused, ValueError or OSError for what cannot be run or written."""
    check_targets({}, {"--json": options.json})
    use_persistent_cache()
    start, out = time.monotonic(), options.out
    with ExitStack() as stack:
        stack.enter_context(claimed(out, options.resume))
        documents, kept = held_out(read_documents(options.data), options.held_out)
        new = not (out / RUN).exists()
        base = make_base(options, documents, new=new)
        check_shape(options, base)
        corpora = [
            tokenise(those, base.tokenizer, base.eos_ids, base.config.vocab_size, console)
            for those in (documents, kept)
        ]
        trained, evaluated = corpora
        packer = Packer(trained, options.start.rows, options.start.length, options.seed)
        trainer, intervals = make_trainer(options, base), intervals_of(options)
        sample = sampling(options, trainer, base, evaluated)
        description = run_description(options, base, trained, evaluated)
        check_same(out, description["arithmetic"])
        if new:
            write_atomically(out / RUN, json.dumps(description, indent=2))
        counted = None
        if evaluated.targets and not options.no_baselines:
            counted = baselines(trained, evaluated, base.config.vocab_size)._asdict()
        checkpoints = stack.enter_context(Checkpoints(out / CHECKPOINTS, options.keep))
        state, position = beginning(trainer, checkpoints, report)
        log = stack.enter_context(Log(out / LOG, int(state.step)))
        report(
            f"{_count(state.params):.2f} M parameters to train; {len(trained.ids)} tokens in {len(documents)} parts, "
            f"held out: {len(evaluated.ids)} in {len(kept)}"
        )
        loop = Loop(
            trainer,
            packer,
            evaluation_of(options, evaluated),
            checkpoints,
            log,
            intervals,
            accumulate=options.accumulate,
            flops_per_s=matrix_rate_of_all(options.compute_dtype),
            sample=sample,
            console=console,
        )
        ending = loop.run(state, position)
        figures = figures_of(log.lines, counted) | {"ended": ending.reason, "seconds": time.monotonic() - start}
        if ending.reason != "not finite":
            figures["model_step"] = write_model(out, base, trainer, checkpoints)
        _draw(log.lines, counted, out / PICTURE, report)
        console.print(figures_table(figures))
        write_json(options.json, figures)
    return STATUS[ending.reason]


def write_model(folder: Path, base: Base, trainer: Trainer, checkpoints: Checkpoints) -> int:
    """The best step's, for serving; which that is."""
    step = checkpoints.best
    assert step is not None
    state, _ = checkpoints.restore(step, trainer.init())
    target, names = folder / MODEL, {"eos_ids": base.eos_ids, "tokenizer_from": base.tokenizer_from}
    export(target, base.hf_config, trainer.model(state), **names, replace=True)
    return step


def export_step(options: Export, report: Report) -> int:
    """Raises Refused, ValueError or OSError for what cannot be read or written."""
    if options.out.exists():
        raise Refused(f"{options.out} exists already")
    asked, arithmetic = stored_run(options.run)
    base = make_base(asked, [], new=False, hf_config=arithmetic["model"])
    if asked.from_ is not None and base.fingerprint() != arithmetic["weights"]:
        raise Refused(f"{asked.from_} has other weights now than those that the run began with")
    with Checkpoints(options.run / CHECKPOINTS, asked.keep) as checkpoints:
        step = checkpoints.best if options.step is None else options.step
        if step not in checkpoints.steps:
            raise Refused(f"{options.run} has no checkpoint of step {step}; it has {checkpoints.steps}")
        trainer = make_trainer(asked, base)
        state, _ = checkpoints.restore(step, trainer.init())
    model = trainer.model(state)
    export(options.out, base.hf_config, model, eos_ids=base.eos_ids, tokenizer_from=base.tokenizer_from)
    report(f"{options.out}: the model of step {step}")
    return 0


def _count(params: nnx.State) -> float:
    return sum(one.size for one in jax.tree.leaves(params)) / 1e6


def _draw(lines: Sequence[Mapping[str, Any]], counted: Mapping[str, float] | None, path: Path, report: Report) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        report(f"{path.name} needs matplotlib: not drawn")
    elif any("loss" in line for line in lines):
        draw(lines, counted, path)


if __name__ == "__main__":
    sys.exit(main())
