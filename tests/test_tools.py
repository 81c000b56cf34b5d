"""The checks in tools/: that they find what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_docs import broken
from check_sizes import oversized


def test_sizes_at_the_limit_and_above(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    body = "\n".join("    x = 1" for _ in range(59))
    path.write_text(f'def fits():\n{body}\n\ndef long():\n    """Docstrings\n    do not count."""\n{body}\n    x = 2\n')
    assert list(oversized(path)) == [f"{path}:62: long has 61 lines; at most 60 are allowed"]
    path.write_text("\n" * 401)
    assert list(oversized(path)) == [f"{path}: module has 401 lines; at most 400 are allowed"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[a](other.md)", None),
        ("[a](other.md#a-second-heading)", None),
        ("[a](#first)\n\n# First", None),
        ("[a](code.py#L2)", None),
        ("[a](code.py#L1-L4)", None),
        ("`code.py:Thing.method`, `code.py:LIMIT`, `code.py:run`", None),
        ("```\n[a](none.md) `code.py:none`\n```", None),
        ("[a](https://example.org/none)", None),
        ("[a](none.md)", "2: link none.md: no such file"),
        ("[a](other.md#third)", "2: link other.md#third: no such heading"),
        ("[a](code.py#L9)", "2: link code.py#L9: the file has 4 lines"),
        ("[a](code.py#L0)", "2: link code.py#L0: the file has 4 lines"),
        ("[a](code.py#run)", "2: link code.py#run: expected #Lnn or #Lnn-Lmm"),
        ("`code.py:Thing.none`", "2: code.py:Thing.none: the file does not define it"),
        ("`none.py:run`", "2: none.py:run: no such file"),
    ],
)
def test_links(tmp_path: Path, text: str, reason: str | None) -> None:
    (tmp_path / "code.py").write_text("class Thing:\n    def method(self): ...\nLIMIT: int = 3\ndef run(): ...\n")
    (tmp_path / "other.md").write_text("# One\n\n## A second heading\n")
    document = tmp_path / "document.md"
    document.write_text(f"\n{text}\n")
    assert list(broken(document)) == ([] if reason is None else [f"{document}:{reason}"])
