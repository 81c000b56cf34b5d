"""What shows only when a recipe is put to use: functions, arguments, losses that are not there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import get_args

import pytest

import lockstep
from lockstep.errors import RecipeError
from lockstep.training.build import build_model, build_optimizer, build_strategy, check_names, load_data
from lockstep.training.import_path import check_arguments, import_function
from lockstep.training.recipe import OptimizerName
from lockstep.training.recipe_file import RecipeFile, load_recipe

# They touch Keras.
pytestmark = pytest.mark.versions

RECIPE = """\
[model]
function = "lockstep.training.digits:model"
arguments = {}

[data]
source = "digits"
arguments = {}

[batch]
global = 64

[optimizer]
name = "sgd"
arguments = {}

[train]
epochs = 1
loss = "mse"
metrics = ["accuracy"]
"""


def recipe_with(folder: Path, old: str, new: str) -> RecipeFile:
    assert old in RECIPE
    path = folder / "recipe.toml"
    path.write_text(RECIPE.replace(old, new), encoding="utf-8")
    return load_recipe(path)


def message(error: pytest.ExceptionInfo[RecipeError]) -> str:
    return str(error.value).split("recipe.toml, ")[1]


def test_no_such_function(tmp_path: Path) -> None:
    file = recipe_with(tmp_path, "digits:model", "digits:modle")
    with pytest.raises(RecipeError) as error:
        import_function(file, ("model", "function"), file.recipe.model.function)
    assert message(error).startswith("line 2: The module lockstep.training.digits has no function 'modle'. Received: ")
    assert message(error).endswith("Did you mean 'model'?")


def test_no_such_module(tmp_path: Path) -> None:
    file = recipe_with(tmp_path, "training.digits:model", "training.digitz:model")
    with pytest.raises(RecipeError) as error:
        import_function(file, ("model", "function"), file.recipe.model.function)
    assert message(error) == (
        "line 2: There is no module 'lockstep.training.digitz'. "
        'Received: function = "lockstep.training.digitz:...". '
        f"Allowed: a module on Python's import path or in {tmp_path}."
    )


def test_a_module_beside_the_recipe_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    (tmp_path / "beside_the_recipe.py").write_text("def net():\n    return 3\n")
    file = recipe_with(tmp_path, "lockstep.training.digits:model", "beside_the_recipe:net")
    assert import_function(file, ("model", "function"), file.recipe.model.function)() == 3


def test_a_module_that_cannot_import_what_it_needs_is_not_the_recipes_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "needs_another.py").write_text("import not_installed_at_all\n")
    file = recipe_with(tmp_path, "lockstep.training.digits:model", "needs_another:net")
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        import_function(file, ("model", "function"), file.recipe.model.function)


def test_an_argument_that_the_function_does_not_take(tmp_path: Path) -> None:
    file = recipe_with(tmp_path, 'source = "digits"\narguments = {}', 'source = "digits"\narguments = { test_frac = 0.5 }')
    with pytest.raises(RecipeError) as error:
        load_data(file)
    assert message(error) == (
        "line 7: load takes no argument 'test_frac'. Received: test_frac = 0.5. "
        "Allowed: test_fraction, split_seed. Did you mean 'test_fraction'?"
    )


def test_an_argument_that_the_function_needs(tmp_path: Path) -> None:
    def net(width: int, **others: int) -> None: ...

    file = recipe_with(tmp_path, "arguments = {}", "arguments = { height = 3 }")
    with pytest.raises(RecipeError) as error:
        check_arguments(file, ("model", "arguments"), net, file.recipe.model.arguments)
    assert message(error) == (
        "line 3: net needs the argument 'width'. Received: {height = 3}. Allowed: width = a value of its kind."
    )


def test_a_data_function_that_returns_something_else(tmp_path: Path) -> None:
    file = recipe_with(tmp_path, 'source = "digits"', 'function = "builtins:dict"')
    with pytest.raises(RecipeError) as error:
        load_data(file)
    assert message(error) == (
        "line 6: The data function returned something else. Received: builtins:dict returned dict. "
        "Allowed: a function that returns a lockstep.training.data.Splits."
    )


OPTIMIZER = 'name = "sgd"\narguments = {}'


def test_an_optimizer_with_arguments(tmp_path: Path) -> None:
    file = recipe_with(tmp_path, OPTIMIZER, 'name = "sgd"\nlearning_rate = 0.5\narguments = { momentum = 0.9 }')
    optimizer = build_optimizer(file)
    assert (float(optimizer.learning_rate), optimizer.momentum) == (0.5, 0.9)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_name_is_one_of_keras(tmp_path: Path, name: str) -> None:
    file = recipe_with(tmp_path, OPTIMIZER, f'name = "{name}"')
    assert type(build_optimizer(file)).__name__.lower() == name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "momentun = 0.9",
            "line 14: SGD takes no argument 'momentun'. Received: momentun = 0.9. Allowed: learning_rate, momentum, ",
        ),
        (
            "momentum = 2.0",
            "line 14: Keras refuses the arguments of sgd: `momentum` must be a float between [0, 1]. "
            "Received: {momentum = 2.0}. Allowed: keyword arguments of keras.optimizers.SGD.",
        ),
        (
            "learning_rate = 0.1",
            "line 14: [optimizer.arguments] has a learning rate besides that of [optimizer]. "
            "Received: learning_rate = 0.1. Allowed: learning_rate of [optimizer] only.",
        ),
    ],
)
def test_wrong_optimizer_arguments(tmp_path: Path, arguments: str, expected: str) -> None:
    file = recipe_with(tmp_path, OPTIMIZER, f'name = "sgd"\narguments = {{ {arguments} }}')
    with pytest.raises(RecipeError) as error:
        build_optimizer(file)
    assert message(error).startswith(expected)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            'loss = "mse"',
            'loss = "msee"',
            'line 18: Keras has no loss of that name. Received: loss = "msee". '
            'Allowed: the name of a Keras loss, such as "sparse_categorical_crossentropy".',
        ),
        (
            'metrics = ["accuracy"]',
            'metrics = ["accuracy",\n "acuracy"]',
            'line 20: Keras has no metric of that name. Received: "acuracy" as element 1 of metrics. '
            'Allowed: the name of a Keras metric, such as "accuracy".',
        ),
    ],
)
def test_unknown_losses_and_metrics(tmp_path: Path, old: str, new: str, expected: str) -> None:
    with pytest.raises(RecipeError) as error:
        check_names(recipe_with(tmp_path, old, new))
    assert message(error) == expected


class OneDevice:
    """Stands in for a strategy where only its scope matters."""

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    def weights(seed: int) -> list[float]:
        file = recipe_with(tmp_path, "epochs = 1", f"epochs = 1\nseed = {seed}")
        model = build_model(file, OneDevice())
        assert model.compiled and type(model.optimizer).__name__ == "SGD"
        return model.weights[0].numpy().ravel().tolist()

    assert weights(1) == weights(1)
    assert weights(1) != weights(2)


def test_a_model_function_that_returns_something_else(tmp_path: Path) -> None:
    file = recipe_with(tmp_path, "lockstep.training.digits:model", "builtins:dict")
    with pytest.raises(RecipeError) as error:
        build_model(file, OneDevice())
    assert message(error) == (
        "line 2: The model function returned something else. Received: builtins:dict returned dict. "
        "Allowed: a function that returns a keras.Model."
    )


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("", {}),
        ("replicas = 3", {"replicas": 3}),
        ('devices = ["GPU:0", "GPU:1"]', {"devices": ["GPU:0", "GPU:1"]}),
        ("logical_replicas = 8", {"logical_replicas": 8}),
        (
            'sync_batch_norm = true\nexchange_dtype = "bfloat16"\nupdate = "sharded"\ncheck_finite = true',
            {"sync_batch_norm": True, "exchange_dtype": "bfloat16", "update": "sharded", "check_finite": True},
        ),
        ("[batch]\nmicro_batches = 4", {"micro_batches": 4}),
    ],
)
def test_the_strategy_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, expected: dict) -> None:
    monkeypatch.setitem(vars(lockstep), "MirroredStrategy", lambda devices, **kwargs: {"devices": devices, **kwargs})
    rest = "" if "[batch]" in section else "\n[batch]"
    file = recipe_with(tmp_path, "[batch]", f"[strategy]\n{section}{rest}")
    nothing = {
        "devices": None,
        "replicas": None,
        "logical_replicas": None,
        "exchange_dtype": None,
        "update": "auto",
        "micro_batches": 1,
    }
    assert build_strategy(file) == {**nothing, "check_finite": False, "sync_batch_norm": False, **expected}
