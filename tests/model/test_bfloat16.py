"""bfloat16 weights and cache: the same model, to bfloat16's precision."""

import jax.numpy as jnp
import numpy as np
import pytest

from model.checkpoint import load
from tests.model.test_transformer import DATA, Runner


@pytest.mark.parametrize("name", ["llama_tied_gqa4", "gemma2", "qwen3_moe"])
def test_logits(name):
    """Each of 3 to 6 layers rounds a handful of values to 2**-9; a wrong one would be off by their deviation."""
    expected = np.load(DATA / name / "expected.npz")
    logits = Runner(load(DATA / name, dtype=jnp.bfloat16).model, 64)(expected["input_ids"][0], 0)
    error = np.abs(logits - expected["logits"][0]) / expected["logits"][0].std()
    assert np.median(error) < 0.03
    assert logits.dtype == np.float32
    assert len(np.unique(logits[-1])) > 0.9 * logits.shape[-1], "logits are rounded to bfloat16: artificial ties"
    top = np.sort(expected["logits"][0], axis=-1)
    clear = top[:, -1] - top[:, -2] > 0.3 * expected["logits"][0].std()
    assert clear.sum() > 1
    wrong = (logits.argmax(-1) != expected["logits"][0].argmax(-1))[clear]
    assert wrong.mean() <= (0.1 if "moe" in name else 0)  # a near tie of two experts may fall the other way
