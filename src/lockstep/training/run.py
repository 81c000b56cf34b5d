"""A training run, from recipe to saved model: five short steps, in the order in which they happen."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lockstep.training.build import build_model, build_strategy, load_data
from lockstep.training.recipe_file import RecipeFile, load_recipe
from lockstep.training.run_folder import create_run_folder, write_resolved_recipe

if TYPE_CHECKING:
    import keras

    from lockstep import MirroredStrategy
    from lockstep.training.data import Splits

__all__ = ["RunResult", "train"]


@dataclass(frozen=True)
class RunResult:
    """What a finished run has to show.

    Args:
        run_dir: the run folder.
        test: loss and metrics on the held-out examples, by name.
        replicas: how many replicas trained.
        steps: optimizer steps done.
    """

    run_dir: Path
    test: dict[str, float]
    replicas: int
    steps: int


def train(recipe_path: Path, run_dir: Path | None = None, console: Console | None = None) -> RunResult:
    """Train as the recipe says, and leave model, resolved recipe and metrics in a new run folder.

    Args:
        recipe_path: a TOML file; see `recipe.py` for its keys.
        run_dir: the run folder, instead of the recipe's ``run_dir``. It must not be there yet.
        console: where to show progress; standard output if not given.

    Raises:
        RecipeError: the recipe is wrong, or the run folder cannot be made.
    """
    console = console or Console()
    file = load_recipe(recipe_path)
    strategy = build_strategy(file)
    splits = load_data(file)
    model = build_model(file, strategy)
    folder = _open_folder(file, strategy, run_dir)
    console.print(_plan(file, strategy, splits, folder), highlight=False, soft_wrap=True)
    return fit_and_test(file, strategy, splits, model, folder, console)


def _open_folder(file: RecipeFile, strategy: MirroredStrategy, run_dir: Path | None) -> Path:
    """The new run folder, with the resolved recipe in it."""
    recipe = file.recipe
    if run_dir is None and recipe.output.run_dir is not None:
        run_dir = Path(recipe.output.run_dir)
    folder = create_run_folder(file.path, run_dir, datetime.now())
    replicas = strategy.num_replicas_in_sync
    write_resolved_recipe(folder / "recipe.toml", recipe, file.path, replicas, folder)
    return folder


def _plan(file: RecipeFile, strategy: MirroredStrategy, splits: Splits, folder: Path) -> str:
    """What is about to be done, in two lines."""
    recipe = file.recipe
    replicas = strategy.num_replicas_in_sync
    global_batch = recipe.batch.global_batch(replicas)
    parts = f" in {recipe.batch.micro_batches} micro-batches" if recipe.batch.micro_batches > 1 else ""
    return (
        f"{len(splits.train):,} training and {len(splits.test):,} test examples; "
        f"global batch {global_batch}, {replicas} replicas with {global_batch / replicas:g} each{parts}\n"
        f"{recipe.optimizer.name}, learning rate {recipe.optimizer.learning_rate:g}, {recipe.train.epochs} epochs, "
        f"seed {recipe.train.seed}; writing to {folder}"
    )


def fit_and_test(
    file: RecipeFile, strategy: MirroredStrategy, splits: Splits, model: keras.Model, folder: Path, console: Console
) -> RunResult:
    """Train, save, and test on the held-out examples."""
    from lockstep.training.data import evaluation_batches, training_batches
    from lockstep.training.metrics_log import MetricsLog, loss_first
    from lockstep.training.progress import ProgressReport
    from lockstep.training.throughput import Throughput

    recipe = file.recipe
    replicas = strategy.num_replicas_in_sync
    global_batch = recipe.batch.global_batch(replicas)
    throughput = Throughput(len(splits.train), global_batch)
    log = MetricsLog(folder / "metrics.jsonl", throughput, recipe.output.log_every_steps)
    progress = ProgressReport(throughput, recipe.train.epochs, replicas, console)
    # Keras's annotations know only "auto"; 0 means that Keras prints nothing.
    silent: Any = 0
    try:
        batches = training_batches(splits.train, global_batch, recipe.train.seed)
        # The dataset shuffles; Keras warns if it is asked to shuffle it again.
        model.fit(batches, epochs=recipe.train.epochs, verbose=silent, shuffle=False, callbacks=[log, progress])
        model.save(folder / "model.keras")
        results: Any = model.evaluate(evaluation_batches(splits.test, global_batch), verbose=silent, return_dict=True)
        test = {name: float(results[name]) for name in loss_first(results)}
        log.write_test(test)
    finally:
        progress.close()
        log.close()
    return RunResult(folder, test, replicas, throughput.step)
