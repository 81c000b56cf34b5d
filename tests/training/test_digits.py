"""The digits and datasets of them."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.training import digits
from lockstep.training.data import Examples, evaluation_batches, training_batches


def test_the_split_is_fixed_stratified_and_complete() -> None:
    data, again = digits.load(), digits.load()
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.inputs.shape == (1437, 8, 8, 1) and data.train.inputs.dtype == np.float32
    assert (data.train.inputs.min(), data.train.inputs.max()) == (0.0, 1.0)
    np.testing.assert_array_equal(data.test.inputs, again.test.inputs)
    np.testing.assert_array_equal(data.train.targets, again.train.targets)
    shares = [np.bincount(part.targets) / len(part) for part in (data.train, data.test)]
    np.testing.assert_allclose(*shares, atol=2e-3)


def test_another_split_seed_holds_out_other_examples() -> None:
    assert not np.array_equal(digits.load().test.inputs, digits.load(split_seed=1).test.inputs)


def test_the_model_gives_probabilities() -> None:
    model = digits.model(filters=4)
    probabilities = model(np.zeros([3, 8, 8, 1], np.float32)).numpy()
    assert probabilities.shape == (3, 10)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-6)


def numbers(count: int) -> Examples:
    return Examples(np.arange(count, dtype=np.float32), np.arange(count))


def test_training_batches_hold_every_example_once_in_another_order_each_epoch() -> None:
    batches = training_batches(numbers(10), global_batch=4, seed=3)
    first, second = ([batch.numpy().tolist() for batch, _ in batches] for _ in range(2))
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(sum(first, [])) == list(range(10))
    assert first != second
    again = training_batches(numbers(10), global_batch=4, seed=3)
    assert [batch.numpy().tolist() for batch, _ in again] == first


def test_evaluation_batches_keep_the_order() -> None:
    batches = [targets.numpy().tolist() for _, targets in evaluation_batches(numbers(5), global_batch=2)]
    assert batches == [[0, 1], [2, 3], [4]]


def test_inputs_and_targets_of_different_length() -> None:
    with pytest.raises(ValueError, match=r"same number of rows. Received: inputs of shape \(3,\), targets of shape \(2,"):
        Examples(np.zeros(3), np.zeros(2))
