"""GGUF metadata -> a `tokenizers.Tokenizer`.

Keys as in the GGUF specification (github.com/ggml-org/ggml/blob/master/docs/gguf.md). Which pre-tokenizer a
`tokenizer.ggml.pre` names, and what holds where a key is absent, is what llama.cpp's `llama-vocab.cpp` does; the
expressions themselves and the Unicode normalisation are those of the models' own tokenizer.json files.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # found in a text before it is split, as llama.cpp does

# Special tokens: the name in templates and Hugging Face files -> GGUF key ("seperator": the specification's spelling).
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


@dataclasses.dataclass(frozen=True)
class _Pre:
    """A byte-level pre-tokenizer and the defaults that come with its name."""

    splitter: pre_tokenizers.PreTokenizer
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _split(*expressions: str) -> pre_tokenizers.PreTokenizer:
    """Each expression in turn cuts the pieces that the one before it left; then bytes become letters."""
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS_GPT2 = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SYMBOLS_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _split(_CONTRACTIONS + r"\p{N}{1,3}" + _SYMBOLS_AND_SPACE)
_QWEN2 = _split(_CONTRACTIONS + r"\p{N}" + _SYMBOLS_AND_SPACE)
_TEKKEN = _split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What llama.cpp does with files that name no pre-tokenizer: not GPT-2's, although it contains it.
_DEFAULT = _split(
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

_PRE = {
    "default": _Pre(_DEFAULT),
    "gpt-2": _Pre(_GPT2),
    "phi-2": _Pre(_GPT2),
    "olmo": _Pre(_GPT2, nfc=True),
    "mpt": _Pre(_GPT2, nfc=True),
    "smollm": _Pre(_DIGITS_GPT2),
    "starcoder": _Pre(_DIGITS_GPT2),
    "refact": _Pre(_DIGITS_GPT2),
    "command-r": _Pre(_DIGITS_GPT2, nfc=True),
    "llama-bpe": _Pre(_LLAMA3, ignore_merges=True, add_bos=True),
    "llama3": _Pre(_LLAMA3, ignore_merges=True, add_bos=True),
    "llama-v3": _Pre(_LLAMA3, ignore_merges=True, add_bos=True),
    "smaug-bpe": _Pre(_LLAMA3),
    "dbrx": _Pre(_LLAMA3),
    "qwen2": _Pre(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Pre(_QWEN2),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, add_bos=True),
}


def read_gguf_tokenizer(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `fields` (GGUF metadata as Python values) say of a tokenizer: the arguments of `model.tokenizer.Tokenizer`
    (core, eos_ids, special_tokens, chat_template), or None if there is no token list.

    Raises:
        ValueError: an unknown tokenizer model or pre-tokenizer, or lists that contradict each other.
    """
    if "tokenizer.ggml.tokens" not in fields:
        return None
    values: dict[str, Any] = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    model = values.get("model")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model {model!r} is not supported, only 'gpt2' and 'llama' are")
    if model == "llama":  # the ids that llama.cpp takes where a file does not state them
        values = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | values
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(values["tokens"])]
    named = {name: _token_id(values, key, len(tokens)) for name, key in NAMED_TOKENS.items() if key in values}
    types = _token_types(values, tokens, named)
    vocab = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    if len(vocab) != len(tokens) - types.count(_UNUSED):
        repeated = next(token for index, token in enumerate(tokens) if vocab.get(token, index) != index)
        raise ValueError(f"tokenizer.ggml.tokens has {repeated!r} more than once")

    core, add_bos = _byte_level(values, vocab) if model == "gpt2" else _sentencepiece(values, vocab, types)
    special = {token: types[index] != _USER_DEFINED for token, index in vocab.items() if types[index] in _ADDED}
    core.add_tokens([AddedToken(token, special=flag, normalized=False) for token, flag in special.items()])
    wanted = {"bos_token": values.get("add_bos_token", add_bos), "eos_token": values.get("add_eos_token", False)}
    add_bos_and_eos(core, wanted, named)
    return {
        "core": core,
        "eos_ids": {_token_id(values, key, len(tokens)) for key in ("eos_token_id", "eot_token_id") if key in values},
        "special_tokens": {name: tokens[index] for name, index in named.items()},
        "chat_template": fields.get("tokenizer.chat_template"),
    }


def add_bos_and_eos(core: tokenizers.Tokenizer, wanted: Mapping[str, Any], ids: Mapping[str, int | None]) -> None:
    """Let `core` put BOS before and EOS after a text that is encoded with special tokens, if `wanted`.

    Both mappings are by name (`bos_token`, `eos_token`). Raises ValueError for one that is wanted and has no id.
    """
    used: dict[str, int] = {}
    for name in ("bos_token", "eos_token"):
        if wanted[name]:
            index = ids.get(name)
            if index is None:
                raise ValueError(f"add_{name} is true, but there is no {name}")
            used[name] = index
    core.post_processor = processors.TemplateProcessing(
        single=[*(["bos_token"] if "bos_token" in used else []), "$A", *(["eos_token"] if "eos_token" in used else [])],
        special_tokens=[{"id": name, "ids": [i], "tokens": [core.id_to_token(i)]} for name, i in used.items()],
    )


def _token_id(values: Mapping[str, Any], key: str, count: int) -> int:
    index = values[key]
    if not 0 <= index < count:
        raise ValueError(f"tokenizer.ggml.{key} is {index}, but there are {count} tokens")
    return index


def _token_types(values: Mapping[str, Any], tokens: Sequence[str], named: Mapping[str, int]) -> list[int]:
    """`tokenizer.ggml.token_type`; without it the named tokens are control tokens and all others normal."""
    types = values.get("token_type")
    if types is None:
        return [_CONTROL if index in named.values() else _NORMAL for index in range(len(tokens))]
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return list(types)


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error


def _byte_level(values: Mapping[str, Any], vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's byte-level BPE, and whether BOS is added by default. `add_space_prefix` is not for these models."""
    name = values.get("pre", "default")
    if name not in _PRE:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not a known pre-tokenizer: {', '.join(sorted(_PRE))}")
    if "merges" not in values:
        raise ValueError("tokenizer.ggml.merges is missing, which tokenizer.ggml.model 'gpt2' needs")
    pre = _PRE[name]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in values["merges"])]
    core = tokenizers.Tokenizer(_bpe(vocab, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre.splitter
    core.decoder = decoders.ByteLevel()
    return core, pre.add_bos


def _sentencepiece(
    values: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE: any two neighbours that form a piece may merge, the highest score first; bytes otherwise."""
    scores = values.get("scores")
    if scores is None or len(scores) != len(types):
        count = "no" if scores is None else len(scores)
        raise ValueError(f"tokenizer.ggml.scores has {count} entries for {len(types)} tokens")
    pieces = {token: scores[index] for token, index in vocab.items() if types[index] == _NORMAL}
    # Of the splits of one piece the longest left part first, as merging from the left would meet them.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=pieces.__getitem__, reverse=True)
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    unknown = next((token for token, index in vocab.items() if types[index] == _UNKNOWN), None)
    core = tokenizers.Tokenizer(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = values.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if prefix else text)
    return core, True
