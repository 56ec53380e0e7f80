"""What the bodies of OpenAI's completions and chat completions ask for, with vLLM's further fields.

A field is served, or it is refused by name; of those that could be served by nothing here, the values that have no
effect are accepted. Hints that change no answer at OpenAI either (`prompt_cache_key`, `safety_identifier`, and `user`
where the policy does not look at users) are accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batching.params import MOST_LOGPROBS, SamplingParams
from batching.policies import FACTS
from model.tokenizer import Tokenizer
from scripts.server.constraints import constraint
from scripts.server.errors import ApiError, invalid
from scripts.server.fields import Fields, parse

COMPLETION_TOKENS = 16  # max_tokens of a completion that does not say it
MOST_MESSAGES = 1024
MOST_BAD_WORDS, MOST_TOKEN_IDS = 128, 2**18  # in a list
MOST = {"bad_words": MOST_BAD_WORDS, "allowed_token_ids": MOST_TOKEN_IDS, "stop_token_ids": 1024, "logit_bias": 2**14}
SAMPLING = (
    "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "n", "stop_token_ids", "stop",
    "ignore_eos", "prompt_logprobs",
)  # fmt: skip
ALONE = ("max_tokens", "logprobs", "json_schema", "regex", "choice", "prompt")
NAMES = {*SAMPLING, *FACTS, *ALONE}  # that the engine speaks of
HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "continue_final_message": (False,),
    "include_stop_str_in_output": (False,), "length_penalty": (1, 1.0), "logits_processors": ([],),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "suffix": ("",),
    "truncate_prompt_tokens": (), "use_beam_search": (False,), "metadata": ({},), "store": (False,),
    "service_tier": ("auto", "default"),
}  # fmt: skip
HARMLESS_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (), "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],), "echo": (False,),
    "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"],), "moderation": (),
    "parallel_tool_calls": (True, False), "prediction": (), "prompt_cache_options": (), "prompt_cache_retention": (),
    "reasoning_effort": ("none",), "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": ("medium",),
    "web_search_options": (),
}  # fmt: skip
HARMLESS_IN_STREAMS: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}
HARMLESS_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],), "audio": (), "function_call": (), "reasoning": (), "reasoning_content": (), "refusal": (),
    "tool_calls": ([],), "type": ("text", "message"),
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """What is served, and within which limits."""

    model: str  # as clients call it
    tokenizer: Tokenizer | None
    max_len: int  # positions in a slot
    most_choices: int  # prompts times n
    uses: frozenset[str] = frozenset()  # which of FACTS the policy looks at


@dataclass(frozen=True)
class Asked:
    """What a body asks for; its prompts are not tokenised yet."""

    chat: bool
    prompts: tuple[Any, ...]  # texts, lists of token ids or, in a chat, one list of messages
    params: SamplingParams
    copies: int = 1  # choices that each sample is told as: what would come out the same is computed once
    add_special_tokens: bool = True
    limited: bool = True  # max_tokens is the client's, not a default that may be too much
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the policy
    stream: bool = False
    include_usage: bool = False
    usage_so_far: bool = False  # in every event, of its choice
    echo: bool = False
    prompt_logprobs: bool = False  # told as vLLM does, not with an echo
    token_ids: bool = False  # told beside the text
    names_are_ids: bool = False  # tokens in logprobs are called token_id:5

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n * self.copies


def completion(body: bytes, served: Served) -> Asked:
    """Of `/v1/completions`. Raises ApiError."""
    fields = Fields(parse(body))
    check_model(fields, served)
    prompts = _prompts(fields, served)
    echo, stream = fields.take("echo", bool, False), fields.take("stream", bool, False)
    logprobs, chosen = fields.take("logprobs", int), fields.take_all(SAMPLING)
    told_prompt = "prompt_logprobs" in chosen
    limit, limit_name = _limit(fields)
    if limit == 0 and not echo and not told_prompt:
        raise fields.error(limit_name, "must be at least 1, or 0 with echo: there would be no answer")
    if echo and (logprobs is not None or limit == 0):
        if told_prompt:
            raise fields.error("prompt_logprobs", "cannot be given beside echo, which tells them with logprobs")
        chosen["prompt_logprobs"] = logprobs or 0
        if stream and logprobs is not None:
            raise fields.error("logprobs", "of the prompt cannot be streamed: leave out echo or stream")
    chosen |= {"logprobs": logprobs, "max_tokens": COMPLETION_TOKENS if limit is None else limit}
    return _asked(
        fields, served, chosen, prompts, chat=False, echo=echo, stream=stream, limited=limit is not None,
        prompt_logprobs=told_prompt, add_special_tokens=fields.take("add_special_tokens", bool, True),
    )  # fmt: skip


def chat(body: bytes, served: Served) -> Asked:
    """Of `/v1/chat/completions`. Raises ApiError."""
    fields = Fields(parse(body))
    check_model(fields, served)
    messages, chosen = messages_of(fields), fields.take_all(SAMPLING)
    told, top = fields.take("logprobs", bool, False), fields.take("top_logprobs", int)
    if top is not None and not told:
        raise fields.error("top_logprobs", "needs logprobs to be true")
    if top is not None and not 0 <= top <= MOST_LOGPROBS:
        raise fields.error("top_logprobs", f"must be in 0 .. {MOST_LOGPROBS}, not {top}")
    limit, limit_name = _limit(fields)
    if limit == 0:
        raise fields.error(limit_name, "must be at least 1, not 0")
    chosen |= {"logprobs": (top or 0) if told else None, "max_tokens": limit}
    fields.take("prompt_cache_key", str)
    fields.refuse(HARMLESS_IN_CHAT)
    return _asked(
        fields, served, chosen, (messages,), chat=True, limited=limit is not None,
        stream=fields.take("stream", bool, False), prompt_logprobs="prompt_logprobs" in chosen,
        add_special_tokens=fields.take("add_special_tokens", bool, False),
    )  # fmt: skip


def _limit(fields: Fields) -> tuple[int | None, str]:
    """Tokens of an answer, and what the client calls that."""
    given = {name: fields.take(name, int) for name in ("max_tokens", "max_completion_tokens")}
    limits = {limit for limit in given.values() if limit is not None}
    if len(limits) > 1:
        raise fields.error("max_tokens", "and max_completion_tokens mean the same: they must not differ")
    name = "max_completion_tokens" if given["max_tokens"] is None else "max_tokens"
    return (limits.pop() if limits else None), name


def _asked(fields: Fields, served: Served, chosen: dict[str, Any], prompts: tuple[Any, ...], **how: Any) -> Asked:
    """The fields that both have, and what they mean together."""
    options = Fields(fields.take("stream_options", dict, {}), "stream_options.")
    include_usage = options.take("include_usage", bool, False)
    usage_so_far = options.take("continuous_usage_stats", bool, False)
    if usage_so_far and not include_usage:
        raise options.error("continuous_usage_stats", "needs include_usage to be true")
    options.refuse(HARMLESS_IN_STREAMS)
    options.end()
    if include_usage and not how["stream"]:
        raise fields.error("stream_options", "is for streams: stream is not true")
    how |= {"include_usage": include_usage, "usage_so_far": usage_so_far}
    if how["stream"] and how["prompt_logprobs"]:
        raise fields.error("prompt_logprobs", "cannot be streamed")
    user = fields.take("user", str)  # what it is to the answer, the policy says
    facts = fields.take_all(FACTS) | ({"user": user} if user is not None and "user" in served.uses else {})
    flags = {"token_ids": "return_token_ids", "names_are_ids": "return_tokens_as_token_ids"}
    how |= {name: fields.take(given, bool, False) for name, given in flags.items()}
    fields.take("safety_identifier", str)
    best_of, n = fields.take("best_of", int), chosen.get("n", 1)
    if best_of is not None and best_of != n:
        raise fields.error("best_of", f"other than n is not supported: it is {best_of}, n is {n}")
    fields.refuse(HARMLESS)
    chosen |= constraint(fields)
    fields.end()
    params, copies = _params(chosen)
    asked = Asked(prompts=prompts, params=params, copies=copies, facts=facts, **how)
    if asked.choices > served.most_choices:
        raise invalid(f"{asked.choices} choices are asked for, prompts times n; at most {served.most_choices}", "n")
    return asked


def _params(chosen: dict[str, Any]) -> tuple[SamplingParams, int]:
    """And how many choices shall be told of each sample, where all would be the same."""
    for name, most in MOST.items():
        if isinstance(chosen.get(name), list | dict) and len(chosen[name]) > most:
            raise invalid(f"{name} holds {len(chosen[name])}; at most {most}", name)
    seed = chosen.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 0:
        chosen["seed"] = seed + 2**64  # OpenAI's are signed
    try:
        one = SamplingParams(**{name: value for name, value in chosen.items() if name != "n"})
        if not one.greedy and one.max_tokens != 0:
            return SamplingParams(**chosen), 1
        copies = chosen.get("n", 1)
        SamplingParams(n=copies)  # whether it is a number
        return one, copies
    except ValueError as error:
        raise refused(str(error)) from None


def refused(reason: str, where: str = "") -> ApiError:
    """What the engine says about a field, of which the first word is the name. `where`: what to say before it."""
    reason = reason.replace("prompt_ids", "prompt")
    first = reason.partition(" ")[0].rstrip(":")
    return invalid(f"{where}{reason:.1000}", first if first in NAMES else None)


def check_model(fields: Fields, served: Served) -> None:
    """Raises ApiError if the field "model" is given and is another one's name."""
    model = fields.take("model", str, served.model)
    if model != served.model:
        raise unknown_model(model, served)


def unknown_model(model: str, served: Served) -> ApiError:
    message = f"the model {model!r:.200} does not exist; this server has {served.model!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _prompts(fields: Fields, served: Served) -> tuple[Any, ...]:
    """The four forms of a prompt as several."""
    given = fields.take_all(["prompt"]).get("prompt")
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        what = "is missing" if given is None else "must be a text, a list of token ids, or a list of such, not empty"
        raise fields.error("prompt", what)
    if _ids(given):
        return (_short(given, served),)
    if len(given) > served.most_choices:
        raise fields.error("prompt", f"holds {len(given)} prompts; at most {served.most_choices}")
    if all(isinstance(one, str) or (isinstance(one, list) and one and _ids(one)) for one in given):
        return tuple(one if isinstance(one, str) else _short(one, served) for one in given)
    raise fields.error("prompt", "must be a text, a list of token ids, or a list of texts or of lists of token ids")


def _ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _short(ids: list[int], served: Served) -> list[int]:
    if len(ids) > served.max_len:
        raise too_long(len(ids), served)
    return ids


def too_long(count: int, served: Served) -> ApiError:
    message = f"the prompt has {count} tokens; this model's context is {served.max_len} tokens"
    return invalid(message, "prompt", "context_length_exceeded")


def messages_of(fields: Fields) -> list[dict[str, str]]:
    """The chat, with texts alone as contents. Raises ApiError."""
    given = fields.take("messages", list)
    if not given:
        raise fields.error("messages", "is missing" if given is None else "must not be empty")
    if len(given) > MOST_MESSAGES:
        raise fields.error("messages", f"holds {len(given)}; at most {MOST_MESSAGES}")
    return [_message(one, f"messages[{index}].") for index, one in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise invalid(f"{where[:-1]} must be an object with a role and a content", where[:-1])
    fields = Fields(given, where)
    message = {"role": fields.take("role", str), "content": _content(fields, where)}
    if message["role"] is None:
        raise fields.error("role", "is missing")
    if "name" in fields:
        message["name"] = fields.take("name", str)
    fields.refuse(HARMLESS_IN_MESSAGES)
    fields.end()
    return message


def _content(fields: Fields, where: str) -> str:
    content = fields.take_all(["content"]).get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.error("content", "is missing" if content is None else "must be a text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        name = f"{where}content[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{name} must be a part of type text, with a text: others are not supported", name)
        if len(part) > 2:
            raise invalid(f"{name} may have a type and a text alone", name)
        texts.append(part["text"])
    return "\n".join(texts)
