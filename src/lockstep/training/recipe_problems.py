"""What is wrong with a recipe, in words: from pydantic's error records to "received, allowed, did you mean"."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lockstep.training.recipe import Recipe
from lockstep.training.toml_lines import KeyPath

__all__ = ["Problem", "assignment", "nearest", "problems", "toml_text"]

_MAX_SHOWN = 80


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe.

    Args:
        path: the key; its line is where the message points.
        what: what is wrong, as a sentence without its full stop.
        received: the offending text, or None where something is missing.
        allowed: what may stand there.
        near: the allowed word nearest to what was received, or None.
    """

    path: KeyPath
    what: str
    received: str | None
    allowed: str
    near: str | None = None

    def text(self) -> str:
        """The message, without file and line."""
        received = "nothing" if self.received is None else self.received
        hint = "" if self.near is None else f" Did you mean {self.near!r}?"
        return f"{self.what}. Received: {received}. Allowed: {self.allowed}.{hint}"


def problems(error: ValidationError, values: dict[str, Any]) -> list[Problem]:
    """Every problem that pydantic found in ``values``, the parsed recipe."""
    found: dict[KeyPath, Problem] = {}
    for record in error.errors():
        problem = _problem(record, values)
        # A value that fits no member of a union is reported once for each of them.
        found.setdefault(problem.path, problem)
    return list(found.values())


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like ``word``, if one is like it at all."""
    matches = difflib.get_close_matches(word.lower(), list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def toml_text(value: Any) -> str:
    """``value`` about as TOML writes it, shortened if it is long."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, list):
        text = "[" + ", ".join(map(toml_text, value)) + "]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{name} = {toml_text(item)}" for name, item in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _problem(record: Any, values: dict[str, Any]) -> Problem:
    path: KeyPath = tuple(record["loc"])
    kind = record["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, record["input"])
    if kind == "missing":
        return _missing_key(path)
    if kind in ("both_keys", "neither_key"):
        return _wrong_number_of_keys(path, kind, record["ctx"]["keys"], values)
    return _wrong_value(path, record["input"])


def _unknown_key(path: KeyPath, value: Any) -> Problem:
    section, name = path[:-1], str(path[-1])
    names = list(_fields(section))
    what = f"{name!r} is not a key of {_table(section)}" if section else f"{name!r} is not a section of a recipe"
    return Problem(path, what, assignment(path, value), ", ".join(names), nearest(name, names))


def _missing_key(path: KeyPath) -> Problem:
    section, name = path[:-1], path[-1]
    if not section:
        keys = ", ".join(_fields(path))
        return Problem(path, f"The section [{name}] is missing", None, f"a table with the keys {keys}")
    return Problem(path, f"The key '{name}' of {_table(section)} is missing", None, _allowed(path))


def _wrong_number_of_keys(path: KeyPath, kind: str, keys: list[str], values: dict[str, Any]) -> Problem:
    first, second = keys
    section = values[str(path[0])]
    if kind == "neither_key":
        what = f"{_table(path)} has neither '{first}' nor '{second}'"
        return Problem(path, what, toml_text(section), f"exactly one of {first}, {second}")
    given = " and ".join(f"{name} = {toml_text(section[name])}" for name in section if name in keys)
    later = [name for name in section if name in keys][-1]
    what = f"{_table(path)} has both '{first}' and '{second}', which decide the same thing"
    return Problem((*path, later), what, given, f"only one of {first}, {second}")


def _wrong_value(path: KeyPath, value: Any) -> Problem:
    # Past section and key pydantic's path goes on with the index into a list, or with the member of a union it tried.
    key_path = path[:2]
    shown = path[:3] if len(path) > 2 and isinstance(path[2], int) else key_path
    field = _field(key_path)
    near = nearest(value, _choices(field.annotation)) if field and isinstance(value, str) else None
    name = str(key_path[-1])
    what = f"'{name}' of {_table(key_path[:-1])} has a wrong value" if len(key_path) > 1 else f"'{name}' is not a table"
    return Problem(shown, what, assignment(shown, value), _allowed(key_path), near)


def assignment(path: KeyPath, value: Any) -> str:
    """``value`` as the recipe gives it: as a table, an array element or a key."""
    name = path[-1]
    if isinstance(name, int):
        return f"{toml_text(value)} as element {name} of {path[-2]}"
    if len(path) == 1 and isinstance(value, dict):
        return f"[{name}]"
    return f"{name} = {toml_text(value)}"


def _table(section: KeyPath) -> str:
    return f"[{'.'.join(map(str, section))}]"


def _field(path: KeyPath) -> FieldInfo | None:
    """The declaration of a key."""
    return _fields(path[:-1]).get(str(path[-1]))


def _fields(section: KeyPath) -> dict[str, FieldInfo]:
    """The keys of a section under the names that a recipe uses."""
    model: Any = Recipe
    for part in section:
        field = model.model_fields.get(str(part))
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return {}
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _allowed(path: KeyPath) -> str:
    """What a key takes, in words; a choice is listed."""
    field = _field(path)
    if field is None:
        return "see the documentation of the recipe"
    choices = _choices(field.annotation)
    if choices:
        return ", ".join(toml_text(choice) for choice in choices)
    extra = field.json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else str(field.annotation)


def _choices(annotation: Any) -> list[str]:
    """The words that a ``Literal`` (or an optional one) allows; empty for other types."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        return [choice for member in get_args(annotation) for choice in _choices(member)]
    return []
