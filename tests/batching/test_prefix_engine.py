"""Prefix reuse on the device: the same tokens with it and without, in any layout; the copy is made in place."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batching import Engine, EngineConfig, Request, SamplingParams
from batching.programs import compile_copy
from batching.step import EngineState, copy_prefix, init_state
from model.checkpoint import load
from model.kv_cache import cache_bytes
from model.logits import init_sampling
from pallas_kernels.attention import IMPLEMENTATIONS, cache_shapes
from tests.batching.compiling import compile_events
from tests.batching.test_engine import prompt_of, run_poisoned

DATA = Path(__file__).parents[1] / "data"
S = 160


@pytest.fixture(scope="module")
def tiny():
    return load(DATA / "llama_tied_gqa4")


def requests_that_begin_alike(temperature):
    """40 of them on three trunks, some exactly those that came before, some cut, some gone on."""
    requests = []
    for index in range(40):
        trunk, shared, own = prompt_of(120, index // 4 % 3), (17 * index) % 121, (5 * index) % 30
        prompt = [*trunk[:shared], *prompt_of(max(own, 1 - shared), 100 + index // 2)]
        params = SamplingParams(max_tokens=1 + 7 * index % 10, temperature=temperature, seed=index)
        requests.append(Request(prompt_ids=prompt, params=params, id=str(index)))
    return requests


def serve(model, requests, reuse, **how):
    engine = Engine(model, EngineConfig(max_len=S, prefix_reuse=reuse, **how))
    return engine, run_poisoned(engine, requests)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("name", "slots", "chunk", "attention"),
    [
        pytest.param("llama_tied_gqa4", 1, 16, None, marks=pytest.mark.slow),
        pytest.param("llama_tied_gqa4", 3, 64, None, marks=pytest.mark.slow),
        ("llama_tied_gqa4", 8, 16, None),
        pytest.param("llama_tied_gqa4", 5, 32, "xla", marks=pytest.mark.slow),
        ("gemma3_text", 4, 32, None),
        pytest.param("mixtral_moe", 4, 32, None, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_with_and_without(name, slots, chunk, attention, temperature):
    model, requests = load(DATA / name).model, requests_that_begin_alike(temperature)
    how = {"slots": slots, "chunk_sizes": (chunk,), "attention": attention}
    (off, expected), (on, outputs) = (serve(model, requests, reuse, **how) for reuse in (False, True))
    assert {key: one.token_ids for key, one in outputs.items()} == {key: one.token_ids for key, one in expected.items()}
    assert sum(one.cached_tokens for one in expected.values()) == off.stats.cached_tokens == 0
    assert sum(one.cached_tokens for one in outputs.values()) == on.stats.cached_tokens > 500
    assert on.stats.prompt_tokens == off.stats.prompt_tokens == sum(len(one.prompt_ids) for one in requests)
    assert off.stats.live_rows - on.stats.live_rows == on.stats.cached_tokens


def test_a_conversation_computes_only_what_is_new(tiny):
    """Turn after turn the prompt is all that was said before, and a little more."""
    params = SamplingParams(max_tokens=8, temperature=0)
    engine = Engine(tiny.model, EngineConfig(slots=8, max_len=S, chunk_sizes=(16,)))
    whole = Engine(tiny.model, EngineConfig(slots=3, max_len=S, chunk_sizes=(64,), prefix_reuse=False))
    said = prompt_of(40, 1)
    for turn in range(5):
        (output,), (expected,) = (one.generate([said], params) for one in (engine, whole))
        assert output.token_ids == expected.token_ids
        assert output.cached_tokens == (len(said) - 4 if turn else 0)
        said = [*said, *output.token_ids, *prompt_of(3, turn)]


def test_a_shared_prompt_is_computed_once(tiny):
    """64 requests that share 300 tokens on 16 slots: at least 85 % fewer prompt tokens are computed."""
    system = prompt_of(300, 0)
    prompts = [[*system, *prompt_of(1 + index % 20, index + 1)] for index in range(64)]
    params = [SamplingParams(max_tokens=1 + index % 5, temperature=index % 2, seed=index) for index in range(64)]
    outputs, computed = {}, {}
    for reuse in (False, True):
        config = EngineConfig(slots=16, max_len=384, chunk_sizes=(64,), prefix_reuse=reuse)
        engine = Engine(tiny.model, config)
        outputs[reuse] = [one.token_ids for one in engine.generate(prompts, params)]
        computed[reuse] = engine.stats.prompt_tokens - engine.stats.cached_tokens
    assert outputs[True] == outputs[False]
    assert computed[True] <= 0.15 * computed[False]


def test_a_failed_step_is_survived(tiny):
    """After it the cache is a new one, and nothing is found in it."""
    prompt, params = prompt_of(60, 1), SamplingParams(max_tokens=4, temperature=0)
    engine = Engine(tiny.model, EngineConfig(slots=3, max_len=S, chunk_sizes=(64,)))
    expected = engine.generate([prompt], params)[0]
    programs = dict(engine.runner.programs)

    def failing(*_):
        raise RuntimeError("it broke")

    engine.runner.programs = dict.fromkeys(programs, failing)
    engine.submit(Request(prompt_ids=prompt, params=params))
    with pytest.raises(RuntimeError, match="it broke"):
        engine.step()
    engine.runner.programs = programs
    outputs = engine.generate([prompt, prompt], params)
    assert [one.token_ids for one in outputs] == [expected.token_ids] * 2
    assert [one.cached_tokens for one in outputs] == [0, 59]


def test_samples_of_one_request_share_its_prompt(tiny):
    engine = Engine(tiny.model, EngineConfig(slots=8, max_len=S, chunk_sizes=(16,)))
    request = Request(prompt_ids=prompt_of(100, 1), params=SamplingParams(max_tokens=9, n=6, seed=3))
    outputs = engine.generate([request])
    assert [one.cached_tokens for one in outputs] == [0] + [99] * 5
    assert len({tuple(one.token_ids) for one in outputs}) == 6
    whole = Engine(tiny.model, EngineConfig(slots=3, max_len=S, chunk_sizes=(64,), prefix_reuse=False))
    assert [one.token_ids for one in whole.generate([request])] == [one.token_ids for one in outputs]


def test_penalties_see_a_prompt_that_was_not_computed_and_its_logprobs_are_whole(tiny):
    prompt = [*prompt_of(20, 1)] * 3
    engine = Engine(tiny.model, EngineConfig(slots=3, max_len=S, chunk_sizes=(64,)))
    params = SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, logprobs=2)
    first, second = (engine.generate([prompt], params)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 59)
    assert first.token_ids == second.token_ids
    for one, other in zip(first.logprobs, second.logprobs, strict=True):
        assert one.top_ids == other.top_ids
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, rtol=1e-5)
    scored = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert scored.cached_tokens == 0
    assert len(scored.prompt_logprobs) == 60


def test_a_switch_that_is_no_switch_is_refused():
    with pytest.raises(ValueError, match="prefix_reuse must be true or false, not 'no'"):
        EngineConfig(prefix_reuse="no")


def test_nothing_compiles_for_a_copy(tiny):
    engine = Engine(tiny.model, EngineConfig(slots=8, max_len=S, chunk_sizes=(16,)))
    with compile_events() as compiled:
        outputs = engine.generate([prompt_of(100, 1)] * 4, SamplingParams(max_tokens=1, temperature=0))
    assert [one.cached_tokens for one in outputs] == [0, 99, 99, 99]
    assert compiled == []


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("length", [1, 127, 128, 129, 256])
def test_copied_rows_in_every_layout(implementation, length):
    shapes = cache_shapes(implementation, 3, 2, 256, 16)
    before = tuple(tuple(jax.random.normal(jax.random.key(n), shape) for shape in shapes) for n in range(2))
    others = {"last_token": jnp.arange(3), "sampling": init_sampling(3, 40)}
    state = EngineState(cache=jax.tree.map(jnp.copy, before), **others)
    after = copy_prefix(state, np.int32(2), np.int32(0), np.int32(length))
    for one, other in zip(jax.tree.leaves(after.cache), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one[0, :, :length], other[2, :, :length])
        np.testing.assert_array_equal(one[0, :, -(-length // 128) * 128 :], other[0, :, -(-length // 128) * 128 :])
        np.testing.assert_array_equal(one[1:], other[1:])
    np.testing.assert_array_equal(after.last_token, np.arange(3))


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu", "mosaic_tpu"])
def test_the_copy_does_not_copy_the_cache(tiny, implementation):
    """By the compiler's own account: the state is aliased, and the temporaries hold a block of rows, not a slot."""
    how = {"slots": 64, "max_len": 2048, "cache_dtype": jnp.float32, "implementation": implementation}
    state = init_state(tiny.model.config, **how)
    program, leaf = compile_copy(state), jax.tree.leaves(state.cache)[0]
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes(state.cache)
    assert memory.temp_size_in_bytes < leaf.nbytes / 64
    text = re.escape("f32[" + ",".join(map(str, leaf.shape)) + "]")
    assert not re.search(rf"= {text}\S* copy\(", program.as_text())
