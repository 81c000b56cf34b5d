"""Recipes: what is read, and what each mistake is called, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import RecipeError
from lockstep.training.recipe_file import load_recipe
from subprocess_tools import REPOSITORY

GOOD = """\
[model]
function = "lockstep.training.digits:model"

[data]
source = "digits"

[strategy]
replicas = 2

[batch]
global = 64

[optimizer]
name = "adam"
learning_rate = 1

[train]
epochs = 3
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(folder: Path, text: str) -> str:
    """The message for a wrong recipe, without the path it starts each line with."""
    path = write(folder, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).replace(f"{path}, ", "")


def test_a_recipe_and_its_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD)).recipe
    assert recipe.model.arguments == {}
    assert recipe.strategy.replicas == 2
    assert recipe.optimizer.learning_rate == 1.0
    assert (recipe.train.epochs, recipe.train.seed, recipe.train.metrics) == (3, 0, ["accuracy"])
    assert recipe.output.run_dir is None


@pytest.mark.parametrize(("batch", "expected"), [("global = 64", 64), ("per_replica = 32", 96)])
def test_either_batch_gives_the_global_one(tmp_path: Path, batch: str, expected: int) -> None:
    recipe = load_recipe(write(tmp_path, GOOD.replace("global = 64", batch))).recipe
    assert recipe.batch.global_batch(replicas=3) == expected


def test_the_demo_recipe_is_right() -> None:
    recipe = load_recipe(REPOSITORY / "recipes" / "digits.toml").recipe
    assert recipe.strategy.replicas == 2


# (what is replaced in GOOD, by what, the whole message)
MISTAKES = {
    "unknown key": (
        "learning_rate = 1",
        "learning_rat = 0.1",
        "line 15: 'learning_rat' is not a key of [optimizer]. Received: learning_rat = 0.1. "
        "Allowed: name, learning_rate, arguments. Did you mean 'learning_rate'?",
    ),
    "unknown key, like none": (
        "replicas = 2",
        "zzz = 2",
        "line 8: 'zzz' is not a key of [strategy]. Received: zzz = 2. Allowed: replicas, devices, "
        "logical_replicas, sync_batch_norm, exchange_dtype, update, check_finite.",
    ),
    "micro-batches": (
        "global = 64",
        "global = 64\nmicro_batches = 0",
        "line 12: 'micro_batches' of [batch] has a wrong value. Received: micro_batches = 0. "
        "Allowed: a whole number, 1 or more.",
    ),
    "exchange dtype": (
        "replicas = 2",
        'exchange_dtype = "int8"',
        "line 8: 'exchange_dtype' of [strategy] has a wrong value. Received: exchange_dtype = \"int8\". "
        'Allowed: "bfloat16", "float16", "float32".',
    ),
    "unknown section": (
        "[strategy]",
        "[stratgy]",
        "line 7: 'stratgy' is not a section of a recipe. Received: [stratgy]. "
        "Allowed: model, data, strategy, batch, optimizer, train, output. Did you mean 'strategy'?",
    ),
    "key outside of sections": (
        "[model]",
        "epochs = 3\n[model]",
        "line 1: 'epochs' is not a section of a recipe. Received: epochs = 3. "
        "Allowed: model, data, strategy, batch, optimizer, train, output.",
    ),
    "section that is no table": (
        '[data]\nsource = "digits"\n',
        'data = "digits"\n',
        # Inside [model] by TOML's rules, so that [data] is missing too.
        "line 1: The section [data] is missing. Received: nothing. "
        "Allowed: a table with the keys source, function, arguments.\n"
        "line 4: 'data' is not a key of [model]. Received: data = \"digits\". Allowed: function, arguments.",
    ),
    "wrong type": (
        "epochs = 3",
        'epochs = "3"',
        "line 18: 'epochs' of [train] has a wrong value. Received: epochs = \"3\". Allowed: a whole number, 1 or more.",
    ),
    "whole number wanted": (
        "replicas = 2",
        "replicas = 2.5",
        "line 8: 'replicas' of [strategy] has a wrong value. Received: replicas = 2.5. Allowed: a whole number, 1 or more.",
    ),
    "true is no number": (
        "global = 64",
        "global = true",
        "line 11: 'global' of [batch] has a wrong value. Received: global = true. Allowed: a whole number, 1 or more.",
    ),
    "wrong element": (
        "epochs = 3",
        'epochs = 3\nmetrics = [\n  "accuracy",\n  3,\n]',
        "line 21: 'metrics' of [train] has a wrong value. Received: 3 as element 1 of metrics. "
        "Allowed: a list of names of Keras metrics.",
    ),
    "out of range": (
        "learning_rate = 1",
        "learning_rate = -0.5",
        "line 15: 'learning_rate' of [optimizer] has a wrong value. Received: learning_rate = -0.5. Allowed: a number above 0.",
    ),
    "not finite": (
        "learning_rate = 1",
        "learning_rate = inf",
        "line 15: 'learning_rate' of [optimizer] has a wrong value. Received: learning_rate = inf. Allowed: a number above 0.",
    ),
    "unknown choice": (
        'name = "adam"',
        'name = "Adamm"',
        "line 14: 'name' of [optimizer] has a wrong value. Received: name = \"Adamm\". "
        'Allowed: "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion", "muon", '
        '"nadam", "rmsprop", "sgd". Did you mean \'adam\'?',
    ),
    "not an import path": (
        '"lockstep.training.digits:model"',
        '"digits.model"',
        "line 2: 'function' of [model] has a wrong value. Received: function = \"digits.model\". "
        'Allowed: an import path "module:function".',
    ),
    "both batches": (
        "global = 64",
        "per_replica = 32\n# both\nglobal = 64",
        "line 13: [batch] has both 'global' and 'per_replica', which decide the same thing. "
        "Received: per_replica = 32 and global = 64. Allowed: only one of global, per_replica.",
    ),
    "neither batch": (
        "global = 64",
        "",
        "line 10: [batch] has neither 'global' nor 'per_replica'. Received: {}. Allowed: exactly one of global, per_replica.",
    ),
    "replicas and devices": (
        "replicas = 2",
        'replicas = 2\ndevices = ["GPU:0"]',
        "line 9: [strategy] has both 'replicas' and 'devices', which decide the same thing. "
        'Received: replicas = 2 and devices = ["GPU:0"]. Allowed: only one of replicas, devices.',
    ),
    "missing key": (
        "epochs = 3",
        "seed = 3",
        "line 17: The key 'epochs' of [train] is missing. Received: nothing. Allowed: a whole number, 1 or more.",
    ),
    "missing section": (
        "[batch]\nglobal = 64\n",
        "",
        "line 1: The section [batch] is missing. Received: nothing. "
        "Allowed: a table with the keys global, per_replica, micro_batches.",
    ),
    "syntax": (
        "global = 64",
        "global = sixty",
        "line 11: The recipe is not valid TOML: Invalid value. Received: global = sixty. "
        'Allowed: lines of the form [section], key = value (text in "quotes"), or # comment.',
    ),
    "syntax at the end": (
        "epochs = 3\n",
        "epochs = [",
        "line 18: The recipe is not valid TOML: Invalid value. Received: epochs = [. "
        'Allowed: lines of the form [section], key = value (text in "quotes"), or # comment.',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_named_with_its_line(tmp_path: Path, mistake: str) -> None:
    old, new, expected = MISTAKES[mistake]
    assert old in GOOD
    assert error_of(tmp_path, GOOD.replace(old, new)) == expected


def test_all_mistakes_are_named_in_the_order_of_lines(tmp_path: Path) -> None:
    text = GOOD.replace("replicas", "replica").replace("epochs = 3", "epochs = 0").replace("source", "sauce")
    starts = [line.split(":")[0] for line in error_of(tmp_path, text).splitlines()]
    assert starts == ["line 5", "line 8", "line 18"]


def test_a_key_given_twice_is_a_syntax_error(tmp_path: Path) -> None:
    message = error_of(tmp_path, GOOD.replace("epochs = 3", "epochs = 3\nepochs = 4"))
    assert message.startswith("line 19: The recipe is not valid TOML: Cannot overwrite a value. Received: epochs = 4.")


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(RecipeError, match="The recipe cannot be read: No such file or directory. Received: .*none.toml"):
        load_recipe(path)


def test_a_recipe_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"# fine\n# \xff\n")
    with pytest.raises(RecipeError, match="line 2 is not UTF-8 text. Received: .* Allowed: a TOML file"):
        load_recipe(path)
