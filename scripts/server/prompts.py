"""From what a body asks for to the engine's requests: prompts as token ids, and what they and their answers come to."""

from collections.abc import Sequence
from dataclasses import replace

from batching import Request, SamplingParams
from model.tokenizer import Tokenizer
from scripts.server.errors import ApiError, invalid
from scripts.server.protocol import Asked, Served, refused, too_long

MOST_TOLD = 2**18  # logprobs in an answer: of each token one, and one for each of the most probable ones beside it


def tokenised(asked: Asked, served: Served) -> list[list[int]]:
    """Each prompt's token ids. For any thread, since it may take its time. Raises ApiError."""
    forms = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
    if any(len(text) > most_characters(served) for text in forms):
        raise too_many_characters(served)
    try:
        found = [ids_of(prompt, asked.chat, asked.add_special_tokens, served) for prompt in asked.prompts]
    except ValueError as error:
        raise invalid(str(error), "messages" if asked.chat else "prompt") from None
    for ids in found:
        if not ids:
            raise invalid("a prompt is empty", "messages" if asked.chat else "prompt")
        if len(ids) > served.max_len:
            raise too_long(len(ids), served)
    return found


def ids_of(prompt: object, chat: bool, add_special_tokens: bool, served: Served) -> list[int]:
    """Raises ValueError for what the tokenizer cannot take, ApiError for what no slot can hold."""
    if isinstance(prompt, list) and not chat:
        return prompt
    tokenizer = tokenizer_of(served)
    text = tokenizer.render(prompt) if isinstance(prompt, list) else str(prompt)
    if len(text) > most_characters(served):
        raise too_many_characters(served)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def tokenizer_of(served: Served) -> Tokenizer:
    if served.tokenizer is None:
        raise invalid("the model has no tokenizer: give the prompt as token ids")
    return served.tokenizer


def most_characters(served: Served) -> int:
    """More than so many are more tokens than a slot holds: what is longer need not be read to be refused."""
    return served.max_len * tokenizer_of(served).longest


def too_many_characters(served: Served) -> ApiError:
    message = f"the prompt is too long: {served.max_len} tokens, this model's context, have at most"
    return invalid(f"{message} {most_characters(served)} characters", "prompt", "context_length_exceeded")


def requests_of(asked: Asked, prompts: Sequence[Sequence[int]], name: str, served: Served) -> list[Request]:
    """Called `name`-0, `name`-1, and so on. Raises ApiError for what no slot can hold."""
    requests, told = [], 0
    for index, ids in enumerate(prompts):
        try:
            params = _fitting(asked, len(ids), served)
            requests.append(Request(prompt_ids=ids, params=params, id=f"{name}-{index}", **asked.facts))
        except ValueError as error:
            raise refused(str(error)) from None
        generated = served.max_len - len(ids) + 1 if params.max_tokens is None else params.max_tokens
        each = 0 if params.logprobs is None else (1 + params.logprobs) * generated
        each += 0 if params.prompt_logprobs is None else (1 + params.prompt_logprobs) * len(ids)
        told += each * params.n * asked.copies
    if told > MOST_TOLD:
        hint = "" if asked.limited else " (a smaller max_tokens would do)"
        raise invalid(f"the answer could hold {told} logprobs; at most {MOST_TOLD} are told at once{hint}", "logprobs")
    return requests


def _fitting(asked: Asked, prompt: int, served: Served) -> SamplingParams:
    """With the max_tokens that a prompt of so many tokens leaves room for, if it was not the client who said it."""
    room, wanted = served.max_len - prompt + 1, asked.params.max_tokens
    if wanted is None or wanted <= room:
        return asked.params
    if not asked.limited:
        return replace(asked.params, max_tokens=room)
    message = f"the prompt's {prompt} tokens and max_tokens {wanted} do not fit into this model's context"
    raise invalid(f"{message}, {served.max_len} tokens", "max_tokens", "context_length_exceeded")
