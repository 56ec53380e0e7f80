"""HF checkpoints made into GGUF files the way llama.cpp's conversion/{base,llama,qwen,gemma}.py do."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

DATA = Path(__file__).parents[1] / "data"
STEMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


def interleave(tensor, heads):
    """Row `h*H + j*H/2 + i` becomes row `h*H + 2*i + j`."""
    size = len(tensor) // heads
    out = np.empty_like(tensor)
    for head in range(heads):
        for half in range(2):
            for i in range(size // 2):
                out[head * size + 2 * i + half] = tensor[head * size + half * (size // 2) + i]
    return out


def convert_tensors(config, tensors):
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    out, stacks = {}, {}
    for name, tensor in tensors.items():
        if architecture in ("llama", "smollm3") and ".q_proj." in name:
            tensor = interleave(tensor, config["num_attention_heads"])
        if architecture in ("llama", "smollm3") and ".k_proj." in name:
            tensor = interleave(tensor, config["num_key_value_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        fixed = {
            "model.embed_tokens.weight": "token_embd",
            "model.norm.weight": "output_norm",
            "lm_head.weight": "output",
        }
        if name in fixed:
            out[fixed[name] + ".weight"] = tensor
            continue
        layer, part, kind = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name).groups()
        if expert := re.search(r"experts\.(\d+)\.(\w+)", part):
            stack = stacks.setdefault(f"blk.{layer}.ffn_{EXPERTS[expert[2]]}_exps.weight", {})
            stack[int(expert[1])] = tensor
        elif part == "post_attention_layernorm":
            after = architecture in ("gemma2", "gemma3", "olmo2")
            out[f"blk.{layer}.{'post_attention_norm' if after else 'ffn_norm'}.weight"] = tensor
        else:
            out[f"blk.{layer}.{STEMS[part]}.{kind}"] = tensor
    return out | {name: np.stack([stack[e] for e in range(len(stack))]) for name, stack in stacks.items()}


def convert_metadata(writer, config):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if config["model_type"] in ("gemma2", "gemma3_text", "mistral"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    for token in ("eos", "eot"):
        writer.add_uint32(f"tokenizer.ggml.{token}_token_id", {"eos": 2, "eot": 5}[token])


def write_gguf(path, config, tensors, kind=Kind.F32, extra=lambda writer: None, architecture=None):
    """`tensors` in GGUF's form; matrices are stored as `kind`, or as they are where it is given per name."""
    writer = gguf.GGUFWriter(path, architecture or ARCHITECTURES.get(config["model_type"], config["model_type"]))
    convert_metadata(writer, config)
    extra(writer)
    for name, tensor in tensors.items():
        if tensor.dtype == np.uint8:  # already blocks
            writer.add_tensor(name, tensor, raw_dtype=kind)
        elif tensor.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_folder(name):
    return json.loads((DATA / name / "config.json").read_text()), load_file(DATA / name / "model.safetensors")


def parameters(model):
    return {".".join(map(str, path)): np.asarray(p.get_value()) for path, p in nnx.to_flat_state(nnx.state(model))}


def assert_equal(found, expected):
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        one, other = (np.ascontiguousarray(array).view(np.uint8) for array in (found[name], value))
        assert np.array_equal(one, other), name
