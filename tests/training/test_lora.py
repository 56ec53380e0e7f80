"""Adapters: nothing at first, alone in what is trained, and part of the model that is exported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.checkpoint import load, save_safetensors
from scripts.training.lora import TARGETS, Lora, init_adapters, merged
from scripts.training.step import Trainer, summed_loss
from tests.training.packs import DATA, RECIPE, assert_same_bits, leaves, model_of, pack, sequences

LORA = Lora(rank=4, alpha=8.0, targets=("qkv", "down"))
BATCH = pack([sequences(320, [9, 8, 7]), sequences(320, [20], seed=1)], 24)


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def trained(model):
    """The trainer, its first state's parts, and the state after eight steps."""
    trainer = Trainer(model, RECIPE, lora=LORA)
    state = trainer.init()
    first = leaves(state.params), trainer.model(state), trainer.evaluate(state, BATCH)[0]
    losses = []
    for _ in range(8):
        state, figures = trainer.step(state, [BATCH])
        losses.append(figures.loss)
    assert losses[-1] < 0.9 * losses[0]
    return trainer, first, state


def test_at_first_it_is_the_model(model, trained):
    _, (adapters, start, loss), _ = trained
    assert_same_bits(start, model)
    plain = Trainer(model, RECIPE)
    assert loss == plain.evaluate(plain.init(), BATCH)[0]
    a = [leaf for path, leaf in adapters.items() if "'a'" in path]
    assert len(a) == 2 * len(model.layers)
    # Deviation `inputs ** -0.5`, of 4 x 64 and 4 x 160 values: right to some 1 / sqrt(2 * 256) of it, three times that.
    assert all(abs(one.std() * one.shape[1] ** 0.5 - 1) < 0.14 for one in a)
    assert len({one.tobytes() for one in a}) == len(a)
    assert not any(leaf.any() for path, leaf in adapters.items() if "'b'" in path)


def test_adapters_alone_are_trained(model, trained):
    trainer, (before, *_), state = trained
    assert all("'a'" in path or "'b'" in path for path in leaves(state.params))
    sizes = {leaf.size for leaf in leaves(state.opt_state).values()}
    assert max(sizes) == max(leaf.size for leaf in before.values())
    for path, leaf in leaves(state.params).items():
        assert (leaf != before[path]).any(), path
    start, now = leaves(model), leaves(trainer.model(state))
    for path, leaf in now.items():
        target = "'qkv'" in path or "'down'" in path
        assert (leaf != start[path]).any() == target, path
        assert leaf.shape == start[path].shape


def test_what_is_merged_is_what_was_trained(trained):
    trainer, _, state = trained
    found = trainer.evaluate(state, BATCH)[0]
    graph, params = nnx.split(trainer.model(state))
    right = jax.jit(lambda params, batch: summed_loss(nnx.merge(graph, params), batch))(params, BATCH)
    # The same products, in another program.
    np.testing.assert_allclose(found, right, rtol=1e-6)


def test_merged_is_the_formula(model, trained):
    """Alpha over rank is 2. Of float32, values of up to 3 or so."""
    trainer, _, state = trained
    start, adapters, checked = leaves(model), leaves(state.params), 0
    for path, leaf in leaves(trainer.model(state)).items():
        a, b = (adapters.get(path.replace("weight", name)) for name in "ab")
        if a is not None and b is not None:
            right = start[path] + 2.0 * b.astype(np.float64) @ a.astype(np.float64)
            np.testing.assert_allclose(leaf, right, rtol=0, atol=1e-6)
            checked += 1
    assert checked == len(adapters) / 2 == 2 * len(model.layers)


def test_export(tmp_path, trained):
    """What is loaded again has the same bits, under HF's names, and so gives the same logits."""
    trainer, _, state = trained
    source = load(DATA / "llama_tied_gqa4")
    tuned = trainer.model(state)
    save_safetensors(tmp_path / "tuned", source.hf_config, tuned, eos_ids=source.eos_ids)
    assert_same_bits(load(tmp_path / "tuned").model, tuned)


def test_experts_have_adapters_of_their_own():
    model = model_of("mixtral_moe")
    lora = Lora(rank=2, targets=("gate_up", "down"))
    _, params = nnx.split(model)
    adapters = init_adapters(lora, params)
    layer = adapters["layers"][0]["mlp"]
    E, D = model.config.num_experts, model.config.width
    assert layer["down"]["b"].shape == (E, D, 2)
    layer["down"]["b"].set_value(jnp.ones((E, D, 2)))
    whole = merged(lora, params, adapters)
    delta = np.asarray(whole["layers"][0]["mlp"]["down"]["weight"] - params["layers"][0]["mlp"]["down"]["weight"])
    a = np.asarray(layer["down"]["a"], np.float64)
    for expert in range(E):
        np.testing.assert_allclose(delta[expert], 8.0 * np.ones((D, 2)) @ a[expert], rtol=0, atol=5e-6)
    assert_same_bits(whole["layers"][0]["attention"], params["layers"][0]["attention"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, not 0"),
        ({"rank": 2.0}, "rank must be a whole number of at least 1, not 2.0"),
        ({"alpha": 0.0}, "alpha must be positive and finite, not 0.0"),
        ({"alpha": float("nan")}, "alpha must be positive and finite, not nan"),
        ({"targets": ()}, r"targets must be some of .*, each once, not \(\)"),
        ({"targets": ("qkv", "router")}, r"targets must be some of .*, not \('qkv', 'router'\)"),
        ({"targets": ("qkv", "qkv")}, "targets must be some of .*, each once"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(ValueError, match=words):
        Lora(**fields)


def test_a_rank_above_a_matrix(model):
    with pytest.raises(ValueError, match=r"rank must be at most 64 for layers.0.attention.o.weight \(64, 64\): 65"):
        Trainer(model, RECIPE, lora=Lora(rank=65, targets=("o",)))
    assert set(TARGETS) == {"qkv", "o", "gate_up", "down"}
