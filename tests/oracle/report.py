"""Prints the oracle's table: the worst relative difference of each row, for every N.

Run from the repository's root: ``python -m tests.oracle.report`` (the short table's rows on all N), or with ``--full``.
With ``--precision`` it is the second table: the worst differences of each value of each factor, and each row that breaks its
bound. ``--rows K`` draws K rows from the whole of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from tests.device_tools import configure_tensorflow

configure_tensorflow()

from .oracle import Case, bound_of, compare, one_device, run  # noqa: E402  (imports TensorFlow, which is configured now)
from .precision_report import precision_lines  # noqa: E402
from .precision_table import drawn_rows  # noqa: E402
from .precision_table import short_table as short_precision_table  # noqa: E402
from .table import REPLICAS, full_table, short_table  # noqa: E402


def cell(case: Case, replicas: int) -> str:
    """The worst difference outside and inside the optimizer's slots, in bold where it breaks the bound."""
    try:
        outcome = run(case, replicas)
        differences = compare(outcome, one_device(case), case)
    except Exception as error:  # a table with a hole says more than none
        return f"**{type(error).__name__}**"
    if outcome.unequal_copies:
        return "**copies differ**"
    if not differences:
        return "copies equal"
    slots = differences.pop("slots")
    worst = max(differences, key=differences.__getitem__)
    text = f"{differences[worst]:.0e} / {slots:.0e}"
    broken = slots > bound_of(case, "slots") or differences[worst] > bound_of(case, worst)
    return f"**{text} ({worst})**" if broken else text


def lines(cases: Iterable[Case]) -> Iterable[str]:
    yield "Worst relative difference in weights, logs, evaluation and predictions / in the optimizer's slots."
    yield ""
    yield "| model | optimizer | feed | batches | " + " | ".join(f"N={n}" for n in REPLICAS) + " |"
    yield "|---|---|---|---|" + "---|" * len(REPLICAS)
    for case in cases:
        yield f"| {case} | " + " | ".join(cell(case, n) for n in REPLICAS) + " |"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every model with every optimizer")
    parser.add_argument("--precision", action="store_true", help="the second table")
    parser.add_argument("--rows", type=int, help="how many rows to draw from the whole second table; its short one without")
    options = parser.parse_args(arguments)
    if options.precision:
        table = precision_lines(short_precision_table() if options.rows is None else drawn_rows(options.rows))
    else:
        table = lines(full_table() if options.full else dict.fromkeys(case for case, _ in short_table()))
    for line in table:
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
