"""From options to what the loop works with: model, trainer, intervals, samples; and whether that can be run at all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from batching.config import DTYPES
from model.files import read_json
from model.tokenizer import Tokenizer
from scripts.command import Refused, Report
from scripts.limits import matrix_rate
from scripts.training.base import Base, check_honoured, loaded_base, named_tokenizer, new_base, own_tokenizer
from scripts.training.checkpoints import Checkpoints
from scripts.training.data import Packer, Position
from scripts.training.folder import RUN, TOKENIZER, read_run
from scripts.training.loop import Evaluation, Intervals
from scripts.training.options import Options
from scripts.training.samples import Sampler, prompts_of
from scripts.training.step import Trainer, TrainState
from scripts.training.tokens import Corpus, Document


def make_base(
    options: Options, documents: Sequence[Document], *, new: bool, hf_config: Mapping[str, Any] | None = None
) -> Base:
    """`documents`: to train a tokenizer on, for a `new` run whose options name none.

    `hf_config` is that of the run, in place of what the options name. Raises ValueError or FileNotFoundError.
    """
    if options.from_ is not None:
        return loaded_base(options.from_, options.tokenizer)
    config = dict(hf_config or options.start.hf_config or read_json(options.config or Path()))
    if new:
        check_honoured(config)
    if options.tokenizer is not None:
        path, tokenizer = named_tokenizer(options.tokenizer)
        if options.preset is not None:
            config["vocab_size"] = tokenizer.vocab_size
    else:
        path = options.out / TOKENIZER
        vocab_size = config.get("vocab_size")
        if type(vocab_size) is not int:
            raise ValueError(f"{options.config}: vocab_size must be a whole number, not {vocab_size!r}")
        tokenizer = own_tokenizer(path, documents, vocab_size, new)
    return new_base(config, tokenizer, path, options.seed)


def check_shape(options: Options, base: Base) -> None:
    """Raises Refused for batches that the model or the devices do not take."""
    rows, length, devices = options.start.rows, options.start.length, len(jax.local_devices())
    if length > base.config.max_positions:
        raise Refused(f"length {length} exceeds the model's {base.config.max_positions} positions")
    if rows % devices:
        raise Refused(f"rows {rows} must be a multiple of the {devices} devices that share them")


def make_trainer(options: Options, base: Base) -> Trainer:
    dtype = DTYPES[options.compute_dtype]
    return Trainer(base.model, options.recipe(), compute_dtype=dtype, remat=options.remat, lora=options.lora())


def run_description(options: Options, base: Base, trained: Corpus, evaluated: Corpus) -> dict[str, Any]:
    """What `run.json` holds: `arithmetic`, which a resumed run must agree with, and what it was asked for."""
    arithmetic = options.arithmetic() | {
        "model": base.hf_config,
        "weights": None if options.from_ is None else base.fingerprint(),
        "training_data": trained.fingerprint(),
        "held_out_data": evaluated.fingerprint(),
    }
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    for name in ("from_", "tokenizer", "data", "config"):  # paths that mean the same from any folder
        if asked[name] is not None and Path(asked[name]).exists():
            asked[name] = str(Path(asked[name]).resolve())
    about = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    return {"arithmetic": arithmetic, "options": asked, "about": about}


def stored_run(folder: Path) -> tuple[Options, dict[str, Any]]:
    """The options of the run in a folder, and its arithmetic. Raises ValueError or FileNotFoundError."""
    options, arithmetic = read_run(folder)
    try:
        asked: dict[str, Any] = {one.name: options[one.name] for one in fields(Options)}
        for name in ("data", "config"):
            asked[name] = None if asked[name] is None else Path(asked[name])
        asked["lora_targets"] = None if asked["lora_targets"] is None else tuple(asked["lora_targets"])
        # The latter two matter to training alone; older runs may have them where they do nothing.
        asked |= {"out": folder, "prompts": (), "evaluate_batches": None}
        return Options(**asked), arithmetic
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / RUN}: not as scripts.train writes it: {error!r}") from error


def beginning(trainer: Trainer, checkpoints: Checkpoints, report: Report) -> tuple[TrainState, Position]:
    """The newest complete step, or the very beginning."""
    state = trainer.init()
    if not checkpoints.steps:
        return state, Position()
    step = checkpoints.steps[-1]
    report(f"going on after step {step}")
    return checkpoints.restore(step, state)


def intervals_of(options: Options) -> Intervals:
    """Raises ValueError."""
    steps = options.recipe().steps
    return Intervals(steps, options.evaluate_every, options.save_every, options.sample_every)


def evaluation_of(options: Options, kept: Corpus, tokenizer: Tokenizer) -> tuple[Evaluation | None, Corpus]:
    """Of what is held out; and that as a corpus in which what is evaluated counts, and nothing else.

    None where no evaluation is asked for, or nothing of it counts.
    """
    if not options.evaluate_every:
        return None, kept
    try:
        packer = Packer(kept, options.start.rows, options.start.length)
    except ValueError:
        return None, replace(kept, counts=np.zeros_like(kept.counts), text_bytes=0)
    batches = list(packer.once(options.evaluate_batches))
    counts, left = np.zeros_like(kept.counts), sum(int(batch.weights.sum()) for batch in batches)
    for start, size in zip(packer.starts.tolist(), packer.sizes.tolist(), strict=True):  # in the order of the batches
        if left:
            piece = slice(start + 1, start + 1 + size)
            counts[piece] = kept.counts[piece]
            left -= int(counts[piece].sum())
    of_all, of_these = (len(tokenizer.decode(kept.ids[one].tolist()).encode()) for one in (kept.counts, counts))
    part = replace(kept, counts=counts, text_bytes=max(1, round(kept.text_bytes * of_these / max(1, of_all))))
    return Evaluation(batches, part.text_bytes / part.targets), part


def sampling(
    options: Options, trainer: Trainer, base: Base, evaluated: Corpus
) -> Callable[[TrainState], list[dict[str, Any]]] | None:
    """Raises ValueError for a prompt that is too long or has no tokens."""
    if not options.sample_every:
        return None
    room = options.start.length
    own = [base.tokenizer.encode(prompt) for prompt in options.prompts]
    sampler = Sampler(own or prompts_of(evaluated, room), base.tokenizer, base.eos_ids, room)
    return lambda state: sampler.sample(trainer.model(state))


def matrix_rate_of_all(dtype: str) -> float:
    """Operations a second of a large matrix product in this dtype, on all devices together. CPU devices share it."""
    return matrix_rate(DTYPES[dtype]) * (1 if jax.default_backend() == "cpu" else len(jax.local_devices()))
