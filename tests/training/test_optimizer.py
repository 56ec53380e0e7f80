"""AdamW, schedule and clipping against float64 NumPy written from the papers' equations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.training.optimizer import Recipe, matrices, optimizer, schedule

RECIPE = Recipe(
    steps=12, learning_rate=3e-2, final_share=0.2, warmup_steps=4, weight_decay=0.3, clip=1.5, beta1=0.8, beta2=0.9
)
SHAPES = {"embedding": (5, 3), "norm": (3,), "bias": (4,), "experts": (2, 3, 4)}


def rate(recipe, number):
    if number < recipe.warmup_steps:
        return recipe.learning_rate * (number + 1) / (recipe.warmup_steps + 1)
    way = min((number - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps), 1.0)
    share = recipe.final_share + (1 - recipe.final_share) * (1 + math.cos(math.pi * way)) / 2
    return recipe.learning_rate * share


@pytest.mark.parametrize("warmup", [0, 1, 4, 11])
def test_schedule(warmup):
    recipe = Recipe(steps=12, learning_rate=3e-2, final_share=0.2, warmup_steps=warmup)
    found = [float(schedule(recipe)(jnp.int32(number))) for number in range(20)]
    # float32, a dozen roundings of 2**-24.
    np.testing.assert_allclose(found, [rate(recipe, number) for number in range(20)], rtol=1e-6)
    assert min(found) > 0
    assert max(found) == found[warmup] == pytest.approx(3e-2)
    assert found[12:] == pytest.approx([6e-3] * 8)


def test_matches_float64():
    """Twelve updates by gradients some of which are clipped; matrices alone decay."""
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    right, first, second = dict(start), {}, {}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in start.items()}
    transform = optimizer(RECIPE)
    state, update = transform.init(params), jax.jit(transform.update)
    clipped = 0
    for number in range(RECIPE.steps):
        size = 0.1 if number % 2 else 2.0
        gradients = {name: size * rng.normal(size=shape) for name, shape in SHAPES.items()}
        changes, state = update({n: jnp.asarray(g, jnp.float32) for n, g in gradients.items()}, state, params)
        params = {name: value + changes[name] for name, value in params.items()}
        norm = math.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
        clipped += norm > RECIPE.clip
        for name, gradient in gradients.items():
            gradient = gradient * min(1.0, RECIPE.clip / norm)
            first[name] = RECIPE.beta1 * first.get(name, 0) + (1 - RECIPE.beta1) * gradient
            second[name] = RECIPE.beta2 * second.get(name, 0) + (1 - RECIPE.beta2) * gradient**2
            mean = first[name] / (1 - RECIPE.beta1 ** (number + 1))
            spread = np.sqrt(second[name] / (1 - RECIPE.beta2 ** (number + 1)))
            decay = RECIPE.weight_decay if name in ("embedding", "experts") else 0.0
            right[name] = right[name] - rate(RECIPE, number) * (mean / (spread + 1e-8) + decay * right[name])
    assert 0 < clipped < RECIPE.steps
    for name in SHAPES:
        # Twelve updates of at most 0.03, each right to a few roundings of 2**-24.
        np.testing.assert_allclose(params[name], right[name], rtol=0, atol=2e-6)


def test_what_decays():
    parameters = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    assert matrices(parameters) == {"embedding": True, "norm": False, "bias": False, "experts": True}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("steps", 0, "steps must be at least 1, not 0"),
        ("steps", 2.5, "steps must be a whole number, not 2.5"),
        ("warmup_steps", 12, "warmup_steps must be from 0 to steps - 1, 11, not 12"),
        ("warmup_steps", -1, "warmup_steps must be from 0 .* not -1"),
        ("learning_rate", 0.0, "learning_rate must be positive and finite, not 0.0"),
        ("learning_rate", math.inf, "learning_rate must be positive and finite, not inf"),
        ("clip", 0.0, "clip must be positive and finite, not 0.0"),
        ("clip", math.nan, "clip must be positive and finite, not nan"),
        ("weight_decay", -0.1, "weight_decay must be at least 0 and finite, not -0.1"),
        ("final_share", 1.1, "final_share must be from 0 to 1, not 1.1"),
        ("beta1", 1.0, "beta1 must be at least 0 and below 1, not 1.0"),
        ("beta2", -0.5, "beta2 must be at least 0 and below 1, not -0.5"),
    ],
)
def test_refusals(field, value, words):
    with pytest.raises(ValueError, match=words):
        Recipe(**{"steps": 12} | {field: value})
