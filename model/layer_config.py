"""What may differ from layer to layer: the window and the position embedding, read from a `config.json`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model.fields import Fields, integers, mapping
from model.rope import Rope, resolve_rope

SlideRule = Callable[[Fields, list[bool]], list[bool]]  # the layers that have RoPE -> the layers that have a window


@dataclass(frozen=True)
class LayerConfig:
    window: int | None = None  # a row sees this many positions, its own included; None: all
    rope: Rope | None = None  # None: no position embedding in this layer
    moe: bool = False


def read_layers(fields: Fields, slides: SlideRule, head_dim: int, positions: int) -> tuple[LayerConfig, ...]:
    """`slides` is the family's rule for a config without `layer_types`."""
    with_rope = _layers_with_rope(fields)
    windows = _windows(fields, slides, with_rope)
    full, local = _ropes(fields, head_dim, positions)
    ropes = [full if window is None else local for window in windows]
    return tuple(
        LayerConfig(window, rope if keep else None)
        for window, rope, keep in zip(windows, ropes, with_rope, strict=True)
    )


def _layers_with_rope(fields: Fields) -> list[bool]:
    layers, interval = fields.integer("num_hidden_layers"), fields.integer_or_off("no_rope_layer_interval")
    given = fields.take("no_rope_layers")
    if given is None:
        return [interval is None or (layer + 1) % interval != 0 for layer in range(layers)]
    if len(integers("no_rope_layers", given)) != layers:
        raise ValueError(f"no_rope_layers has {len(given)} entries for {layers} layers")
    return [bool(keep) for keep in given]


def _windows(fields: Fields, slides: SlideRule, with_rope: list[bool]) -> list[int | None]:
    window, types, kinds = fields.integer_or_off("sliding_window"), fields.take("layer_types"), ("full", "sliding")
    if types is None:
        types = [f"{kinds[slide]}_attention" for slide in slides(fields, with_rope)]
    allowed = [f"{kind}_attention" for kind in kinds]
    if not isinstance(types, list) or len(types) != len(with_rope) or not all(kind in allowed for kind in types):
        raise ValueError(f"layer_types must be {len(with_rope)} of {allowed}, not {types}")
    if "sliding_attention" not in types:
        return [None] * len(types)
    if window is None:
        raise ValueError("layers have 'sliding_attention' and sliding_window is None")
    known = "use_sliding_window" in fields.known
    if not fields.flag("use_sliding_window") if known else fields.config.get("use_sliding_window") is False:
        raise ValueError("use_sliding_window is false and layers have 'sliding_attention'")
    return [window if kind == "sliding_attention" else None for kind in types]


def _ropes(fields: Fields, head_dim: int, positions: int) -> tuple[Rope, Rope]:
    """For layers that see all and for layers with a window: the same unless the family has `rope_local_base_freq`.

    Written as `rope_parameters`, or in the older form as `rope_theta` and `rope_scaling` beside each other.
    """
    nested, scaling = fields.take("rope_parameters"), _rope_fields("rope_scaling", fields.take("rope_scaling"))
    factors = fields.take("rope_freq_factors")

    def resolve(name: str, given: Any, theta: str, older: dict[str, Any]) -> Rope:
        explicit = {} if fields.config.get(theta) is None else {"rope_theta": fields.number(theta)}
        found = _rope_fields(name, given)
        for key, value in (older | explicit).items() if given is not None else ():
            if found.get(key, value if key == "rope_theta" else None) != value:
                raise ValueError(f"{name} says {key} {found.get(key)!r}, and beside it the config says {value!r}")
        return resolve_rope({"rope_theta": fields.take(theta)} | older | found, head_dim, positions, factors)

    if "rope_local_base_freq" not in fields.known:
        rope = resolve("rope_parameters", nested, "rope_theta", scaling)
        return rope, rope
    kinds = ("full_attention", "sliding_attention")
    each = {} if nested is None else mapping("rope_parameters", nested)
    if not each.keys() <= set(kinds):
        raise ValueError(f"rope_parameters must have {kinds}, one for each kind of layer, not {sorted(each)}")
    full, local = (each.get(kind) for kind in kinds)
    return (
        resolve("rope_parameters.full_attention", full, "rope_theta", scaling),
        resolve("rope_parameters.sliding_attention", local, "rope_local_base_freq", {}),
    )


def _rope_fields(name: str, value: Any) -> dict[str, Any]:
    """Without nulls, and with `rope_type` for the older `type`."""
    if value is None:
        return {}
    fields = mapping(name, value)
    older = fields.pop("type", "default")
    return {"rope_type": older} | fields
