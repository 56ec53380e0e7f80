"""SmolLM2 at temperature 1: whatever it would like to say, what it says is valid."""

import re

import pytest

from batching import Engine, EngineConfig, Request, SamplingParams
from tests.batching.schemas import SCHEMAS, check

MESSAGES = [{"role": "user", "content": "Describe a person, a place or a thing of your choice as JSON."}]


@pytest.fixture(scope="module")
def engine():
    try:
        return Engine.from_pretrained("smollm2-135m-instruct", EngineConfig(slots=16, max_len=512, chunk_sizes=(64,)))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def generate(engine, seeds, **constraint):
    """A finished output for each seed."""
    outputs = engine.generate(
        [Request(messages=MESSAGES, params=SamplingParams(seed=seed, **constraint)) for seed in seeds]
    )
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert all(output.stop_reason in engine.eos_ids for output in outputs)
    return [output.text for output in outputs]


@pytest.mark.parametrize("each", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_json_of_every_schema(engine, each):
    """So many texts each: they end, parse and validate."""
    params = [(name, SamplingParams(seed=seed, json_schema=SCHEMAS[name])) for name in SCHEMAS for seed in range(each)]
    outputs = engine.generate([Request(messages=MESSAGES, params=one) for _, one in params])
    for (name, _), output in zip(params, outputs, strict=True):
        assert output.finish_reason == "stop", output.text
        check(output.text, SCHEMAS[name])
    assert len({output.text for output in outputs}) > 5 * each


def test_regular_expressions_and_choices(engine):
    expression = r"[A-Z][a-z]{2,12}( [A-Z][a-z]{2,12})?, (19|20)[0-9]{2}"
    assert all(re.fullmatch(expression, text) for text in generate(engine, range(8), regex=expression))
    choice = ["a person", "a place", "a thing"]
    assert set(generate(engine, range(16), choice=choice)) <= set(choice)
