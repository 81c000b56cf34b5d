"""``lockstep verify``: does a training compute on N replicas what it computes on one device?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

__all__ = ["verify"]

# Exit code where N replicas and one device part.
DIFFERENT = 1


def verify(
    target: Annotated[
        str, typer.Argument(help="A recipe, or a function that makes a training.", metavar="RECIPE.toml|MODULE:FUNCTION")
    ],
    replicas: Annotated[
        int | None, typer.Option(help="How many replicas to compare with one device. Default: the recipe's; all GPUs; or 2.")
    ] = None,
    steps: Annotated[int, typer.Option(help="How many updates to compare.")] = 5,
    tolerance: Annotated[float, typer.Option(help="The relative difference that is allowed.")] = 1e-3,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A difference to take out of the comparison: dropout (switched off), batch-norm (synchronised)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="For initial weights and random numbers.")] = 0,
) -> None:
    """Train a few steps on one device and on N replicas, and say where they part and why. Exit code 1 if they do.

    MODULE:FUNCTION takes a strategy and returns (model, batches) or (model, batches, step).
    """
    # Imported here, so that `lockstep --help` is quick.
    from lockstep.training.verify import report, verdict

    found = verdict.verify(target, replicas, steps, tolerance, allow or (), seed)
    report.print_verdict(found, Console())
    if not found.is_equal:
        raise typer.Exit(DIFFERENT)
