"""``lockstep train``: a training run from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["train"]


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="RECIPE.toml")],
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run folder; it must not be there yet. Default: a new folder under runs/.", metavar="DIR"),
    ] = None,
) -> None:
    """Train as RECIPE.toml says; model, resolved recipe and metrics go into a new run folder."""
    # Imported here, so that `lockstep --help` is quick.
    from lockstep.training import run

    console = Console()
    result = run.train(recipe, run_dir, console)
    for name, value in result.test.items():
        console.print(f"test {name} {value:.4f}", highlight=False)
    # Without wrapping, so that the path can be copied, or read by a script.
    console.print(f"run folder {result.run_dir}", highlight=False, soft_wrap=True)
