"""The bytes of tokens, joined, are the text of the tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from model.token_bytes import TokenBytes
from model.tokenizer import Tokenizer
from tests.model.test_tokenizer import byte_level_fields, smollm, spm_fields, tokenizer_from_gguf

TOKENIZERS = {
    "bytes": tokenizer_from_gguf(byte_level_fields()),
    "sentencepiece": tokenizer_from_gguf(spm_fields()),
    "no space before a text": tokenizer_from_gguf(spm_fields(add_space_prefix=False)),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text("abc hé😀\t"))
def test_texts_are_the_bytes_of_their_tokens(name, text):
    tokenizer = TOKENIZERS[name]
    tokens = TokenBytes(tokenizer)
    joined = b"".join(tokens.of[index] for index in tokenizer.encode(text, add_special_tokens=False))
    assert joined.decode().removeprefix(" " if tokens.strips_space else "") == text
    assert b"".join(tokens.of[index] for index in tokens.encode(text)) == text.encode()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_any_tokens_have_the_text_of_their_bytes(name, data):
    tokenizer = TOKENIZERS[name]
    tokens = TokenBytes(tokenizer)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    joined = b"".join(tokens.of[index] for index in ids)
    try:
        text = joined.decode()
    except UnicodeDecodeError:  # a grammar allows no such tokens
        return
    assert tokenizer.decode(ids) == text.removeprefix(" " if tokens.strips_space else "")


def test_only_sentencepiece_strips_a_space():
    assert [TokenBytes(tokenizer).strips_space for tokenizer in TOKENIZERS.values()] == [False, True, False]
    assert TokenBytes(smollm()).strips_space is False


def test_special_tokens_and_ids_without_a_token_have_no_bytes():
    tokenizer = tokenizer_from_gguf(byte_level_fields(token_type=[1] * 258 + [3, 5, 4]))
    assert TokenBytes(tokenizer).of[256:] == [b"he", b" he", b"", b"", b"two words"]
    assert TokenBytes(smollm()).of[:3] == [b"", b"", b""]


def test_decoders_that_want_the_whole_text_are_refused():
    tokenizer = tokenizer_from_gguf(byte_level_fields())
    tokenizer._core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 0, 1)])
    with pytest.raises(ValueError, match="its decoder works on whole texts"):
        TokenBytes(tokenizer)


def test_ids_with_gaps():
    tokenizer = Tokenizer(Core(models.WordLevel({"a": 0, "b": 7}, unk_token="a")))
    assert (tokenizer.decode([7]), tokenizer.vocab_size) == ("b", 8)
