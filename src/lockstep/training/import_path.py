"""Calling what a recipe names by import path, with errors that point at its lines."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.training.recipe_file import RecipeFile
from lockstep.training.recipe_problems import Problem, nearest, toml_text
from lockstep.training.toml_lines import KeyPath

__all__ = ["NoModuleError", "check_arguments", "import_function", "import_module", "public_functions"]


def import_function(file: RecipeFile, path: KeyPath, import_path: str) -> Callable[..., Any]:
    """The function that ``import_path`` ("module:function") names; the recipe's own folder is searched last.

    Raises:
        RecipeError: no such module or function, at the line of ``path``.
    """
    module_name, _, name = import_path.partition(":")
    module = _import_module(file, path, module_name)
    function = getattr(module, name, None)
    if callable(function):
        return function
    names = public_functions(module)
    raise file.error(
        Problem(
            path,
            f"The module {module_name} has no function {name!r}",
            f"{path[-1]} = {toml_text(import_path)}",
            ", ".join(names) or "the module has no public function",
            nearest(name, names),
        )
    )


def check_arguments(
    file: RecipeFile, path: KeyPath, function: Callable[..., Any], arguments: dict[str, Any], closed: bool = False
) -> None:
    """Check that ``function`` takes ``arguments``, before the call makes a less readable error of it.

    With ``closed``, a function's ``**kwargs`` count for nothing: Keras optimizers have them only to reject what is in
    them.

    Raises:
        RecipeError: an argument that the function does not take, or one that it needs and is not given.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        # Some functions written in C do not say what they take; then the call itself is the check.
        return
    takes_any = not closed and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    called = getattr(function, "__name__", str(function))
    for name, value in arguments.items():
        if name not in named and not takes_any:
            what = f"{called} takes no argument {name!r}"
            allowed = ", ".join(named) or "no arguments"
            raise file.error(Problem((*path, name), what, f"{name} = {toml_text(value)}", allowed, nearest(name, named)))
    for name in named:
        if parameters[name].default is inspect.Parameter.empty and name not in arguments:
            what = f"{called} needs the argument {name!r}"
            raise file.error(Problem(path, what, toml_text(arguments), f"{name} = a value of its kind"))


def _import_module(file: RecipeFile, path: KeyPath, name: str) -> ModuleType:
    folder = file.path.resolve().parent
    try:
        return import_module(name, folder)
    except NoModuleError as error:
        what = f"There is no module {error.missing!r}"
        allowed = f"a module on Python's import path or in {folder}"
        raise file.error(Problem(path, what, f"{path[-1]} = {toml_text(f'{name}:...')}", allowed)) from None


class NoModuleError(Exception):
    """There is no module of a name, or of the part ``missing`` of it. Whoever asked for it says where the name came from."""

    def __init__(self, missing: str):
        super().__init__(missing)
        self.missing = missing


def import_module(name: str, folder: Path) -> ModuleType:
    """The module ``name``, also looked for in ``folder``: last, so that a file there never hides an installed package.

    Raises:
        NoModuleError: there is none.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing != name and not name.startswith(f"{missing}."):
            # The module is there; something that it imports is not. That is no mistake of who named it.
            raise
        raise NoModuleError(missing) from None


def public_functions(module: ModuleType) -> list[str]:
    """The names of what can be called in ``module``, in order."""
    return sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
