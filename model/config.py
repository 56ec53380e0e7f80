"""What a model is: one frozen `ModelConfig`, resolved from the `config.json` of any family that is covered.

Families differ by the values of fields, never by name: `families.py` translates, nothing else asks what a model is
called.
"""

from dataclasses import dataclass
from typing import Any, Literal

from model.families import Activation, resolve_family
from model.layer_config import LayerConfig


@dataclass(frozen=True)
class ModelConfig:
    """Every field changes the mathematics. Build it with `from_hf`."""

    vocab_size: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_positions: int
    norm_eps: float
    activation: Activation = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None  # over each head, or over all heads together
    pre_norm: bool = True  # normalise what enters attention and MLP
    post_norm: bool = False  # normalise what leaves them
    norm_offset: float = 0.0  # a norm multiplies by (offset + weight)
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk: bool = True  # the chosen experts' weights are renormalised to sum to one

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_attention_heads {self.num_heads} is not a multiple of {self.num_kv_heads} KV heads")
        if any(layer.moe for layer in self.layers) and not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.experts_per_token} is not in 1..{self.num_experts}")
        sizes = (self.vocab_size, self.width, self.mlp_width, self.num_kv_heads, self.head_dim, len(self.layers))
        if min(sizes) < 1:
            raise ValueError(f"vocabulary, width, MLP width, KV heads, head_dim, layers must be positive, not {sizes}")

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, freq_factors: bool = False) -> "ModelConfig":
        """From the contents of a `config.json`.

        `freq_factors`: it may have `rope_freq_factors`, which a GGUF file or our own copy of one gives, never HF.

        Raises:
            ValueError: a family, a value or a field that is not covered, named.
        """
        return cls(**resolve_family(config, freq_factors=freq_factors))
