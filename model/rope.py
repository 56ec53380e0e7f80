"""Rotary position embedding (RoPE) and the scalings that checkpoints use.

Su et al., "RoFormer" (arXiv 2104.09864), equation 34, in the half-split form of HF transformers: component `i` turns
with component `i + H/2`. Scalings: linear (arXiv 2306.15595), YaRN (arXiv 2309.00071), Llama 3's bands.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from model.fields import boolean, positive_number


@dataclass(frozen=True)
class Rope:
    """Resolved frequencies, so that no layer asks which scaling made them.

    `frequencies`: radians per position, H/2 of them. `scale` multiplies cos and sin (YaRN's attention factor).
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


Rotation = tuple[Float[Array, "T H/2"], Float[Array, "T H/2"]]  # cos and sin of each row's angles


def rotation(positions: Int[Array, " T"], rope: Rope) -> Rotation:
    """Float32, and the same for every layer with this RoPE: cosines cost more than what is done with them."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.frequencies, jnp.float32)[None, :]
    return jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale


def apply_rope(x: Float[Array, "T heads H"], rotation: Rotation) -> Float[Array, "T heads H"]:
    """Rotate each row by its position, in float32 whatever `x` is; the result is `x.dtype`."""
    cos, sin = (part[:, None, :] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def resolve_rope(
    parameters: dict[str, Any], head_dim: int, max_positions: int, freq_factors: list[float] | None = None
) -> Rope:
    """From HF's `rope_parameters` of one layer type: `rope_theta`, `rope_type`, and that type's own fields.

    `freq_factors` (a GGUF's `rope_freqs` tensor) divide the frequencies of the default type.
    Raises ValueError for a type, a field or a value that is not covered.
    """
    fields = {name: value for name, value in parameters.items() if value is not None}
    theta = positive_number("rope_theta", fields.pop("rope_theta", None))
    kind = fields.pop("rope_type", "default")
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported, only 1.0")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(f"rope_type {kind!r} is not supported; supported are {sorted(_SCALINGS)}")
    if head_dim % 2:
        raise ValueError(f"RoPE needs an even head_dim, not {head_dim}")
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    try:
        frequencies, scale = _SCALINGS[kind](frequencies, fields, theta, head_dim, max_positions)
    except KeyError as error:
        raise ValueError(f"rope_type {kind!r} needs the field {error.args[0]!r}") from None
    if fields:
        raise ValueError(f"rope_type {kind!r} has fields that are not supported: {sorted(fields)}")
    if freq_factors is not None:
        if kind != "default" or not isinstance(freq_factors, list) or len(freq_factors) != len(frequencies):
            raise ValueError(f"rope_freq_factors must be {len(frequencies)} numbers, and rope_type 'default'")
        frequencies = frequencies / [positive_number("rope_freq_factors", factor) for factor in freq_factors]
    return Rope(tuple(frequencies.tolist()), scale)


def _number(fields: dict[str, Any], name: str, *default: Any) -> Any:
    """A positive number, or the default as it is. Raises KeyError if it is not there and has no default."""
    return default[0] if default and name not in fields else positive_number(name, fields.pop(name))


def _default(frequencies, fields, theta, head_dim, max_positions):
    return frequencies, 1.0


def _linear(frequencies, fields, theta, head_dim, max_positions):
    _number(fields, "original_max_position_embeddings", None)  # informative: the formula does not use it
    return frequencies / _number(fields, "factor"), 1.0


def _llama3(frequencies, fields, theta, head_dim, max_positions):
    factor, low, high = (_number(fields, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ValueError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    turns = _number(fields, "original_max_position_embeddings") * frequencies / (2 * math.pi)  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies, 1.0


def _yarn(frequencies, fields, theta, head_dim, max_positions):
    original = _number(fields, "original_max_position_embeddings", max_positions)
    factor = _number(fields, "factor", max_positions / original)
    fast, slow = _number(fields, "beta_fast", 32.0), _number(fields, "beta_slow", 1.0)
    mscale, mscale_all = _number(fields, "mscale", None), _number(fields, "mscale_all_dim", None)
    if slow >= fast or theta <= 1:
        raise ValueError(f"beta_slow {slow} is not below beta_fast {fast}, or rope_theta {theta} is not above 1")

    def attention(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = attention(mscale) / attention(mscale_all) if mscale and mscale_all else attention(1.0)
    scale = _number(fields, "attention_factor", scale)

    def dimension(turns: float) -> float:  # the component that makes `turns` turns within the original context
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if boolean("truncate", fields.pop("truncate", True)):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return frequencies / factor * ramp + frequencies * (1 - ramp), scale


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
