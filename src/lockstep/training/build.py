"""What a recipe asks for, built: the strategy, the data, the compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.errors import RecipeError
from lockstep.training.recipe_file import RecipeFile
from lockstep.training.recipe_problems import Problem, assignment, toml_text
from lockstep.training.toml_lines import KeyPath

if TYPE_CHECKING:
    import keras

    from lockstep import MirroredStrategy
    from lockstep.training.data import Splits

__all__ = ["build_model", "build_optimizer", "build_strategy", "check_names", "load_data", "strategy_options"]


def build_strategy(file: RecipeFile) -> MirroredStrategy:
    """The strategy that ``[strategy]`` asks for. It sets up TensorFlow, so it has to come before anything else does."""
    import lockstep

    return lockstep.MirroredStrategy(**strategy_options(file))


def strategy_options(file: RecipeFile) -> dict[str, Any]:
    """The arguments of the strategy that ``[strategy]`` and ``[batch]`` ask for."""
    wanted = file.recipe.strategy
    return {
        "devices": wanted.devices,
        "replicas": wanted.replicas,
        "logical_replicas": wanted.logical_replicas,
        "check_finite": wanted.check_finite,
        "sync_batch_norm": wanted.sync_batch_norm,
        "exchange_dtype": wanted.exchange_dtype,
        "update": wanted.update,
        "micro_batches": file.recipe.batch.micro_batches,
    }


def load_data(file: RecipeFile) -> Splits:
    """The training and test examples that ``[data]`` names."""
    from lockstep.training import digits
    from lockstep.training.data import Splits
    from lockstep.training.import_path import check_arguments, import_function

    data = file.recipe.data
    load = digits.load
    if data.function is not None:
        load = import_function(file, ("data", "function"), data.function)
    check_arguments(file, ("data", "arguments"), load, data.arguments)
    splits = load(**data.arguments)
    if not isinstance(splits, Splits):
        received = f"{data.function} returned {type(splits).__name__}"
        allowed = "a function that returns a lockstep.training.data.Splits"
        raise file.error(Problem(("data", "function"), "The data function returned something else", received, allowed))
    return splits


def build_model(file: RecipeFile, strategy: MirroredStrategy) -> keras.Model:
    """The compiled model, its variables made in the scope of ``strategy`` from the recipe's seed."""
    import keras

    from lockstep.training.import_path import check_arguments, import_function

    recipe = file.recipe
    function = import_function(file, ("model", "function"), recipe.model.function)
    check_arguments(file, ("model", "arguments"), function, recipe.model.arguments)
    keras.utils.set_random_seed(recipe.train.seed)
    with strategy.scope():
        model = function(**recipe.model.arguments)
        if not isinstance(model, keras.Model):
            received = f"{recipe.model.function} returned {type(model).__name__}"
            allowed = "a function that returns a keras.Model"
            raise file.error(Problem(("model", "function"), "The model function returned something else", received, allowed))
        check_names(file)
        model.compile(optimizer=build_optimizer(file), loss=recipe.train.loss, metrics=list(recipe.train.metrics))
    return model


def build_optimizer(file: RecipeFile) -> keras.Optimizer:
    """The Keras optimizer that ``[optimizer]`` describes."""
    import keras

    from lockstep.training.import_path import check_arguments

    wanted = file.recipe.optimizer
    # By class: `keras.optimizers.get` does not know all of them by name.
    optimizer_class = next(item for name, item in vars(keras.optimizers).items() if name.lower() == wanted.name)
    arguments = {"learning_rate": wanted.learning_rate, **wanted.arguments}
    if "learning_rate" in wanted.arguments:
        path = ("optimizer", "arguments", "learning_rate")
        received = f"learning_rate = {toml_text(wanted.arguments['learning_rate'])}"
        what = "[optimizer.arguments] has a learning rate besides that of [optimizer]"
        raise file.error(Problem(path, what, received, "learning_rate of [optimizer] only"))
    check_arguments(file, ("optimizer", "arguments"), optimizer_class, wanted.arguments, closed=True)
    try:
        return optimizer_class(**arguments)
    except (TypeError, ValueError) as error:
        path = ("optimizer", "arguments")
        what = f"Keras refuses the arguments of {wanted.name}: {error}"
        allowed = f"keyword arguments of keras.optimizers.{optimizer_class.__name__}"
        raise file.error(Problem(path, what.rstrip("."), toml_text(wanted.arguments), allowed)) from error


def check_names(file: RecipeFile) -> None:
    """Check the names of loss and metrics now: ``compile`` would report an unknown one only in the first step.

    Raises:
        RecipeError: Keras has no loss or metric of that name.
    """
    import keras

    train = file.recipe.train
    if not _keras_knows(keras.losses.get, train.loss):
        raise _unknown_name(file, ("train", "loss"), "loss", train.loss, "sparse_categorical_crossentropy")
    for index, metric in enumerate(train.metrics):
        if metric not in _CHOSEN_BY_SHAPE and not _keras_knows(keras.metrics.get, metric):
            raise _unknown_name(file, ("train", "metrics", index), "metric", metric, "accuracy")


# What these mean Keras decides by the shape of the targets, so `keras.metrics.get` need not know them.
_CHOSEN_BY_SHAPE = ("accuracy", "acc", "crossentropy", "ce")


def _keras_knows(get: Callable[[str], Any], name: str) -> bool:
    try:
        get(name)
    except ValueError:
        return False
    return True


def _unknown_name(file: RecipeFile, path: KeyPath, kind: str, name: str, example: str) -> RecipeError:
    received = assignment(path, name)
    allowed = f'the name of a Keras {kind}, such as "{example}"'
    return file.error(Problem(path, f"Keras has no {kind} of that name", received, allowed))
