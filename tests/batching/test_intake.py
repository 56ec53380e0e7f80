"""What becomes of a request before it is queued, and that several threads may do it at once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from batching import Request, SamplingParams
from batching.grammar import GrammarCompiler
from batching.intake import Intake
from tests.batching.schemas import SCHEMAS
from tests.batching.test_grammar import PADDED, TOKENIZERS, walk

TOKENIZER = TOKENIZERS["sentencepiece"]
EOS = 0
CONSTRAINTS = [
    *({"json_schema": SCHEMAS[name]} for name in ("nested", "enum", "anyOf")),
    {"regex": "[a-f]{3,9}(é|x)"},
    {"choice": ["a long text that leaves no choice", "another one"]},
]


def make_intake(grammars=None):
    grammars = GrammarCompiler(TOKENIZER, PADDED, [EOS]) if grammars is None else grammars
    return Intake(PADDED, frozenset([EOS]), TOKENIZER, grammars, max_len=64, max_queue=8)


class NoGrammars:
    """Grammars that nobody may ask for."""

    def matcher(self, params, stop_ids):
        raise AssertionError("a grammar is compiled")


@pytest.mark.parametrize(
    ("prompt_ids", "fields", "message"),
    [
        ([1], {"n": 9}, "n is 9, but the queue holds 8"),
        ([1], {"n": 200_000, "max_tokens": 4}, "n is 200000, but the queue holds 8"),
        ([1] * 65, {}, "the prompt has 65 tokens; a slot holds 1 to 64"),
        ([], {}, "the prompt has 0 tokens; a slot holds 1 to 64"),
        ([1] * 60, {"max_tokens": 6}, "60 tokens and max_tokens 6 need 65 positions; a slot holds 64"),
    ],
)
def test_what_never_fits_is_refused_before_a_grammar_is_compiled(prompt_ids, fields, message):
    intake = make_intake(NoGrammars())
    with pytest.raises(ValueError, match=message):
        intake.sequences(Request(prompt_ids=prompt_ids, params=SamplingParams(regex="a", **fields)))


def test_what_just_fits_is_accepted():
    intake = make_intake()
    assert len(intake.sequences(Request(prompt_ids=[1], params=SamplingParams(n=8, regex="a")))) == 8
    for length, tokens in ((64, 1), (60, 5), (64, None)):
        params = SamplingParams(max_tokens=tokens)
        (sequence,) = intake.sequences(Request(prompt_ids=[1] * length, params=params, priority=3))
        assert (len(sequence.prompt), sequence.priority) == (length, 3)


def test_threads_take_in_requests_while_others_follow_their_grammars():
    """The same prompts and texts as one after the other."""

    def serve(intake, index):
        constraint = CONSTRAINTS[index % len(CONSTRAINTS)]
        request = Request(prompt=f"ab {index}", params=SamplingParams(**constraint))
        (sequence,) = intake.sequences(request)
        endless = SamplingParams(**constraint, ignore_eos=True)  # its first mask is computed at once
        intake.sequences(Request(prompt="a", params=endless))
        return sequence.prompt, walk(sequence.grammar, TOKENIZER, EOS, np.random.default_rng(index))

    expected = [serve(make_intake(), index) for index in range(60)]
    for _ in range(3):
        intake = make_intake()
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(serve, [intake] * 60, range(60))) == expected
