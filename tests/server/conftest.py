"""One small server for many tests, an engine like its own to compare with, and OpenAI's clients."""

import openai
import pytest

from tests.server.servers import Running, checkpoint, engine_of


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def alone(folder):
    """An engine like the server's."""
    return engine_of(folder)


@pytest.fixture(scope="session")
def server(folder):
    with Running(engine_of(folder)) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one
