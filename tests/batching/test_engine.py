"""The engine on tiny models: tokens depend on the request alone, nothing compiles or copies after warm-up."""

import dataclasses
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batching import Engine, EngineConfig, QueueFull, Request, SamplingParams
from model.checkpoint import load

DATA = Path(__file__).parents[1] / "data"
S = 96


@pytest.fixture(scope="module")
def tiny():
    return load(DATA / "llama_tied_gqa4")


@pytest.fixture(scope="module")
def alone(tiny):
    """Serves one request by itself."""
    engine = Engine(tiny.model, EngineConfig(slots=1, max_len=S, chunk_sizes=(16,)))
    return lambda request: engine.generate([request])[0].token_ids


def poison(engine):
    """Fill every row that nobody may count on with NaN: all but those that the scheduler says a slot holds."""
    held = [len(engine.scheduler.prefixes.held(slot)) for slot in range(engine.config.slots)]
    if not engine.config.prefix_reuse:
        assert all(held[slot] == 0 for slot in engine.scheduler.free)
    cache = engine.runner.state.cache
    free = np.arange(jax.tree.leaves(cache)[0].shape[2]) >= np.array(held)[:, None]
    cache = jax.tree.map(lambda leaf: jnp.where(free[:, None, :, None], jnp.nan, leaf), cache)
    engine.runner.state = dataclasses.replace(engine.runner.state, cache=cache)


def run_poisoned(engine, requests):
    """Serve, with every row that nobody may count on before a turn full of NaN: in free slots and behind the others."""
    for request in requests:
        engine.submit(request)
    outputs = {}
    while engine.unfinished:
        poison(engine)
        outputs |= {output.id: output for output in engine.step()}
    return outputs


def prompt_of(length, seed):
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def requests_of_many_lengths(temperature=0.0):
    lengths = [1, 15, 16, 17, 31, 32, 33, S - 1, S] + [1 + 89 * i // 22 for i in range(23)]
    return [
        Request(
            prompt_ids=prompt_of(length, seed),
            params=SamplingParams(
                max_tokens=min(1 + 7 * seed % 20, S - length + 1), temperature=temperature, seed=seed
            ),
            id=f"{seed}",
        )
        for seed, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(("temperature", "reuse"), [(0.0, False), (0.8, True)])
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize(
    ("slots", "attention"),
    [(1, None), (3, None), (8, None), pytest.param(3, "xla", marks=pytest.mark.slow), (8, "xla")],
)
def test_tokens_do_not_depend_on_the_schedule(tiny, alone, slots, attention, chunk, temperature, reuse):
    """32 requests of lengths 1 to S, shuffled, rows that nobody holds full of NaN: the same tokens as each alone."""
    requests = requests_of_many_lengths(temperature)
    assert len(requests) == 32
    expected = {request.id: alone(request) for request in requests}
    random.Random(slots * chunk).shuffle(requests)
    config = EngineConfig(slots=slots, max_len=S, chunk_sizes=(chunk,), attention=attention, prefix_reuse=reuse)
    outputs = run_poisoned(Engine(tiny.model, config), requests)
    assert {name: output.token_ids for name, output in outputs.items()} == expected


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral_moe", "olmo2_postnorm")]


@pytest.mark.parametrize("name", ["gemma3_text", *SLOW])
def test_other_families_beside_each_other(name):
    """Windows, experts and post norms under a schedule too."""
    model = load(DATA / name).model
    requests = requests_of_many_lengths()[::4]
    by_slots = [
        run_poisoned(Engine(model, EngineConfig(slots=slots, max_len=S, chunk_sizes=(chunk,))), requests)
        for slots, chunk in ((1, 16), (4, 64))
    ]
    first, second = ({key: output.token_ids for key, output in outputs.items()} for outputs in by_slots)
    assert first == second


def test_static_policy_gives_the_same_tokens(tiny, alone):
    requests = requests_of_many_lengths()
    engine = Engine(tiny.model, EngineConfig(slots=8, max_len=S, chunk_sizes=(64,), policy="static"))
    for output, request in zip(engine.generate(requests), requests, strict=True):
        assert output.token_ids == alone(request)
    static = engine.stats.turns, engine.stats.busy_share
    engine = Engine(tiny.model, EngineConfig(slots=8, max_len=S, chunk_sizes=(64,)))
    engine.generate(requests)
    assert engine.stats.turns < static[0]
    assert engine.stats.busy_share > static[1]


def test_the_policy_changes_only_when_idle(tiny, alone):
    engine = Engine(tiny.model, EngineConfig(slots=2, max_len=S, chunk_sizes=(16,)))
    request = requests_of_many_lengths()[3]
    engine.submit(request)
    with pytest.raises(RuntimeError, match="only while no request is unfinished"):
        engine.reconfigure(policy="static")
    while engine.unfinished:
        engine.step()
    engine.reconfigure(policy="static")
    assert engine.generate([request])[0].token_ids == alone(request)
    with pytest.raises(ValueError, match="'fastest' is not one of"):
        engine.reconfigure(policy="fastest")


def test_non_finite_logits_end_that_request_alone(alone):
    """A token whose embedding is NaN: its request ends with an error, its slot is safe to use again."""
    broken = load(DATA / "llama_untied")
    good = [
        Request(prompt_ids=prompt_of(20, seed), params=SamplingParams(max_tokens=8, temperature=0)) for seed in (1, 2)
    ]
    expected = [output.token_ids for output in Engine(broken.model, EngineConfig(slots=2, max_len=S)).generate(good)]
    weight = broken.model.embed.weight
    weight[...] = weight[...].at[2].set(jnp.nan)  # the prompts hold ids from 3 up, and greedy never chose it
    assert not any(2 in ids for ids in expected)
    engine = Engine(broken.model, EngineConfig(slots=2, max_len=S))
    bad = Request(prompt_ids=[5, 2, 6], params=SamplingParams(max_tokens=8))
    outputs = engine.generate([bad, good[0], good[1]])
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error == "the logits after 3 tokens are not finite"
    assert not outputs[0].unservable
    assert [output.token_ids for output in outputs[1:]] == expected


def test_seeds(tiny):
    engine = Engine(tiny.model, EngineConfig(slots=4, max_len=S))
    drawn = engine.generate([[5, 6]] * 3, SamplingParams(max_tokens=12, temperature=1.5))
    assert len({tuple(output.token_ids) for output in drawn}) == 3
    replay = engine.generate([[5, 6]], SamplingParams(max_tokens=12, temperature=1.5, seed=drawn[1].seed))
    assert replay[0].token_ids == drawn[1].token_ids
    high, low = (SamplingParams(max_tokens=12, temperature=1.5, seed=seed) for seed in (2**32 + 1, 1))
    one, other = engine.generate([[5, 6]] * 2, [high, low])
    assert one.token_ids != other.token_ids, "the high word of a seed counts"


def test_submit_step_cancel(tiny):
    engine = Engine(tiny.model, EngineConfig(slots=2, max_len=S, max_queue=3, run_ahead=0))
    params = SamplingParams(max_tokens=6, temperature=0)
    ids = [engine.submit(Request(prompt_ids=prompt_of(9, seed), params=params)) for seed in range(3)]
    with pytest.raises(QueueFull):
        engine.submit(Request(prompt_ids=[1], params=params))
    with pytest.raises(ValueError, match="still running"):
        engine.submit(Request(prompt_ids=[1], params=params, id=ids[0]))
    assert engine.step() == []
    assert engine.cancel(ids[0]) is True
    assert engine.cancel("nobody") is False
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    assert engine.step() == []
    assert [(output.id, output.finish_reason, output.completion_tokens) for output in outputs] == [
        (ids[0], "cancelled", 1),
        (ids[1], "length", 6),
        (ids[2], "length", 6),
    ]
    times = outputs[1].metrics
    assert times.arrival <= times.admission <= times.first_token == times.tokens[0] <= times.tokens[-1] <= times.end
    assert times.turns == 6


def test_more_requests_than_the_queue_holds(tiny):
    engine = Engine(tiny.model, EngineConfig(slots=2, max_len=S, max_queue=2))
    outputs = engine.generate([[5]] * 20, SamplingParams(max_tokens=2, temperature=0))
    assert len({tuple(output.token_ids) for output in outputs}) == 1
