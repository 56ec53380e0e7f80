"""A token row has the same bits in every program, at every place in it and beside every neighbour."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.checkpoint import load
from model.kv_cache import init_cache
from model.layers import matmul
from model.logits import init_sampling
from model.logprobs import prompt_logprobs, sampled_logprobs
from model.sampling import categorical, sample
from pallas_kernels import cpu
from pallas_kernels.attention import choose_implementation
from tests.model.sampling_rows import settings_of
from tests.model.test_transformer import DATA, FAMILIES

SLOTS, LENGTH = 3, 24
# Whole vectors of 8 and 16 rows and not, and either side of 64 rows of width 64, where XLA begins to fuse sums with
# what stands around them. All are held against the largest.
SIZES = (1, 7, 80)
MORE_SIZES = (3, 4, 8, 16, 24, 33, 48, 64)
# Between them: every activation, biases, norms of heads, soft caps, and experts beside dense layers.
FAMILIES_IN_MORE = ("gemma2", "llama_mha_bias", "qwen3_moe_mixed", "qwen3_qknorm")

needs_kernels = pytest.mark.skipif(
    not cpu.rows_invariant(jnp.float32), reason="without the kernels XLA's sums depend on the number of rows"
)


@functools.partial(jax.jit, static_argnames=("graph", "implementation"))
def forward(params, cache, tokens, slots, positions, *, graph, implementation):
    model = nnx.merge(graph, params)
    hidden, cache = model(tokens, slots, positions, cache, num_decode=0, implementation=implementation)
    return (hidden, model.unembed(hidden)), cache


class Served:
    """Three sequences that a model computes in programs of any size."""

    def __init__(self, name, dtype):
        model = load(DATA / name, dtype=dtype).model
        config = model.config
        heads = {"head_dim": config.head_dim, "kv_heads": config.num_kv_heads}
        how = {"dtype": dtype, "cache_dtype": dtype, "heads": config.num_heads}
        implementation = choose_implementation(None, **how, **heads)
        size = {"layers": len(config.layers), "slots": SLOTS, "max_len": LENGTH, "dtype": dtype}
        cache = init_cache(implementation=implementation, **size, **heads)
        graph, params = nnx.split(model)
        self.forward = functools.partial(forward, params, graph=graph, implementation=implementation)
        self.cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache)
        self.sequences = np.random.default_rng(0).integers(0, config.vocab_size, (SLOTS, LENGTH)).astype(np.int32)

    def __call__(self, size, seed, *, length=LENGTH):
        """(sequence, position) -> that row's hidden state and logits, computed in chunks and an order that `seed`
        decides, with rows of padding before and between the chunks."""
        rng = np.random.default_rng(seed)
        cache, slot_of, done, outputs = self.cache, rng.permutation(SLOTS), [0] * SLOTS, {}
        while min(done) < length:
            who, at = np.full(size, SLOTS), np.zeros(size, int)  # the sequence of each row, and its position there
            row = rng.integers(0, size // 4 + 1)
            for sequence in rng.permutation(SLOTS):
                count = min(rng.integers(1, max(2, size // 2)), length - done[sequence], max(0, size - row))
                who[row : row + count] = sequence
                at[row : row + count] = np.arange(done[sequence], done[sequence] + count)
                done[sequence] += count
                row += count + rng.integers(0, 2)
            tokens = self.sequences[np.minimum(who, SLOTS - 1), at]
            slots = np.append(slot_of, SLOTS)[who].astype(np.int32)
            out, cache = self.forward(cache, tokens, slots, at.astype(np.int32))
            out = jax.tree.map(np.asarray, out)
            outputs |= {(who[row], at[row]): [part[row] for part in out] for row in np.flatnonzero(who < SLOTS)}
        return outputs


def check_same(outputs, expected, label):
    for row, out in outputs.items():
        for name, got, wanted in zip(("hidden", "logits"), out, expected[row], strict=True):
            assert np.isfinite(np.asarray(got, np.float32)).all()
            # By their bytes: the sign of a zero counts too.
            assert got.tobytes() == wanted.tobytes(), f"{label}: {name} of (sequence, position) {row}"


# One of each kind of layer; the others differ from these in their numbers.
QUICK = {
    "gemma2",
    "gemma3_text",
    "llama_tied_gqa4",
    "olmo2_postnorm",
    "llama_mha_bias",
    "qwen3_moe_mixed",
    "qwen3_qknorm",
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(set(FAMILIES) - QUICK)]


@needs_kernels
@pytest.mark.parametrize("name", [*sorted(QUICK), *SLOW])
def test_rows_have_the_same_bits_in_every_program(name):
    served, (*sizes, largest) = Served(name, jnp.float32), SIZES
    expected = served(largest, 0)
    assert len(expected) == SLOTS * LENGTH
    check_same(served(largest, 1), expected, "the same program")
    for size in (*sizes, *(MORE_SIZES if name in FAMILIES_IN_MORE else ())):
        check_same(served(size, size, length=5 if size < 4 else LENGTH), expected, f"{size} rows")


@needs_kernels
@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("name", ["gemma2", "llama_tied_gqa4", "qwen3_moe"])
def test_rows_have_the_same_bits_in_one_program_in_bfloat16(name, size):
    """Products are XLA's, so this says nothing of programs with other numbers of rows."""
    served = Served(name, jnp.bfloat16)
    expected = served(size, 0)
    for seed in (1, 2):
        check_same(served(size, seed), expected, f"order {seed}")


@needs_kernels
def test_one_row_in_bfloat16_is_multiplied_as_among_others():
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((4, 576), (3000, 576)))
    product = jax.jit(functools.partial(matmul, dtype=jnp.float32))
    np.testing.assert_array_equal(product(x[:1], weight), product(x, weight)[:1])


def check_rows(run, *arrays):
    """That `run`, jitted, gives rows of `arrays` the same bits whatever their number and place."""

    def some(tree, first, count):
        return jax.tree.map(lambda x: x[first : first + count], tree)

    run = jax.jit(run)
    expected = run(*arrays)
    for place in ((0, 1), (7, 7), (1, 33)):
        jax.tree.map(np.testing.assert_array_equal, run(*some(arrays, *place)), some(expected, *place))


@needs_kernels
def test_logprobs_and_draws_have_the_same_bits_for_any_number_of_rows():
    V = 333  # narrow enough that the order of XLA's own sums depends on the number of rows
    rng = np.random.default_rng(2)
    logits = np.float32(rng.normal(size=(48, V)) * 3)
    tokens, seeds = rng.integers(0, V, 48).astype(np.int32), rng.integers(0, 99, (48, 2)).astype(np.uint32)

    def run(logits, tokens, seeds):
        scaled = logits - logits.max(axis=-1, keepdims=True)
        told = sampled_logprobs(logits, tokens, tokens >= 0)
        return told, prompt_logprobs(lambda x: x, logits, tokens, V), categorical(scaled, seeds, tokens)

    check_rows(run, logits, tokens, seeds)


@needs_kernels
def test_filtered_draws_are_the_same_for_any_number_of_rows():
    kinds = ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 2.0, "top_k": 40})
    settings = settings_of([kinds[row % 4] | {"seed": row} for row in range(48)])
    state, slots = init_sampling(48, 320), np.arange(48, dtype=np.int32)
    logits = np.float32(np.random.default_rng(3).normal(size=(48, 320)) * 3)
    check_rows(lambda logits, settings, slots: sample(logits, settings, state, slots, slots), logits, settings, slots)
