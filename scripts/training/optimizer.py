"""AdamW as it is usual for language models: warm-up and cosine, decay on matrices alone, gradients clipped by norm."""

import math
from dataclasses import dataclass

import jax
import optax


@dataclass(frozen=True)
class Recipe:
    """How parameters change with their gradients (AdamW: arXiv 1711.05101, equation and names as in optax).

    `learning_rate` is the highest: it is reached by a straight line over the first `warmup_steps` updates, the first of
    which is not zero, and falls from there by half a cosine to `final_share` of itself at update `steps`. `clip` bounds
    the norm of all gradients together. `weight_decay` a step is in units of the learning rate.

    Raises ValueError naming the field, its value and the limit.
    """

    steps: int
    learning_rate: float = 1e-3
    final_share: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        for name in ("steps", "warmup_steps"):
            if type(value := getattr(self, name)) is not int:
                raise ValueError(f"{name} must be a whole number, not {value!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(f"warmup_steps must be from 0 to steps - 1, {self.steps - 1}, not {self.warmup_steps}")
        for name in ("learning_rate", "clip"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {value}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, not {self.weight_decay}")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"final_share must be from 0 to 1, not {self.final_share}")
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value}")


def schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate of an update by its number, from 0. After the last one it stays where it is."""
    return optax.warmup_cosine_decay_schedule(
        init_value=recipe.learning_rate / (recipe.warmup_steps + 1),
        peak_value=recipe.learning_rate,
        warmup_steps=recipe.warmup_steps,
        decay_steps=recipe.steps,
        end_value=recipe.learning_rate * recipe.final_share,
    )


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """For a tree of parameters of any shapes."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.adamw(
            schedule(recipe),
            b1=recipe.beta1,
            b2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            mask=matrices,
        ),
    )


def matrices(params):
    """Which parameters decay: the embedding and all other matrices, stacked ones too; neither norms nor biases."""
    return jax.tree.map(lambda parameter: parameter.ndim >= 2, params)
