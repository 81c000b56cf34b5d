"""The line of each TOML key, against texts whose writer noted the lines while it wrote them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.toml_lines import KeyPath, key_lines, tomllib


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", {}, id="empty"),
        pytest.param("# [no]\n\na = 1 # b = 2\n", {("a",): 3}, id="comments"),
        pytest.param("[a]\nb = 1\n[a.c]\n", {("a",): 1, ("a", "b"): 2, ("a", "c"): 3}, id="tables"),
        pytest.param("[ a . 'b.c' ]\n\"d e\" = 1", {("a",): 1, ("a", "b.c"): 1, ("a", "b.c", "d e"): 2}, id="quoted"),
        pytest.param('"\\u0061" = 1', {("a",): 1}, id="escaped key"),
        pytest.param("a.b.c = 1\na.d = 2", {("a",): 1, ("a", "b"): 1, ("a", "b", "c"): 1, ("a", "d"): 2}, id="dotted"),
        pytest.param("a = [\n 1, # x\n 2,\n]\nb = 3", {("a",): 1, ("a", 0): 2, ("a", 1): 3, ("b",): 5}, id="array"),
        pytest.param(
            "[[a]]\nb = 1\n[[a]]\n[a.c]\nd = 1",
            {
                ("a",): 1,
                ("a", 0): 1,
                ("a", 0, "b"): 2,
                ("a", 1): 3,
                ("a", 1, "c"): 4,
                ("a", 1, "c", "d"): 5,
            },
            id="array of tables",
        ),
        pytest.param(
            "a = { b = 1, c = { d = [1] } }\n",
            {("a",): 1, ("a", "b"): 1, ("a", "c"): 1, ("a", "c", "d"): 1, ("a", "c", "d", 0): 1},
            id="inline tables",
        ),
        pytest.param('a = """\nb = 1\n\\""" c\n""""\nd = 1', {("a",): 1, ("d",): 5}, id="multi-line string"),
        pytest.param("a = '''\n[b]\\\n'''''\nd = 1", {("a",): 1, ("d",): 4}, id="literal string"),
        pytest.param('a = "x # \\" [b]"\nc = \'"\'\nd = ""', {("a",): 1, ("c",): 2, ("d",): 3}, id="strings"),
        pytest.param("a = 1979-05-27 07:32:00\nb = -inf\nc = 0xF", {("a",): 1, ("b",): 2, ("c",): 3}, id="plain"),
        pytest.param("a = 1\r\n[b]\r\nc = 2\r\n", {("a",): 1, ("b",): 2, ("b", "c"): 3}, id="carriage returns"),
    ],
)  # fmt: skip
def test_lines_by_hand(text: str, expected: dict[KeyPath, int]) -> None:
    tomllib.loads(text)
    assert key_lines(text) == expected


def test_text_that_is_not_toml_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected '=' at offset 2; the text is not valid TOML"):
        key_lines("a b")
    with pytest.raises(ValueError, match="Expected a key or value at offset 4"):
        key_lines('a = "')


@dataclass
class Writer:
    """Writes TOML in drawn styles and notes the line of each key."""

    draw: st.DrawFn
    text: str = ""
    lines: dict[KeyPath, int] = field(default_factory=dict)

    @property
    def line(self) -> int:
        return self.text.count("\n") + 1

    def note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.line)

    def any_of(self, *choices: str) -> str:
        return self.draw(st.sampled_from(choices))

    def key(self, name: str) -> str:
        bare = name.isascii() and name.isalnum()
        quoted = json.dumps(name, ensure_ascii=False)
        return self.any_of(quoted, name) if bare else quoted

    def blank(self, *extra: str) -> None:
        self.text += self.any_of("", " ", "\t", *extra)

    def noise(self) -> None:
        """Whole lines that hold no key, though they may look as if they did."""
        self.text += self.any_of("", "\n", "# x = 1\n", "  # [table]\n\n", "\t\n")

    def value(self, path: KeyPath, value: object, inline: bool) -> None:
        if isinstance(value, dict):
            self.text += "{"
            for index, (name, item) in enumerate(value.items()):
                self.text += ", " if index else " "
                self.pair((*path, name), item, inline=True)
            self.text += " }"
        elif isinstance(value, list):
            self.text += "["
            for index, item in enumerate(value):
                self.blank("\n", " # ] [\n", "\n\n")
                self.note((*path, index))
                self.value((*path, index), item, inline)
                self.text += ","
            self.blank("\n")
            self.text += "]"
        elif isinstance(value, str):
            self.string(value)
        else:
            self.text += json.dumps(value)

    def string(self, value: str) -> None:
        quoted = json.dumps(value)
        if self.draw(st.booleans()):
            self.text += quoted
        else:
            # A first newline is no part of the value; quotes inside stay escaped.
            self.text += f'"""\n{quoted[1:-1]}\\\n   """'

    def pair(self, path: KeyPath, value: object, inline: bool = False) -> None:
        self.note(path)
        self.text += self.key(str(path[-1]))
        self.blank()
        self.text += "="
        self.blank()
        self.value(path, value, inline)

    def table(self, path: KeyPath, value: dict[str, object]) -> None:
        """The pairs of a table, then its tables, under headers of their own or inline."""
        tables = {name: item for name, item in value.items() if isinstance(item, dict) and self.draw(st.booleans())}
        for name, item in value.items():
            if name not in tables:
                self.noise()
                self.blank()
                self.pair((*path, name), item)
                self.text += self.any_of("\n", " # a = 1\n", "\n\n")
        for name, item in tables.items():
            self.noise()
            self.note((*path, name))
            names = [self.key(str(part)) for part in (*path, name)]
            self.text += f"[{self.any_of('.', ' . ').join(names)}]" + self.any_of("\n", " # b\n")
            self.table((*path, name), item)


NAMES = st.text(min_size=1, max_size=6).filter(str.isprintable) | st.sampled_from(["a", "b", "a.b", "#"])
TEXTS = st.text(st.characters(codec="ascii", exclude_characters="\x7f"), max_size=12)
VALUES = st.recursive(
    st.booleans() | st.integers(-1000, 1000) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_lines_of_any_document(data: st.DataObject) -> None:
    document = data.draw(st.dictionaries(NAMES, VALUES, max_size=5))
    writer = Writer(data.draw)
    writer.table((), document)
    assert tomllib.loads(writer.text) == document  # the writer is right; now the scanner
    assert key_lines(writer.text) == writer.lines
