"""The rows of the second table, and which of them are run when."""

from __future__ import annotations

import itertools
import random

from .precision import FACTORS, Row


def whole_table() -> list[Row]:
    """Every combination. Those that share a reference follow each other."""
    return [Row(*values) for values in itertools.product(*FACTORS.values())]


# Which model an optimizer meets in the short table: mostly those that are quick to trace.
MODEL_OF = dict.fromkeys(FACTORS["optimizer"], "dense") | {
    "momentum": "conv + synchronized BN",
    "rmsprop": "conv + synchronized BN",
    "adamw": "embedding + LSTM, masked",
    "adafactor": "attention",
}


def short_table() -> list[Row]:
    """One model, accumulation and remainder for each optimizer, so that its three precisions share a reference in float32.

    They contain every optimizer and every model in each precision, each precision with each accumulation, number of
    replicas and remainder, and each remainder with each number of replicas.
    """
    _, optimizers, precisions, accumulations, remainders, replicas = FACTORS.values()
    rows = []
    for (i, optimizer), (j, precision) in itertools.product(enumerate(optimizers), enumerate(precisions)):
        accumulation = accumulations[i % len(accumulations)]
        remainder = remainders[i % len(remainders)]
        rows.append(Row(MODEL_OF[optimizer], optimizer, precision, accumulation, remainder, replicas[(i + j) % len(replicas)]))
    return rows


def drawn_rows(count: int, seed: int = 1) -> list[Row]:
    """Random rows, in which each value of a factor is about as frequent as its other values; fewer if some are equal."""
    draw = random.Random(seed)
    columns = []
    for values in FACTORS.values():
        column = list(itertools.islice(itertools.cycle(values), count))
        draw.shuffle(column)
        columns.append(column)
    return list(dict.fromkeys(Row(*values) for values in zip(*columns, strict=True)))
