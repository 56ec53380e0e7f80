"""Schedules: one set of requests, served in every way there is, and each compared with itself served alone."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from batching import Engine, EngineConfig, Request, SamplingParams, programs
from batching.policies import POLICIES
from model.checkpoint import load

S = 64
SHAPES = ((1, (16,)), (2, (16,)), (3, (16,)), (5, (32,)), (8, (16, 48)))  # slots and chunk sizes


@functools.cache
def tiny():
    return load(Path(__file__).parents[1] / "data" / "llama_tied_gqa4").model


def _params(index: int) -> SamplingParams:
    """Every kind of draw, and every kind of end."""
    kinds = [
        dict(temperature=0.0),
        dict(temperature=1.0, seed=index),
        dict(temperature=0.7, top_k=20, top_p=0.9, seed=1),
        dict(temperature=1.3, min_p=0.02, seed=2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        dict(temperature=0.0, prompt_logprobs=2, logit_bias={5: 3.0, 9: -4.0}),
        dict(temperature=1.0, seed=3, stop_token_ids=list(range(0, 320, 9)), min_tokens=3),
        dict(temperature=1.0, seed=4, n=2),
    ]
    return SamplingParams(max_tokens=(3, 9, 1, 14)[index % 4], logprobs=2, **kinds[index % len(kinds)])


def _prompt(index: int) -> list[int]:
    """Some begin alike."""
    trunk = [(7 * place + 3) % 320 for place in range(30)] if index % 3 else []
    own = [(index * 31 + place * place * 5 + 11) % 320 for place in range((2, 5, 17, 9, 14)[index % 5])]
    return [*trunk, *own]


REQUESTS = [Request(prompt_ids=_prompt(index), params=_params(index), id=str(index)) for index in range(14)]


@dataclass(frozen=True)
class Schedule:
    """A way to serve some of the requests."""

    shape: tuple[int, tuple[int, ...]]
    policy: str
    run_ahead: int
    prefix_reuse: bool
    arrivals: tuple[tuple[int, int, int], ...]  # (step, which request, its priority), in order of submission
    cancels: tuple[tuple[int, int], ...]  # (step, which request)

    def config(self, **how) -> EngineConfig:
        slots, chunk_sizes = self.shape
        own = dict(slots=slots, max_len=S, chunk_sizes=chunk_sizes, policy=self.policy, run_ahead=self.run_ahead)
        return EngineConfig(**own | {"prefix_reuse": self.prefix_reuse} | how)


@st.composite
def schedules(draw, shapes=SHAPES) -> Schedule:
    chosen = draw(st.lists(st.sampled_from(range(len(REQUESTS))), min_size=1, max_size=8, unique=True))
    policy = draw(st.sampled_from(sorted(POLICIES)))
    step = st.integers(0, 12)
    priority = st.integers(0, 3) if policy == "priority" else st.just(0)
    arrivals = [(draw(step), which, draw(priority)) for which in chosen]
    return Schedule(
        shape=draw(st.sampled_from(shapes)),
        policy=policy,
        run_ahead=draw(st.integers(0, 3)),
        prefix_reuse=draw(st.booleans()),
        arrivals=tuple(sorted(arrivals, key=lambda one: one[0])),
        cancels=tuple((draw(st.integers(0, 25)), which) for which in chosen if draw(st.integers(0, 4)) == 0),
    )


class Programs:
    """Compiles each program of the tiny model once. `clear` when they are no longer needed: they are large."""

    def __init__(self) -> None:
        self._made: dict = {}

    def engine(self, config: EngineConfig) -> Engine:
        """A fresh engine; whatever its cache holds that nobody wrote is NaN."""
        patched = {name: self._once(getattr(programs, name)) for name in PATCHED}
        with mock.patch.multiple("batching.runner", **patched):
            engine = Engine(tiny(), config)
        poisoned = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), engine.runner.state.cache)
        engine.runner.state = dataclasses.replace(engine.runner.state, cache=poisoned)
        return engine

    def _once(self, compile_one):
        def compiled(*arguments):
            shapes = [str(one) for one in arguments if isinstance(one, programs.PlanShapes | str)]
            arrays = [leaf.shape for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "shape")]
            key = (compile_one.__name__, *shapes, *arrays[-20:])
            if key not in self._made:
                self._made[key] = compile_one(*arguments)
            return self._made[key]

        return compiled

    def clear(self) -> None:
        self._made.clear()
        jax.clear_caches()


PATCHED = ("compile_programs", "compile_copy", "compile_sampling")


def serve(engine: Engine, schedule: Schedule) -> dict:
    """(request, sample) -> Output. Raises AssertionError where one does not end, or more than once."""
    outputs, step = {}, 0
    arrivals = list(schedule.arrivals)
    while arrivals or engine.unfinished:
        while arrivals and (arrivals[0][0] <= step):
            _, which, priority = arrivals.pop(0)
            engine.submit(dataclasses.replace(REQUESTS[which], priority=priority))
        for at, which in schedule.cancels:
            if at == step:
                engine.cancel(REQUESTS[which].id)
        for output in engine.step():
            key = int(output.id), output.index
            assert key not in outputs, "it ended twice"
            outputs[key] = output
        step += 1
        assert step < 1000, "it does not come to an end"
    wanted = {(which, index) for _, which, _ in schedule.arrivals for index in range(REQUESTS[which].params.n)}
    assert set(outputs) == wanted
    return outputs


def alone(engine: Engine) -> dict:
    """(request, sample) -> Output of each request, served when there is no other."""
    return {
        (which, output.index): output
        for which, request in enumerate(REQUESTS)
        for output in engine.generate([dataclasses.replace(request)])
    }


def check(outputs: dict, expected: dict, *, tolerance: float) -> None:
    """Each request got what it gets alone, or the beginning of that if it was cancelled.

    Args:
        tolerance: on logprobs; 0: the same bits.
    """
    for key, output in outputs.items():
        own = expected[key]
        assert output.finish_reason in (own.finish_reason, "cancelled"), (key, output.error)
        count = len(output.token_ids) if output.finish_reason == "cancelled" else len(own.token_ids)
        assert output.token_ids == own.token_ids[:count], key
        _check_logprobs(output.logprobs, own.logprobs[:count], tolerance)
        if own.prompt_logprobs is not None:
            told = output.prompt_logprobs[1:]
            assert len(told) == len(own.prompt_logprobs) - 1 or output.finish_reason == "cancelled"
            _check_logprobs(told, own.prompt_logprobs[1 : 1 + len(told)], tolerance)


def _check_logprobs(got: list, expected: list, tolerance: float) -> None:
    numbers = [np.float32([[one.logprob, *one.top_logprobs] for one in all_of]) for all_of in (got, expected)]
    if tolerance:
        np.testing.assert_allclose(*numbers, rtol=0, atol=tolerance)
    else:
        np.testing.assert_array_equal(*(one.view(np.int32) for one in numbers))
        assert [one.top_ids for one in got] == [one.top_ids for one in expected]
