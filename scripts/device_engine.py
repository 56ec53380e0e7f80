"""A small model with random weights through the whole engine, with one implementation of attention and with `xla`."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from batching import Engine, EngineConfig, SamplingParams
from model.config import ModelConfig
from model.kv_cache import init_cache
from model.layer_config import LayerConfig
from model.rope import Rope
from model.transformer import Transformer

PROMPTS, ANSWER = (1, 17, 64, 130, 300, 511), 24  # tokens
MARGIN = 0.3  # of the logits' deviation: what bfloat16 may decide either way
MEDIAN = 0.03  # of the logits' deviation: how far they may be apart
MAX_LEN = 16384  # a layer's cache has 67 MB or more: what a product may take for itself is less
SETTINGS = {"slots": 4, "max_len": MAX_LEN, "chunk_sizes": (256,), "dtype": "bfloat16", "prefix_reuse": False}


def make_config(head_dim: int, window: int | None, soft_cap: float | None = None) -> ModelConfig:
    """Two layers like Llama's; the second has the window."""
    rope = Rope(tuple((1e4 ** -(np.arange(0, head_dim, 2) / head_dim)).tolist()))
    layers = tuple(LayerConfig(one, rope) for one in (None, window))
    return ModelConfig(
        vocab_size=1024,
        width=512,
        mlp_width=1024,
        num_heads=8,
        num_kv_heads=4,
        head_dim=head_dim,
        layers=layers,
        max_positions=MAX_LEN,
        norm_eps=1e-5,
        attention_soft_cap=soft_cap,
    )


MODELS = {"h64": make_config(64, None), "h128_window": make_config(128, 100, 30.0)}


def compare_engines(name: str, implementation: str) -> dict[str, Any]:
    """Greedy answers of both engines, held against the logits of `xla` over the same tokens; and the cache's copies."""
    config = MODELS[name]
    model = Transformer(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in PROMPTS]
    result: dict[str, Any] = {"implementation": implementation}
    answers, reasons = {}, []
    for one in dict.fromkeys((implementation, "xla")):
        answers[one], result[one] = serve(model, one, prompts)
        reasons += [f"{one}: {reason}" for reason in result[one].pop("reasons")]
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers[implementation], strict=True)]
    ours, theirs = (logits_of(model, one, sequences) for one in (implementation, "xla"))
    worst, apart = 0.0, []
    for prompt, answer, mine, right in zip(prompts, answers[implementation], ours, theirs, strict=True):
        deviation = right.std()
        drawn = right[len(prompt) - 1 : len(prompt) - 1 + len(answer)]  # row t gives token t + 1
        short = drawn.max(-1) - drawn[np.arange(len(answer)), answer]
        worst = max(worst, float(short.max() / deviation))
        apart.append(np.abs(mine - right).ravel() / deviation)
    result["worst_margin"], result["median_apart"] = worst, float(np.median(np.concatenate(apart)))
    result["most_apart"] = float(max(one.max() for one in apart))
    pairs = list(zip(answers[implementation], answers["xla"], strict=True))
    result["same_tokens"] = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
    result["tokens"] = sum(len(one) for one, _ in pairs)
    if not worst < MARGIN:
        reasons.append(f"a token that is {worst:.2f} deviations worse than the best by xla's logits")
    if not result["median_apart"] < MEDIAN:
        reasons.append(f"logits are {result['median_apart']:.3f} deviations apart in the median")
    return result | {"status": "wrong" if reasons else "ok", "reason": "; ".join(reasons)}


def serve(model: Transformer, implementation: str, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    """The answers, and what it took; `reasons`: why not all is well with them."""
    start = time.perf_counter()
    engine = Engine(model, EngineConfig(attention=implementation, **SETTINGS))  # type: ignore[arg-type]
    compiled = time.perf_counter()
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    served = time.perf_counter()
    again = engine.generate(prompts, params)
    figures: dict[str, Any] = {
        "compile_s": compiled - start,
        "first_serve_s": served - compiled,
        "serve_s": time.perf_counter() - served,
        "turns": engine.stats.turns // 2,
        "cache_bytes": engine.runner.cache_bytes,
        "temp_bytes": {},
        "reasons": [],
    }
    figures["reasons"] += [f"a request failed: {one.error}" for one in outputs if one.error is not None]
    if [one.token_ids for one in again] != [one.token_ids for one in outputs]:
        figures["reasons"].append("the same requests gave other tokens the second time")
    layer_bytes = engine.runner.cache_bytes / len(model.config.layers)
    for shape, program in engine.runner.programs.items():
        memory = program.memory_analysis()  # type: ignore[attr-defined]
        figures["temp_bytes"][f"{shape[0]}+{shape[1]}"] = memory.temp_size_in_bytes
        if memory.alias_size_in_bytes < engine.runner.cache_bytes:
            figures["reasons"].append(f"program {shape} does not update the cache in place")
        if memory.temp_size_in_bytes >= layer_bytes:
            mb = memory.temp_size_in_bytes / 1e6
            figures["reasons"].append(f"program {shape} takes {mb:.1f} MB, a layer's cache has {layer_bytes / 1e6:.1f}")
    return [one.token_ids for one in outputs], figures


def logits_of(model: Transformer, implementation: str, sequences: list[list[int]]) -> list[np.ndarray]:
    """float32 logits after each token of each sequence, each computed as one chunk behind nothing."""
    config, rows = model.config, -(-max(map(len, sequences)) // 256) * 256
    cache = init_cache(
        layers=len(config.layers),
        slots=1,
        max_len=rows,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.bfloat16,
        implementation=implementation,
    )

    graph, state = nnx.split(model)

    @jax.jit
    def run(state, cache, tokens, slots):
        model = nnx.merge(graph, state)
        hidden, _ = model(tokens, slots, jnp.arange(rows), cache, num_decode=0, implementation=implementation)
        return model.unembed(hidden)

    found = []
    for sequence in sequences:
        live = np.arange(rows) < len(sequence)
        tokens = np.zeros(rows, np.int32)
        tokens[: len(sequence)] = sequence
        logits = run(state, cache, jnp.asarray(tokens), jnp.asarray(np.where(live, 0, 1).astype(np.int32)))
        found.append(np.asarray(logits)[: len(sequence)])
    return found
