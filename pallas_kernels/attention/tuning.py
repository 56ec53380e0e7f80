"""Block sizes of the Mosaic kernels: a documented default, and what was measured to be better on a device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Keys a block and blocks in flight, for decode rows and for prompt chunks.

    On GPUs a block of keys must divide 128, of which a slot's rows are a multiple.
    """

    decode_block_k: int
    decode_stages: int
    chunk_block_k: int
    chunk_stages: int


# (implementation, head dim at most) -> what fits the registers, shared memory or VMEM of every device it runs on.
DEFAULTS = {
    ("mosaic_gpu", 64): Tuning(64, 3, 128, 2),  # decode: as many CTAs share an SM as registers allow
    ("mosaic_gpu", 80): Tuning(64, 4, 128, 2),
    ("mosaic_gpu", 96): Tuning(64, 3, 128, 2),
    ("mosaic_gpu", 128): Tuning(64, 2, 128, 2),
    ("mosaic_gpu", 256): Tuning(64, 2, 64, 2),
    ("mosaic_tpu", 256): Tuning(512, 2, 512, 2),
}

# (implementation, device kind, dtype, head dim) -> what `scripts/tune_attention.py` found.
MEASURED: dict[tuple[str, str, str, int], Tuning] = {}


def tuning(implementation: str, device_kind: str, dtype: str, head_dim: int) -> Tuning:
    """The entry for this device, dtype and head dim; else the default of the smallest head dim that is not below.

    Raises ValueError for a head dim that no default is for.
    """
    if found := MEASURED.get((implementation, device_kind, dtype, head_dim)):
        return found
    fitting = [key for key in DEFAULTS if key[0] == implementation and key[1] >= head_dim]
    if not fitting:
        raise ValueError(f"{implementation} has no block sizes for a head dim of {head_dim}")
    return DEFAULTS[min(fitting)]
