"""An error while a step runs reaches the user with its own text, whichever replica it happens on."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices

pytestmark = pytest.mark.versions
REPLICAS = 3


@pytest.fixture
def strategy() -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(REPLICAS))


def _slow(x: tf.Tensor) -> tf.Tensor:
    """A scalar that takes a while to compute, so that other replicas are still at it when one fails."""
    y = tf.ones((200, 200)) * x[0]
    for _ in range(20):
        y = y @ tf.ones((200, 200)) / 200.0
    return y[0, 0]


def _before_the_exchange(x: tf.Tensor) -> tf.Tensor:
    tf.debugging.assert_less(x, 5.0, message="too large")
    return tf.distribute.get_replica_context().all_reduce("SUM", _slow(x))


def _after_the_exchange(x: tf.Tensor) -> tf.Tensor:
    total = tf.distribute.get_replica_context().all_reduce("SUM", _slow(x))
    tf.debugging.assert_less(x, 5.0, message="too large")
    return _slow(x) + total


@pytest.mark.parametrize("bad", range(REPLICAS))
@pytest.mark.parametrize("step", [_before_the_exchange, _after_the_exchange])
def test_an_assertion_in_a_loop(strategy: Any, step: Any, bad: int) -> None:
    run = tf.function(lambda x: strategy.reduce("SUM", strategy.run(step, (strategy.split(x),)), axis=None))
    values = np.ones(REPLICAS, "float32")
    assert np.isfinite(float(run(values)))
    values[bad] = 9.0
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            run(values)


@pytest.mark.parametrize("bad", range(REPLICAS))
def test_bad_data_in_fit(strategy: Any, bad: int) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    words, labels = np.ones((6, 2), "int32"), np.ones(6, "int64")
    model.fit(words, labels, batch_size=6, verbose=0)
    start = model.get_weights()
    labels[2 * bad] = 7
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 7 which is outside"):
        model.fit(words, labels, batch_size=6, verbose=0)
    labels[2 * bad], words[2 * bad] = 1, 50
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"= 50 is not in \[0, 10\)"):
        model.fit(words, labels, batch_size=6, verbose=0)
    for before, after in zip(start, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
