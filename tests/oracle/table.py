"""The rows of the table: every value of every factor, and which of their combinations are run when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from .feeds import FEEDS, SIZES
from .models import MODELS
from .optimizers import OPTIMIZERS
from .oracle import Case

REPLICAS = (1, 2, 3, 4)

Row = tuple[Case, int]
Pair = tuple[tuple[int, object], tuple[int, object]]

EXTRA: tuple[Row, ...] = (
    # One replica takes Keras's own path.
    (Case("dense", "adam", "arrays", "remainder 1"), 1),
    (Case("dense", "adam", "loop", "remainder 1"), 1),
    # A replica without examples must add nothing to statistics that are shared, however it runs.
    (Case("conv + synchronized BN", "momentum", "loop", "smaller than N"), 3),
    (Case("conv + synchronized BN", "momentum", "arrays, run eagerly", "smaller than N"), 3),
    # Here the optimizer's variables are made in the first traced step, and Nadam reads one that it has just assigned.
    (Case("dense", "nadam", "loop", "even"), 4),
)


def _rows() -> Iterator[tuple]:
    return itertools.product(MODELS, OPTIMIZERS, FEEDS, SIZES, REPLICAS)


def _pairs(row: Sequence[object]) -> set[Pair]:
    """The pairs of values in ``row`` that the short table has to contain.

    Every model, feed and kind of sizes with every N > 1, and every optimizer once. More would take minutes to trace; the
    full table has the rest.
    """
    if row[-1] == 1:
        return set()
    model, optimizer, feed, sizes, replicas = enumerate(row)
    return {(model, replicas), (feed, replicas), (sizes, replicas), (optimizer, optimizer)}


def short_table() -> list[Row]:
    """Few rows that contain all `_pairs`, and `EXTRA`."""
    draw = random.Random(3)
    makes_sense = [row for row in _rows() if Case(*row[:4]).makes_sense]
    missing = set().union(*(_pairs(row) for row in makes_sense))
    rows = []
    while missing:
        # Greedy, over a sample: near the fewest rows possible, and quick.
        a, b = min(missing, key=repr)
        fitting = [row for row in draw.sample(makes_sense, 3000) if row[a[0]] == a[1] and row[b[0]] == b[1]]
        best = max(fitting, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append((Case(*best[:4]), best[4]))
    return [*rows, *EXTRA]


def full_table() -> list[Case]:
    """Every model with every optimizer, for every N; feeds and sizes take turns, so that each model meets all of them."""
    feeds, sizes = list(FEEDS), list(SIZES)
    cases = []
    for (i, model), (j, optimizer) in itertools.product(enumerate(MODELS), enumerate(OPTIMIZERS)):
        able = [feed for feed in feeds if Case(model, optimizer, feed, sizes[0]).makes_sense]
        if not able:
            continue
        cases.append(Case(model, optimizer, able[(i + j) % len(able)], sizes[(2 * i + j) % len(sizes)]))
    return cases
