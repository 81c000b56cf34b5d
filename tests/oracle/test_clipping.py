"""Clipping sees the whole gradient, dense or sparse, and Keras's gradient accumulation counts as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from lockstep.engine import keras_optimizers
from oracle import precision
from oracle.oracle import relative_difference
from oracle.precision import Row

# Each clips in every step; clipped by replica, a share of the gradient would be hit less, or not at all.
CLIPPING = {"clipnorm": 0.02, "global_clipnorm": 0.03, "clipvalue": 0.003}
DENSE, SPARSE = "dense", "embedding + LSTM, masked"


def row_of(model: str) -> Row:
    return Row(model, "momentum", "float32", 1, "1", 3)


def worst(ours: precision.Outcome, theirs: precision.Outcome) -> float:
    assert ours.weights.keys() == theirs.weights.keys()
    return max(relative_difference(ours.weights[path], want) for path, want in theirs.weights.items())


@pytest.mark.parametrize("option", CLIPPING)
@pytest.mark.parametrize("model", [DENSE, SPARSE])
def test_clipping(model: str, option: str) -> None:
    row, clip = row_of(model), {option: CLIPPING[option]}
    ours, theirs = precision.run(row, **clip), precision.run(row.reference, **clip)
    assert ours.unequal_copies == ()
    assert worst(ours, theirs) < 1e-5
    assert worst(precision.one_device(row.reference), theirs) > 1e-2, "nothing was clipped"


def test_the_gradient_of_the_embedding_is_sparse_when_it_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type] = []
    exchange = keras_optimizers.sum_over_replicas

    def watched(gradients: list[Any]) -> list[Any]:
        totals = exchange(gradients)
        kinds.extend(type(total) for total in totals)
        return totals

    monkeypatch.setattr(keras_optimizers, "sum_over_replicas", watched)
    precision.run(row_of(SPARSE), global_clipnorm=CLIPPING["global_clipnorm"])
    assert kinds[0] is tf.IndexedSlices


@pytest.mark.parametrize("steps", [-1, 1])
def test_a_number_of_accumulation_steps_that_is_none(steps: int) -> None:
    with pytest.raises(ValueError, match=f"must be an integer >= 2. Received: gradient_accumulation_steps={steps}"):
        precision.run(row_of(DENSE), gradient_accumulation_steps=steps)


def test_to_keras_zero_accumulation_steps_are_no_accumulation() -> None:
    row = row_of(DENSE)
    ours = precision.run(row, gradient_accumulation_steps=0)
    assert worst(ours, precision.one_device(row.reference)) < 1e-5
