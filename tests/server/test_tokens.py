"""Token ids as texts: which ids there are."""

import httpx2
import pytest

from tests.server.servers import SPECIAL, check


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.url, timeout=60) as one:
        yield one


@pytest.mark.parametrize("bad", [320, -1, 2**31, 2**32, -(2**64), 10**200], ids=lambda bad: f"{bad!s:.9}")
def test_ids_outside_the_vocabulary_are_refused(http, bad):
    message = check(http.post("/detokenize", json={"tokens": [5, bad, 6]}), 400, "tokens")["message"]
    assert message == f"tokens holds {bad!s:.80}; the vocabulary is 0 .. 319"


@pytest.mark.parametrize("bad", [["a"], [True], [1.0], [None], [[1]], {}, "a", None])
def test_what_is_no_list_of_ids(http, bad):
    assert "list" in check(http.post("/detokenize", json={"tokens": bad}), 400, "tokens")["message"]


def test_every_id_of_the_vocabulary(http, alone):
    for index, text in enumerate(SPECIAL):
        assert http.post("/detokenize", json={"tokens": [index]}).json() == {"prompt": text}
    ids = list(range(320))
    text = alone.tokenizer.decode(ids, skip_special_tokens=False)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
