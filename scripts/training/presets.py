"""Models to train from nothing, as a `config.json` of HF's Llama family, and how they are trained by default."""

from dataclasses import dataclass
from typing import Any, Literal

from scripts.training.optimizer import Recipe

PresetName = Literal["tiny", "small"]


@dataclass(frozen=True)
class Preset:
    """What holds where nothing else is asked for: `rows` of `length` tokens a batch."""

    hf_config: dict[str, Any] | None
    recipe: Recipe
    rows: int
    length: int


def _llama(width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, positions: int) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "max_position_embeddings": positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


PRESETS: dict[PresetName, Preset] = {
    # 2.8 and 26 million parameters
    "tiny": Preset(
        _llama(width=192, mlp=512, layers=6, heads=6, kv_heads=2, vocabulary=2048, positions=1024),
        # The strong decay is for little text that is seen several times.
        Recipe(steps=1500, learning_rate=4e-3, warmup_steps=80, weight_decay=1.0),
        rows=8,
        length=256,
    ),
    "small": Preset(
        _llama(width=512, mlp=1408, layers=8, heads=8, kv_heads=4, vocabulary=8192, positions=2048),
        Recipe(steps=5000, learning_rate=1.5e-3, warmup_steps=200),
        rows=16,
        length=512,
    ),
}
# For a config.json of one's own, and for weights that are there already.
SCRATCH = Preset(None, Recipe(steps=1000, learning_rate=1e-3, warmup_steps=50), rows=16, length=256)
FINE_TUNING = Preset(None, Recipe(steps=100, learning_rate=2e-5, warmup_steps=10, weight_decay=0.0), rows=8, length=256)
LORA_LEARNING_RATE = 2e-4
