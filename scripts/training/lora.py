"""LoRA (arXiv 2106.09685): a frozen matrix W is used as `W + alpha / rank * B @ A`, and only A and B are trained.

The sum is formed before the forward pass, not `x A B` beside `x W` in each layer: what is trained is then the very
model that is exported and served, roundings included, whatever a layer does with its weight. The price is the gradient
of the whole matrix, which is there for a moment; optimiser and checkpoints hold A and B alone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

TARGETS = ("qkv", "o", "gate_up", "down")
_Path = tuple[Any, ...]


@dataclass(frozen=True)
class Lora:
    """`targets`: the matrices of a layer that get adapters. Queries, keys and values, which lie in one matrix, share
    one A, as gate and up do; each expert of a mixture has its own. `seed` is that of A, normal with deviation
    `inputs ** -0.5`; B is zero. Raises ValueError naming the field, its value and the limit.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, not {self.rank!r}")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha must be positive and finite, not {self.alpha}")
        if not self.targets or not set(self.targets) <= set(TARGETS) or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets must be some of {TARGETS}, each once, not {self.targets}")


def init_adapters(lora: Lora, params: nnx.State) -> nnx.State:
    """A and B for the targets among `params`, float32: paths as theirs, with `a` and `b` in place of `weight`.

    Raises ValueError for a rank above the smaller side of a matrix.
    """
    found = []
    for number, (path, parameter) in enumerate(_targets(lora, params)):
        *stack, outputs, inputs = parameter.shape
        if lora.rank > min(outputs, inputs):
            where = ".".join(map(str, path))
            raise ValueError(f"rank must be at most {min(outputs, inputs)} for {where} {parameter.shape}: {lora.rank}")
        key = jax.random.fold_in(jax.random.key(lora.seed), number)
        a = jax.random.normal(key, (*stack, lora.rank, inputs), jnp.float32) * inputs**-0.5
        found.append(((*path[:-1], "a"), nnx.Param(a)))
        found.append(((*path[:-1], "b"), nnx.Param(jnp.zeros((*stack, outputs, lora.rank), jnp.float32))))
    return nnx.from_flat_state(found)


def merged(lora: Lora, params: nnx.State, adapters: nnx.State) -> nnx.State:
    """`params` with the adapters added to their matrices, in float32."""
    flat, adapted = dict(nnx.to_flat_state(params)), dict(nnx.to_flat_state(adapters))
    for path, parameter in _targets(lora, params):
        a, b = (adapted[*path[:-1], name].get_value() for name in ("a", "b"))
        delta = jnp.matmul(b, a, precision="highest")
        flat[path] = parameter.replace(parameter.get_value() + lora.alpha / lora.rank * delta)
    return nnx.from_flat_state(flat)


def _targets(lora: Lora, params: nnx.State) -> list[tuple[_Path, Any]]:
    """The matrices that get adapters, in the order of the parameters."""
    flat = nnx.to_flat_state(params)
    return [(path, one) for path, one in flat if path[-1] == "weight" and path[-2] in lora.targets]
