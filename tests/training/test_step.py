"""The training step: packs against sequences alone, micro-batches against one batch, bits against bits."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from model.layers import MixtureOfExperts
from pallas_kernels import cpu
from scripts.training import step
from scripts.training.step import Trainer, TrainState, summed_loss
from tests.training.packs import DATA, RECIPE, assert_close, assert_same_bits, leaves, model_of, pack, sequences

LENGTH = 24
TEXTS = sequences(320, [9, 7, 8, 5, 13, 2, 24, 1, 11])
ROWS = [TEXTS[:3], TEXTS[3:6], TEXTS[6:7], TEXTS[7:]]  # full; padding; one alone; one of a single token
SHORT = [[TEXTS[7]], [TEXTS[5], TEXTS[3]], [TEXTS[5]], [TEXTS[1]]]
# Sums of float32 in another order: at most 2.5e-7 was seen. Between programs whose products XLA takes in other ways, as
# for fewer than some 90 rows, it is 2e-6, which is within what either differs from float64 by (3e-6).
SAME = 1e-6


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def trainer(model):
    return Trainer(model, RECIPE)


def loss_and_gradients(model, batch, **how):
    """Of the summed loss, as the trainer has them, for a batch of any shape."""
    graph, params = nnx.split(model)
    value = jax.value_and_grad(lambda params, batch: summed_loss(nnx.merge(graph, params), batch, **how))
    return jax.jit(value)(params, batch)


@pytest.fixture(scope="module")
def packed(model):
    return loss_and_gradients(model, pack(ROWS, LENGTH))


def test_a_pack_is_its_sequences_alone(model, packed):
    alone = loss_and_gradients(model, pack([[one] for one in TEXTS], LENGTH))
    np.testing.assert_allclose(packed[0], alone[0], rtol=SAME)
    assert_close(packed[1], alone[1], SAME)
    assert all(np.abs(leaf).max() > 0 for leaf in leaves(packed[1]).values())


def test_a_mask_that_lets_neighbours_in_would_be_seen(model, packed):
    """Two sequences taken for one: what the test above would find."""
    batch = pack(ROWS, LENGTH)
    one = batch._replace(segments=np.where(batch.segments == 1, 0, batch.segments))
    assert abs(float(loss_and_gradients(model, one)[0] / packed[0]) - 1) > 1e-3


@pytest.mark.parametrize("name", ["gemma2", "mixtral_moe", "qwen3_qknorm", "smollm3_nope"])
def test_the_loss_is_that_of_hf(name):
    """Of the logits that HF transformers computed. Those agree to 5e-5 of their deviation (tests/model)."""
    expected = np.load(DATA / name / "expected.npz")
    batch = pack([[ids] for ids in expected["input_ids"].astype(np.int32)], expected["input_ids"].shape[1])
    logits = expected["logits"].astype(np.float64)
    top = logits.max(-1)
    every = np.log(np.exp(logits - top[..., None]).sum(-1)) + top
    chosen = np.take_along_axis(logits, np.maximum(batch.targets, 0)[..., None], -1)[..., 0]
    right = np.sum((every - chosen) * batch.weights)
    graph, params = nnx.split(model_of(name))
    found = jax.jit(lambda params, batch: summed_loss(nnx.merge(graph, params), batch))(params, batch)
    np.testing.assert_allclose(found, right, rtol=1e-5)


def test_experts_have_the_gradients_of_a_dense_mixture():
    """Every expert on every row, those that were not chosen times zero."""
    whole = model_of("mixtral_moe")
    layer = next(layer.mlp for layer in whole.layers if isinstance(layer.mlp, MixtureOfExperts))
    graph, params = nnx.split(layer)
    rng = np.random.default_rng(0)
    x, into = (rng.normal(size=(20, whole.config.width)).astype(np.float32) for _ in range(2))

    def sparse(params, x):
        with cpu.differentiable(True):
            return jnp.sum(nnx.merge(graph, params)(x) * into)

    def dense(params, x):
        one = nnx.merge(graph, params)
        probabilities = jax.nn.softmax(x @ one.router.weight[...].T)
        best, chosen = jax.lax.top_k(probabilities, whole.config.experts_per_token)
        shares = (jax.nn.one_hot(chosen, whole.config.num_experts) * best[..., None]).sum(1)
        gate, up = jnp.split(jnp.einsum("td,efd->tef", x, one.gate_up.weight[...]), 2, axis=-1)
        out = jnp.einsum("tef,edf->ted", jax.nn.silu(gate) * up, one.down.weight[...])
        return jnp.sum(jnp.einsum("te,ted->td", shares / shares.sum(1, keepdims=True), out) * into)

    found, right = (jax.jit(jax.grad(one, argnums=(0, 1)))(params, x) for one in (sparse, dense))
    assert_close(found, right, 5 * SAME)


def test_logits_a_part_at_a_time(model, packed, monkeypatch):
    """96 tokens in 14 parts of 7, the last of which is filled up."""
    monkeypatch.setattr(step, "LOGITS_BYTES", 7 * 320 * 4)
    parts = loss_and_gradients(model, pack(ROWS, LENGTH))
    np.testing.assert_allclose(parts[0], packed[0], rtol=SAME)
    assert_close(parts[1], packed[1], 2 * SAME)  # parts of 7 rows: see above


def test_remat_gives_the_same_for_less_memory(model):
    batch, (graph, params) = pack([sequences(320, [90, 38])] * 8, 128), nnx.split(model)

    def compiled(remat):
        value = jax.value_and_grad(lambda params: summed_loss(nnx.merge(graph, params), batch, remat=remat))
        return jax.jit(value).lower(params).compile()

    kept, again = compiled(False), compiled(True)
    assert_close(again(params), kept(params), SAME)
    sizes = [one.memory_analysis().temp_size_in_bytes for one in (again, kept)]
    assert sizes[0] < 0.75 * sizes[1]


def test_micro_batches_are_one_batch(trainer):
    """Of unequal lengths, and so of unequal numbers of tokens: 71 and 12, the mean of whose means is another."""
    parts, whole = [pack(ROWS, LENGTH), pack(SHORT, LENGTH)], pack([*ROWS, *SHORT], LENGTH)
    assert [part.weights.sum() for part in parts] == [71, 12]
    state, figures = trainer.step(trainer.init(), parts)
    at_once, right = trainer.step(trainer.init(), [whole])
    assert figures.tokens == right.tokens == 83
    np.testing.assert_allclose(figures[:4], right[:4], rtol=SAME)
    # What Adam has seen: a tenth of the gradients and a twentieth of their squares. What it makes of them in its first
    # step is their sign, also where they are mere rounding.
    assert_close(moments(state).mu, moments(at_once).mu, SAME)
    assert_close(moments(state).nu, moments(at_once).nu, 2 * SAME)
    means = [trainer.step(trainer.init(), [part])[1].loss for part in parts]
    assert abs(np.mean(means) / right.loss - 1) > 1e-3


def moments(state) -> optax.ScaleByAdamState:
    def right(node):
        return isinstance(node, optax.ScaleByAdamState)

    return next(filter(right, jax.tree.leaves(state.opt_state, is_leaf=right)))


def batches_of(number):
    lengths = np.random.default_rng(number).integers(1, 13, 8)
    texts = sequences(320, lengths, number)
    return [pack([texts[:2], texts[2:4]], LENGTH), pack([texts[4:6], texts[6:]], LENGTH)]


def test_twenty_steps_are_ten_and_ten_more(model, trainer):
    """To the bit, by way of host memory and a trainer of its own; and a second run has the same bits."""
    straight, half, losses = trainer.init(), None, []
    for number in range(20):
        if number == 10:
            half = jax.tree.map(np.array, straight)
        straight, figures = trainer.step(straight, batches_of(number))
        losses.append(figures.loss)
    assert int(straight.step) == 20
    other = Trainer(model, RECIPE)
    resumed, again = TrainState(*half), []
    for number in range(10, 20):
        resumed, figures = other.step(resumed, batches_of(number))
        again.append(figures.loss)
    assert again == losses[10:]
    assert_same_bits(resumed, straight)
    assert len(set(losses)) == 20


def test_it_learns(trainer):
    batch, state, losses = pack(ROWS, LENGTH), trainer.init(), []
    for _ in range(20):
        state, figures = trainer.step(state, [batch])
        losses.append(figures.loss)
        assert figures.finite
    # An untrained model of 320 tokens is at log 320 = 5.8 or above.
    assert losses[0] > 5.5
    assert losses[-1] < 0.5 * losses[0]
    assert figures.learning_rate == pytest.approx(float(trainer._schedule(19)))
    total, tokens = trainer.evaluate(state, batch)
    assert tokens == figures.tokens == batch.weights.sum()
    assert total / tokens < losses[-1]


def test_the_model_is_left_alone_and_given_as_a_copy(trainer, model):
    start = leaves(model)
    state = trainer.init()
    before = trainer.model(state)
    loss = trainer.evaluate(state, pack(ROWS, LENGTH))[0]
    for _ in range(2):
        state, _ = trainer.step(state, [pack(ROWS, LENGTH)])
    for one in (model, before):
        assert {path: leaf.tobytes() for path, leaf in leaves(one).items()} == {
            p: a.tobytes() for p, a in start.items()
        }
    assert_same_bits(trainer.model(state), state.params)
    assert trainer.evaluate(trainer.init(), pack(ROWS, LENGTH))[0] == loss


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_changes_nothing(trainer, value):
    state, _ = trainer.step(trainer.init(), [pack(ROWS, LENGTH)])
    state.params["final_norm"]["weight"].set_value(jnp.full((64,), value))
    before = jax.tree.map(np.array, state)
    state, figures = trainer.step(state, [pack(ROWS, LENGTH)])
    assert not figures.finite
    assert int(state.step) == 1
    assert_same_bits(state, before)


def test_bfloat16_has_float32_masters(model, packed):
    """Weights and activations are rounded to 2**-9, in three layers; parameters and gradients are float32."""
    half = Trainer(model, RECIPE, compute_dtype=jnp.bfloat16)
    batch = pack(ROWS, LENGTH)
    state, figures = half.step(half.init(), [batch])
    assert figures.loss == pytest.approx(float(packed[0]) / figures.tokens, rel=1e-2)
    assert {str(leaf.dtype) for leaf in leaves(state).values()} == {"float32", "int32"}
    # At most 0.087 of an array's norm was seen.
    assert_close(jax.tree.map(lambda one: one * 10 * figures.tokens, moments(state).mu), packed[1], 0.15)
    with pytest.raises(ValueError, match="compute_dtype must be float32 or bfloat16, not float16"):
        Trainer(model, RECIPE, compute_dtype=jnp.float16)


def test_serving_keeps_its_kernels(model):
    """Traced before, between or after: training has none of them, and a layer that serves has all."""
    if reason := cpu.unavailable():
        pytest.skip(reason)
    graph, params = nnx.split(model)
    batch = pack(ROWS[:1], LENGTH)
    flat = [field.reshape(-1) for field in batch[:3]]
    cache = tuple((jnp.zeros((1, 2, LENGTH, 8)),) * 2 for _ in model.layers)

    def serve(params):
        return nnx.merge(graph, params)(*flat, cache, num_decode=0, implementation="packed")[0]

    def calls(function, *arguments):
        return jax.jit(function).lower(*arguments).as_text().count("@carousel_")

    first = calls(serve, params)
    assert first >= 4
    assert calls(jax.grad(lambda params: summed_loss(nnx.merge(graph, params), batch)), params) == 0
    assert calls(lambda params: serve(params), params) == first


def test_two_devices_are_one():
    """To 1e-6: each sums its rows, and the sums of two are added; bits are the same for the same devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command, root = [sys.executable, "-m", "tests.training.two_devices"], Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def changed(**fields):
    batch = pack(ROWS, LENGTH)
    for name, (index, value) in fields.items():
        getattr(batch, name)[index] = value
    return batch


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (changed(tokens=((0, 3), 320)), "tokens must be from 0 to 319, not 0 to 320"),
        (changed(tokens=((0, 3), -1)), "tokens must be from 0 to 319, not -1 to"),
        (changed(targets=((0, 3), 320)), "targets must be from 0 to 319, not"),
        (changed(segments=((1, 23), 25)), "segments must be from 0 to 24, not 0 to 25"),
        (changed(positions=((0, 3), 24)), "positions must be from 0 to 23, not 0 to 24"),
        (changed(weights=((0, 3), 0.5)), "weights must be 0 or 1"),
        (changed(weights=((1, 23), 1.0)), "0 where the segment says padding"),
        (changed(positions=((0, 3), 4)), "row 0, token 3: segment 0, position 4: sequences must rise"),
        (changed(positions=((0, 9), 1)), "row 0, token 9: segment 1, position 1: sequences must rise"),
        (changed(segments=((0, 20), 0)), "row 0, token 20: segment 0, position 4"),
        (
            pack(ROWS, LENGTH)._replace(tokens=np.zeros((4, 23), np.int32)),
            r"one shape, rows by tokens, not .*\(4, 23\)",
        ),
        (pack(ROWS, LENGTH)._replace(tokens=np.zeros((4, 24))), "tokens must be int32, not float64"),
        (pack(ROWS, LENGTH)._replace(weights=np.zeros((4, 24), np.float32)), "no token of these 1 batches counts"),
    ],
)
def test_refusals(trainer, batch, words):
    with pytest.raises(ValueError, match=words):
        trainer.step(trainer.init(), [batch])
