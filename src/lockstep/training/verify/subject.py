"""What is verified: a training that can be set up again and again, on one device or on several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import VerifyError
from lockstep.training.import_path import NoModuleError, import_module, public_functions
from lockstep.training.recipe_file import RecipeFile, load_recipe
from lockstep.training.recipe_problems import nearest

if TYPE_CHECKING:
    import keras

    from lockstep import MirroredStrategy

__all__ = ["Build", "Subject", "from_function", "from_recipe"]

_ALLOWED = (
    "a function that takes a strategy and returns (model, batches), with a compiled Keras model and the global batches to "
    "train it on, or (model, batches, step), with a function step(batch) that does one update and returns the loss"
)


@dataclass(frozen=True)
class Subject:
    """A model with what it is trained on.

    Attributes:
      model: the Keras model whose variables are compared; compiled, unless there is a ``step``.
      batches: a ``tf.data.Dataset`` or another iterable of global batches. With a ``step``, whatever it takes.
      step: does one update with one of ``batches`` and returns the loss; None to train with Keras.
    """

    model: keras.Model
    batches: Iterable[Any]
    step: Callable[[Any], Any] | None = None


Build = Callable[["MirroredStrategy"], Subject]


def from_recipe(path: Path) -> tuple[RecipeFile, Build]:
    """The recipe at ``path`` as a subject: its model, and its training batches in their first order."""
    from lockstep.training.build import build_model, load_data
    from lockstep.training.data import training_batches

    file = load_recipe(path)

    def build(strategy: MirroredStrategy) -> Subject:
        model = build_model(file, strategy)
        batch = file.recipe.batch
        if batch.global_ is None:
            raise VerifyError(
                "One device and N replicas must train on the same global batches. Received: per_replica of [batch]. "
                "Allowed here: global. Say global = per_replica times the number of replicas."
            )
        return Subject(model, training_batches(load_data(file).train, batch.global_, file.recipe.train.seed))

    return file, build


def from_function(target: str) -> Build:
    """The subject that ``target`` ("module:function") makes; modules are also looked for in the current folder."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise VerifyError(
            f'Neither a recipe nor a function. Received: {target!r}. Allowed: a TOML file, or "module:function" for {_ALLOWED}.'
        )
    folder = Path.cwd()
    try:
        module = import_module(module_name, folder)
    except NoModuleError as error:
        raise VerifyError(
            f"There is no module {error.missing!r}. Received: {target!r}. "
            f"Allowed: a module on Python's import path or in {folder}."
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        names = public_functions(module)
        guess = nearest(name, names)
        hint = f" Did you mean {guess!r}?" if guess else ""
        raise VerifyError(
            f"The module {module_name} has no function {name!r}. Received: {target!r}. Allowed: {', '.join(names)}.{hint}"
        )

    def build(strategy: MirroredStrategy) -> Subject:
        return _as_subject(target, function(strategy))

    return build


def _as_subject(target: str, made: Any) -> Subject:
    import keras

    if isinstance(made, tuple) and len(made) in (2, 3):
        made = Subject(*made)
    if not isinstance(made, Subject) or not isinstance(made.model, keras.Model):
        raise VerifyError(f"The function returned something else. Received: {target} returned {made!r}. Allowed: {_ALLOWED}.")
    if made.step is None and not made.model.compiled:
        raise VerifyError(
            f"The model is not compiled. Received: {target} returned {made.model.name!r} without a step. Allowed: {_ALLOWED}."
        )
    return made
