"""Texts and chats as token ids, and back, in vLLM's form. The functions are for any thread."""

from typing import Any

from scripts.server.errors import invalid
from scripts.server.fields import Fields, parse
from scripts.server.prompts import ids_of, tokenizer_of
from scripts.server.protocol import Served, check_model, messages_of

HARMLESS = {
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": (),
    "chat_template_kwargs": ({},), "tools": ([],),
}  # fmt: skip


def tokenize(body: bytes, served: Served) -> dict[str, Any]:
    """Of `/tokenize`. Raises ApiError."""
    fields = Fields(parse(body))
    check_model(fields, served)
    chat, text = "messages" in fields, fields.take("prompt", str)
    if chat == (text is not None):
        raise invalid("give a prompt or messages, one of the two", "prompt")
    messages = messages_of(fields) if chat else None
    special, names = fields.take("add_special_tokens", bool, not chat), fields.take("return_token_strs", bool, False)
    fields.refuse(HARMLESS)
    fields.end()
    try:
        ids = ids_of(text if messages is None else messages, chat, special, served)
    except ValueError as error:
        raise invalid(str(error), "messages" if chat else "prompt") from None
    texts = [tokenizer_of(served).decode([one], skip_special_tokens=False) for one in ids] if names else None
    return {"count": len(ids), "max_model_len": served.max_len, "tokens": ids, "token_strs": texts}


def detokenize(body: bytes, served: Served) -> dict[str, Any]:
    """Of `/detokenize`. Special tokens keep their texts. Raises ApiError.

    An id that the tokenizer lacks is refused, even where the model has it (padded embeddings): it has no text.
    """
    fields = Fields(parse(body))
    check_model(fields, served)
    ids = fields.take("tokens", list)
    fields.end()
    if ids is None or not all(type(one) is int for one in ids):
        raise invalid("tokens must be a list of token ids", "tokens")
    tokenizer = tokenizer_of(served)
    outside = next((one for one in ids if not 0 <= one < tokenizer.vocab_size), None)
    if outside is not None:
        raise invalid(f"tokens holds {outside!s:.80}; the vocabulary is 0 .. {tokenizer.vocab_size - 1}", "tokens")
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}
