"""Lists that say which test proves what: an entry is ``file::test``, and must be there."""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent


@cache
def tests_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file, read and not run."""
    path = TESTS / f"{file}.py"
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def missing(entry: str) -> bool:
    """Whether ``file::test`` names no test."""
    file, _, name = entry.partition("::")
    return name not in tests_in(file)
