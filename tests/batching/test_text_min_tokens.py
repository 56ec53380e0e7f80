"""Stop strings in the text of the first `min_tokens` tokens do not count; those that later tokens complete do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batching.test_text import NAMES, cases, streamed, tokenizer_named


def by_definition(tokenizer, ids, stop, least):
    """Text, stop string and number of tokens, from the text decoded at once after every token.

    A match does not count if it was there, at the same place, after one of the first `least` tokens.
    """
    early = [tokenizer.decode(ids[:count]) for count in range(1, least + 1)]
    for count in range(least + 1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        places = [(start, -len(one), one) for one in stop for start in range(len(text)) if text.startswith(one, start)]
        found = [
            (start, *rest, one) for start, *rest, one in places if not any(t.startswith(one, start) for t in early)
        ]
        if found:
            start, _, reason = min(found)
            return text[:start], reason, count
    return tokenizer.decode(ids), None, len(ids)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_a_stop_string_that_the_first_tokens_complete_does_not_count(name, data):
    ids, stop = data.draw(cases(name))
    least = data.draw(st.integers(0, len(ids)))
    pieces, reason, count = streamed(tokenizer_named(name), ids, stop, least)
    assert ("".join(pieces), reason, count) == by_definition(tokenizer_named(name), ids, stop, least)
    assert reason is None or count > least


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_characters_that_come_byte_by_byte(data):
    """Where the first tokens end within a character, what they have before it is theirs all the same."""
    tokenizer = tokenizer_named("byte fallback")
    text = data.draw(st.text("aé漢", min_size=1, max_size=6))
    ids = [3 + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    stop = data.draw(st.lists(st.text("aé漢", min_size=1, max_size=2), min_size=1, max_size=2))
    least = data.draw(st.integers(0, len(ids)))
    pieces, reason, count = streamed(tokenizer, ids, stop, least)
    assert ("".join(pieces), reason, count) == by_definition(tokenizer, ids, stop, least)


def test_texts_that_later_tokens_change():
    """By hand: bytes of a character hide what is before them; three letters become another one."""
    fallback, whole = tokenizer_named("byte fallback"), tokenizer_named("as a whole")
    assert streamed(fallback, [3 + byte for byte in "aéa".encode()], ["a"], 2) == (["", "", "", "aé"], "a", 4)
    assert streamed(whole, [0, 0, 0], ["x"], 1) == (["", "", ""], "x", 3)
    assert streamed(whole, [0, 0, 0], ["x"], 3)[1] is None
