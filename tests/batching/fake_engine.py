"""An `Engine` on a `FakeDevice`: queue, text, streams and cancellation as they are, tokens known beforehand."""

from functools import cache
from pathlib import Path
from unittest import mock

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from batching import Engine, EngineConfig, Request, SamplingParams
from model.checkpoint import load
from model.tokenizer import Tokenizer
from tests.batching.fake import VOCABULARY, FakeDevice, alone

LETTERS = [chr(0x4E00 + index) for index in range(VOCABULARY)]  # token 0 is the first of them, and so on


@cache
def letters() -> Tokenizer:
    """One character a token; the model's ids from 97 on are unknown to it."""
    core = Core(models.WordLevel({letter: index for index, letter in enumerate(LETTERS)}, unk_token=LETTERS[0]))
    core.decoder = decoders.Sequence([decoders.Fuse()])
    return Tokenizer(core)


def text_of(tokens) -> str:
    return "".join(LETTERS[token] for token in tokens)


@cache
def _model():
    return load(Path(__file__).parents[1] / "data" / "llama_tied_gqa4").model


def fake_engine(slots=2, max_len=64, *, tokenizer=None, eos_ids=(), **config) -> Engine:
    """`engine.device` is its device. No program is compiled."""
    chosen = EngineConfig(**{"slots": slots, "max_len": max_len, "chunk_sizes": (16,)} | config)
    names = ("compile_programs", "compile_copy", "compile_sampling")
    with mock.patch.multiple("batching.runner", **dict.fromkeys(names, mock.DEFAULT)):
        engine = Engine(_model(), chosen, tokenizer=tokenizer, eos_ids=eos_ids)
    engine.device = FakeDevice(slots, max_len)

    def run(turn):
        for copy in turn.copies:
            engine.device.copy(copy)
        return engine.device.step(turn.plan.rows)

    engine.run = run
    return engine


def request_of(name, prompt, **params) -> Request:
    return Request(prompt_ids=list(prompt), params=SamplingParams(**params), id=name)


def prompt_of(length, seed=0) -> list[int]:
    """Different prompts for different seeds."""
    return [(seed * 7 + 3 * index + index * index) % VOCABULARY for index in range(length)]


def expected_of(request) -> list[int]:
    """What a request gets that only its length ends."""
    return alone(request.prompt_ids, request.params.max_tokens)


def check_slots(engine) -> None:
    """No slot leaked or is held twice."""
    held = [one.slot for one in engine.scheduler.running]
    assert sorted(held + engine.scheduler.free) == list(range(engine.config.slots))


def finish(engine) -> list:
    """Step until nothing is left; the Outputs."""
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
        check_slots(engine)
    assert not engine.delivery.waiting
    assert not engine._unqueued
    return outputs
