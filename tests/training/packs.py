"""Packs of random sequences, and trainers of a tiny checkpoint, for the tests of training."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx

from model.checkpoint import load
from scripts.training.optimizer import Recipe
from scripts.training.step import Batch

DATA = Path(__file__).parents[1] / "data"
RECIPE = Recipe(steps=40, learning_rate=3e-3, warmup_steps=3, clip=1e6)


def model_of(name="llama_tied_gqa4"):
    return load(DATA / name).model


def sequences(vocab, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length, dtype=np.int32) for length in lengths]


def pack(rows, length):
    """A batch of a list of sequences for each row, one after the other: every token but a sequence's last counts."""
    shape = len(rows), length
    tokens, positions, targets = (np.zeros(shape, np.int32) for _ in range(3))
    segments, weights = np.full(shape, length, np.int32), np.zeros(shape, np.float32)
    for row, many in enumerate(rows):
        start = 0
        for segment, one in enumerate(many):
            end = start + len(one)
            tokens[row, start:end], segments[row, start:end] = one, segment
            positions[row, start:end] = np.arange(len(one))
            targets[row, start : end - 1], weights[row, start : end - 1] = one[1:], 1
            targets[row, end - 1] = -7  # does not count, so it may be anything
            start = end
    return Batch(tokens, segments, positions, targets, weights)


def leaves(tree):
    """Every array of a state or model, by its path, in NumPy and in a copy."""
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same_bits(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        assert leaf.dtype == other[path].dtype, path
        np.testing.assert_array_equal(leaf, other[path], err_msg=path)


def assert_close(one, other, tolerance):
    """Each array: the norm of the difference against that of `other`."""
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        difference, size = (float(np.linalg.norm(x)) for x in (leaf - other[path], other[path]))
        assert difference <= tolerance * size, f"{path}: {difference / size} of the norm"
