"""These tests compile for accelerators that are not here.

`bash scripts/test.sh --aot` runs them, in an environment that has the compilers; elsewhere they are not collected.
"""

from importlib.util import find_spec

import pytest

from tests.aot.report import REPORT, table


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing too
        return False


if not all(map(_has, ("libtpu", "jax_plugins.xla_cuda13"))):
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the kernels take, also where all is well: it says how near the limits are."""
    if REPORT:
        terminalreporter.section("what the compilers say")
        for line in table():
            terminalreporter.write_line(line)
