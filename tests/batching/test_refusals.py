"""What cannot be served is refused before any work."""

import re
from pathlib import Path

import numpy as np
import pytest

from batching import Engine, EngineConfig, Request, SamplingParams
from model.checkpoint import load

DATA = Path(__file__).parents[1] / "data"
S = 96


@pytest.fixture(scope="module")
def engine():
    return Engine(load(DATA / "llama_tied_gqa4").model, EngineConfig(slots=2, max_len=S))


REFUSED = [
    ([[]], None, "request 0: the prompt has 0 tokens"),
    ([[1], [320]], None, "request 1: prompt_ids holds 320; the vocabulary is 0 .. 319"),
    ([[-1]], None, "request 0: prompt_ids holds -1"),
    ([[1.5]], None, "request 0: each of prompt_ids must be an integer, not 1.5"),
    ([[True]], None, "request 0: each of prompt_ids must be an integer, not True"),
    (["text"], None, "request 0: the model has no tokenizer"),
    ([[1] * (S + 1)], None, f"request 0: the prompt has {S + 1} tokens; a slot holds 1 to {S}"),
    ([[1] * 90], SamplingParams(max_tokens=8), "90 tokens and max_tokens 8 need 97 positions; a slot holds 96"),
    ([[1]], SamplingParams(stop_token_ids=(320,)), "stop_token_ids holds 320"),
    ([[1]], SamplingParams(allowed_token_ids=(319, 320)), "allowed_token_ids holds 320; the vocabulary is 0 .. 319"),
    ([[1]], SamplingParams(allowed_token_ids=(-1,)), "allowed_token_ids holds -1"),
    ([[1]], SamplingParams(logit_bias={320: 1.0}), "logit_bias holds 320; the vocabulary is 0 .. 319"),
    ([[1]], SamplingParams(bad_words=("a",)), "the model has no tokenizer: bad_words cannot be looked for"),
    (
        [[1]],
        SamplingParams(allowed_token_ids=(7, 8), stop_token_ids=(8, 7), min_tokens=1),
        "allowed_token_ids, bad_words and min_tokens together leave no token that may be sampled",
    ),
    ([[1]], SamplingParams(n=1025), "n is 1025, but the queue holds 1024"),
    ([[1], [1]], [SamplingParams(), SamplingParams(n=10**9)], "request 1: n is 1000000000, but the queue holds 1024"),
    ([[1] * (S + 1)], SamplingParams(max_tokens=0, prompt_logprobs=1), f"the prompt has {S + 1} tokens"),
    ([[1]], [], "1 prompts and 0 params"),
    ([[1]], [{}], "request 0: params must be SamplingParams, not dict"),
    ("text", None, "give a list of prompts, not one str"),
    ([Request(prompt_ids=[1], id="x")] * 2, None, "request 1: the id 'x' is given twice"),
    ([Request(prompt_ids=[1])], SamplingParams(), "request 0: a Request brings its own params"),
]


@pytest.mark.parametrize(("prompts", "params", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refused_before_any_work(engine, prompts, params, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.generate(prompts, params)
    assert not engine.unfinished
    assert engine.stats.turns == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 0}, "slots must be at least 1, not 0"),
        ({"slots": 2.0}, "slots must be an integer, not 2.0"),
        ({"max_len": 0}, "max_len must be at least 1"),
        ({"chunk_sizes": (100,)}, "chunk_sizes must be positive multiples of 16"),
        ({"chunk_sizes": 16}, "chunk_sizes must be a list of integers, not 16"),
        ({"chunk_sizes": (16.0,)}, "each of chunk_sizes must be an integer, not 16.0"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"cache_dtype": "int8"}, "cache_dtype must be one of"),
        ({"policy": "fastest"}, "policy 'fastest' is not one of"),
        ({"attention": "cuda"}, "attention must be one of"),
    ],
)
def test_engine_config_refuses(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EngineConfig(**fields)


def test_a_config_that_does_not_fit_the_model():
    model = load(DATA / "llama_tied_gqa4").model
    with pytest.raises(ValueError, match="max_len 4096 exceeds the model's 2048 positions"):
        Engine(model, EngineConfig(max_len=4096))
    with pytest.raises(ValueError, match="dtype is bfloat16, but the model's weights are float32"):
        Engine(model, EngineConfig(dtype="bfloat16"))


def test_submit_wants_a_request(engine):
    with pytest.raises(ValueError, match="expected a Request, not str"):
        engine.submit("text")


def test_the_config_is_carried_out():
    loaded = load(DATA / "llama_tied_gqa4")
    engine = Engine(loaded.model, EngineConfig(slots=2, max_len=S, cache_dtype="bfloat16", attention="xla"))
    assert {str(leaf.dtype) for layer in engine.runner.state.cache for leaf in layer} == {"bfloat16"}
    assert engine.runner.attention == "xla"
    assert all(decode > 0 for decode, _ in engine.runner.programs), "with blocks, decode rows are apart"
    assert EngineConfig(slots=np.int8(100), chunk_sizes=[np.int16(16)]).chunk_sizes == (16,)
    assert type(EngineConfig(slots=np.int8(100)).slots) is int
