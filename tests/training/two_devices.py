"""Run by `test_step.py` in a process of its own, in which XLA makes two devices of one CPU."""

import jax
import numpy as np
import pytest

from scripts.training.step import Trainer
from tests.training.packs import RECIPE, assert_close, assert_same_bits, model_of, pack, sequences


def main() -> None:
    assert jax.local_device_count() == 2
    model, texts = model_of(), sequences(320, [9, 7, 8, 5, 13, 2, 24, 1, 11])
    batch = pack([texts[:3], texts[3:6], texts[6:7], texts[7:], texts[1:3], texts[3:4], texts[5:6], texts[7:8]], 24)
    both, one = Trainer(model, RECIPE), Trainer(model, RECIPE, devices=jax.local_devices()[1:])
    assert len(both.devices) == 2
    state, figures = both.step(both.init(), [batch, batch])
    alone, right = one.step(one.init(), [batch, batch])
    # Each device sums its own rows: float32 in another order.
    np.testing.assert_allclose(figures[:4], right[:4], rtol=1e-6)
    moments, others = (one.opt_state[1][0] for one in (state, alone))
    assert_close(moments.mu, others.mu, 1e-6)
    assert_close(moments.nu, others.nu, 2e-6)
    np.testing.assert_allclose(both.evaluate(both.init(), batch), one.evaluate(one.init(), batch), rtol=1e-6)
    assert_same_bits(both.step(both.init(), [batch, batch])[0], state)
    # A state of one goes on on both, and the model is on one device.
    moved, again = both.step(alone, [batch])
    assert again.finite
    assert int(moved.step) == 2
    assert both.model(moved).embed.weight.get_value().devices() == {jax.local_devices()[0]}
    with pytest.raises(ValueError, match="1 rows of tokens are not a multiple of 2 devices"):
        both.step(moved, [pack([texts[:3]], 24)])


if __name__ == "__main__":
    main()
