"""N devices compute what one device computes in 16 bit too, up to what rounding does on one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep.engine import keras_optimizers
from lockstep.engine.context import current
from oracle.precision import FACTORS, Row, compare, run
from oracle.precision_table import drawn_rows, short_table, whole_table


def check(row: Row) -> None:
    outcome = run(row)
    assert outcome.unequal_copies == ()
    broken = {part: difference for part, difference in compare(row, outcome).items() if difference.broken}
    assert not broken, f"{broken} of {row}"


@pytest.mark.oracle
@pytest.mark.parametrize("row", short_table(), ids=str)
def test_n_devices_compute_what_one_does(row: Row) -> None:
    check(row)


# Each example takes seconds, so a failing one is not shrunk.
@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(row=st.builds(Row, **{name: st.sampled_from(values) for name, values in FACTORS.items()}))
def test_any_row(row: Row) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", whole_table(), ids=str)
def test_every_row(row: Row) -> None:
    check(row)


def pairs(rows: list[Row], one: str, other: str) -> set[tuple]:
    return {(getattr(row, one), getattr(row, other)) for row in rows}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("optimizer", "precision"),
        ("model", "precision"),
        ("precision", "accumulation"),
        ("precision", "replicas"),
        ("precision", "remainder"),
        ("remainder", "replicas"),
    ],
)
def test_the_short_table_contains_every(one: str, other: str) -> None:
    assert len(short_table()) <= 35
    assert pairs(short_table(), one, other) == set(itertools.product(FACTORS[one], FACTORS[other]))


def test_drawn_rows_are_even_and_repeatable() -> None:
    rows = drawn_rows(60)
    assert rows == drawn_rows(60) != drawn_rows(60, seed=2)
    assert 55 <= len(rows) <= 60
    assert 18 <= sum(row.precision == "float32" for row in rows) <= 20


# The bounds find what they are there for.


def _one_replica_too_large() -> Any:
    first = tf.equal(tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group), 0)
    return tf.where(first, 1.1, 1.0)


def _mean_over_slices() -> Any:
    """Turns a slice's share of the global mean into an N-th of its own mean, as if all slices had the same size."""
    replica = current()
    fraction = tf.convert_to_tensor(replica.fraction)
    return tf.where(fraction > 0, 1 / (replica.replicas * fraction), 0.0)


def _n_times() -> Any:
    return float(current().replicas)


def plant(monkeypatch: pytest.MonkeyPatch, factor: Callable[[], Any]) -> None:
    """Multiplies what each replica hands in for the exchange by ``factor()``."""
    exchange = keras_optimizers.sum_over_replicas
    monkeypatch.setattr(
        keras_optimizers, "sum_over_replicas", lambda gradients: exchange([g * tf.cast(factor(), g.dtype) for g in gradients])
    )


# What stays unseen: N times the gradient, in weights that an optimizer moves by the gradient's direction alone. Its slots tell.
SEEN_BY = {
    ("sgd", _one_replica_too_large): {"weights"},
    ("sgd", _mean_over_slices): {"weights"},
    ("sgd", _n_times): {"weights"},
    ("adam", _one_replica_too_large): {"weights", "slots"},
    ("adam", _n_times): {"slots"},
}


@pytest.mark.parametrize(("optimizer", "factor"), SEEN_BY, ids=lambda value: getattr(value, "__name__", value).strip("_"))
def test_a_wrong_scale_breaks_a_bound(optimizer: str, factor: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, factor)
    row = Row("dense", optimizer, "mixed_bfloat16", 1, "N - 1", 4)
    differences = compare(row, run(row))
    assert SEEN_BY[optimizer, factor] <= {part for part, difference in differences.items() if difference.broken}
    assert differences["weights"].broken == ("weights" in SEEN_BY[optimizer, factor])
