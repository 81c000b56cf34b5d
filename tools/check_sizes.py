"""Check that modules have at most 400 lines and functions at most 60. Usage: python tools/check_sizes.py FOLDER..."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60


def oversized(path: Path) -> Iterator[str]:
    """One message for the module, and one for each function in it, that is too long.

    A function counts from its ``def`` to its end, without decorators and docstring: documentation is never too long.
    """
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    if lines > MAX_MODULE_LINES:
        yield f"{path}: module has {lines} lines; at most {MAX_MODULE_LINES} are allowed"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = _code_lines(node)
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES} are allowed"


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of ``function``, less those of its docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        total -= first.end_lineno - first.lineno + 1
    return total


def main(folders: list[str]) -> int:
    """Print every message for the Python files under ``folders``; 1 if there is one."""
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    messages = [message for path in paths for message in oversized(path)]
    print("\n".join(messages) if messages else f"sizes: {len(paths)} modules are small enough")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["src"]))
