"""Outputs and Deltas as the JSON that OpenAI's clients read."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batching import Delta, Output, Request
from batching.request import Logprobs
from scripts.server.errors import ApiError, closing
from scripts.server.logprobs import Teller, TokenNames
from scripts.server.protocol import Asked, Served

encoded = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: nothing that a model generates can break it
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: %s\n\n" % encoded(value).encode()


@dataclass
class Choice:
    """One of an answer's choices, as far as it was told."""

    index: int
    teller: Teller
    begun: bool = False


class Answer:
    """What is told of the requests of one body: at once by `whole`, or piece after piece by `piece`."""

    def __init__(self, name: str, asked: Asked, requests: Sequence[Request], served: Served, names: TokenNames) -> None:
        self.asked, self._requests, self._served = asked, requests, served
        what = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": name,
            "object": f"{what}.chunk" if asked.chat and asked.stream else what,
            "created": int(time.time()),
            "model": served.model,
        }
        samples, self._choices = asked.params.n * asked.copies, dict[tuple[str, int], list[Choice]]()
        self._prompts = {request.id: place for place, request in enumerate(requests)}
        for place, request in enumerate(requests):
            for number in range(samples):
                teller = Teller(names, served.tokenizer, ids=asked.names_are_ids)
                choice = Choice(place * samples + number, teller)
                self._choices.setdefault((request.id, number // asked.copies), []).append(choice)
        self._outputs: list[Output] = []

    # At once.

    def whole(self, outputs: Iterable[Output]) -> bytes:
        """The body of the answer. Raises ApiError if a request did not come to its end."""
        choices = []
        for output in outputs:
            self.ended(output)
            choices += [self._finished(choice, output) for choice in self._choices[output.id, output.index]]
        choices.sort(key=lambda choice: choice["index"])
        return encoded(self._head | {"choices": choices, "usage": self.usage()}).encode()

    def _finished(self, choice: Choice, output: Output) -> dict[str, Any]:
        asked, text = self.asked, output.text or ""
        told: dict[str, Any] = {"index": choice.index, "logprobs": self._logprobs(choice, output)}
        told |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if asked.chat:
            told["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            told["text"] = self._echo(output.id) + text
        if asked.prompt_logprobs:
            told["prompt_logprobs"] = choice.teller.prompt(output.prompt_logprobs or ())
        return told | self._ids(output.id, output.token_ids)

    def _logprobs(self, choice: Choice, output: Output) -> dict[str, Any] | None:
        """Of a completion with echo, the prompt's too."""
        if output.logprobs is None:
            return None
        if self.asked.chat:
            return choice.teller.chat(output.logprobs)
        before: dict[str, list[Any]] = {}
        if self.asked.echo:
            before = choice.teller.completion(self._prompt_ids(output.id), output.prompt_logprobs or ())
            choice.teller.goes_on_at(len(self._echo(output.id)))
        after = choice.teller.completion([one.token_id for one in output.logprobs], output.logprobs)
        return {name: before.get(name, []) + values for name, values in after.items()}

    # Piece after piece.

    def piece(self, delta: Delta) -> bytes:
        """The events that a delta brings, perhaps none. Raises ApiError if its request did not come to its end."""
        if delta.output is not None:
            self.ended(delta.output)
        return b"".join(self._chunks(choice, delta) for choice in self._choices[delta.id, delta.index])

    def _chunks(self, choice: Choice, delta: Delta) -> bytes:
        asked, before, text = self.asked, b"", delta.text or ""
        first, choice.begun = not choice.begun, True
        if first and asked.chat:
            before = self._event(choice, {"delta": {"role": "assistant", "content": ""}})
        if first and asked.echo:
            text = self._echo(delta.id) + text
        told: dict[str, Any] = {"delta": {"content": text} if text else {}} if asked.chat else {"text": text}
        if delta.logprobs:
            told["logprobs"] = self._told(choice, delta.logprobs)
        if asked.token_ids:
            told |= self._ids(delta.id, delta.token_ids, first)
        if delta.output is not None:
            told |= {"finish_reason": delta.output.finish_reason, "stop_reason": delta.output.stop_reason}
        elif not text and not delta.logprobs and not (asked.token_ids and delta.token_ids):
            return before
        return before + self._event(choice, told)

    def _told(self, choice: Choice, logprobs: list[Logprobs]) -> dict[str, Any]:
        if self.asked.chat:
            return choice.teller.chat(logprobs)
        return choice.teller.completion([one.token_id for one in logprobs], logprobs)

    def _event(self, choice: Choice, told: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self.asked.include_usage else {}
        one = {"index": choice.index, "logprobs": None, "finish_reason": None} | told
        return event(self._head | {"choices": [one]} | usage)

    def last(self) -> bytes:
        """The events after those of the choices."""
        usage = event(self._head | {"choices": [], "usage": self.usage()}) if self.asked.include_usage else b""
        return usage + DONE

    # Both.

    def ended(self, output: Output) -> None:
        """Raises ApiError unless it is an end that a client can be told of."""
        if output.finish_reason == "cancelled":
            raise closing()
        if output.finish_reason == "error":
            raise ApiError(500, f"the request failed in the engine; the server's log says why, at {output.id}")
        self._outputs.append(output)

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many samples it has."""
        firsts = [output for output in self._outputs if output.index == 0]
        prompt = sum(output.prompt_tokens for output in firsts)
        generated = sum(output.completion_tokens for output in self._outputs) * self.asked.copies
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in firsts)},
        }

    def _ids(self, request: str, token_ids: Sequence[int], first: bool = True) -> dict[str, Any]:
        if not self.asked.token_ids:
            return {}
        return ({"prompt_token_ids": self._prompt_ids(request)} if first else {}) | {"token_ids": list(token_ids)}

    def _prompt_ids(self, request: str) -> list[int]:
        return list(self._requests[self._prompts[request]].prompt_ids or ())

    def _echo(self, request: str) -> str:
        """The prompt as a text, if it is wanted."""
        if not self.asked.echo:
            return ""
        prompt = self.asked.prompts[self._prompts[request]]
        if isinstance(prompt, str):
            return prompt
        return "" if self._served.tokenizer is None else self._served.tokenizer.decode(prompt)
