"""Where each key of a TOML text stands.

Python's TOML readers return values without positions. This module returns the positions without values: the text must
already be known to be valid TOML, so that the scanner only has to tell keys from strings, comments and brackets.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["KeyPath", "key_lines", "tomllib"]

# A key from the root of the document: names of tables and keys, and indices into arrays.
KeyPath = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRINGS = {
    # At most two quotes may stand right before the three that end a multi-line string.
    '"""': re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}(?!")', re.DOTALL),
    "'''": re.compile(r"'''.*?'{3,5}(?!')", re.DOTALL),
    '"': re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    "'": re.compile(r"'[^'\n]*'"),
}
# Numbers, booleans and dates; a date and its time may have one space between them.
_PLAIN_VALUE = re.compile(r"[^,\[\]{}#\n]+")


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key, table header and array element of a valid TOML text.

    A table that several headers or dotted keys build up has the line of the first of them.

    >>> key_lines('[batch]\\nglobal = 64\\n')
    {('batch',): 1, ('batch', 'global'): 2}
    """
    return _Scanner(text).scan()


class _Scanner:
    """One pass over a TOML text; ``position`` is where it has got to."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[KeyPath, int] = {}
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        # How many [[headers]] each array of tables has had.
        self._array_sizes: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self._skip_blank()
        while self.position < len(self.text):
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip_blank()
        return self.lines

    def _header(self) -> KeyPath:
        """Read ``[a.b]`` or ``[[a.b]]``; the path of the table it opens."""
        array = self.text.startswith("[[", self.position)
        self.position += 2 if array else 1
        *parents, last = self._dotted_key()
        path = self._enter((), parents)
        path = (*path, last)
        self._note(path)
        if array:
            index = self._array_sizes.get(path, 0)
            self._array_sizes[path] = index + 1
            path = (*path, index)
            self._note(path)
        self._expect("]]" if array else "]")
        return path

    def _enter(self, path: KeyPath, names: list[str]) -> KeyPath:
        """Follow ``names`` down from ``path``; in an array of tables a name means its newest element."""
        for name in names:
            path = (*path, name)
            self._note(path)
            if path in self._array_sizes:
                path = (*path, self._array_sizes[path] - 1)
        return path

    def _pair(self, table: KeyPath) -> None:
        """Read ``key = value``."""
        path = self._enter(table, self._dotted_key())
        self._expect("=")
        self._value(path)

    def _dotted_key(self) -> list[str]:
        """Read ``a."b c".d``; the names in it."""
        names = [self._simple_key()]
        self._skip_blank()
        while self._peek() == ".":
            self.position += 1
            names.append(self._simple_key())
            self._skip_blank()
        return names

    def _simple_key(self) -> str:
        self._skip_blank()
        if self._peek() in ("'", '"'):
            quoted = self._take(_STRINGS[self._peek()])
            return tomllib.loads(f"key = {quoted}")["key"]
        return self._take(_BARE_KEY)

    def _value(self, path: KeyPath) -> None:
        self._skip_blank()
        if self._peek() == "[":
            self._array(path)
        elif self._peek() == "{":
            self._inline_table(path)
        else:
            quotes = next((q for q in _STRINGS if self.text.startswith(q, self.position)), None)
            self._take(_STRINGS[quotes] if quotes else _PLAIN_VALUE)

    def _array(self, path: KeyPath) -> None:
        self._expect("[")
        self._skip_blank()
        index = 0
        while self._peek() != "]":
            self._note((*path, index))
            self._value((*path, index))
            self._skip_separator()
            index += 1
        self._expect("]")

    def _inline_table(self, path: KeyPath) -> None:
        self._expect("{")
        self._skip_blank()
        while self._peek() != "}":
            self._pair(path)
            self._skip_separator()
        self._expect("}")

    def _skip_separator(self) -> None:
        self._skip_blank()
        if self._peek() == ",":
            self.position += 1
        self._skip_blank()

    def _note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, bisect_right(self._newlines, self.position - 1) + 1)

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _skip_blank(self) -> None:
        blank = _BLANK.match(self.text, self.position)
        if blank:
            self.position = blank.end()

    def _expect(self, token: str) -> None:
        self._skip_blank()
        if not self.text.startswith(token, self.position):
            raise ValueError(f"Expected {token!r} at offset {self.position}; the text is not valid TOML.")
        self.position += len(token)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        if match is None:
            raise ValueError(f"Expected a key or value at offset {self.position}; the text is not valid TOML.")
        self.position = match.end()
        return match[0]
