"""The folder that a run leaves behind: `recipe.toml`, `metrics.jsonl`, `model.keras`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

import lockstep
from lockstep.errors import RecipeError
from lockstep.training.recipe import Recipe

__all__ = ["create_run_folder", "write_resolved_recipe"]


def create_run_folder(recipe_path: Path, run_dir: Path | None, now: datetime) -> Path:
    """Make the run folder and return it: ``run_dir``, or ``runs/<recipe>-<time>``. Never one that is there already.

    Raises:
        RecipeError: ``run_dir`` exists, or cannot be made.
    """
    try:
        if run_dir is not None:
            run_dir.mkdir(parents=True)
            return run_dir
        return _new_folder(Path("runs"), f"{recipe_path.stem}-{now:%Y%m%d-%H%M%S}")
    except FileExistsError as error:
        raise RecipeError(
            f"The run folder exists already. Received: {error.filename}. Allowed: a path that is not there yet, so "
            "that no results are overwritten; name another with --run-dir or run_dir of [output], or leave both out."
        ) from None
    except OSError as error:
        raise RecipeError(
            f"The run folder cannot be made: {error.strerror}. Received: {error.filename}. "
            "Allowed: a path where a folder can be made; name one with --run-dir or run_dir of [output]."
        ) from None


def _new_folder(parent: Path, name: str) -> Path:
    """``parent/name``, or ``parent/name-2`` and so on where runs began in the same second."""
    attempt = 1
    while True:
        folder = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not folder.exists():
                # Something on the way to it is a file.
                raise
            attempt += 1


def write_resolved_recipe(path: Path, recipe: Recipe, recipe_path: Path, replicas: int, run_dir: Path) -> None:
    """Write ``recipe`` with every default and every derived value filled in; it can be trained from like any other.

    Args:
        path: where to.
        recipe: the recipe.
        recipe_path: where it was read from.
        replicas: how many replicas trained; with logical replicas, how many of those.
        run_dir: the run folder.
    """
    values: dict[str, Any] = recipe.model_dump(by_alias=True, exclude_none=True)
    global_batch = recipe.batch.global_batch(replicas)
    values["batch"] = {"global": global_batch, "micro_batches": recipe.batch.micro_batches}
    # Logical replicas are the same on any number of devices, so that number need not be kept.
    if "devices" not in values["strategy"] and recipe.strategy.logical_replicas is None:
        values["strategy"]["replicas"] = replicas
    # Where this run went is a fact about this run, and no place for the next one.
    values["output"].pop("run_dir", None)
    heading = (
        f"# {recipe_path.name} as lockstep {lockstep.__version__} understood it, for the run in {run_dir.name}:\n"
        f"# {replicas} replicas, {global_batch} examples per step, {global_batch / replicas:g} per replica.\n\n"
    )
    path.write_text(heading + tomli_w.dumps(values), encoding="utf-8")
