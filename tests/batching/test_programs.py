"""The compiled programs of an engine: all made before the first request, and none copies the cache."""

import re
from pathlib import Path

import jax
import pytest

from batching import Engine, EngineConfig, SamplingParams
from model.checkpoint import load
from tests.batching.compiling import compile_events

DATA = Path(__file__).parents[1] / "data"
S = 96


FIELDS = [
    SamplingParams(max_tokens=9, **fields)
    for fields in (
        {"top_k": 5},
        {"top_k": 200, "top_p": 0.99, "min_p": 0.01, "n": 2},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"logit_bias": {1: 1.0}, "allowed_token_ids": range(99)},
        {"min_tokens": 3, "stop_token_ids": (1,)},
        {"logprobs": 3},
        {"prompt_logprobs": 20},
    )
]


@pytest.mark.parametrize(
    ("attention", "programs"),
    [
        ("xla", [(4, 0), (4, 16), (4, 64), (5, 0), (5, 16), (5, 64)]),
        (None, [(0, n) for n in (4, 5, 8, 16, 21, 32, 48, 64, 69)]),
    ],
)
def test_nothing_compiles_after_warm_up(attention, programs):
    config = EngineConfig(slots=5, max_len=S, chunk_sizes=(16, 64), attention=attention)
    engine = Engine(load(DATA / "llama_tied_gqa4").model, config)
    assert sorted(engine.runner.programs) == programs
    with compile_events() as compiled:
        outputs = engine.generate(
            [[5] * length for length in range(1, S + 1)], SamplingParams(max_tokens=1, temperature=0.5)
        )
        engine.generate([[1]], SamplingParams(temperature=0))
        engine.generate([[1] * 20] * 7, FIELDS)
    assert [output.completion_tokens for output in outputs] == [1] * S
    assert compiled == []


@pytest.mark.parametrize(
    "name",
    ["llama_tied_gqa4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral_window", "mixtral_moe"))],
)
def test_no_step_copies_the_cache(name):
    """By the compiler's own account: the cache is aliased, and temporaries are smaller than one layer's keys."""
    model = load(DATA / name).model
    engine = Engine(model, EngineConfig(slots=64, max_len=2048, chunk_sizes=(16,)))
    cache = jax.tree.leaves(engine.runner.state.cache)
    for shape, program in engine.runner.programs.items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= engine.runner.cache_bytes, shape
        assert memory.temp_size_in_bytes < cache[0].nbytes, shape
        text = re.escape("f32[" + ",".join(map(str, cache[0].shape)) + "]")
        assert not re.search(rf"= {text}\S* copy\(", program.as_text()), shape
