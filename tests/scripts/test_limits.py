"""Operations and bytes against numbers worked out by hand."""

from dataclasses import replace

import numpy as np

from model.config import ModelConfig
from model.families import LayerConfig
from scripts.limits import Work, attention_work, dense, linear_work, request_flops

CONFIG = ModelConfig(
    vocab_size=11,
    width=6,
    mlp_width=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    layers=(LayerConfig(), LayerConfig(window=3)),
    max_positions=64,
    norm_eps=1e-5,
)


def test_one_product():
    assert dense(rows=3, inputs=4, outputs=5, itemsize=2) == Work(2 * 3 * 20, 2 * 20)
    assert Work(1, 2) + Work(3, 4) == Work(4, 6)
    assert Work(1, 2).times(3) == Work(3, 6)


def test_dense_products_of_five_rows():
    """Weights of a layer: 6 x 16 for two queries, a key and a value of 4; 8 x 6; three of 6 x 10."""
    assert linear_work(CONFIG, rows=5, itemsize=2) == {
        "QKV": Work(2 * (2 * 5 * 96), 2 * (2 * 96)),
        "output": Work(2 * (2 * 5 * 48), 2 * (2 * 48)),
        "MLP": Work(2 * (2 * 5 * 180), 2 * (2 * 180)),
    }


def test_a_row_computes_two_experts_and_all_four_are_read():
    moe = (LayerConfig(), LayerConfig(moe=True))
    config = replace(CONFIG, layers=moe, num_experts=4, experts_per_token=2, moe_intermediate_size=5)
    expert = 6 * 15
    assert linear_work(config, rows=5, itemsize=2)["MLP"] == Work(
        2 * 5 * 180 + 2 * (2 * 5 * expert), 2 * 180 + 4 * (2 * expert)
    )


def test_attention_of_a_decode_row_and_three_rows_that_share_a_slot():
    """A key costs 2 heads x 4 x (product and sum) x (score and value) = 32; a row of the cache has 2 x 4 numbers."""
    slots, positions = np.array([0, 1, 1, 1]), np.array([6, 2, 3, 4])
    full = Work(32 * (7 + 3 + 4 + 5), 16 * (7 + 5))
    windowed = Work(32 * (3 + 3 + 3 + 3), 16 * (3 + 5))  # slot 0: positions 4..6; slot 1: 0..4, by three rows together
    assert attention_work(replace(CONFIG, layers=(LayerConfig(),)), slots, positions, itemsize=2) == full
    assert attention_work(replace(CONFIG, layers=(LayerConfig(window=3),)), slots, positions, itemsize=2) == windowed
    assert attention_work(CONFIG, slots, positions, itemsize=2) == full + windowed


def test_a_request_of_three_tokens_and_two_more():
    """The last token has no row: four rows, of which two are sampled."""
    linear = 2 * 4 * (96 + 48 + 180) * 2
    attention = 32 * (1 + 2 + 3 + 4) + 32 * (1 + 2 + 3 + 3)
    head = 2 * 2 * (6 * 11)
    assert request_flops(CONFIG, prompt=3, generated=2) == linear + attention + head == 6056
