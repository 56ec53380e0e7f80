"""Named attention shapes, for the tests of attention's values, races and programs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionCase:
    """`decode`: positions of the decode rows, None for padding. `chunks`: (first position, tokens) of each segment."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    rows: int  # S
    decode: tuple[int | None, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None


S = 256
LENGTHS = (1, 127, 128, 129, S - 1, S)
CASES = [
    AttentionCase("decode_lengths", 3, 1, 64, S, decode=tuple(n - 1 for n in LENGTHS)),
    AttentionCase("decode_padding", 8, 2, 16, S, decode=(5, None, 200, None)),
    AttentionCase("decode_only_padding", 4, 4, 64, S, decode=(None, None)),
    AttentionCase("chunk_whole", 4, 1, 64, S, chunks=((0, S),)),
    AttentionCase("chunk_one_token", 4, 2, 80, S, chunks=((0, 1), (127, 1), (128, 1), (S - 1, 1))),
    AttentionCase("chunk_tails", 8, 1, 96, S, chunks=((0, 15), (0, 16), (0, 17), (100, 31), (128, 33))),
    AttentionCase("chunk_padding_blocks", 2, 2, 128, S, chunks=((7, 20), (0, 0), (64, 64))),
    AttentionCase("mixed", 9, 3, 64, S, decode=(0, 127, None, 255), chunks=((0, 40), (96, 64), (3, 5))),
    AttentionCase("head_dim_80", 3, 3, 80, S, decode=(130, 3), chunks=((60, 70),)),
    AttentionCase("head_dim_96", 8, 1, 96, S, decode=(130, 3)),
    AttentionCase("head_dim_128", 8, 2, 128, S, decode=(130, None, 3), chunks=((60, 70),)),
    AttentionCase("head_dim_256", 8, 4, 256, S, decode=(130, 3), chunks=((60, 70),)),
    AttentionCase("window_1", 4, 2, 64, S, decode=(0, 200), chunks=((0, 20), (120, 30)), window=1),
    AttentionCase("window_4", 4, 2, 64, S, decode=(0, 2, 200), chunks=((0, 20), (120, 30)), window=4),
    AttentionCase("window_128", 4, 2, 64, S, decode=(127, 128, 255), chunks=((0, 140), (150, 90)), window=128),
    AttentionCase("soft_cap", 4, 2, 64, S, decode=(3, 255), chunks=((0, 64),), soft_cap=2.0),
    AttentionCase("scale", 4, 2, 32, S, decode=(3, 255), chunks=((0, 64),), window=8, soft_cap=5.0, scale=0.3),
    AttentionCase(
        "window_soft_cap_scale", 4, 2, 64, S, decode=(255,), chunks=((9, 64),), window=8, soft_cap=5.0, scale=0.3
    ),
]

# Several splits of decode rows on a GPU, 512 keys each (256 where H = 256), some of them cut by a window; more key
# blocks than a ring of buffers holds; several of them a tile on a TPU. Interpreters take seconds for each.
LONG_S = 1536
LONG = (LONG_S - 1, 511, 512, 600, 0, None)
LONG_CASES = [
    AttentionCase("long_decode", 4, 1, 64, LONG_S, decode=LONG),
    AttentionCase("long_decode_window", 4, 2, 64, LONG_S, decode=LONG, window=700),
    AttentionCase("long_decode_256", 2, 1, 256, LONG_S, decode=LONG, window=300),
    AttentionCase("long_chunk", 3, 1, 64, LONG_S, chunks=((700, 100), (1400, 130))),
    AttentionCase("long_chunk_window", 2, 1, 128, LONG_S, chunks=((700, 100), (1400, 130)), window=600),
]
