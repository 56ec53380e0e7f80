"""Documents from files, and packing: every pair of tokens once an epoch, the same order from anywhere."""

import itertools
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.training import data
from scripts.training.data import Packer, Position, held_out, read_documents
from scripts.training.python_text import docstrings, python_text
from scripts.training.step import check_batch
from scripts.training.tokens import Corpus, Document


def corpus(lengths, counts=None):
    """Tokens that are all different: what is where can be seen."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    counts = np.ones(starts[-1], bool) if counts is None else np.array(counts, bool)
    counts[starts[:-1][np.array(lengths) > 0]] = False
    where = tuple(f"document {n}" for n in range(len(lengths)))
    return Corpus(np.arange(starts[-1], dtype=np.int32), counts, starts, where, 0)


def pairs(batch):
    """(token, target) of what counts, in the order of rows."""
    counted = batch.weights > 0
    return list(zip(batch.tokens[counted].tolist(), batch.targets[counted].tolist(), strict=True))


PACKS = st.tuples(
    st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda lengths: max(lengths) > 1),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(0, 2**63 - 1),
)


@settings(deadline=None)
@given(PACKS)
def test_every_pair_of_tokens_is_there_once_an_epoch(pack):
    lengths, rows, length, seed = pack
    made = corpus(lengths)
    packer, limits = Packer(made, rows, length, seed), SimpleNamespace(vocab_size=1000, max_positions=length)
    position, taken, found = Position(), [], []
    while position.epoch < 3:
        batch, after, pieces = packer.batch(position)
        check_batch(batch, limits)
        assert batch.tokens.shape == (rows, length)
        assert len(pieces) > 0
        taken += pieces
        found += pairs(batch)
        position = after
    P, epochs = len(packer.starts), position.epoch  # of few pieces, several epochs are in one batch
    assert taken == list(itertools.chain(*(packer.order(epoch) for epoch in range(epochs + 1))))[: len(taken)]
    assert all(sorted(packer.order(epoch)) == list(range(P)) for epoch in range(epochs + 1))
    assert divmod(len(taken), P) == position
    # All pairs within documents, once in each epoch that is whole, and once at most in the next.
    all_pairs = {(t - 1, t) for t in made.ids[made.counts].tolist()}
    times = {pair: found.count(pair) for pair in all_pairs}
    assert set(times.values()) <= ({epochs, epochs + 1} if position.index else {epochs})
    assert set(found) == all_pairs


@settings(deadline=None)
@given(PACKS, st.integers(0, 20))
def test_the_order_is_the_same_from_anywhere(pack, steps):
    lengths, rows, length, seed = pack
    one, position = Packer(corpus(lengths), rows, length, seed), Position()
    for _ in range(steps):
        position = one.batch(position).after
    again = Packer(corpus(lengths), rows, length, seed).batch(Position(**position._asdict()))
    for mine, other in zip(one.batch(position).batch, again.batch, strict=True):
        np.testing.assert_array_equal(mine, other)


@settings(deadline=None)
@given(PACKS)
def test_once_is_every_pair_once(pack):
    lengths, rows, length, seed = pack
    made = corpus(lengths)
    batches = list(Packer(made, rows, length, seed).once())
    found = sorted(pair for batch in batches for pair in pairs(batch))
    assert found == [(t - 1, t) for t in made.ids[made.counts].tolist()]
    assert len(list(Packer(made, rows, length).once(2))) == min(2, len(batches))


def test_epochs_and_seeds_have_orders_of_their_own():
    made = corpus([9] * 20)
    orders = [tuple(Packer(made, 2, 8, seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_what_does_not_count_is_there_and_weighs_nothing():
    """Prompts of 3 and 2 tokens, completions of 2 and 1."""
    packer = Packer(corpus([5, 3], counts=[0, 0, 0, 1, 1, 0, 0, 1]), 2, 4)
    (batch,) = packer.once()
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [5, 6, 0, 0]]
    assert batch.weights.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert pairs(batch) == [(2, 3), (3, 4), (6, 7)]
    assert packer.shortened == 0


def test_an_answer_is_learnt_from_all_that_is_before_it():
    """Five documents longer than a piece: a text, a long prompt, a long completion, a chat, and one just too long."""
    masks = [0, *[1] * 9], [*[0] * 96, 1, 1], [0, 0, *[1] * 9], [*[0] * 2, *[1] * 2, *[0] * 5, 1], [*[0] * 4, 1, 1]
    packer = Packer(corpus([len(mask) for mask in masks], list(itertools.chain(*masks))), 1, 4)
    begins = packer.corpus.starts.tolist()
    assert packer.starts.tolist() == [0, 4, 8, begins[2], begins[3], begins[4]]
    assert packer.where(range(1, 4)) == ["document 0", "document 2"]
    assert packer.shortened == 4
    learnt = [pairs(batch) for batch in packer.once()]
    assert [len(one) for one in learnt] == [4, 4, 1, 3, 2, 1]
    with pytest.raises(ValueError, match="prompts of over 4"):
        Packer(corpus([98], masks[1]), 1, 4)
    assert Packer(corpus([98], masks[1]), 1, 97).shortened == 0


def test_pieces_know_their_documents():
    packer = Packer(corpus([5, 0, 12, 3]), 1, 4)
    assert packer.where(range(len(packer.starts))) == ["document 0", "document 2", "document 3"]
    with pytest.raises(ValueError, match="no token counts"):
        Packer(corpus([1, 1]), 1, 4)


def test_files_of_a_folder_in_order(tmp_path):
    for name, text in (("b.txt", "two"), ("a/z.md", "one"), ("c.rst", ""), (".git/x.txt", "no"), ("d.bin", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "e.jsonl").write_text('{"text": "three"}\n\n{"prompt": "4", "completion": "5"}\n')
    found = read_documents(tmp_path)
    assert [one.content for one in found] == ["one", "two", "three", ("4", "5")]
    assert [one.where.removeprefix(f"{tmp_path}/") for one in found] == [
        "a/z.md",
        "b.txt",
        "e.jsonl line 1",
        "e.jsonl line 3",
    ]
    assert read_documents(tmp_path / "b.txt") == [Document(f"{tmp_path}/b.txt", "two")]


def test_a_text_is_its_file_without_a_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n')
    found = read_documents(tmp_path)
    assert [one.content for one in found] == ["one\r\ntwo\rthree\n", "one", "two"]
    assert found[-1].where.endswith("b.jsonl line 3")


@settings(deadline=None)
@given(st.lists(st.text("ab é\r\n", max_size=12) | st.text("a", min_size=12, max_size=50), max_size=30))
def test_a_long_text_is_cut_and_nothing_is_lost(tmp_path_factory, lines):
    file, text = tmp_path_factory.getbasetemp() / "long.txt", "".join(lines) + "end"
    file.write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "PART", 16)
        found = read_documents(file)
    assert "".join(one.content for one in found) == text
    assert all(0 < len(one.content) <= 16 for one in found)
    assert [one.whole for one in found] == [False] * (len(found) - 1) + [True]
    for one, after in itertools.pairwise(found):  # at the end of a line, or within one that is too long
        first = after.content.splitlines(keepends=True)[0]
        assert one.content.endswith(("\n", "\r")) or len(one.content) == 16 or len(one.content) + len(first) > 16


def test_a_text_without_lines_takes_linear_time(tmp_path):
    (tmp_path / "line.txt").write_text("a b " * 8_000_000)
    began = time.process_time()
    found = read_documents(tmp_path / "line.txt")
    assert time.process_time() - began < 1
    assert len(found) == math.ceil(32_000_000 / data.PART)
    assert sum(len(one.content) for one in found) == 32_000_000


BAD = {
    '{"text": "a"': "line 2: not JSON",
    '["text"]': "line 2: must be an object",
    '{"text": 5}': "line 2: must hold strings",
    '{"prompt": "a", "completion": null}': "line 2: must hold strings",
    '{"prompt": "a"}': "{text} or {prompt, completion} or {messages}",
    '{"text": "a", "weight": 2}': "weight",
    "[" * 100_000: "line 2: not JSON",
    '{"messages": "hello"}': "line 2: messages must be a list, not 'hello'",
    '{"messages": null}': "line 2: messages must be a list",
    '{"text": "a\\ud800"}': "line 2: has a lone surrogate: '\\ud800'",
    '{"prompt": "a", "completion": "\\udc00"}': "line 2: has a lone surrogate",
    '{"text": "a", "text": "b"}': "line 2: the key 'text' is given more than once",
    '{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}': "line 2: the key 'role' is given",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named(tmp_path, line):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"lines\.jsonl") as error:
        read_documents(file)
    assert BAD[line] in str(error.value)


def test_what_holds_no_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "other.pdf").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, reason in (
        ("empty.txt", "no text"),
        ("latin.txt", "UTF-8"),
        ("other.pdf", ".txt"),
        ("folder", "no file"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_documents(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_documents(tmp_path / "nothing.txt")


def test_held_out_documents_are_always_the_same():
    documents = [Document(f"{n}", "text") for n in range(40)]
    kept, out = held_out(documents, 0.05)
    assert len(out) == 2
    assert sorted(kept + out) == sorted(documents)
    assert held_out(documents, 0.05) == (kept, out)
    assert len(held_out(documents[:3], 0.05)[1]) == 1
    assert held_out(documents, 0) == (documents, [])
    with pytest.raises(ValueError, match="1 documents cannot be divided"):
        held_out(documents[:1], 0.05)


def test_python_documents_itself(tmp_path):
    text = python_text()
    paragraphs = text.removesuffix("\n").split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert "Assert statements are a convenient way" in text
    assert json.JSONDecoder.__doc__.split("\n\n")[0] in text
    (tmp_path / "broken.py").write_text("def f(:")
    assert docstrings(tmp_path / "broken.py") == []
