"""The client of a benchmark: a workload against any server that speaks OpenAI's completions, over HTTP and asyncio.

Bodies have vLLM's names: the prompt as token ids, `temperature` 0, `ignore_eos`, and `return_token_ids`, which tells
exactly what was generated. What a server refuses of that is left out: `probe` finds out, and says so. Priorities and
users are not sent. A run may find prompts that the server still has from the one before: `cached_tokens`, where it
tells, says how much.

The first-token clock starts when the request is sent on an open connection and stops at the first event with text.
Tokens are counted from the server's `usage`. Several tokens in an event came at the same time; where ids are not told,
they are spread evenly over the events with text, so that the first and the last token's times are exact.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from model.checkpoint import read_tokenizer, resolve
from model.config import ModelConfig
from model.files import read_json
from model.gguf_file import GGUFFile, hf_config
from model.tokenizer import Tokenizer, tokenizer_from_gguf
from scripts.command import Refused, Report
from scripts.fleet import Arrival, Arrivals
from scripts.http_client import OK, Failed, Server, exchange
from scripts.metrics import Served, spread
from scripts.traces import Item

NOT_THE_FORM = {OK, 401, 403, 404, 408, 429}  # statuses that do not say that the form of a request is refused
PROBE_TOKENS = 4
NO_DELAY_S = 0.01  # between when a request is due and when it is sent


class Form(NamedTuple):
    """How a server is asked."""

    prompt_ids: bool  # the prompt as token ids; else as text
    token_ids: bool  # ask for the ids of what was generated


FORMS = (Form(True, True), Form(True, False), Form(False, True), Form(False, False))


@dataclass
class Answer:
    """What came for one request."""

    sent: float = 0.0
    end: float = 0.0
    texts: list[tuple[float, int]] = field(default_factory=list)  # of each event with text: when, and ids so far
    text: str = ""
    ids: list[int] = field(default_factory=list)  # if the server tells them
    usage: Mapping[str, Any] | None = None

    def counted(self, name: str) -> int:
        """A number of tokens that the server told; 0 if it did not."""
        value = (self.usage or {}).get(name)
        return value if type(value) is int else 0

    @property
    def tokens(self) -> int:
        return self.counted("completion_tokens")

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the server had from other requests, if it tells."""
        details = (self.usage or {}).get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else 0
        return value if type(value) is int else 0

    @property
    def ids_known(self) -> bool:
        return 0 < self.tokens == len(self.ids)

    @property
    def times(self) -> list[float]:
        """When each token came."""
        if self.ids_known:
            known = [count for _, count in self.texts]
            places = np.minimum(np.searchsorted(known, np.arange(1, self.tokens + 1)), len(self.texts) - 1)
        else:
            places = np.linspace(0, len(self.texts) - 1, self.tokens).round().astype(int)
        return [self.texts[place][0] for place in places.tolist()]


async def ask(server: Server, request: bytes, item: Item, answer: Answer) -> None:
    """Fill the answer of a streamed completion. Raises Failed, with what had come until then in the answer."""
    async with exchange(server, request) as (answer.sent, reply):
        while (data := await reply.event()) not in (None, "[DONE]"):
            now = time.monotonic()
            try:
                take(json.loads(data), answer, now)
            except (AttributeError, TypeError, RecursionError):
                raise Failed("error", f"no event of a completion: {data:.200}") from None
        answer.end = time.monotonic()
    if data is None:
        raise Failed("error", "the stream broke off")
    if not answer.tokens and (answer.usage is None or answer.texts):
        raise Failed("no usage", "the server did not say how many tokens it generated")
    if answer.tokens and not answer.texts:
        raise Failed("error", f"{answer.tokens} tokens and no text")
    if answer.tokens > item.max_tokens:
        raise Failed("error", f"{answer.tokens} tokens, {item.max_tokens} were asked for")
    if answer.tokens < item.max_tokens and item.ignore_eos:
        raise Failed("early end", f"{answer.tokens} tokens, {item.max_tokens} were asked for")


def take(event: Any, answer: Answer, now: float) -> None:
    """Raises Failed for an error that the server sends in the stream."""
    if event.get("error") is not None:
        raise Failed("error", f"in the stream: {event['error']!r:.300}")
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        answer.ids += choice.get("token_ids") or ()
        if text := choice.get("text"):
            answer.texts.append((now, len(answer.ids)))
            answer.text += text


@dataclass(frozen=True)
class Client:
    """A server, how it wants to be asked, and the model's vocabulary and tokenizer."""

    server: Server
    vocabulary: int
    tokenizer: Tokenizer | None
    form: Form = FORMS[0]

    def request(self, item: Item, prompt: Sequence[int]) -> bytes:
        body: dict[str, Any] = {"model": self.server.model, "prompt": list(prompt), "max_tokens": item.max_tokens}
        if not self.form.prompt_ids:
            assert self.tokenizer is not None
            body["prompt"] = self.tokenizer.decode(prompt, skip_special_tokens=False)
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"ignore_eos": True} if item.ignore_eos else {}
        body |= {"return_token_ids": True} if self.form.token_ids else {}
        return self.server.request("POST", "completions", body)

    def generated(self, answer: Answer) -> list[int]:
        """The ids of an answer, as far as they can be known."""
        if answer.ids_known or self.tokenizer is None:
            return answer.ids
        return self.tokenizer.encode(answer.text, add_special_tokens=False)


def load_vocabulary(name: str) -> tuple[int, Tokenizer | None]:
    """How many tokens a model knows, and its tokenizer: no weights. Raises ValueError or OSError."""
    path = resolve(name)
    if path.is_file():
        file = GGUFFile(path)
        return ModelConfig.from_hf(hf_config(file), freq_factors=True).vocab_size, tokenizer_from_gguf(file.fields)
    config = ModelConfig.from_hf(read_json(path / "config.json"), freq_factors=True)
    return config.vocab_size, read_tokenizer(path)


async def connected(server: Server, model: str, item: Item, report: Report) -> Client:
    """Serve a few tokens of a request, in the first form that the server takes. Raises Refused if it takes none.

    `model` tells the vocabulary and the tokenizer. `report` is told what the server does not take, or tell.
    """
    try:
        vocabulary, tokenizer = load_vocabulary(model)
        prompt = item.prompt(vocabulary)
    except ValueError as error:
        raise Refused(str(error)) from error
    item, reason = replace(item, max_tokens=min(item.max_tokens, PROBE_TOKENS)), ""
    for form in FORMS if tokenizer is not None else FORMS[:2]:
        client, answer = Client(server, vocabulary, tokenizer, form), Answer()
        try:
            await ask(server, client.request(item, prompt), item, answer)
        except Failed as error:
            if error.kind in ("error", "timeout"):
                reason = reason or str(error)
                if error.status in NOT_THE_FORM:
                    break
                continue
        tell(client, prompt, answer, reason, report)
        return client
    raise Refused(f"the server did not serve a first request: {reason}")


def tell(client: Client, prompt: Sequence[int], answer: Answer, refused: str, report: Report) -> None:
    """What is not as it should be. `refused`: why another form was."""
    if not client.form.prompt_ids:
        report(f"prompts are sent as text, which the server may cut into other tokens; of ids it said: {refused}")
    elif answer.counted("prompt_tokens") != len(prompt):
        report(f"the server counts {answer.counted('prompt_tokens')} tokens in a prompt of {len(prompt)}")
    if not answer.ids_known:
        report("the server does not tell the ids of its tokens: they are compared with nothing")


async def first_model(server: Server) -> str:
    """The name of a model that the server has. Raises Refused."""
    try:
        async with exchange(server, server.request("GET", "models")) as (_, reply):
            return json.loads(await reply.rest())["data"][0]["id"]
    except (Failed, KeyError, IndexError, TypeError) as error:
        raise Refused(f"the server does not tell its models, give --server-model: {error}") from error


class ServerRun:
    """A workload on a server: requests come when they come, as far as there are connections."""

    def __init__(self, client: Client, items: Sequence[Item], on_progress: Callable[[int, float], None]) -> None:
        self.served: list[Served] = []
        self.failures: dict[str, tuple[str, str]] = {}
        self.tokens: dict[str, list[int]] = {}  # where the server tells them
        self._client, self._on_progress, self._arrivals = client, on_progress, Arrivals(items)
        self._delays: list[float] = []  # seconds until a request that was due was sent
        self._cached, self._open, self._start = 0, 0, 0.0
        # Made before the clock starts, where that can be.
        self._prompts = {one.id: one.prompt(client.vocabulary) for one in items if not one.continues}
        self._requests = {one.id: client.request(one, self._prompts[one.id]) for one in items if not one.continues}

    @property
    def more(self) -> dict[str, Any]:
        """Figures beside those of the requests."""
        late = sum(delay > NO_DELAY_S for delay in self._delays)
        return {"sent_late": late, "send_delay_s": spread(self._delays), "cached_tokens": self._cached}

    async def run(self) -> "ServerRun":
        gate, woken = asyncio.Semaphore(self._client.server.connections), asyncio.Event()
        self._start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while self._arrivals.next_at is not None or self._open:
                while (at := self._arrivals.next_at) is not None and at <= self._now():
                    self._open += 1
                    group.create_task(self._serve(self._arrivals.pop(), gate, woken))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if at is None else at - self._now()):
                        await woken.wait()
                woken.clear()
        return self

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _serve(self, arrival: Arrival, gate: asyncio.Semaphore, woken: asyncio.Event) -> None:
        item, answer = arrival.item, Answer()
        prompt = self._prompts.get(item.id) or item.prompt(self._client.vocabulary, arrival.before)
        request = self._requests.get(item.id) or self._client.request(item, prompt)
        async with gate:
            try:
                await ask(self._client.server, request, item, answer)
            except Failed as error:
                self.failures[item.id] = error.kind, str(error)
        self._open -= 1
        self._end(arrival, prompt, answer)
        woken.set()

    def _end(self, arrival: Arrival, prompt: Sequence[int], answer: Answer) -> None:
        item, failed = arrival.item, arrival.item.id in self.failures
        sent = answer.sent - self._start if answer.sent else arrival.at
        end = answer.end - self._start if answer.end else self._now()
        times = [] if failed else [token - self._start for token in answer.times]
        count, slos = answer.counted("prompt_tokens") or len(prompt), (item.ttft_slo_s, item.tpot_slo_s)
        outcome = "failed" if failed else "completed"
        self.served.append(Served(item.id, sent, times, end, count, outcome, *slos))
        self._delays.append(sent - arrival.at)
        self._cached += answer.cached
        if answer.ids_known:
            self.tokens[item.id] = answer.ids
        self._arrivals.ended(item.id, end, lambda: (*prompt, *self._client.generated(answer)))
        self._on_progress(len(self.served), end)
