"""Words that may not be generated: their token ids, how many there may be, and when nothing else is left."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers

from batching import Engine, EngineConfig, SamplingParams
from batching.intake import Intake
from model.checkpoint import load
from model.tokenizer import Tokenizer
from tests.batching.test_grammar import byte_level

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
    assert bad.unservable
    assert good.token_ids == plain.token_ids
    with pytest.raises(ValueError, match="together leave no token that may be sampled"):
        engine.generate([[5]], SamplingParams(allowed_token_ids=[7], bad_words=["w7"]))


def intake_of(tokenizer: Tokenizer) -> Intake:
    return Intake(tokenizer.vocab_size, frozenset(), tokenizer, None, max_len=96, max_queue=8)


def spelt(tokenizer: Tokenizer, *words: str) -> list[list[str]]:
    """The forms of bad words as the tokenizer spells its tokens."""
    forms = intake_of(tokenizer)._bad_words(SamplingParams(bad_words=words))
    return [[tokenizer._core.id_to_token(token) for token in form] for form in forms]


def test_bad_words_with_and_without_a_space_before_them():
    """In as many tokens, in fewer, in more, and in the same ones behind a space of its own."""
    assert spelt(byte_level("Ġa"), "a") == [["a"], ["Ġa"]]
    assert spelt(byte_level("ab", "Ġab"), "abb", "ab") == [["ab", "b"], ["Ġab", "b"], ["ab"], ["Ġab"]]
    assert spelt(byte_level("Ġa", "ab"), "ab") == [["ab"], ["Ġa", "b"]]
    assert spelt(byte_level("bb", "Ġb", "ab"), " ab") == [["ab"]], "after a space comes the same token"
    assert spelt(spaced_words(), "w5") == [["w5"]]


@pytest.fixture(scope="module")
def smollm2():
    try:
        return load("smollm2-135m-instruct")
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_bad_words_in_the_default_model_s_tokens(smollm2):
    assert spelt(smollm2.tokenizer, "the") == spelt(smollm2.tokenizer, " the") == [["the"], ["Ġthe"]]
    assert spelt(smollm2.tokenizer, "stupid") == [["st", "up", "id"], ["Ġstupid"]]
    assert spelt(smollm2.tokenizer, "The cat", "xy") == [["The", "Ġcat"], ["ĠThe", "Ġcat"], ["xy"], ["Ġxy"]]


@pytest.mark.slow
def test_the_default_model_never_says_a_bad_word(smollm2):
    """It is made to want nothing else, at the start of the text and after a space."""
    config = EngineConfig(slots=2, max_len=64, chunk_sizes=(16,))
    engine = Engine(smollm2.model, config, tokenizer=smollm2.tokenizer)
    for word in ("stupid", "Paris", "banana"):
        for text in (word, f" {word}"):
            wanted = dict.fromkeys(smollm2.tokenizer.encode(text, add_special_tokens=False), 60)
            params = [
                SamplingParams(max_tokens=12, temperature=0, logit_bias=wanted, bad_words=words)
                for words in ([], [word])
            ]
            free, bound = engine.generate(["She said:"] * 2, params)
            assert text * 2 in free.text
            assert word not in bound.text


def test_bad_words_are_limited():
    intake = intake_of(spaced_words())
    with pytest.raises(ValueError, match="9 tokens; at most 8 can be"):
        intake._bad_words(SamplingParams(bad_words=[" ".join(["w1"] * 9)]))
    with pytest.raises(ValueError, match=r"bad_words holds 'w1 \\ud800': .*surrogate"):
        intake._bad_words(SamplingParams(bad_words=["w1 \ud800"]))
    many = [f"w1 w{index}" for index in range(33)]
    with pytest.raises(ValueError, match=r"33 sequences of several tokens.*at most 32 are looked for"):
        intake._bad_words(SamplingParams(bad_words=many))
    assert len(intake._bad_words(SamplingParams(bad_words=[*many[:32], *(f"w{index}" for index in range(99))]))) == 131
