"""Typed reading of a `config.json`: every field is checked, and one that nobody reads is an error."""

import math
from collections.abc import Collection, Mapping
from typing import Any


def positive_integer(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"config field {name!r} must be a positive integer, not {value!r}")
    return value


def nonnegative_integer(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"config field {name!r} must be an integer that is not negative, not {value!r}")
    return value


def positive_number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:  # NaN fails it too
        raise ValueError(f"config field {name!r} must be a positive number, not {value!r}")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"config field {name!r} must be true or false, not {value!r}")
    return value


def integers(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(item) in (int, bool) and item >= 0 for item in value):
        raise ValueError(f"config field {name!r} must be a list of integers, not {value!r}")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"config field {name!r} must be an object, not {value!r}")
    return {key: item for key, item in value.items() if item is not None}


# Fields that change nothing in the model: training, bookkeeping, and what old HF versions wrote into every config,
# among it the defaults of generation.
_NEUTRAL = frozenset(
    """architectures attention_dropout auto_map bos_token_id cache_implementation dtype embd_pdrop eos_token_id
    gradient_checkpointing hidden_dropout initializer_range is_llama_config model_type _name_or_path neftune_noise_alpha
    output_router_logits pad_token_id pretraining_tp resid_pdrop router_aux_loss_coef router_jitter_noise torch_dtype
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache

    attn_implementation _attn_implementation _attn_implementation_autoset chunk_size_feed_forward _commit_hash
    decoder_start_token_id finetuning_task id2label is_decoder label2id output_attentions output_hidden_states prefix
    problem_type return_dict sep_token_id task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class
    torchscript use_bfloat16 use_return_dict

    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    target_lookbehind temperature top_k top_p typical_p""".split()
)
# What a field that a family does not have must say: that the thing is off.
_OFF: dict[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "qkv_bias": False,
    "rope_interleaved": False,
    "shared_expert_intermediate_size": 0,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}


class Fields:
    """The fields of one config: those in `known` may be read, and `refuse_rest` refuses the others."""

    def __init__(self, config: Mapping[str, Any], known: Collection[str], defaults: Mapping[str, Any]) -> None:
        self.config, self.known, self.defaults = config, known, defaults

    def take(self, name: str) -> Any:
        """The field, else the family's default, which an explicit null beats. None too if the family lacks it."""
        return self.config.get(name, self.defaults.get(name)) if name in self.known else None

    def integer(self, name: str) -> int:
        return positive_integer(name, self.take(name))

    def number(self, name: str) -> float:
        return positive_number(name, self.take(name))

    def number_or_off(self, name: str) -> float | None:
        return None if self.take(name) is None else self.number(name)

    def integer_or_off(self, name: str) -> int | None:
        return None if self.take(name) is None else self.integer(name)

    def flag(self, name: str) -> bool:
        """False unless it is there."""
        return self.take(name) is not None and boolean(name, self.take(name))

    def must_be(self, expected: Mapping[str, Any]) -> None:
        """These fields change nothing as long as they say what holds anyway. A null says nothing."""
        for name, value in expected.items():
            found = self.config.get(name)
            if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
                raise ValueError(f"config field {name!r} is {found!r}; only {value!r} is supported here")

    def refuse_rest(self, expected: Mapping[str, Any], ignored: Collection[str]) -> None:
        expected = {name: value for name, value in (_OFF | dict(expected)).items() if name not in self.known}
        self.must_be(expected)
        fine = _NEUTRAL | set(self.known) | set(expected) | set(ignored)
        unknown = sorted(name for name, value in self.config.items() if value is not None and name not in fine)
        if unknown:
            shown = ", ".join(f"{name} = {self.config[name]!r}" for name in unknown)
            family = self.config.get("model_type")
            raise ValueError(f"config fields that {family} does not have and may change the mathematics: {shown}")
