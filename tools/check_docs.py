"""Check links in Markdown files. Usage: python tools/check_docs.py FILE_OR_FOLDER...

What is checked, all of it offline:

- a relative link leads to a file or folder of this repository;
- ``#Lnn`` or ``#Lnn-Lmm`` after a code file is a line that the file has;
- ``#heading`` after a Markdown file, or alone, is a heading of it;
- a code span `` `path.py:symbol` `` names a class, function or assignment of that file (dots lead inside a class).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_SYMBOL = re.compile(r"`([\w./-]+\.py):([A-Za-z_][\w.]*)`")
_LINES = re.compile(r"L(\d+)(?:-L(\d+))?")
_EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:")


def broken(document: Path) -> Iterator[str]:
    """One message for each link or symbol of ``document`` that leads nowhere."""
    text = _without_fences(document.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), start=1):
        for match in _LINK.finditer(line):
            reason = _why_link_is_broken(document, match[1])
            if reason:
                yield f"{document}:{number}: link {match[1]}: {reason}"
        for match in _SYMBOL.finditer(line):
            reason = _why_symbol_is_broken(document, match[1], match[2])
            if reason:
                yield f"{document}:{number}: {match[1]}:{match[2]}: {reason}"


def _without_fences(text: str) -> str:
    """``text`` with fenced code blanked, so that line numbers stay right."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)


def _why_link_is_broken(document: Path, link: str) -> str | None:
    if _EXTERNAL.match(link):
        return None
    name, _, anchor = link.partition("#")
    target = (document.parent / name) if name else document
    if not target.exists():
        return "no such file"
    if not anchor:
        return None
    if target.suffix == ".md":
        return None if anchor in _headings(target) else "no such heading"
    lines = _LINES.fullmatch(anchor)
    if lines is None:
        return "expected #Lnn or #Lnn-Lmm"
    count = len(target.read_text(encoding="utf-8").splitlines())
    last = int(lines[2] or lines[1])
    return None if 1 <= int(lines[1]) <= last <= count else f"the file has {count} lines"


def _headings(document: Path) -> set[str]:
    """The anchors of the headings of ``document``, in GitHub's spelling."""
    text = _without_fences(document.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+\s+(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _why_symbol_is_broken(document: Path, path: str, symbol: str) -> str | None:
    for target in (REPOSITORY / path, document.parent / path):
        if target.is_file():
            return None if _defines(target, symbol) else "the file does not define it"
    return "no such file"


def _defines(path: Path, symbol: str) -> bool:
    """Whether the Python file at ``path`` has ``symbol``, such as ``function`` or ``Class.method``."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in symbol.split("."):
        found = next((node for node in body if part in _names(node)), None)
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def main(arguments: list[str]) -> int:
    """Print every message for the given files and the Markdown files in the given folders; 1 if there is one."""
    documents: list[Path] = []
    for path in map(Path, arguments):
        documents += sorted(path.rglob("*.md")) if path.is_dir() else [path]
    messages = [message for document in documents for message in broken(document)]
    print("\n".join(messages) if messages else f"docs: the links of {len(documents)} documents resolve")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
