"""The ``lockstep`` command and its subcommands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

import lockstep
from lockstep.cli.train import train
from lockstep.cli.verify import verify
from lockstep.errors import LockstepError

__all__ = ["app", "main"]

# Exit code of a wrong recipe or a setup that cannot work; the same as that of a wrong command line.
USAGE_ERROR = 2

app = typer.Typer(
    name="lockstep",
    help="Synchronous data-parallel training for TensorFlow and Keras 3.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Synchronous data-parallel training for TensorFlow and Keras 3."""


def main() -> None:
    """Run the command. What lockstep itself refuses is a message on stderr; anything else is a traceback."""
    # Without TensorFlow's notes about its own build (all but one, written before it reads this); warnings still show.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        app()
    except LockstepError as error:
        # No markup, wrapping or colour inside: the text may be a path with brackets, and may be searched for.
        Console(stderr=True).print("Error:", style="bold red", end=" ")
        print(error, file=sys.stderr)
        sys.exit(USAGE_ERROR)
