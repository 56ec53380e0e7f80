"""The ASGI application: who may ask, what is asked where, and one answer to each request whatever happens."""

import asyncio
import contextlib
import hmac
import json
import logging
import math
import time
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from batching import AsyncEngine, Engine, Output, QueueFull, Request
from scripts.server import openapi, tokens
from scripts.server.answers import Answer
from scripts.server.connection import EVENTS, Endpoint, Handler, Memory, Sender, Share, read_body, while_connected
from scripts.server.errors import ApiError, Gone, closing
from scripts.server.logprobs import TokenNames
from scripts.server.prompts import requests_of, tokenised
from scripts.server.protocol import Asked, Served, chat, completion, refused, unknown_model
from scripts.server.watch import Watch

log = logging.getLogger(__name__)
OPEN = ("/health",)  # needs no key
PAGES = ("/", "/live", "/metrics")  # a browser asks for the key, which it sends as a password
LARGE = 2**16  # bytes of a body that the event loop does not wait for
BODIES = 16  # so many of the largest size are read at once
UNREAD = 2**28  # bytes of answers that clients have not read


@dataclass(frozen=True)
class Limits:
    """What one client may take of the server."""

    body_bytes: int = 2**20  # of a request
    choices: int = 128  # of one request: prompts times n
    stall_s: float = 60.0  # a body that does not come, or an answer that nobody reads, for so long

    def __post_init__(self) -> None:
        for name, least in (("body_bytes", 1), ("choices", 1), ("stall_s", 0.1)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {least} and finite, not {getattr(self, name)}")


class App:
    """Serves one engine, in its own thread, until `close`. To be made in the event loop."""

    def __init__(self, engine: Engine, model: str, *, key: str | None = None, limits: Limits | None = None) -> None:
        """`model`: its name to clients. `key`: what they must have, if anything."""
        self.limits, self._key, self._created = limits or Limits(), key, int(time.time())
        uses = frozenset(getattr(engine.scheduler.policy, "uses", ()))
        choices = min(self.limits.choices, engine.config.max_queue)
        self.served = Served(model, engine.tokenizer, engine.config.max_len, choices, uses)
        self._names = TokenNames(engine.tokenizer)
        self._bodies, self._answers = Memory("reads", BODIES * self.limits.body_bytes), Memory("sends", UNREAD)
        self._reading: set[asyncio.Timeout] = set()  # of bodies that are being sent
        self.closing = False
        self.watch = Watch(engine, model)  # before the engine's thread
        self._engine, self.engine = engine, AsyncEngine(engine)
        self._document = openapi.document(model)
        self._router = Router(
            [
                Route("/v1/completions", Endpoint(self._generation(completion, "cmpl")), methods=["POST"]),
                Route("/v1/chat/completions", Endpoint(self._generation(chat, "chatcmpl")), methods=["POST"]),
                Route("/tokenize", Endpoint(self._in_thread(tokens.tokenize)), methods=["POST"]),
                Route("/detokenize", Endpoint(self._in_thread(tokens.detokenize)), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/openapi.json", self._openapi),
                *self.watch.routes(),
            ],
            redirect_slashes=False,
        )

    def stop(self) -> None:
        """Take no new requests, nor those whose bodies are still being sent, and leave the pages."""
        self.closing = True
        self.watch.close()
        for timeout in self._reading:
            if not timeout.expired():
                timeout.reschedule(0)

    async def close(self) -> None:
        """End what runs: who still waits is told that the server shuts down. May be called again."""
        self.stop()
        await self.engine.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        sender, scope["app"] = Sender(send, self.limits.stall_s), self
        try:
            self._admit(scope)
            await self._router(scope, receive, sender)
        except Gone:
            return
        except ApiError as error:
            await self._refuse(sender, error)
        except HTTPException as error:
            message = f"{error.detail}: {scope['method']} {scope['path']}"[:200]
            await self._refuse(sender, ApiError(error.status_code, message, headers=error.headers))
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            await self._refuse(sender, ApiError(500, "the server failed; its log says why"))
        if sender.status is not None and sender.status >= 400:
            self.watch.refused(sender.status)

    async def _refuse(self, sender: Sender, error: ApiError) -> None:
        if sender.status is None:
            with contextlib.suppress(Gone):
                await sender.json(error.body, error.status, error.headers)

    def _admit(self, scope: Scope) -> None:
        """Raises ApiError for a client without the key, and for anybody once the server is shutting down."""
        path = scope["path"]
        if self._key is not None and path not in OPEN and not self._has_key(dict(scope["headers"])):
            scheme = "Basic" if path in PAGES else "Bearer"
            headers = {"WWW-Authenticate": f'{scheme} realm="carousel"'}
            raise ApiError(401, "a valid API key is needed", code="invalid_api_key", headers=headers)
        if self.closing and path not in OPEN:
            raise closing()

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        assert self._key is not None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"basic":
            try:
                given = b64decode(given.strip(), validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given.strip(), self._key.encode())

    # Completions and chat completions.

    def _generation(self, read: Callable[[bytes, Served], Asked], prefix: str) -> Handler:
        async def handle(scope: Scope, receive: Receive, sender: Sender) -> None:
            name = f"{prefix}-{uuid.uuid4().hex}"
            with self._bodies.share() as share:
                body = await self._body(scope, receive, share)
                if len(body) > LARGE:
                    asked = await while_connected(asyncio.to_thread(read, body, self.served), receive)
                else:
                    asked = read(body, self.served)
                prompts = await while_connected(asyncio.to_thread(tokenised, asked, self.served), receive)
            requests = requests_of(asked, prompts, name, self.served)
            answer = Answer(name, asked, requests, self.served, self._names)
            await while_connected((self._stream if asked.stream else self._whole)(answer, requests, sender), receive)

        return handle

    async def _body(self, scope: Scope, receive: Receive, share: Share) -> bytes:
        """Raises ApiError; also when the server begins to close before all of it is there."""
        within_s = self.limits.stall_s
        timeout = asyncio.timeout(within_s)
        try:
            async with timeout:
                self._reading.add(timeout)
                return await read_body(scope, receive, share, self.limits.body_bytes)
        except TimeoutError:
            if self.closing:
                raise closing() from None
            message = f"the body did not come within {within_s:g} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
        finally:
            self._reading.discard(timeout)

    async def _whole(self, answer: Answer, requests: list[Request], sender: Sender) -> None:
        with _told(len(requests)):
            outputs = await self.engine.generate(requests)
        self._ended(outputs, answer.asked)
        if answer.asked.echo or any(output.logprobs or output.prompt_logprobs for output in outputs):  # it takes time
            body = await asyncio.to_thread(answer.whole, outputs)
        else:
            body = answer.whole(outputs)
        with self._answers.share() as share:
            share.take(len(body))
            await sender.json(body)

    async def _stream(self, answer: Answer, requests: list[Request], sender: Sender) -> None:
        """The status waits for the first piece, and so is that of a request that cannot be served."""
        deltas = self.engine.stream(*requests)
        try:
            async with contextlib.aclosing(deltas):
                with _told(len(requests)):
                    async for delta in deltas:
                        self._ended([delta.output] if delta.output is not None else (), answer.asked)
                        piece = answer.piece(delta)
                        if sender.status is None:
                            await sender.begin(200, EVENTS, {"Cache-Control": "no-cache"})
                        if piece:
                            await sender.more(piece)
            await sender.end(answer.last())
        except ApiError as error:
            if sender.status is None:
                raise
            await sender.end(b"data: %s\n\ndata: [DONE]\n\n" % error.body)

    def _ended(self, outputs: Iterable[Output], asked: Asked) -> None:
        for output in outputs:
            self.watch.ended(output, asked.params, asked.copies)
            if output.finish_reason == "error" and not output.unservable:
                log.error("request %s: %s", output.id, output.error)

    # The rest.

    def _in_thread(self, function: Callable[[bytes, Served], dict[str, Any]]) -> Handler:
        async def handle(scope: Scope, receive: Receive, sender: Sender) -> None:
            with self._bodies.share() as share:
                body = await self._body(scope, receive, share)
                answer = await while_connected(asyncio.to_thread(function, body, self.served), receive)
            await sender.json(json.dumps(answer).encode())

        return handle

    async def _models(self, _: HttpRequest) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: HttpRequest) -> JSONResponse:
        if request.path_params["name"] != self.served.model:
            raise unknown_model(request.path_params["name"], self.served)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.served.model,
            "object": "model",
            "created": self._created,
            "owned_by": "carousel",
            "root": self.served.model,
            "parent": None,
            "max_model_len": self.served.max_len,
        }

    async def _health(self, _: HttpRequest) -> JSONResponse:
        if self._engine.broken is not None:
            return JSONResponse({"status": "broken"}, 503)
        return JSONResponse({"status": "closing" if self.closing else "ok"}, 503 if self.closing else 200)

    async def _openapi(self, _: HttpRequest) -> JSONResponse:
        return JSONResponse(self._document)


@contextlib.contextmanager
def _told(prompts: int) -> Any:
    """What the engine says of requests that it does not take, to a client who knows prompts."""
    try:
        yield
    except QueueFull as error:
        raise ApiError(429, f"the server is busy: {error}", code="queue_full") from None
    except ValueError as error:
        place, _, reason = str(error).removeprefix("request ").partition(": ")
        if not place.isdigit():
            raise
        raise refused(reason, "" if prompts == 1 else f"prompt {place}: ") from None
    except RuntimeError as error:
        if str(error) == "the engine is closed":
            raise closing() from None
        log.exception("a request was not taken")
        raise ApiError(503, "the engine stopped; the server's log says why") from None
