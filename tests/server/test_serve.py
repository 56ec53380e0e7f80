"""The command: it says where it listens, serves, and ends as it is told to."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from scripts.serve import Options, main
from tests.server.servers import post

ROOT = Path(__file__).parents[2]
LIMIT = 120  # seconds
SMALL = ["--slots", "2", "--max-len", "96", "--chunk-sizes", "32", "--port", "0"]


@contextlib.contextmanager
def command(*arguments: str, **environment: str):
    """The process, the address that it told, and what it said until then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.serve", *SMALL, *arguments],
        cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"serving (\S+) at (http://\S+) \(2 slots of 96, ", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, found, said
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_signals(folder, number, status):
    """The request that runs comes to its end first."""
    arguments = ["--model", str(folder), "--served-model-name", "tiny", "--api-key", "sesame"]
    with command(*arguments, CAROUSEL_API_KEY="other") as (process, told, said):
        assert told[1] == "tiny"
        assert "warning" not in said
        with httpx2.Client(base_url=told[2], headers={"Authorization": "Bearer sesame"}, timeout=60) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
            fields = {"prompt": [70], "max_tokens": 90, "stream": True, "ignore_eos": True, "logprobs": 0}
            with http.stream("POST", "/v1/completions", json=fields) as reply:
                events = (line for line in reply.iter_lines() if line)
                next(events)
                process.send_signal(number)
                *rest, done = events
            assert done == "data: [DONE]"
            tokens = sum(len(json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]) for line in rest)
            assert tokens >= 80  # all but those of the first event
        assert process.wait(LIMIT) == status
        assert process.communicate() == ("", "")


def test_a_second_signal_ends_at_once(folder):
    with command("--model", str(folder), "--grace-s", "600") as (process, told, _):
        port = int(told[2].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(post("/tokenize", {"prompt": "a"})[:-1])
            time.sleep(0.3)  # the server is inside the request
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 128 + signal.SIGTERM


def test_what_cannot_be_run(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--model", str(folder), "--port", str(port)]) == 2
    assert f"127.0.0.1 port {port}" in capsys.readouterr().err
    assert main(["--model", str(folder / "none"), "--port", "0"]) == 2
    assert main(["--host", "no.such.host.invalid", "--port", "0"]) == 2
    assert main(["--model", str(folder), "--port", "0", "--max-len", "99999999"]) == 2
    for wrong in ({"port": 70_000}, {"grace_s": -1.0}, {"api_key": ""}, {"max_connections": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
            Options(**wrong)


def test_a_warning_where_everybody_may_ask(folder, capsys):
    assert main(["--model", str(folder / "none"), "--port", "0", "--host", "0.0.0.0"]) == 2
    assert "warning: anybody who can reach 0.0.0.0" in capsys.readouterr().err
    assert main(["--model", str(folder / "none"), "--port", "0", "--host", "0.0.0.0", "--api-key", "a"]) == 2
    assert "warning" not in capsys.readouterr().err
