"""Serve: a model behind OpenAI's HTTP interface, for any client of it.

Completions, chat completions, models, tokens; /health, /metrics, and at / a page that shows the slots turn by turn.
What the server says goes to stderr. SIGTERM or Ctrl-C: no new requests are taken, those that run may end within the
grace time, the others are told; a second signal ends at once.

With a key, clients send it as a bearer token, and browsers as a password; /health needs none. It is better in the
environment, as CAROUSEL_API_KEY, than on the command line, where others can see it. Whitespace around it, such as the
newline of a secret's file, is no part of it.

Exit status: 0 after SIGTERM, also while the model loads; 2 if something could not be run, such as a model that does
not load or a port that is in use; 130 after Ctrl-C.
"""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import tyro
from rich.console import Console

from batching import EngineConfig
from scripts.command import Refused, Report, exit_status
from scripts.http_client import KEY, sendable
from scripts.startup import make_engine

try:
    from scripts.server.app import App, Limits
    from scripts.server.lifecycle import HttpServer, address_of, bound, run
except ModuleNotFoundError as error:  # not everybody wants a server
    sys.exit(f"error: {error}; to serve, install carousel[serve]")


@dataclass(frozen=True)
class Options:
    model: str = "smollm2-135m-instruct"
    """A known name, a folder, a .gguf file, or a model of the Hugging Face hub."""
    served_model_name: str | None = None
    """What clients call it, if not as it is called here."""
    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 is all of this machine's, for anybody who can reach it."""
    port: int = 8000
    """0 is any that is free."""
    api_key: str | None = field(default=None, repr=False)
    """What clients must know; CAROUSEL_API_KEY of the environment if it is not given."""
    grace_s: float = 30.0
    """Seconds that running requests have to end after SIGTERM."""
    max_connections: int = 4096
    """At once; further ones are turned away. Fewer where this process may not have so many open files."""
    limits: tyro.conf.OmitArgPrefixes[Limits] = field(default_factory=Limits)
    """What one client may take."""
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)
    """How requests are served."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must be in 0 .. 65535, not {self.port}")
        if not 0 <= self.grace_s <= 1e6:
            raise ValueError(f"grace_s must be in 0 .. 1e6, not {self.grace_s}")
        if self.max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {self.max_connections}")
        if self.key is not None and not sendable(self.key):
            raise ValueError(f"the API key, --api-key or {KEY}, must be printable ASCII without spaces, not empty")

    @property
    def key(self) -> str | None:
        """Without the whitespace around it."""
        given = os.environ.get(KEY) if self.api_key is None else self.api_key
        return None if given is None else given.strip()

    @property
    def name(self) -> str:
        return self.served_model_name or self.model


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status. `argv`: the command line without the program's name."""
    options = tyro.cli(Options, prog="python -m scripts.serve", description=__doc__, args=argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    with ending_at_once(console):
        return exit_status(lambda report: serve(options, console, report), console)


def serve(options: Options, console: Console, report: Report) -> int:
    """Until a signal. The exit status."""
    with bound(options.host, options.port) as sock:  # before the model is loaded, in case it is in use
        connections = allowed(options.max_connections, report)
        if options.key is None and not loopback(sock.getsockname()[0]):
            report(f"warning: anybody who can reach {options.host} can use this server: give an --api-key")
        engine, figures = make_engine(options.model, options.engine, console)
        gc.collect()
        gc.freeze()  # what is there stays: a collection need not look at it while clients wait

        async def served() -> int | None:
            app = App(engine, options.name, key=options.key, limits=options.limits)
            server = HttpServer(app, grace_s=options.grace_s, most_connections=connections)
            slots = f"{options.engine.slots} slots of {options.engine.max_len}"
            loaded = f"loaded in {figures['load_s'] + figures['compile_s']:.1f} s"
            ready = f"serving {options.name} at {address_of(sock)} ({slots}, {loaded})"
            return await run(server, sock, lambda: report(ready))

        ended_by = asyncio.run(served())
    return 130 if ended_by == signal.SIGINT else 0


@contextlib.contextmanager
def ending_at_once(console: Console) -> Iterator[None]:
    """Until an event loop takes the signals they end the process, which has nobody to tell and nothing to keep."""

    def end(number: int, _: object) -> None:
        try:
            console.show_cursor()  # which bars hide
        finally:
            os._exit(130 if number == signal.SIGINT else 0)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def allowed(connections: int, report: Report) -> int:
    """As many as there may be files, whose limit is raised if it can be; says if these are fewer than wanted.

    Raises Refused where there are too few to serve.
    """
    spare = 128  # files that are open for other reasons
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + spare
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most - spare < 1:
            raise Refused(f"this process may have {hard} open files, too few to serve")
        if most < wanted:
            files = f"this process may have {most} open files"
            report(f"warning: at most {most - spare} connections at once, not {connections}: {files}")
            return most - spare
    return connections


if __name__ == "__main__":
    sys.exit(main())
