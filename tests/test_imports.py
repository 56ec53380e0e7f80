"""Imports go one way, and no file grows past what a person reads in one sitting."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "model", "batching", "scripts")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
TESTS = sorted((ROOT / "tests").rglob("*.py"))
HOST_SIDE = "params request plan scheduler policies sequence prefix turn recording checks".split()
WITHOUT_JAX = [f"batching.{name}" for name in HOST_SIDE]
MAY_IMPORT = {  # our own packages that each may import, besides itself
    "pallas_kernels": set(),
    "model": {"pallas_kernels"},
    "batching": {"model", "pallas_kernels"},
    "scripts": {"batching", "model", "pallas_kernels"},
}


@cache
def imports(module: str) -> frozenset[str]:
    """Full names of what a module of ours imports, wherever in the file; of ours, the module that is meant."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{module} line {node.lineno}: relative import"
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in FILES else node.module)
    return frozenset(found)


def top(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("module", FILES)
def test_packages_import_one_way(module):
    ours = {top(name) for name in imports(module)} & set(PACKAGES)
    assert ours <= MAY_IMPORT[top(module)] | {top(module)}


@pytest.mark.parametrize("module", [module for module in FILES if top(module) == "pallas_kernels"])
def test_kernels_import_jax_alone(module):
    """And NumPy, whose scalars are what jax.ffi takes as attributes."""
    foreign = {top(name) for name in imports(module)} - sys.stdlib_module_names
    assert foreign <= {"jax", "jaxtyping", "numpy", "pallas_kernels"}


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_the_host_side_needs_no_jax(module):
    reached, todo = set(), [module]
    while todo:
        for name in imports(todo.pop()) - reached:
            reached.add(name)
            todo += [name] if name in FILES else []
    assert {top(name) for name in reached} - sys.stdlib_module_names <= {"batching", "numpy"}
    assert "batching" not in reached, "the package itself is the engine: import the module that is meant"


def test_only_tests_and_scripts_know_scripts():
    assert [module for module in FILES if top(module) != "scripts" and "scripts" in map(top, imports(module))] == []


@pytest.mark.parametrize("path", [*FILES.values(), *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path):
    limit = 350 if "pallas_kernels" in path.parts else 300
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit
