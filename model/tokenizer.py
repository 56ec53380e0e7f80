"""Text <-> token ids, the chat template, and text that comes out token by token."""

import codecs
import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders

from model.files import read_json
from model.tokenizer_gguf import NAMED_TOKENS, add_bos_and_eos, read_gguf_tokenizer


class Tokenizer:
    """Text <-> token ids, chat template, ids that end a generation.

    `eos_ids` is what the tokenizer's own files say, `vocab_size` is above all ids it knows (with added tokens;
    a model's embedding may have more rows), `adds_bos` is whether an empty text encodes to something.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        """`special_tokens` are the variables a template sees (`bos_token`: `"<s>"`, ...)."""
        core.no_truncation()  # tokenizer.json may carry both, left over from training
        core.no_padding()
        self._core = core
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size: int = max(core.get_vocab().values(), default=-1) + 1
        self.adds_bos = bool(self.encode(""))
        self.longest = max(map(len, core.get_vocab()), default=1)  # characters of a token
        self._special_texts = {t.content for t in core.get_added_tokens_decoder().values() if t.special}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for a lone surrogate, which has no UTF-8 and so no token."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text has a lone surrogate at character {error.start}: {text[error.start]!r}") from error
        return self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids  # threads go on

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids beyond the vocabulary (padded embeddings) decode to nothing. No clean-up of spaces."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat as text, up to where the assistant speaks (`add_generation_prompt`).

        Raises:
            ValueError: there is no template, a message is malformed, or the template refuses the chat.
        """
        if self._chat_template is None:
            raise ValueError("this tokenizer has no chat template: give the prompt as text or token ids")
        _check_messages(messages)
        try:
            return _compile(self._chat_template).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except Exception as error:  # a template is data: whatever goes wrong in it is an error of this input
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The template writes BOS itself where the model wants one, so none is added."""
        return self.encode(self.render(messages), add_special_tokens=False)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; in a prompt it is only a scope."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """As Hugging Face's `apply_chat_template` does, with the same filters and functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages must be a non-empty list, got {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index} must be a dict, got {message!r}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {index}: {key!r} must be a string, got {message.get(key)!r}")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, None if it has none.

    Raises:
        ValueError: a file that is broken or contradicts another one, named in the message; a vocabulary in another
            form than tokenizer.json.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        for other in (path.with_name(name) for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
            if other.exists():
                make = "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                raise ValueError(f"{other} is not read: tokenizer.json is needed beside it; to make it: {make}")
        return None
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path}: {error}") from error
    config_path, template_path = path.with_name("tokenizer_config.json"), path.with_name("chat_template.jinja")
    others = config_path, path.with_name("special_tokens_map.json")
    config, special = (read_json(other) if other.exists() else {} for other in others)
    listed = special | config
    template = _read(template_path) if template_path.exists() else None
    try:
        named = {name: _text(name, listed[name]) for name in NAMED_TOKENS if listed.get(name) is not None}
        _add_tokens(core, config, named)
        eos_id = core.token_to_id(named["eos_token"]) if "eos_token" in named else None
        if "eos_token" in named and eos_id is None:
            raise ValueError(f"eos_token {named['eos_token']!r} is not in the vocabulary")
        if template is None and config.get("chat_template") is not None:
            template = _chat_template(config["chat_template"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{config_path}: {error if isinstance(error, ValueError) else repr(error)}") from error
    eos_ids = () if eos_id is None else (eos_id,)
    return Tokenizer(core, eos_ids=eos_ids, special_tokens=named, chat_template=template)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def _text(name: str, value: Any) -> str:
    """A string, or the string in the object that a serialised `AddedToken` is."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string, got {value!r}")
    return text


def _chat_template(value: Any) -> str | None:
    """A template, or the one called "default" of several with names."""
    if not isinstance(value, list):
        return _text("chat_template", value)
    return {entry["name"]: _text("chat_template", entry["template"]) for entry in value}.get("default")


def _add_tokens(core: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """What tokenizer_config.json has to add to tokenizer.json: tokens, and for some classes BOS and EOS."""
    known = {token.content: token for token in core.get_added_tokens_decoder().values()}
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    changed = []
    for _, entry in listed:
        flags = {flag: entry[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized") if flag in entry}
        was_special = entry["content"] in known and known[entry["content"]].special
        token = AddedToken(entry["content"], special=entry.get("special", False) or was_special, **flags)
        if repr(token) != repr(known.get(token.content)):
            changed.append(token)
            known[token.content] = token
    core.add_tokens(changed)  # in one call: each of them rebuilds the matcher
    for key, entry in listed:
        if core.token_to_id(entry["content"]) != int(key):
            raise ValueError(f"token {entry['content']!r} has id {core.token_to_id(entry['content'])}, not {key}")
    core.add_special_tokens([t for t in named.values() if t not in known and core.token_to_id(t) is not None])
    # In general tokenizer.json's post-processor decides, but LlamaTokenizerFast and GemmaTokenizerFast replace it.
    wanted = {name: config.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    slow_class = (config.get("tokenizer_class") or "").removesuffix("Fast")
    if slow_class in ("LlamaTokenizer", "GemmaTokenizer") and set(wanted.values()) != {None}:
        wanted["bos_token"] = wanted["bos_token"] is not False  # not stated: true
        add_bos_and_eos(core, wanted, {name: core.token_to_id(text) for name, text in named.items()})


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer in GGUF metadata (Python values), None if there is none; ValueError if it is not supported."""
    parts = read_gguf_tokenizer(fields)
    return None if parts is None else Tokenizer(**parts)


class Detokenizer:
    """Incremental: `push` returns the text that is now certain, `flush` the rest and starts afresh.

    The pieces joined are `tokenizer.decode(ids)` to the last character. A byte-level tokenizer is a stream of UTF-8.
    For most others a token's text depends on whether something is before it and, if it is a byte, on the run of
    bytes that it is in (a run that is not UTF-8 is one U+FFFD per byte). So the tokens up to the first text are
    kept as a context, each later token is decoded behind it, and a run of bytes waits for the token that ends it.
    Where this does not hold (`_rule`), all waits for `flush`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        decoder = tokenizer._core.decoder
        self._decode = " ".join if decoder is None else decoder.decode
        self._rule = _rule(decoder)
        self._restart()

    def _restart(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[str] = []  # tokens
        self._context_text = 0  # characters
        self._held: list[str] = []  # tokens

    def push(self, token_id: int) -> str:
        token = self._tokenizer._core.id_to_token(token_id)
        if token is None or token in self._tokenizer._special_texts:
            return ""
        if self._rule == "bytes":
            return self._utf8.decode(_token_bytes(token))
        self._held.append(token)
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return "" if self._rule == "whole" or is_byte else self._release()

    def preview(self) -> str:
        """What `flush` would return, if that is whole characters; else, and where nothing is held, ""."""
        text = self._decode(self._context + self._held)[self._context_text :] if self._held else ""
        return "" if text.endswith("\ufffd") else text

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True) + self._release()
        self._restart()
        return text

    def _release(self) -> str:
        if not self._held:
            return ""
        text = self._decode(self._context + self._held)[self._context_text :]
        if not self._context_text:
            self._context += self._held
            if text and self._decode(self._held[-1:]):
                self._context = self._held[-1:]  # one token will do
            self._context_text = len(self._decode(self._context))
        self._held = []
        return text


def _rule(decoder: decoders.Decoder | None) -> str:
    """Decode as "bytes", as "tokens" behind a context, or only as a "whole"? From tokenizers/src/decoders/*.rs."""
    if decoder is None:  # tokens with a space between any two
        return "tokens"
    try:
        spec = json.loads(decoder.__getstate__())
    except Exception:  # a decoder written in Python does not show what it does
        return "whole"
    stages = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return "bytes"
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    fuse = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    byte = kinds.index("ByteFallback") if "ByteFallback" in kinds else 0
    exact = (
        all(kind in ("Replace", "Strip", "WordPiece", "Metaspace", "ByteFallback") for kind in kinds[:fuse])
        and kinds.count("ByteFallback") < 2
        and all(stage == space for stage in stages[:byte])  # the byte tokens still have their spelling there
        # From Fuse on there is one token, the text: it may change character by character, or at its start.
        and all(
            stage == space or kind in ("Fuse", "Metaspace") or (kind == "Strip" and not stage["stop"])
            for kind, stage in zip(kinds[fuse:], stages[fuse:], strict=True)
        )
    )
    return "tokens" if exact else "whole"


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's alphabet leaves as they are
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}


def _token_bytes(token: str) -> bytes:
    """A token in GPT-2's alphabet of bytes; one with other letters (an added token) is text."""
    return bytes(map(_BYTES.__getitem__, token)) if _BYTES.keys() >= set(token) else token.encode()
