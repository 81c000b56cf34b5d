"""The shape of the source: sizes, the direction of imports, and the doors to private parts of TensorFlow and Keras."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from check_sizes import oversized
from subprocess_tools import REPOSITORY, run_snippet

SOURCE = REPOSITORY / "src" / "lockstep"
MODULES = sorted(SOURCE.rglob("*.py"))

# What each part may import, besides itself. A module at the top level of the package is a part of its own.
ENGINE = {"engine", "errors", "strategy", ""}
MIDDLE = {"training", "observe", "plan", "launch"}
ALLOWED = {
    "errors": set(),
    "": {"errors", "strategy"},
    "engine": {"errors"},
    "strategy": {"errors", "engine"},
    **dict.fromkeys(MIDDLE, ENGINE),
    "cli": ENGINE | MIDDLE,
    "__main__": {"cli"},
}

PRIVATE = {
    "tensorflow.python": "engine/tf_private.py",
    "keras.src": "engine/keras_private.py",
}


def part_of(module: str) -> str:
    """The part of lockstep that a dotted module name belongs to; the package itself is the part named ``""``."""
    return (module.split(".") + [""])[1]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of each import in ``path``, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports in lockstep are absolute"
            base = node.module or ""
            for alias in node.names:
                # `from lockstep import errors` names the submodule; `from lockstep.errors import X` a name in it.
                yield node.lineno, f"{base}.{alias.name}"


def module_id(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_modules_and_functions_are_small(path: Path) -> None:
    assert list(oversized(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_imports_go_one_way(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py").replace("__init__", "")
    for line, module in imports(path):
        if module.split(".")[0] != "lockstep":
            continue
        part = part_of(module)
        if part in ("MirroredStrategy", "__version__"):
            part = ""
        assert part == own or part in ALLOWED[own], f"{path}:{line}: {own or 'lockstep'} may not import {module}"


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_private_modules_have_one_door(path: Path) -> None:
    for line, module in imports(path):
        for private, door in PRIVATE.items():
            inside = f"{module}.".startswith(f"{private}.")
            assert not inside or module_id(path) == door, f"{path}:{line}: only {door} may import {private}"


def test_importing_lockstep_does_not_start_tensorflow() -> None:
    result = run_snippet(
        """
        import sys
        import lockstep
        lockstep.errors.RecipeError
        print(lockstep.__version__, "tensorflow" in sys.modules, "keras" in sys.modules)
        """
    ).check()
    version, tensorflow, keras = result.stdout.split()
    assert version.count(".") == 2
    assert (tensorflow, keras) == ("False", "False")


def test_an_unknown_public_name_is_named() -> None:
    import lockstep

    with pytest.raises(AttributeError, match="has no attribute 'MirrorStrategy'. It offers: MirroredStrategy"):
        _ = lockstep.MirrorStrategy  # type: ignore[attr-defined]
