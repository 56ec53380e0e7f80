"""Outputs and Deltas as the JSON that OpenAI's clients read."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batching import Delta, Output, Request
from batching.request import Logprobs
from scripts.server.errors import ApiError, closing, invalid
from scripts.server.logprobs import Teller, TokenNames
from scripts.server.protocol import Asked, Served

encoded = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: nothing that a model generates can break it
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: %s\n\n" % encoded(value).encode()


@dataclass
class Sample:
    """One sample of a request, and the choices that it is told as, as far as it was told."""

    choices: range
    teller: Teller
    tokens: int = 0
    begun: bool = False


class Answer:
    """What is told of the requests of one body: at once by `whole`, or piece after piece by `piece`."""

    def __init__(self, name: str, asked: Asked, requests: Sequence[Request], served: Served, names: TokenNames) -> None:
        self.asked, self._served = asked, served
        what = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": name,
            "object": f"{what}.chunk" if asked.chat and asked.stream else what,
            "created": int(time.time()),
            "model": served.model,
        }
        self._prompts = {request.id: place for place, request in enumerate(requests)}
        self._prompt_ids: dict[str, list[int]] = {one.id: list(one.prompt_ids or ()) for one in requests}
        self._echoes: dict[str, str] = {}
        self._samples: dict[tuple[str, int], Sample] = {}
        for place, request in enumerate(requests):
            for number in range(asked.params.n):
                first = (place * asked.params.n + number) * asked.copies
                teller = Teller(names, served.tokenizer, ids=asked.names_are_ids)
                self._samples[request.id, number] = Sample(range(first, first + asked.copies), teller)
        self._outputs: list[Output] = []

    # At once.

    def whole(self, outputs: Iterable[Output]) -> bytes:
        """The body of the answer. Raises ApiError if a request did not come to its end."""
        choices, body = list[dict[str, Any]](), dict[str, Any]()
        for output in outputs:
            self.ended(output)
            sample = self._samples[output.id, output.index]
            told = self._finished(sample, output)
            if not self.asked.chat:
                told |= self._of_prompt(sample, output)
            elif output.index == 0:  # there is one prompt
                body = self._of_prompt(sample, output)
            choices += [{"index": index} | told for index in sample.choices]
        choices.sort(key=lambda choice: choice["index"])
        return encoded(self._head | {"choices": choices, "usage": self.usage()} | body).encode()

    def _finished(self, sample: Sample, output: Output) -> dict[str, Any]:
        asked, text = self.asked, output.text or ""
        told: dict[str, Any] = {"logprobs": self._logprobs(sample, output)}
        told |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if asked.chat:
            told["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            told["text"] = self._echo(output.id) + text
        return told | ({"token_ids": output.token_ids} if asked.token_ids else {})

    def _of_prompt(self, sample: Sample, output: Output) -> dict[str, Any]:
        told: dict[str, Any] = {"prompt_token_ids": self._prompt_ids[output.id]} if self.asked.token_ids else {}
        if self.asked.prompt_logprobs:
            told["prompt_logprobs"] = sample.teller.prompt(output.prompt_logprobs or ())
        return told

    def _logprobs(self, sample: Sample, output: Output) -> dict[str, Any] | None:
        """Of a completion with echo, the prompt's too."""
        if output.logprobs is None:
            return None
        if not self.asked.echo:
            return self._told(sample, output.logprobs)
        before = sample.teller.completion(self._prompt_ids[output.id], output.prompt_logprobs or ())
        sample.teller.goes_on_at(len(self._echo(output.id)))
        after = self._told(sample, output.logprobs)
        return {name: before[name] + values for name, values in after.items()}

    # Piece after piece.

    def piece(self, delta: Delta) -> bytes:
        """The events that a delta brings, perhaps none. Raises ApiError if its request did not come to its end."""
        if delta.output is not None:
            self.ended(delta.output)
        asked, sample, text = self.asked, self._samples[delta.id, delta.index], delta.text or ""
        first, sample.begun = not sample.begun, True
        sample.tokens += len(delta.token_ids)
        before = b""
        if first and asked.chat:
            before = self._events(delta, {"delta": {"role": "assistant", "content": ""}}, first)
        if first and asked.echo:
            text = self._echo(delta.id) + text
        told: dict[str, Any] = {"delta": {"content": text} if text else {}} if asked.chat else {"text": text}
        if delta.logprobs:
            told["logprobs"] = self._told(sample, delta.logprobs)
        if asked.token_ids:
            told["token_ids"] = delta.token_ids
        if delta.output is not None:
            told |= {"finish_reason": delta.output.finish_reason, "stop_reason": delta.output.stop_reason}
        elif not text and not delta.logprobs and not (asked.token_ids and delta.token_ids):
            return before
        return before + self._events(delta, told, first and not asked.chat)

    def _told(self, sample: Sample, logprobs: list[Logprobs]) -> dict[str, Any]:
        if self.asked.chat:
            return sample.teller.chat(logprobs)
        return sample.teller.completion([one.token_id for one in logprobs], logprobs)

    def _events(self, delta: Delta, told: dict[str, Any], first: bool) -> bytes:
        """The same for each of a sample's choices, with the prompt's token ids where these come first."""
        asked, sample, body = self.asked, self._samples[delta.id, delta.index], dict[str, Any]()
        if asked.include_usage:
            used = self._usage(len(self._prompt_ids[delta.id]), sample.tokens) if asked.usage_so_far else None
            body["usage"] = used
        if first and asked.token_ids:
            (body if asked.chat else told)["prompt_token_ids"] = self._prompt_ids[delta.id]
        common = {"logprobs": None, "finish_reason": None} | told
        return b"".join(event(self._head | {"choices": [{"index": index} | common]} | body) for index in sample.choices)

    def last(self) -> bytes:
        """The events after those of the choices."""
        usage = event(self._head | {"choices": [], "usage": self.usage()}) if self.asked.include_usage else b""
        return usage + DONE

    # Both.

    def ended(self, output: Output) -> None:
        """Raises ApiError unless it is an end that a client can be told of."""
        if output.finish_reason == "cancelled":
            raise closing()
        if output.unservable:
            raise invalid(f"the request cannot be served: {output.error}", code="unservable")
        if output.finish_reason == "error":
            raise ApiError(500, f"the request failed in the engine; the server's log says why, at {output.id}")
        self._outputs.append(output)

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many samples it has."""
        firsts = [output for output in self._outputs if output.index == 0]
        generated = sum(output.completion_tokens for output in self._outputs) * self.asked.copies
        used = self._usage(sum(output.prompt_tokens for output in firsts), generated)
        return used | {"prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in firsts)}}

    def _usage(self, prompt: int, generated: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _echo(self, request: str) -> str:
        """The prompt as a text, if it is wanted."""
        if not self.asked.echo:
            return ""
        if request not in self._echoes:
            prompt, tokenizer = self.asked.prompts[self._prompts[request]], self._served.tokenizer
            if not isinstance(prompt, str):
                prompt = "" if tokenizer is None else tokenizer.decode(prompt)
            self._echoes[request] = prompt
        return self._echoes[request]
