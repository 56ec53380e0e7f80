"""The command: it says where it listens, serves, and ends as it is told to."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest

from scripts import serve
from scripts.command import Refused
from scripts.serve import KEY, Options, allowed, main
from scripts.server.lifecycle import bound
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
            long = {"prompt": [70], "n": 128, "max_tokens": 90, "ignore_eos": True, "stream": True}
            sock.sendall(post("/v1/completions", long))
            sock.recv(1)  # of its first text: it takes seconds
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
    for wrong in ({"port": 70_000}, {"grace_s": -1.0}, {"max_connections": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
            Options(**wrong)


def test_two_servers_that_start_together(folder, capsys):
    """Both may bind before one listens: the other says where it could not."""
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        make = serve.make_engine

        def slowly(*arguments):
            first.listen()
            return make(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("scripts.serve.make_engine", slowly)
            assert main([*SMALL, "--model", str(folder), "--port", str(port)]) == 2
    assert f"http://127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_model_loads(tmp_path, number, status):
    """Its configuration is a pipe, from which nothing comes."""
    os.mkfifo(tmp_path / "config.json")
    arguments = [sys.executable, "-m", "scripts.serve", *SMALL, "--model", str(tmp_path)]
    with subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        ended = threading.Timer(LIMIT, process.kill)
        ended.start()
        try:
            with open(tmp_path / "config.json", "w"):  # opens once it is read
                process.send_signal(number)
                assert process.wait(LIMIT) == status
            assert process.communicate() == (None, "")
        finally:
            ended.cancel()
            process.kill()


@pytest.mark.parametrize("key", ["sesame", " sesame\n", "\tsesame\r\n", "!~:sesame"])
def test_whitespace_around_a_key_is_no_part_of_it(monkeypatch, key):
    monkeypatch.setenv(KEY, key)
    assert Options().key == Options(api_key=key).key == key.strip()
    assert Options(api_key="other\n").key == "other"


@pytest.mark.parametrize("key", ["", " \n", "ses ame", "ses\name", "s\udcffsame", "sésame", "sesame\x7f", "\0sesame"])
def test_keys_that_nobody_could_send_are_refused(monkeypatch, capsys, key):
    with pytest.raises(ValueError, match="must be printable ASCII without spaces, not empty") as told:
        Options(api_key=key)
    assert "same" not in str(told.value)
    if "\0" not in key:
        monkeypatch.setenv(KEY, key)
        with pytest.raises(SystemExit):
            main(["--port", "0"])
        assert "same" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limits", "wanted", "found", "said"),
    [
        ((1024, 4224), 4096, 4096, None),
        ((1024, resource.RLIM_INFINITY), 4096, 4096, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 4096, 4096, None),
        ((1024, 1024), 896, 896, None),
        ((256, 1024), 4096, 896, "at most 896 connections at once, not 4096: this process may have 1024 open files"),
    ],
)
def test_connections_that_there_are_files_for(monkeypatch, limits, wanted, found, said):
    told, held = [], []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: held.append(pair))
    assert allowed(wanted, told.append) == found
    assert told == ([f"warning: {said}"] if said else [])
    assert held in ([], [(found + 128, limits[1])])


def test_too_few_files_to_serve(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 128))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    with pytest.raises(Refused, match="128 open files, too few to serve"):
        allowed(4096, print)


def test_a_warning_where_everybody_may_ask(folder, capsys):
    assert main(["--model", str(folder / "none"), "--port", "0", "--host", "0.0.0.0"]) == 2
    assert "warning: anybody who can reach 0.0.0.0" in capsys.readouterr().err
    assert main(["--model", str(folder / "none"), "--port", "0", "--host", "0.0.0.0", "--api-key", "a"]) == 2
    assert "warning" not in capsys.readouterr().err
