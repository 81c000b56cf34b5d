"""Exchanges inside of a tf.cond: all replicas go through the same branch, and meet in it."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices

pytestmark = pytest.mark.versions
N = 3


@pytest.fixture(scope="module")
def strategy() -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(N))


def _context() -> Any:
    return tf.distribute.get_replica_context()


def _number() -> tf.Tensor:
    """1, 2, 3 on the three replicas."""
    return tf.cast(_context().replica_id_in_sync_group, tf.float32) + 1.0


def _values(strategy: Any, fn: Any, *args: Any) -> list[list[float]]:
    """What ``fn`` returns on each replica, in a tf.function."""
    results = tf.function(lambda *a: strategy.run(fn, a))(*args)
    return [[float(v) for v in strategy.experimental_local_results(part)] for part in tf.nest.flatten(results)]


def test_each_branch_exchanges_what_it_says(strategy: Any) -> None:
    def replica(choice: tf.Tensor) -> Any:
        x = _number()
        y = x * 10.0

        def joined() -> tf.Tensor:
            everything = _context().all_gather(x[None], 0)
            return _context().all_reduce("SUM", y) + everything[-1]

        return tf.cond(choice > 0, joined, lambda: _context().all_reduce("MEAN", x) + y)

    assert _values(strategy, replica, tf.constant(1)) == [[63.0, 63.0, 63.0]]
    assert _values(strategy, replica, tf.constant(0)) == [[12.0, 22.0, 32.0]]


def test_branches_inside_branches_and_an_exchange_after_them(strategy: Any) -> None:
    def replica(choice: tf.Tensor) -> Any:
        x = _context().all_reduce("SUM", _number())

        def inner() -> tf.Tensor:
            return tf.cond(choice > 1, lambda: _context().all_reduce("SUM", x * _number()), lambda: _number())

        y = tf.cond(choice > 0, inner, lambda: x)
        return _context().all_reduce("SUM", y)

    # The sum of the numbers is 6; of three times the sum of 6, 12, 18: 108.
    for choice, want in ((2, 108.0), (1, 6.0), (0, 18.0)):
        assert _values(strategy, replica, tf.constant(choice)) == [[want] * N]


def test_the_gradient_of_a_branch_with_an_exchange(strategy: Any) -> None:
    def replica(choice: tf.Tensor) -> Any:
        x = _number()
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(choice > 0, lambda: x * _context().all_reduce("SUM", x * x), lambda: 2.0 * x)
        return y, tape.gradient(y, x)

    # y_r = x_r sum x^2; the sum of all y has the gradient sum x^2 + 2 x_r sum x.
    assert _values(strategy, replica, tf.constant(1)) == [[14.0, 28.0, 42.0], [26.0, 38.0, 50.0]]
    assert _values(strategy, replica, tf.constant(0)) == [[2.0, 4.0, 6.0], [2.0, 2.0, 2.0]]


def test_writes_before_in_and_after_a_branch_keep_their_order(strategy: Any) -> None:
    with strategy.scope():
        own = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)

    def replica(choice: tf.Tensor) -> Any:
        own.assign(_number())

        def scaled() -> tf.Tensor:
            own.assign(own.read_value() * _context().all_reduce("SUM", own.read_value()))
            return tf.constant(0.0)

        tf.cond(choice > 0, scaled, lambda: tf.constant(1.0))
        read = own.read_value()
        own.assign_add(100.0)
        return read, own.read_value()

    assert _values(strategy, replica, tf.constant(1)) == [[6.0, 12.0, 18.0], [106.0, 112.0, 118.0]]
    assert _values(strategy, replica, tf.constant(0)) == [[1.0, 2.0, 3.0], [101.0, 102.0, 103.0]]


def test_replicas_that_choose_different_branches_are_told(strategy: Any) -> None:
    def replica() -> Any:
        return tf.cond(_number() > 1.0, lambda: _context().all_reduce("SUM", 1.0), lambda: tf.constant(2.0))

    message = r"all of them must choose the same branch.*The replicas chose:\] \[0 1 1\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        _values(strategy, replica)


# Gradients accumulated by hand, applied every third batch under a condition.

ACCUMULATORS: dict[str, dict[str, Any]] = {
    "kept per replica": {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    },
    "as they come": {},
}


def _accumulated(strategy: Any, kind: str, make: Any, in_function: bool) -> list[np.ndarray]:
    """Weights after training on uneven batches, an update for every three."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(40, size)).astype("float32") for size in (4, 1))
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = make()
        sums = [tf.Variable(tf.zeros(w.shape), trainable=False, **ACCUMULATORS[kind]) for w in model.trainable_weights]
        count = tf.Variable(
            0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, name="count"
        )

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(tf.reduce_mean((model(x) - y) ** 2, -1), global_batch_size=21)
        for total, gradient in zip(sums, tape.gradient(loss, model.trainable_weights), strict=True):
            total.assign_add(gradient)
        count.assign_add(1)
        if count % 3 == 0:
            optimizer.apply_gradients(zip(sums, model.trainable_weights, strict=True))
            for total in sums:
                total.assign(tf.zeros_like(total))
        return loss

    def step(batch: Any) -> Any:
        return strategy.run(replica_step, batch) if strategy else replica_step(*batch)

    compiled = tf.function(step) if in_function else step
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(7).repeat(3)
    for batch in strategy.experimental_distribute_dataset(dataset) if strategy else dataset:
        compiled(batch)
    return [w.numpy() for w in model.weights]


@pytest.mark.parametrize("in_function", [True, False], ids=["tf.function", "eager"])
@pytest.mark.parametrize("kind", ACCUMULATORS)
def test_accumulating_by_hand_equals_one_device(strategy: Any, kind: str, in_function: bool) -> None:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3)

    ours, theirs = (_accumulated(s, kind, make, in_function) for s in (strategy, None))
    for value, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(value, want, rtol=2e-6, atol=1e-7)
