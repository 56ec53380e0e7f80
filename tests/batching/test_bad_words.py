"""Words that may not be generated: their token ids, how many there may be, and when nothing else is left."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers

from batching import Engine, EngineConfig, SamplingParams
from batching.intake import Intake
from model.checkpoint import load
from model.tokenizer import Tokenizer

V = 320


def spaced_words() -> Tokenizer:
    """Token 5 is "w5", and words stand between spaces."""
    core = Core(models.WordLevel({f"w{index}": index for index in range(V)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(core)


def test_a_row_that_may_draw_nothing_ends_with_an_error_alone():
    """Two tokens are allowed, and each would complete a word after either of them."""
    model = load(Path(__file__).parents[1] / "data" / "llama_tied_gqa4").model
    engine = Engine(model, EngineConfig(slots=3, max_len=96, chunk_sizes=(16,)), tokenizer=spaced_words())
    greedy = {"max_tokens": 5, "temperature": 0}
    nothing = {"allowed_token_ids": [7, 8], "bad_words": ["w7 w7", "w7 w8", "w8 w7", "w8 w8"]}
    (plain,) = engine.generate([[5, 6]], SamplingParams(**greedy))
    bad, good = engine.generate([[5, 6]] * 2, [SamplingParams(**greedy, **nothing), SamplingParams(**greedy)])
    assert (bad.finish_reason, bad.completion_tokens) == ("error", 1)
    assert bad.error == "the logits after 3 tokens leave no token that is allowed"
    assert good.token_ids == plain.token_ids
    with pytest.raises(ValueError, match="together leave no token that may be sampled"):
        engine.generate([[5]], SamplingParams(allowed_token_ids=[7], bad_words=["w7"]))


@pytest.mark.parametrize("words", [["the"], [" the"], ["The cat", "xyzzyx"], ["日本"]])
def test_bad_words_as_vllm_encodes_them(words):
    """With and without a space before the word, the second where it is as many tokens and begins with another one."""
    tokenizer = load("smollm2-135m-instruct").tokenizer
    expected = []
    for word in words:
        plain, spaced = (tokenizer.encode(text + word.lstrip(), add_special_tokens=False) for text in ("", " "))
        expected.append(tuple(plain))
        if plain[0] != spaced[0] and len(plain) == len(spaced):
            expected.append(tuple(spaced))
    intake = Intake(tokenizer.vocab_size, frozenset(), tokenizer, None)
    assert intake._bad_words(SamplingParams(bad_words=words)) == tuple(expected)
    assert tokenizer.decode(expected[0]).strip() == words[0].strip()


def test_bad_words_are_limited():
    intake = Intake(V, frozenset(), spaced_words(), None)
    with pytest.raises(ValueError, match="9 tokens; at most 8 can be"):
        intake._bad_words(SamplingParams(bad_words=[" ".join(["w1"] * 9)]))
    many = [f"w1 w{index}" for index in range(33)]
    with pytest.raises(ValueError, match=r"33 sequences of several tokens.*at most 32 are looked for"):
        intake._bad_words(SamplingParams(bad_words=many))
    assert len(intake._bad_words(SamplingParams(bad_words=[*many[:32], *(f"w{index}" for index in range(99))]))) == 131
