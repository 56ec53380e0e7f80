"""The sampling fields through the engine, all mixed in its batches: what they change, and no neighbour."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from batching import Engine, EngineConfig, Request, SamplingParams
from model.checkpoint import load
from model.kv_cache import init_cache
from tests.batching.test_bad_words import spaced_words
from tests.batching.test_engine import prompt_of
from tests.model.sampling_oracle import edited

DATA = Path(__file__).parents[1] / "data"
S, V, EOS = 96, 320, 2
COUNT = 14
PROMPT = prompt_of(21, 3)
TOLERANCE = 2e-5  # of logprobs: float32 sums in another order
GREEDY = {"max_tokens": COUNT, "temperature": 0}


@pytest.fixture(scope="module")
def model():
    return load(DATA / "llama_tied_gqa4").model


@pytest.fixture(scope="module")
def words():
    return spaced_words()


@pytest.fixture(scope="module")
def engine(model, words):
    config = EngineConfig(slots=3, max_len=S, chunk_sizes=(16,))
    return Engine(model, config, tokenizer=words, eos_ids=[EOS])


@pytest.fixture(scope="module")
def oracle(model):
    """The logits after a history, by a program of its own."""
    config = model.config
    sizes = {"layers": len(config.layers), "slots": 1, "max_len": S, "kv_heads": config.num_kv_heads}
    how = {"implementation": "xla"}
    cache = init_cache(**sizes, head_dim=config.head_dim, dtype=jnp.float32, **how)
    graph, weights = nnx.split(model)

    @jax.jit
    def run(weights, tokens, slots):
        model = nnx.merge(graph, weights)
        hidden, _ = model(tokens, slots, jnp.arange(S), cache, num_decode=0, **how)
        return model.unembed(hidden)

    def logits(history):
        """[len(history), V]"""
        tokens, live = np.zeros(S, np.int32), np.arange(S) < len(history)
        tokens[: len(history)] = history
        return np.float64(run(weights, tokens, np.int32(~live)))[: len(history)]

    return logits


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def serve(engine, *kinds, prompt=PROMPT):
    """An output for each dict of fields, served beside each other."""
    return engine.generate([prompt] * len(kinds), [SamplingParams(**kind) for kind in kinds])


def simulate(oracle, prompt=PROMPT, count=COUNT, **fields):
    """Greedy tokens with what the fields do to the logits, by the oracle's logits."""
    fields = dict(repetition=1.0, presence=0.0, frequency=0.0, early=(), min_tokens=0, of_prompt=prompt) | fields
    early, least, seen = fields.pop("early"), fields.pop("min_tokens"), fields.pop("of_prompt")
    output = []
    while len(output) < count:
        stops = early if len(output) < least else ()
        x = edited(oracle([*prompt, *output])[-1], prompt=seen, output=output, stops=stops, **fields)
        output.append(int(np.argmax(x)))
    return output


def test_each_field_alone_and_all_beside_each_other(engine, oracle):
    """Greedy tokens follow the oracle's arithmetic; a plain request beside them is as it is alone, to the last bit."""
    (plain,) = serve(engine, GREEDY | {"logprobs": 3})
    first, second, third = plain.token_ids[:3]
    allowed = [token for token in range(V) if token % 3]
    bias = {first: -2.0, 100: 100, 101: 99.5}
    fields = {
        "repetition": ({"repetition_penalty": 1.4}, {"repetition": 1.4}),
        "presence": ({"presence_penalty": 2}, {"presence": 2}),
        "frequency": ({"frequency_penalty": 1.5}, {"frequency": 1.5}),
        "bias": ({"logit_bias": bias}, {"bias": [bias.get(token, 0.0) for token in range(V)]}),
        "allowed": ({"allowed_token_ids": allowed}, {"mask": allowed}),
        "bad word": ({"bad_words": [f"w{first}"]}, {"words": [[first]]}),
        "bad words": (
            {"bad_words": [f"w{first} w{second}", f"w{second} w{third} w5"]},
            {"words": [[first, second], [second, third, 5]]},
        ),
        "early": (
            {"min_tokens": 3, "stop_token_ids": [first]},
            {"early": [EOS, first], "min_tokens": 3},
        ),
        "together": (
            {"repetition_penalty": 0.8, "presence_penalty": -1, "logit_bias": {first: 3}, "bad_words": [f"w{third}"]},
            {
                "repetition": 0.8,
                "presence": -1,
                "bias": [3.0 * (token == first) for token in range(V)],
                "words": [[third]],
            },
        ),
    }
    plain_fields = GREEDY | {"logprobs": 3, "ignore_eos": True}
    kinds = [GREEDY | {"ignore_eos": True} | kind for kind, _ in fields.values()]
    outputs = serve(engine, plain_fields, *kinds, plain_fields)
    assert outputs[0].token_ids == outputs[-1].token_ids == plain.token_ids == simulate(oracle)
    assert outputs[0].logprobs == outputs[-1].logprobs == plain.logprobs
    for (name, (_, changes)), output in zip(fields.items(), outputs[1:-1], strict=True):
        expected = simulate(oracle, **changes)
        if output.finish_reason == "stop":
            assert output.stop_reason == first
            expected = expected[: expected.index(first, 3) + 1]
        assert output.token_ids == expected, name
        assert output.token_ids != plain.token_ids, name


def test_a_slots_earlier_user_leaves_nothing_behind(model, words, oracle):
    """One slot: penalties count from nothing again, and who uses none is not touched by what lies there."""
    engine = Engine(model, EngineConfig(slots=1, max_len=S, chunk_sizes=(16,)), tokenizer=words)
    kinds = [
        GREEDY | {"frequency_penalty": 2, "repetition_penalty": 2, "bad_words": ["w1 w2"]},
        GREEDY,
        GREEDY | {"logit_bias": {7: 100}},
        GREEDY | {"frequency_penalty": 2},
    ]
    prompts = [prompt_of(9, seed) for seed in range(4)]
    outputs = engine.generate(prompts, [SamplingParams(**kind) for kind in kinds])
    assert outputs[1].token_ids == simulate(oracle, prompts[1])
    assert outputs[2].token_ids == [7] * COUNT
    assert outputs[3].token_ids == simulate(oracle, prompts[3], frequency=2)


def test_filters(engine, oracle):
    """Every drawn token is one that the filter leaves, by the oracle; the narrowest filters leave the greedy one."""
    (plain,) = serve(engine, GREEDY)
    drawn = {"max_tokens": 30, "temperature": 1.5, "seed": 5, "ignore_eos": True}
    narrow = [
        {"top_k": 1},
        {"top_p": 1e-5},
        {"top_p": 1e-38},
        {"min_p": 1},
        {"temperature": 1e-5},
        {"temperature": 1e-38},
    ]
    for output in serve(engine, *(drawn | {"max_tokens": COUNT} | kind for kind in narrow)):
        assert output.token_ids == plain.token_ids
    off = [{"top_k": 0}, {"top_k": -1}, {"top_k": V}, {"top_k": V + 1}, {"top_k": 2**40}, {"top_p": 1}, {"min_p": 0}]
    (free,) = serve(engine, drawn)
    for output in serve(engine, *(drawn | kind for kind in [*off, {"min_p": 1e-38}])):
        assert output.token_ids == free.token_ids
    kinds = {"top_k": (4, 100), "top_p": (0.1, 0.6), "min_p": (0.3, 0.7)}
    for name, values in kinds.items():
        outputs = serve(engine, *(drawn | {name: value} for value in values))
        assert len({tuple(one.token_ids) for one in (*outputs, free)}) == 3
        for value, output in zip(values, outputs, strict=True):
            rows = oracle([*PROMPT, *output.token_ids])[len(PROMPT) - 1 : -1] / 1.5
            for row, token in zip(rows, output.token_ids, strict=True):
                larger = row > row[token] + 1e-4
                share = np.exp(log_softmax(row))
                left = {
                    "top_k": larger.sum() < value,
                    "top_p": share[larger].sum() < value + 1e-4,
                    "min_p": share[token] > value * share.max() * (1 - 1e-4),
                }
                assert left[name]


def check_top(reported, expected, most):
    """`expected`: all logprobs of each row."""
    for row, one in zip(expected, reported, strict=True):
        assert one.logprob == pytest.approx(row[one.token_id], abs=TOLERANCE)
        assert len(one.top_ids) == len(one.top_logprobs) == most
        np.testing.assert_allclose(one.top_logprobs, np.sort(row)[::-1][:most], atol=TOLERANCE)
        np.testing.assert_allclose(row[one.top_ids], one.top_logprobs, atol=TOLERANCE)


def test_logprobs_are_of_the_models_own_logits(engine, oracle):
    changed = {"logit_bias": {9: 50}, "repetition_penalty": 1.3, "temperature": 0.7, "seed": 3, "max_tokens": COUNT}
    outputs = serve(engine, changed | {"logprobs": 20}, changed | {"logprobs": 0}, changed, GREEDY | {"logprobs": 5})
    assert outputs[2].logprobs is None
    assert [one.token_ids for one in outputs[:3]] == [outputs[0].token_ids] * 3
    for output, most in ((outputs[0], 20), (outputs[1], 0), (outputs[3], 5)):
        expected = log_softmax(oracle([*PROMPT, *output.token_ids])[len(PROMPT) - 1 : -1])
        assert [one.token_id for one in output.logprobs] == output.token_ids
        check_top(output.logprobs, expected, most)


def test_prompt_logprobs_do_not_depend_on_chunks(model, engine, oracle):
    """Of a prompt in chunks of 16, beside decode rows and in one chunk; and scoring alone, which generates nothing."""
    prompt = prompt_of(77, 9)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=4)
    noise = [SamplingParams(max_tokens=20, temperature=1.0, seed=1)] * 2
    *_, chunked = engine.generate([PROMPT[:7], PROMPT[:9], prompt], [*noise, params])
    whole = Engine(model, EngineConfig(slots=1, max_len=S, chunk_sizes=(96,)))
    again, scored, short = whole.generate(
        [prompt, prompt, [5]], [params, *[SamplingParams(max_tokens=0, prompt_logprobs=4)] * 2]
    )
    expected = log_softmax(oracle(prompt))
    for output in (chunked, again, scored):
        assert output.prompt_logprobs[0] is None
        assert [one.token_id for one in output.prompt_logprobs[1:]] == prompt[1:]
        check_top(output.prompt_logprobs[1:], expected[:-1], 4)
    assert (scored.finish_reason, scored.token_ids, scored.completion_tokens) == ("length", [], 0)
    assert short.prompt_logprobs == [None]
    full = Request(prompt_ids=[5] * S, params=SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert len(whole.generate([full])[0].prompt_logprobs) == S


def test_samples(engine):
    """`n` outputs with one id, each as a request of its own with its seed would have it."""
    params = {"max_tokens": COUNT, "temperature": 1.2}
    requests = [
        Request(prompt_ids=PROMPT, id="a", params=SamplingParams(**params, n=5, seed=2**32 - 1)),
        Request(prompt_ids=PROMPT, id="b", params=SamplingParams(**params, seed=7)),
    ]
    outputs = engine.generate(requests)
    assert [(output.id, output.index) for output in outputs] == [*(("a", index) for index in range(5)), ("b", 0)]
    assert outputs[0].seed == 2**32 - 1
    assert len({output.seed for output in outputs[:5]}) == len({tuple(one.token_ids) for one in outputs[:5]}) == 5
    assert [one.token_ids for one in serve(engine, *(params | {"seed": one.seed} for one in outputs))] == [
        one.token_ids for one in outputs
    ]
    deltas = list(engine.stream(requests))
    for output in outputs:
        pieces = [delta for delta in deltas if (delta.id, delta.index) == (output.id, output.index)]
        assert [token for delta in pieces for token in delta.token_ids] == output.token_ids
        assert pieces[-1].output.token_ids == output.token_ids
    unseeded = serve(engine, params | {"n": 2}, params | {"n": 2})
    assert len({one.seed for one in unseeded}) == 4


def test_samples_are_cancelled_together(model):
    engine = Engine(model, EngineConfig(slots=2, max_len=S, chunk_sizes=(16,), max_queue=4))
    request = Request(prompt_ids=[5], id="a", params=SamplingParams(max_tokens=9, n=3))
    engine.submit(request)
    engine.step()
    with pytest.raises(ValueError, match="'a' is still running"):
        engine.submit(request)
    assert engine.cancel("a")
    assert not engine.cancel("a")
    outputs = engine.step()
    assert sorted((one.index, one.finish_reason) for one in outputs) == [(index, "cancelled") for index in range(3)]
    assert not engine.unfinished
    stream = engine.stream([request, Request(prompt_ids=[5], id="b", params=SamplingParams(max_tokens=2, n=4))])
    next(stream)
    assert engine.cancel("b"), "queued or not"
    ends = [delta.output for delta in stream if delta.output is not None]
    assert sorted((one.id, one.index) for one in ends) == [
        *(("a", index) for index in range(3)),
        *(("b", index) for index in range(4)),
    ]
    assert {one.finish_reason for one in ends if one.id == "b"} == {"cancelled"}
    assert not engine._unqueued


def test_prompts_whose_logits_are_not_finite():
    """Where they were asked for it is an error, though the last token's are in order."""
    broken = load(DATA / "mistral_window").model  # what is behind the window does not reach the last token
    weight = broken.embed.weight
    weight[...] = weight[...].at[2].set(jnp.nan)
    prompt = [2, *prompt_of(80, 1)]
    engine = Engine(broken, EngineConfig(slots=2, max_len=S, chunk_sizes=(16,)))
    fields = {"max_tokens": 2, "temperature": 0}
    scored, plain = serve(engine, fields | {"prompt_logprobs": 0}, fields, prompt=prompt)
    assert (scored.finish_reason, scored.error) == ("error", "the logits of the prompt are not finite")
    assert (plain.finish_reason, plain.completion_tokens) == ("length", 2)
