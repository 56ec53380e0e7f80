"""What a run of scripts.train is asked to do, checked, with the preset's values where nothing was said."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from scripts.training.lora import TARGETS, Lora
from scripts.training.optimizer import Recipe
from scripts.training.presets import FINE_TUNING, LORA_LEARNING_RATE, PRESETS, SCRATCH, Preset, PresetName


@dataclass(frozen=True)
class Options:
    data: Path
    """A file or a folder: .txt, .md, .rst and .py are texts; a line of .jsonl has a text, a prompt and its completion,
    or messages. Of the latter two only completions and answers are learnt."""
    out: Path
    """The run's folder. scripts.generate --model takes it afterwards."""
    preset: PresetName | None = None
    """A model from nothing, with settings that suit it."""
    config: Path | None = None
    """A model from nothing, by a config.json as Hugging Face has it."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """A model to go on with: a known name, a folder, a .gguf file, or one of the Hugging Face hub."""
    tokenizer: str | None = None
    """That of a folder or a model; else one is trained on the data, or it is the model's own."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on, to the bit, with the run in the folder, given the same options."""

    steps: int | None = None
    """Updates in all. This and what follows: if not given, as the preset has it."""
    learning_rate: float | None = None
    warmup_steps: int | None = None
    final_share: float | None = None
    """Of the learning rate, at the end of its cosine."""
    weight_decay: float | None = None
    clip: float | None = None
    """The largest norm of the gradients."""
    beta1: float | None = None
    beta2: float | None = None
    rows: int | None = None
    """Rows of a batch."""
    length: int | None = None
    """Tokens of a row. Longer texts are cut into pieces; of longer prompts and chats what is past it is left out."""

    accumulate: int = 1
    """Batches of one update."""
    seed: int = 0
    """Of new weights, of adapters, and of the order of the data: from 0 to 2**32 - 1."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """In which the model computes; weights and sums stay in float32. If not given: bfloat16, on CPUs float32."""
    remat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Less memory for more time: compute layers again for their gradients."""
    lora_rank: int | None = None
    """Train adapters of this rank in place of the weights."""
    lora_alpha: float | None = None
    """Adapters count alpha / rank times; twice the rank if not given."""
    lora_targets: tuple[str, ...] | None = None
    """The matrices that get adapters: all of a layer if not given."""

    held_out: float = 0.05
    """Share of the documents that is kept for evaluation."""
    evaluate_every: int = 100
    """Steps; each evaluation is followed by a checkpoint, which is there too if nothing is held out. 0: never."""
    evaluate_batches: int | None = None
    """Batches of an evaluation; all of what is held out if not given."""
    save_every: int = 0
    """Steps between further checkpoints."""
    keep: int = 2
    """Checkpoints that are kept: the last ones, and the best besides."""
    sample_every: int = 500
    """Steps between samples of what the model says. 0: never."""
    prompts: tuple[str, ...] = ()
    """For samples; if not given, the beginnings of documents that are held out."""
    no_baselines: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not compare with unigrams and trigrams."""
    json: str | None = None
    """Where the figures go, as one JSON object; - is stdout."""

    def __post_init__(self) -> None:
        given = [name for name, value in self._starts().items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(self._starts())} is needed, not {', '.join(given) or 'none'}")
        if self.lora_rank is None and (self.lora_alpha is not None or self.lora_targets is not None):
            raise ValueError("--lora-alpha and --lora-targets need --lora-rank")
        if self.lora_rank is not None and self.from_ is None:
            raise ValueError("--lora-rank is for a model that is there already: --from")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out must be at least 0 and below 1, not {self.held_out}")
        for name in ("accumulate", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("rows", "length", "evaluate_batches"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, not {self.seed}")
        if self.prompts and not self.sample_every:
            raise ValueError("--prompts are for samples, which --sample-every 0 leaves out")
        if self.evaluate_batches is not None and not (self.held_out and self.evaluate_every):
            raise ValueError("--evaluate-batches needs evaluations: --held-out and --evaluate-every above 0")
        self.recipe()
        self.lora()

    def _starts(self) -> dict[str, Any]:
        return {"--preset": self.preset, "--config": self.config, "--from": self.from_}

    @property
    def start(self) -> Preset:
        """With values of the options where they are given."""
        start = SCRATCH if self.preset is None else PRESETS[self.preset]
        start = FINE_TUNING if self.from_ is not None else start
        return replace(start, rows=self.rows or start.rows, length=self.length or start.length)

    def recipe(self) -> Recipe:
        """Raises ValueError. A warm-up that was not asked for is shortened with the run."""
        usual = self.start.recipe
        if self.lora_rank is not None:
            usual = replace(usual, learning_rate=LORA_LEARNING_RATE)
        given = {one.name: value for one in fields(Recipe) if (value := getattr(self, one.name)) is not None}
        warmup = min(usual.warmup_steps, math.ceil(given.get("steps", usual.steps) / 10) - 1)
        return replace(usual, **({"warmup_steps": max(0, warmup)} | given))

    def lora(self) -> Lora | None:
        """Raises ValueError."""
        if self.lora_rank is None:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return Lora(self.lora_rank, alpha, TARGETS if self.lora_targets is None else self.lora_targets, self.seed)

    @property
    def compute_dtype(self) -> str:
        return self.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")

    def arithmetic(self) -> dict[str, Any]:
        """Of the options, those on which the results depend, besides model and data."""
        lora = self.lora()
        return {
            **asdict(self.recipe()),
            "rows": self.start.rows,
            "length": self.start.length,
            "accumulate": self.accumulate,
            "seed": self.seed,
            "dtype": self.compute_dtype,
            "remat": self.remat,
            "evaluate_batches": self.evaluate_batches,  # of which losses are compared for the best
            "lora": None if lora is None else asdict(lora),
            "devices": len(jax.local_devices()),
        }
