"""Reading a recipe from its file, with errors that name file and line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.errors import RecipeError
from lockstep.training.recipe import Recipe
from lockstep.training.recipe_problems import Problem, problems
from lockstep.training.toml_lines import KeyPath, key_lines, tomllib

__all__ = ["RecipeFile", "load_recipe"]


@dataclass(frozen=True)
class RecipeFile:
    """A recipe and where it was written, so that later checks can still point at lines.

    Args:
        path: the file.
        recipe: its contents, checked.
        lines: the line of each key in it.
    """

    path: Path
    recipe: Recipe
    lines: dict[KeyPath, int]

    def error(self, problem: Problem) -> RecipeError:
        """The error for a problem that shows only when the recipe is put to use, such as a missing function."""
        return _error(self.path, self.lines, [problem])


def load_recipe(path: Path) -> RecipeFile:
    """Read and check the recipe at ``path``.

    Raises:
        RecipeError: the file cannot be read, is not TOML, or has unknown keys or wrong values. Each problem is
            named with its line, what was received, what is allowed, and the nearest allowed word.
    """
    text = _read(path)
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, error) from None
    lines = key_lines(text)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise _error(path, lines, problems(error, values)) from None
    return RecipeFile(path, recipe, lines)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        reason = f"line {line} is not UTF-8 text"
    raise RecipeError(
        f"The recipe cannot be read: {reason}. Received: {path}. "
        "Allowed: a TOML file, for example recipes/digits.toml of the lockstep repository."
    )


def _syntax_error(path: Path, text: str, error: tomllib.TOMLDecodeError) -> RecipeError:
    # The position has been an attribute only since Python 3.14; the message has always had it.
    position = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
    rows = text.splitlines() or [""]
    line = int(position[1]) if position and position[1] else len(rows)
    what = str(error).replace(position[0], "") if position else str(error)
    received = rows[line - 1].strip() if line <= len(rows) else ""
    return RecipeError(
        f"{path}, line {line}: The recipe is not valid TOML: {what}. Received: {received or 'the end of the file'}. "
        'Allowed: lines of the form [section], key = value (text in "quotes"), or # comment.'
    )


def _error(path: Path, lines: dict[KeyPath, int], found: list[Problem]) -> RecipeError:
    placed = sorted(((_line(lines, problem.path), problem) for problem in found), key=lambda pair: pair[0])
    return RecipeError("\n".join(f"{path}, line {line}: {problem.text()}" for line, problem in placed))


def _line(lines: dict[KeyPath, int], key_path: KeyPath) -> int:
    """The line of a key; for a missing one that of the table it is missing from, or of the file's start."""
    while key_path:
        if key_path in lines:
            return lines[key_path]
        key_path = key_path[:-1]
    return 1
