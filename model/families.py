"""What the `config.json` of each model family means, as the fields of `ModelConfig`.

Follows HF transformers' configuration and modelling code of each family, the defaults included that a file leaves out.
A field that is not known here is an error: it might change the mathematics.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from model.rope import Rope, resolve_rope

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None = None  # a row sees this many positions, its own included; None: all
    rope: Rope | None = None  # None: no position embedding in this layer
    moe: bool = False


def resolve_family(config: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `ModelConfig`. Raises ValueError for what is not covered, naming the field."""
    fields = _Fields(config)
    family = fields.take("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; supported are {sorted(_FAMILIES)}")
    fields.defaults = _COMMON | _FAMILIES[family].defaults
    common = _common(fields)
    special = _FAMILIES[family].special(fields, common)
    fields.refuse_rest()
    return common | special


# Fields that change nothing at inference: training, bookkeeping, defaults of generation.
_NEUTRAL = frozenset(
    """architectures attention_dropout auto_map bos_token_id cache_implementation dtype embd_pdrop eos_token_id
    hidden_dropout initializer_range is_llama_config model_type _name_or_path output_router_logits pad_token_id
    pretraining_tp resid_pdrop router_aux_loss_coef router_jitter_noise torch_dtype transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_cache""".split()
)
# These change the mathematics unless they have this value.
_REQUIRED = {
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "num_nextn_predict_layers": 0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}

_COMMON: dict[str, Any] = dict(
    hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, max_position_embeddings=2048
)


class _Fields:
    """A config that remembers which of its fields were read, so that an unread one is an error."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = {name: value for name, value in config.items() if value is not None}
        self.explicit_null = {name for name, value in config.items() if value is None}
        self.defaults: dict[str, Any] = {}
        self.read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The field, else the family's default (an explicit null beats it), else `default`."""
        self.read.add(name)
        family_default = None if name in self.explicit_null else self.defaults.get(name)
        return self.config.get(name, default if family_default is None else family_default)

    def need(self, name: str) -> int:
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config field {name!r} must be a positive integer, not {value!r}")
        return value

    def refuse_rest(self) -> None:
        for name, value in self.config.items():
            if name in _REQUIRED and name not in self.read and value != _REQUIRED[name]:
                raise ValueError(f"config field {name!r} is {value!r}; only {_REQUIRED[name]!r} is supported")
        known = self.read | _NEUTRAL | set(_REQUIRED)
        unknown = sorted(name for name, value in self.config.items() if name not in known)
        if unknown:
            shown = ", ".join(f"{name} = {self.config[name]!r}" for name in unknown)
            raise ValueError(f"config fields that are not supported and may change the mathematics: {shown}")


def _common(fields: _Fields) -> dict[str, Any]:
    """What every family has."""
    width, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    if fields.take("head_dim") is None and width % heads:
        raise ValueError(f"head_dim is absent and hidden_size {width} is not a multiple of {heads} heads")
    head_dim = width // heads if fields.take("head_dim") is None else fields.need("head_dim")
    layers, positions = fields.need("num_hidden_layers"), fields.need("max_position_embeddings")
    windows = _windows(fields, layers)
    ropes = _ropes(fields, head_dim, positions, windows)
    activation = fields.take("hidden_activation", fields.take("hidden_act"))
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported are {sorted(_ACTIVATIONS)}")
    return dict(
        vocab_size=fields.need("vocab_size"),
        width=width,
        mlp_width=fields.need("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads if fields.take("num_key_value_heads") is None else fields.need("num_key_value_heads"),
        head_dim=head_dim,
        layers=tuple(LayerConfig(window, rope) for window, rope in zip(windows, ropes, strict=True)),
        max_positions=positions,
        norm_eps=float(fields.take("rms_norm_eps")),
        activation=_ACTIVATIONS[activation],
        tie_embeddings=bool(fields.take("tie_word_embeddings")),
    )


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


def _windows(fields: _Fields, layers: int) -> list[int | None]:
    """The sliding window of each layer, from `layer_types` where there is one, else by the family's rule."""
    window = fields.take("sliding_window")
    types = fields.take("layer_types")
    rule = fields.defaults.get("window_rule", lambda fields, layer: True)
    by_rule = [rule(fields, layer) for layer in range(layers)]  # always asked, so that its fields count as read
    if fields.take("use_sliding_window", True) is False:
        if types and "sliding_attention" in types:
            raise ValueError("use_sliding_window is false and layer_types has 'sliding_attention'")
        return [None] * layers
    if types is None:
        return [window if window and slides else None for slides in by_rule]
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types must be {layers} of 'full_attention' and 'sliding_attention', not {types}")
    if "sliding_attention" in types and not window:
        raise ValueError(f"layer_types has 'sliding_attention' and sliding_window is {window}")
    return [window if kind == "sliding_attention" else None for kind in types]


def _ropes(fields: _Fields, head_dim: int, positions: int, windows: list[int | None]) -> list[Rope | None]:
    """Each layer's RoPE: the nested `rope_parameters`, or `rope_theta` and `rope_scaling` beside each other."""
    nested, theta, scaling = fields.take("rope_parameters"), fields.take("rope_theta"), fields.take("rope_scaling")
    local_theta, factors = fields.take("rope_local_base_freq"), fields.take("rope_freq_factors")
    nested = nested or {"rope_theta": theta, **(scaling or {})}
    if "full_attention" in nested or "sliding_attention" in nested:
        full, local = nested.get("full_attention"), nested.get("sliding_attention")
    else:
        full, local = nested, {"rope_theta": local_theta} if local_theta else nested
    resolved = []
    for parameters, used in ((full, None in windows), (local, any(windows))):
        if used and parameters is None:
            raise ValueError("rope_parameters lacks a layer type that layer_types uses")
        extra = {"freq_factors": tuple(factors)} if factors else {}
        given = {"rope_theta": theta, **(parameters or {}), **extra}
        resolved.append(resolve_rope(given, head_dim, positions) if used else None)
    without = fields.take("no_rope_layers")
    interval = fields.take("no_rope_layer_interval")
    if without is None:
        without = [interval is None or (layer + 1) % interval != 0 for layer in range(len(windows))]
    if len(without) != len(windows):
        raise ValueError(f"no_rope_layers has {len(without)} entries for {len(windows)} layers")
    return [resolved[window is not None] if keep else None for window, keep in zip(windows, without, strict=True)]


def _attention_bias(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    bias = bool(fields.take("attention_bias", False))
    return dict(qkv_bias=bias, o_bias=bias)


def _llama(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return _attention_bias(fields, common) | dict(mlp_bias=bool(fields.take("mlp_bias", False)))


def _plain(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return {}


def _qwen2(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return dict(qkv_bias=True)


def _qwen3(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return _attention_bias(fields, common) | dict(qk_norm="head")


def _olmo2(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return _attention_bias(fields, common) | dict(qk_norm="full", pre_norm=False, post_norm=True)


def _gemma2(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return _attention_bias(fields, common) | dict(
        post_norm=True,
        norm_offset=1.0,
        embedding_scale=common["width"] ** 0.5,
        attention_scale=float(fields.take("query_pre_attn_scalar")) ** -0.5,
        attention_soft_cap=fields.take("attn_logit_softcapping"),
        final_soft_cap=fields.take("final_logit_softcapping"),
    )


def _gemma3(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return _gemma2(fields, common) | dict(qk_norm="head")


def _mixtral(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    return dict(
        layers=_with_experts(common["layers"], lambda layer: True),
        num_experts=fields.need("num_local_experts"),
        experts_per_token=fields.need("num_experts_per_tok"),
        moe_intermediate_size=common["mlp_width"],
    )


def _qwen3_moe(fields: _Fields, common: dict[str, Any]) -> dict[str, Any]:
    dense, every = fields.take("mlp_only_layers", []), fields.take("decoder_sparse_step", 1)
    return _qwen3(fields, common) | dict(
        layers=_with_experts(common["layers"], lambda layer: layer not in dense and (layer + 1) % every == 0),
        num_experts=fields.take("num_local_experts") or fields.need("num_experts"),
        experts_per_token=fields.need("num_experts_per_tok"),
        moe_intermediate_size=fields.need("moe_intermediate_size"),
        norm_topk=bool(fields.take("norm_topk_prob", False)),
    )


def _with_experts(layers: tuple[LayerConfig, ...], moe: Callable[[int], bool]) -> tuple[LayerConfig, ...]:
    return tuple(LayerConfig(layer.window, layer.rope, moe(index)) for index, layer in enumerate(layers))


@dataclass(frozen=True)
class _Family:
    """`special`: the fields that are its own; `defaults`: what its HF class assumes where a file is silent."""

    special: Callable[[_Fields, dict[str, Any]], dict[str, Any]]
    defaults: dict[str, Any]


def _after_max_window_layers(fields: _Fields, layer: int) -> bool:
    return layer >= fields.take("max_window_layers", 28)


def _all_but_every(fields: _Fields, layer: int) -> bool:
    pattern = fields.take("_sliding_window_pattern", fields.take("sliding_window_pattern"))
    return (layer + 1) % pattern != 0


_QWEN: dict[str, Any] = dict(use_sliding_window=False, sliding_window=4096, window_rule=_after_max_window_layers)
_GEMMA: dict[str, Any] = dict(
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    head_dim=256,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    window_rule=_all_but_every,
)
_FAMILIES = {
    "llama": _Family(_llama, {}),
    "mistral": _Family(_plain, dict(num_key_value_heads=8, sliding_window=4096)),
    "mixtral": _Family(_mixtral, dict(num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5, num_local_experts=8)),
    "qwen2": _Family(_qwen2, _QWEN),
    "qwen3": _Family(_qwen3, _QWEN | dict(head_dim=128)),
    "qwen3_moe": _Family(_qwen3_moe, _QWEN | dict(num_experts=128, num_experts_per_tok=8)),
    "smollm3": _Family(
        _llama, _QWEN | dict(tie_word_embeddings=True, rope_theta=2e6, no_rope_layer_interval=4, num_key_value_heads=4)
    ),
    "olmo2": _Family(_olmo2, dict(rms_norm_eps=1e-5)),
    "gemma2": _Family(
        _gemma2,
        _GEMMA | dict(sliding_window_pattern=2, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    ),
    "gemma3_text": _Family(
        _gemma3, _GEMMA | dict(sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=10000.0)
    ),
}
