"""What the `config.json` of each model family means, as the fields of `ModelConfig`.

Follows HF transformers' configuration and modelling code of each family, the defaults included that a file leaves out.
A field that a family does not have there might change the mathematics: an error, unless it says what holds anyway.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from model.fields import Fields, integers, nonnegative_integer
from model.layer_config import LayerConfig, SlideRule, read_layers

Activation = Literal["silu", "gelu_tanh", "gelu"]
_ACTIVATIONS: dict[Any, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


def resolve_family(config: Mapping[str, Any], *, freq_factors: bool = False) -> dict[str, Any]:
    """The keyword arguments of `ModelConfig`. Raises ValueError for what is not covered, naming the field.

    `freq_factors`: `config` may have `rope_freq_factors` (a GGUF's `rope_freqs` tensor), which no HF config has.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ValueError(f"model_type {name!r} is not supported; supported are {sorted(_FAMILIES)}")
    family = _FAMILIES[name]
    known = _COMMON | family.fields | ({"rope_freq_factors"} if freq_factors else set())
    fields = Fields(config, known, _DEFAULTS | family.defaults)
    fields.refuse_rest(family.expected, family.ignored)
    common = _common(fields, family)
    return common | family.special(fields, common)


def _common(fields: Fields, family: "_Family") -> dict[str, Any]:
    """What most families have."""
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer_or_off("head_dim")
    if head_dim is None and width % heads:
        raise ValueError(f"head_dim is absent and hidden_size {width} is not a multiple of {heads} heads")
    head_dim, positions = head_dim or width // heads, fields.integer("max_position_embeddings")
    activation = fields.take("hidden_activation" if "hidden_activation" in family.fields else "hidden_act")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported are {sorted(_ACTIVATIONS)}")
    return dict(
        vocab_size=fields.integer("vocab_size"),
        width=width,
        mlp_width=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.integer_or_off("num_key_value_heads") or heads,
        head_dim=head_dim,
        layers=read_layers(fields, family.slides, head_dim, positions),
        max_positions=positions,
        norm_eps=fields.number("rms_norm_eps"),
        activation=_ACTIVATIONS[activation],
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def _llama(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    return {}


def _qwen2(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    return dict(qkv_bias=True)


def _qwen3(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    return dict(qk_norm="head")


def _olmo2(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    return dict(qk_norm="full", pre_norm=False, post_norm=True)


def _gemma2(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    # Published configs say these twice.
    fields.must_be({name: fields.take(other) for name, other in _GEMMA_TWICE.items()})
    return dict(
        post_norm=True,
        norm_offset=1.0,
        embedding_scale=common["width"] ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=fields.number_or_off("attn_logit_softcapping"),
        final_soft_cap=fields.number_or_off("final_logit_softcapping"),
    )


def _gemma3(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    return _gemma2(fields, common) | dict(qk_norm="head")


def _mixtral(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    return dict(
        layers=_with_experts(common["layers"], lambda layer: True),
        num_experts=_num_experts(fields),
        experts_per_token=fields.integer("num_experts_per_tok"),
        moe_intermediate_size=common["mlp_width"],
    )


def _qwen3_moe(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    dense, every = fields.take("mlp_only_layers"), fields.integer("decoder_sparse_step")
    dense = [] if dense is None else integers("mlp_only_layers", dense)
    return _qwen3(fields, common) | dict(
        layers=_with_experts(common["layers"], lambda layer: layer not in dense and (layer + 1) % every == 0),
        num_experts=_num_experts(fields),
        experts_per_token=fields.integer("num_experts_per_tok"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        norm_topk=fields.flag("norm_topk_prob"),
    )


def _num_experts(fields: Fields) -> int:
    """HF takes either name."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.config.get(name) is not None]
    counts = {fields.integer(name) for name in names or ["num_local_experts"]}
    if len(counts) > 1:
        raise ValueError(f"num_experts and num_local_experts differ: {sorted(counts)}")
    return counts.pop()


def _with_experts(layers: tuple[LayerConfig, ...], moe: Callable[[int], bool]) -> tuple[LayerConfig, ...]:
    return tuple(LayerConfig(layer.window, layer.rope, moe(index)) for index, layer in enumerate(layers))


def _never(fields: Fields, with_rope: list[bool]) -> list[bool]:
    return [False for _ in with_rope]


def _if_there_is_a_window(fields: Fields, with_rope: list[bool]) -> list[bool]:
    return [fields.take("sliding_window") is not None for _ in with_rope]


def _if_used(fields: Fields, with_rope: list[bool]) -> list[bool]:
    return [fields.flag("use_sliding_window") and fields.take("sliding_window") is not None for _ in with_rope]


def _after_max_window_layers(fields: Fields, with_rope: list[bool]) -> list[bool]:
    first = nonnegative_integer("max_window_layers", fields.take("max_window_layers"))
    return [used and layer >= first for layer, used in enumerate(_if_used(fields, with_rope))]


def _without_rope(fields: Fields, with_rope: list[bool]) -> list[bool]:
    return [used and not rope for used, rope in zip(_if_used(fields, with_rope), with_rope, strict=True)]


def _every_other(fields: Fields, with_rope: list[bool]) -> list[bool]:
    return [layer % 2 == 0 for layer, _ in enumerate(with_rope)]


def _by_pattern(fields: Fields, with_rope: list[bool]) -> list[bool]:
    pattern = fields.integer("sliding_window_pattern")
    fields.must_be({"_sliding_window_pattern": pattern})  # HF writes it, beside layer_types, and does not read it
    return [(layer + 1) % pattern != 0 for layer, _ in enumerate(with_rope)]


@dataclass(frozen=True)
class _Family:
    """`fields`: what its HF class reads beside `_COMMON`; `defaults`: what that assumes where a file is silent."""

    special: Callable[[Fields, dict[str, Any]], dict[str, Any]]
    fields: Set[str]
    defaults: dict[str, Any] = field(default_factory=dict)
    slides: SlideRule = _never
    ignored: Set[str] = frozenset()  # fields of published configs that the class does not read
    expected: dict[str, Any] = field(default_factory=dict)  # such fields, and what they must say


_COMMON = frozenset(
    """head_dim hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
    num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size""".split()
)
_DEFAULTS: dict[str, Any] = dict(hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10000.0)
_EXPERTS = {"num_experts", "num_local_experts", "num_experts_per_tok"}
_QWEN = {"hidden_act", "use_sliding_window", "sliding_window"}
_QWEN_DEFAULTS: dict[str, Any] = dict(sliding_window=4096, max_window_layers=28, num_key_value_heads=32)
_GEMMA = set(
    """attention_bias final_logit_softcapping hidden_activation layer_types query_pre_attn_scalar
    sliding_window""".split()
)
_GEMMA_TWICE = {"hidden_act": "hidden_activation", "sliding_window_size": "sliding_window"}
_GEMMA_DEFAULTS: dict[str, Any] = dict(
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    head_dim=256,
    num_key_value_heads=4,
    query_pre_attn_scalar=256,
    sliding_window=4096,
)
_FAMILIES = {
    "llama": _Family(_llama, {"hidden_act", "attention_bias", "mlp_bias"}),
    "mistral": _Family(
        _llama,
        {"hidden_act", "sliding_window"},
        dict(num_key_value_heads=8, sliding_window=4096),
        _if_there_is_a_window,
    ),
    "mixtral": _Family(
        _mixtral,
        {"hidden_act", "sliding_window", *_EXPERTS},
        dict(num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5, num_local_experts=8, num_experts_per_tok=2),
        _if_there_is_a_window,
    ),
    "qwen2": _Family(_qwen2, {*_QWEN, "layer_types", "max_window_layers"}, _QWEN_DEFAULTS, _after_max_window_layers),
    "qwen3": _Family(
        _qwen3,
        {*_QWEN, "attention_bias", "layer_types", "max_window_layers"},
        _QWEN_DEFAULTS | dict(head_dim=128),
        _after_max_window_layers,
        expected=dict(use_qk_norm=True),
    ),
    "qwen3_moe": _Family(
        _qwen3_moe,
        {*_QWEN, *_EXPERTS, "attention_bias", "decoder_sparse_step", "mlp_only_layers"}
        | {"moe_intermediate_size", "norm_topk_prob"},
        dict(num_local_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1)
        | dict(sliding_window=4096, num_key_value_heads=4),
        _if_used,
        ignored={"max_window_layers"},
        expected=dict(use_qk_norm=True),
    ),
    "smollm3": _Family(
        _llama,
        {*_QWEN, "attention_bias", "layer_types", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
        dict(tie_word_embeddings=True, rope_theta=2e6, no_rope_layer_interval=4, num_key_value_heads=4),
        _without_rope,
        ignored={"max_window_layers"},
    ),
    "olmo2": _Family(_olmo2, {"hidden_act", "attention_bias"}, dict(rms_norm_eps=1e-5)),
    "gemma2": _Family(
        _gemma2,
        _GEMMA | {"attn_logit_softcapping"},
        _GEMMA_DEFAULTS | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        _every_other,
        ignored=set(_GEMMA_TWICE),
        expected=dict(sliding_window_pattern=2),
    ),
    "gemma3_text": _Family(  # its class has attn_logit_softcapping, and its attention does not use it
        _gemma3,
        _GEMMA | {"rope_local_base_freq", "sliding_window_pattern"},
        _GEMMA_DEFAULTS | dict(sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=10000.0),
        _by_pattern,
        ignored={*_GEMMA_TWICE, "_sliding_window_pattern"},
    ),
}
