"""What of a document is to be predicted, and a tokenizer that is trained on the documents."""

import json
import tracemalloc

import numpy as np
import pytest
from rich.console import Console

from model.tokenizer import load_tokenizer
from scripts.training.tokens import EOS, Document, tokenise, train_tokenizer
from tests.training.micro import TEMPLATE, sentences, write_inputs

CONSOLE = Console(stderr=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_inputs(tmp_path_factory.mktemp("inputs")) / "tokenizer")


def texts(corpus, tokenizer, document=0):
    """The tokens of a document that do not count, and those that do, as text."""
    place = slice(*corpus.starts[document : document + 2])
    ids, counts = corpus.ids[place], corpus.counts[place]
    return [tokenizer.decode(ids[counts == wanted].tolist(), skip_special_tokens=False) for wanted in (False, True)]


def made(content, tokenizer, whole=True):
    return tokenise([Document("here", content, whole)], tokenizer, tokenizer.eos_ids, 300, CONSOLE)


def test_all_of_a_text_counts_but_its_first_token(tokenizer):
    corpus = made("the cat sat on é", tokenizer)
    first, rest = texts(corpus, tokenizer)
    assert first + rest == f"the cat sat on é{EOS}"
    assert corpus.targets == len(corpus.ids) - 1
    assert corpus.text_bytes == len("the cat sat on é".encode()) - len(first)
    assert tokenizer.decode(made("the cat", tokenizer, whole=False).ids, skip_special_tokens=False) == "the cat"


def test_of_a_pair_the_completion_counts(tokenizer):
    corpus = made(("the cat", " sat"), tokenizer)
    assert texts(corpus, tokenizer) == ["the cat", f" sat{EOS}"]
    assert corpus.text_bytes == len(" sat")
    first, rest = texts(made(("", "a cat"), tokenizer), tokenizer)
    assert first + rest == f"a cat{EOS}"


def test_of_a_chat_all_answers_count(tokenizer):
    roles = ("system", "be small"), ("user", "a cat"), ("assistant", " it sat "), ("user", "on"), ("assistant", "a mat")
    messages = [{"role": role, "content": content} for role, content in roles]
    corpus = made(messages, tokenizer)
    asked, said = texts(corpus, tokenizer)
    assert asked == "[system]be small[user]a cat[assistant][user]on[assistant]"
    assert said == f"it sat{EOS}a mat{EOS}"  # as the template trims it
    assert corpus.text_bytes == len("it sata mat")
    # The tokens of the prompt are those with which the model is asked for its answer.
    assert corpus.ids.tolist()[: len(prompt := tokenizer.encode_chat(messages[:2]))] == prompt


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "ends with the assistant's"),
        ([{"role": "user", "content": "a"}], "ends with the assistant's"),
        ([{"role": "assistant", "content": "a"}], "cannot begin"),
        ([{"role": "user"}, {"role": "assistant", "content": "a"}], "'content' must be a string"),
        ([{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}], "'content' must be a string"),
        ("\ud800", "surrogate"),
    ],
)
def test_what_is_no_chat_is_named(tokenizer, content, reason):
    with pytest.raises(ValueError, match="here") as error:
        made(content, tokenizer)
    assert reason in str(error.value)


ASKED, SAID = {"role": "user", "content": "a cat"}, {"role": "assistant", "content": "sat"}


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (f"the cat {EOS} sat", "the text"),
        (f"the cat{EOS}", "the text"),
        (("the cat", f" sat{EOS}"), "the completion"),
        ([ASKED, SAID | {"content": f"abc {EOS} def"}], "message 1"),
        ([ASKED | {"content": f"a {EOS} cat"}, SAID], "message 0"),
        ([ASKED, SAID, ASKED, SAID | {"calls": [{"name": f"{EOS}"}]}], "message 3"),
    ],
)
def test_the_text_of_an_end_is_refused(tokenizer, content, name):
    with pytest.raises(ValueError, match="here") as error:
        made(content, tokenizer)
    assert f"here: {name} holds '{EOS}'" in str(error.value)


def test_a_prompt_may_hold_the_text_of_an_end(tokenizer):
    prompt = f"a cat{EOS}a mat"
    corpus = made((prompt, " sat"), tokenizer)
    assert texts(corpus, tokenizer) == [prompt, f" sat{EOS}"]
    assert corpus.ids.tolist()[: -corpus.targets] == tokenizer.encode(prompt)


def test_tokens_take_little_memory(tokenizer):
    tracemalloc.start()
    corpus = made("the cat sat " * 50_000, tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.ids.dtype == np.int32
    assert peak < 80 * len(corpus.ids)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("<|endoftext|>", "."), "none of the EOS tokens"),
        (("[{{ m.role }}]", "[{{ m.role }} of {{ messages | length }}]"), "changes what came before"),
    ],
)
def test_a_template_that_cannot_be_learnt_from_is_refused(tmp_path, change, reason):
    folder = write_inputs(tmp_path) / "tokenizer"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    changed = config | {"chat_template": TEMPLATE.replace(*change)}
    (folder / "tokenizer_config.json").write_text(json.dumps(changed))
    roles = ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")
    with pytest.raises(ValueError, match=reason):
        made([{"role": role, "content": content} for role, content in roles], load_tokenizer(folder))


def test_a_vocabulary_that_is_too_small_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"token \d+, but the model's vocabulary is of 200"):
        tokenise([Document("here", "the cat sat")], tokenizer, [0], 200, CONSOLE)


def test_a_trained_tokenizer_is_read_back(tmp_path):
    text = "".join(sentences(100))
    train_tokenizer([Document("", text), Document("", ("prompt", "completion"))], 320, tmp_path / "one")
    train_tokenizer([Document("", text), Document("", ("prompt", "completion"))], 320, tmp_path / "two")
    one = load_tokenizer(tmp_path / "one")
    assert (one.vocab_size, one.eos_ids, one.adds_bos) == (320, {0}, False)
    other = "Any text: ünïcode, \x00, 你好,\n\t  spaces"
    assert one.decode(one.encode(other)) == other
    assert len(one.encode(text)) < 0.5 * len(text)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    with pytest.raises(ValueError, match="256 has no room"):
        train_tokenizer([], 256, tmp_path / "small")
    with pytest.raises(ValueError, match="here: messages need a tokenizer"):
        train_tokenizer([Document("here", [{}])], 320, tmp_path / "chat")


def test_a_fingerprint_is_of_tokens_documents_and_targets(tokenizer):
    one = made("the cat sat", tokenizer)
    assert one.fingerprint() == made("the cat sat", tokenizer).fingerprint()
    pair, other = made(("the cat", " sat"), tokenizer), made("the cat  sat", tokenizer)
    two = tokenise([Document("", "the", False), Document("", " cat sat")], tokenizer, [0], 300, CONSOLE)
    assert np.array_equal(one.ids, pair.ids)
    assert np.array_equal(one.ids, two.ids)
    assert len({corpus.fingerprint() for corpus in (one, pair, other, two)}) == 4
