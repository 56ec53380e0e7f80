"""A server in a thread of the test's process, on a free port, and a small model that has a tokenizer and a template."""

import asyncio
import json
import shutil
import socket
import threading
import time
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from batching import Engine, EngineConfig
from model.checkpoint import load
from scripts.server.app import App, Limits
from scripts.server.lifecycle import HttpServer, address_of, bound
from tests.batching.async_tools import Steps

LIMIT = 60  # seconds, for a test that hangs
CONFIG = EngineConfig(slots=4, max_len=96, chunk_sizes=(32,), max_queue=256)
SPECIAL = ["<pad>", "<s>", "<end>"]  # the model's ids 0 to 2; the last one ends a text
TEMPLATE = """{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}\
{{ raise_exception('no such role') }}{% endif %}[{{ message.role }}]{{ message.content }}\n{% endfor %}[assistant]"""


def checkpoint(folder: Path) -> Path:
    """llama_tied_gqa4 with a tokenizer of its 320 ids: three special tokens, 256 bytes, and pairs of letters."""
    source = Path(__file__).parents[1] / "data" / "llama_tied_gqa4"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder / name)
    letters = "etaoinsh"
    pairs = [(a, b) for a in letters for b in letters][: 320 - 256 - len(SPECIAL)]
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    core = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    core.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def loaded(folder: Path):
    return load(folder)


def engine_of(folder: Path, config: EngineConfig = CONFIG) -> Engine:
    tiny = loaded(folder)
    return Engine(tiny.model, config, tokenizer=tiny.tokenizer, eos_ids=tiny.eos_ids)


class Running:
    """`with Running(engine) as server`: serves it until the end, when every slot must be free."""

    def __init__(
        self,
        engine: Engine,
        *,
        grace_s: float = 5.0,
        limits: Limits | None = None,
        key: str | None = None,
        most_connections: int = 4096,
    ):
        self.engine, self._grace_s, self._limits, self._key = engine, grace_s, limits, key
        self._most_connections = most_connections
        self._started, self._thread = threading.Event(), threading.Thread(target=self._run)
        self.failed: BaseException | None = None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failed = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        with bound("127.0.0.1", 0) as sock:
            self.url, self.port = address_of(sock), sock.getsockname()[1]
            self.app = App(self.engine, "tiny", key=self._key, limits=self._limits)
            self.http = HttpServer(self.app, grace_s=self._grace_s, most_connections=self._most_connections)
            serving = asyncio.create_task(self.http.serve([sock]))
            while not self.http.started and not serving.done():
                await asyncio.sleep(0.001)
            self._started.set()
            await serving

    def __enter__(self) -> "Running":
        self._thread.start()
        assert self._started.wait(LIMIT)
        assert self.failed is None, self.failed
        return self

    def stop(self) -> None:
        """As a signal does."""
        self.http.should_exit = True

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        assert self.failed is None, self.failed
        assert not self.engine.unfinished
        assert len(self.engine.scheduler.free) == self.engine.config.slots

    def idle(self) -> bool:
        return not self.engine.unfinished and len(self.engine.scheduler.free) == self.engine.config.slots

    def wait(self, what) -> None:
        """Until something is so."""
        end = time.monotonic() + LIMIT
        while not what():
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.002)

    def connect_narrowly(self) -> socket.socket:
        """The system takes next to nothing of an answer that is not read, here and on the connections that follow."""
        self.http.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock = socket.socket()
        sock.settimeout(LIMIT)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)


def post(path: str, body: bytes | dict, *headers: str) -> bytes:
    """A request as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", *headers, "", ""]).encode() + data


def read_all(sock: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    pieces = []
    while piece := sock.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def check(reply, status: int, param: str | None = None) -> dict:
    """It is an error in OpenAI's form."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    return error


__all__ = ["CONFIG", "LIMIT", "SPECIAL", "Running", "Steps", "check", "checkpoint", "engine_of", "post", "read_all"]
