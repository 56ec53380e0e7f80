"""Text for trying things out: what documents Python itself, from the installation that runs this.

The topics of its language reference (`help("for")`) and the docstrings of its standard library, each paragraph once.
"""

import ast
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def python_text() -> str:
    """The same for the same installation."""
    paragraphs = dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            for docstring in docstrings(file):
                paragraphs |= dict.fromkeys(docstring.split("\n\n"))
    return "\n\n".join(paragraphs) + "\n"


def docstrings(file: Path) -> list[str]:
    """Of the module, its classes and its functions; of a file that this Python does not read, none."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    except (SyntaxError, ValueError):
        return []
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    return [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".txt"):
        sys.exit("python -m scripts.training.python_text FILE.txt")
    Path(sys.argv[1]).write_text(python_text(), encoding="utf-8")
