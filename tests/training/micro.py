"""A run that takes seconds: a text, a model of 30 thousand parameters, and the command line that trains it."""

import json
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from model.kv_cache import init_cache
from scripts import train
from scripts.training.tokens import Document, train_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
WORDS = "the cat sat on a mat and saw how ten small birds flew over old walls into green trees".split()
QUIET = ["--evaluate-every", "0", "--sample-every", "0", "--no-baselines"]
# A word that the template does not say itself ends an answer: the tokenizer's only special token.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def sentences(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + ".\n" for _ in range(count)]


def write_inputs(folder):
    """`text.txt`, `config.json`, and `tokenizer` with a chat template."""
    (folder / "text.txt").write_text("".join(sentences(800)))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    train_tokenizer([Document("", "".join(sentences(200)))], 300, folder / "tokenizer")
    config = folder / "tokenizer/tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def command(inputs, out, *more):
    """`more` may be options that are there already: the last one counts."""
    words = {"--data": inputs / "text.txt", "--config": inputs / "config.json", "--out": out, "--rows": 4}
    words |= {"--length": 32, "--steps": 20, "--held-out": 0.2}
    return [str(word) for pair in words.items() for word in pair] + [str(word) for word in more]


def run(inputs, out, *more):
    return train.main(command(inputs, out, *more))


def saved_state(out, step):
    """Every array of a checkpoint, by its path, as Orbax itself reads it."""
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore((out / "checkpoints" / str(step) / "state").resolve())
    return {name: np.asarray(value) for name, value in found.items()}


def saved_steps(out):
    return sorted(int(name) for name in os.listdir(out / "checkpoints") if name.isdigit())


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
        assert value.dtype == other[name].dtype


def logits(model, ids):
    """[rows, tokens, V], each row alone."""
    unembed = jax.jit(lambda params, hidden: nnx.merge(graph, params).unembed(hidden))
    graph, params = nnx.split(model)
    forward = hidden_states(model, len(ids[0]))
    return np.stack([unembed(params, forward(params, np.asarray(row, np.int32))) for row in ids])


def residuals(model, ids):
    """[tokens, D]: what leaves the last layer."""
    return np.asarray(hidden_states(model, len(ids))(nnx.split(model)[1], np.asarray(ids, np.int32)))


def hidden_states(model, T):
    """Of a model's parameters and T tokens, by the definition of attention."""
    config, graph = model.config, nnx.split(model)[0]
    shape = dict(slots=1, max_len=T, kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=jnp.float32)
    cache = init_cache(layers=len(config.layers), implementation="reference", **shape)

    @jax.jit
    def forward(params, tokens):
        model, slots = nnx.merge(graph, params), jnp.zeros(T, jnp.int32)
        return model(tokens, slots, jnp.arange(T), cache, num_decode=0, implementation="reference")[0]

    return forward
