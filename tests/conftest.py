"""Options and settings that all tests share."""

import gc
import inspect
import os
from pathlib import Path

import jax
import pytest

from batching import EngineConfig

# XLA's threads on a CPU. The GPU interpreter blocks one of them in every warpgroup that waits for a barrier: with two
# of them, the warpgroup that all wait for may never come to run.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))


MAPS = Path("/proc/self/maps")
MOST_MAPS = 25_000  # of 65,530 that Linux lets a process have; a program of XLA's for CPUs takes some 400


@pytest.fixture(autouse=True)
def few_programs():
    """JAX keeps every program it has compiled: a long run would come to the end of its memory maps, and crash there."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take longer than a minute or so")


def pytest_configure() -> None:
    # Every engine of the tests verifies its turns, unless a test says otherwise.
    names = list(inspect.signature(EngineConfig).parameters)
    defaults = dict(zip(names, EngineConfig.__init__.__defaults__, strict=True)) | {"checks": True}
    EngineConfig.__init__.__defaults__ = tuple(defaults.values())
    # Arrays of different rank never meet by accident.
    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
