"""Run folders are new, and the recipe in them can be trained from."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from lockstep.errors import RecipeError
from lockstep.training.recipe_file import load_recipe
from lockstep.training.run_folder import create_run_folder, write_resolved_recipe
from subprocess_tools import REPOSITORY

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_a_new_folder_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [create_run_folder(Path("recipes/digits.toml"), None, NOW) for _ in range(3)]
    names = ["digits-20260102-030405", "digits-20260102-030405-2", "digits-20260102-030405-3"]
    assert folders == [Path("runs") / name for name in names]
    assert all(folder.is_dir() for folder in folders)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"The run folder exists already. Received: {tmp_path}. Allowed: a path that"):
        create_run_folder(Path("digits.toml"), tmp_path, NOW)


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(RecipeError, match=r"The run folder cannot be made: Not a directory. Received: .*/runs/new"):
        create_run_folder(Path("digits.toml"), tmp_path / "runs" / "new", NOW)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="The run folder"):
        create_run_folder(Path("digits.toml"), None, NOW)


def test_the_resolved_recipe_says_the_same_with_everything_filled_in(tmp_path: Path) -> None:
    given = REPOSITORY / "recipes" / "digits.toml"
    recipe = load_recipe(given).recipe
    path = tmp_path / "recipe.toml"
    write_resolved_recipe(path, recipe, given, replicas=2, run_dir=tmp_path)
    assert "2 replicas, 64 examples per step, 32 per replica." in path.read_text()
    assert load_recipe(path).recipe == recipe


def test_the_resolved_recipe_has_the_global_batch_and_no_run_folder(tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    text = (REPOSITORY / "recipes" / "digits.toml").read_text()
    text = text.replace("global = 64", "per_replica = 5").replace("replicas = 2", "")
    given.write_text(f'{text}\n[output]\nrun_dir = "somewhere"\n')
    path = tmp_path / "recipe.toml"
    write_resolved_recipe(path, load_recipe(given).recipe, given, replicas=3, run_dir=tmp_path)
    resolved = load_recipe(path).recipe
    assert (resolved.batch.global_, resolved.batch.per_replica, resolved.strategy.replicas) == (15, None, 3)
    assert resolved.output.run_dir is None


def test_the_resolved_recipe_of_logical_replicas_names_no_devices(tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    text = (REPOSITORY / "recipes" / "digits.toml").read_text()
    text = text.replace("global = 64", "per_replica = 5\nmicro_batches = 2")
    given.write_text(text.replace("replicas = 2", "replicas = 2\nlogical_replicas = 8"))
    path = tmp_path / "recipe.toml"
    write_resolved_recipe(path, load_recipe(given).recipe, given, replicas=8, run_dir=tmp_path)
    resolved = load_recipe(path).recipe
    assert (resolved.batch.global_, resolved.batch.micro_batches, resolved.strategy.logical_replicas) == (40, 2, 8)
    assert resolved.strategy.replicas == 2
