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
from scripts.training.tokens import Corpus, tokenise

SMALLER = "fewer --rows, a smaller --length or --remat"
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
        return exit_status(lambda report: _refusing(lambda: export_step(asked, report)), console, smaller=SMALLER)
    options = tyro.cli(Options, prog="python -m scripts.train", description=__doc__, args=argv)
    return exit_status(lambda report: _refusing(lambda: train(options, console, report)), console, smaller=SMALLER)


def _refusing(run: Callable[[], int]) -> int:
    try:
        return run()
    except ValueError as error:
        raise Refused(str(error)) from error


def read(options: Options, console: Console, *, new: bool) -> tuple[Base, Corpus, Corpus]:
    """What is started from, what is learnt, and what is held out. Raises Refused, ValueError or OSError."""
    documents, kept = held_out(read_documents(options.data), options.held_out)
    base = make_base(options, documents, new=new)
    check_shape(options, base)
    about = (base.tokenizer, base.eos_ids, base.config.vocab_size, console)
    return base, tokenise(documents, *about), tokenise(kept, *about)


def train(options: Options, console: Console, report: Report) -> int:
    """The exit status. Raises Refused, ValueError or OSError for what cannot be run or written."""
    check_targets({}, {"--json": options.json})
    if options.data.is_dir() and options.out.resolve().is_relative_to(options.data.resolve()):
        raise Refused(f"--out {options.out} lies in --data {options.data}: the run's files would be data for --resume")
    use_persistent_cache()
    start, out = time.monotonic(), options.out
    with ExitStack() as stack:
        stack.enter_context(claimed(out, options.resume))
        new = not (out / RUN).exists()
        base, trained, evaluated = read(options, console, new=new)
        packer = Packer(trained, options.start.rows, options.start.length, options.seed)
        trainer, intervals = make_trainer(options, base), intervals_of(options)
        sample = sampling(options, trainer, base, evaluated)
        description = run_description(options, base, trained, evaluated)
        check_same(out, description["arithmetic"])
        if new:
            write_atomically(out / RUN, json.dumps(description, indent=2))
        evaluation, scored = evaluation_of(options, evaluated, base.tokenizer)
        if options.evaluate_every and evaluation is None:
            report("nothing that counts is held out: there is nothing to evaluate")
        counted = None
        if scored.targets and not options.no_baselines:
            counted = baselines(trained, scored, base.config.vocab_size)._asdict()
        checkpoints = stack.enter_context(Checkpoints(out / CHECKPOINTS, options.keep))
        state, position = beginning(trainer, checkpoints, report)
        log = stack.enter_context(Log(out / LOG, int(state.step)))
        texts = [f"{len(one.ids)} tokens in {len(one.where)} parts" for one in (trained, evaluated)]
        report(f"{_count(state.params):.2f} M parameters to train; {texts[0]}, held out: {texts[1]}")
        if packer.shortened:
            cut = f"{packer.shortened} prompts or chats are longer than --length {packer.length}"
            report(f"{cut}: what is past it is left out")
        loop = Loop(
            trainer,
            packer,
            evaluation,
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
    trainer = make_trainer(asked, base)
    like = trainer.init()
    with Checkpoints(options.run / CHECKPOINTS, read_only=True) as checkpoints:
        step = checkpoints.best if options.step is None else options.step
        if step is None or not checkpoints.steps:
            raise Refused(f"{options.run} has no checkpoint yet")
        if step not in checkpoints.steps:
            raise Refused(f"{options.run} has no checkpoint of step {step}; it has {checkpoints.steps}")
        state, _ = checkpoints.restore(step, like)
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
