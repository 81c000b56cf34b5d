"""Variables of another strategy, or of none, in a replica; and sparse values that are made of lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import values_v2

import lockstep
from device_tools import devices
from lockstep.errors import StrategyMismatchError

RULE = "A replica function can only use variables of its own strategy."
WRITES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda v: v.assign([3.0, 4.0]),
    "add": lambda v: v.assign_add([1.0, 1.0]),
    "scatter": lambda v: v.scatter_add(tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))),
    "cond": lambda v: tf.cond(tf.constant(True), lambda: v.assign_add([1.0, 1.0]), lambda: v.assign_sub([1.0, 1.0])),
    "loop": lambda v: tf.while_loop(
        lambda i: i < 2, lambda i: [i + 1 + 0 * tf.cast(v.assign_add([1.0, 1.0])[0], tf.int32)], [0]
    ),
    "nested": lambda v: tf.function(lambda: v.assign_add([1.0, 1.0]))(),
}


@pytest.fixture(params=[1, 2], scope="module")
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _of(strategy: Any) -> tf.Variable:
    with strategy.scope():
        return tf.Variable([1.0, 2.0], name="theirs")


def _ways(strategy: Any, fn: Callable[[], Any]) -> list[Callable[[], Any]]:
    return [lambda: strategy.run(fn), tf.function(lambda: strategy.run(fn)), lambda: strategy.run(tf.function(fn))]


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("owner", [lockstep.MirroredStrategy, tf.distribute.MirroredStrategy])
@pytest.mark.parametrize("copies", [1, 2])
def test_written(strategy: Any, name: str, owner: Any, copies: int) -> None:
    other = owner(devices(copies))
    variable = _of(other)
    for step in _ways(strategy, lambda: WRITES[name](variable)):
        with pytest.raises(StrategyMismatchError) as error:
            step()
        text = str(error.value)
        assert RULE in text and "Mixing" not in text
        assert f"in a run of {strategy!r}, " in text and f"made in the scope of {other!r}." in text
        assert "Make the model, optimizer and metrics in the scope of the strategy that trains them." in text
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_read_with_fewer_copies_than_replicas() -> None:
    strategy, other = lockstep.MirroredStrategy(devices(3)), lockstep.MirroredStrategy(devices(2))
    variable = _of(other)
    with pytest.raises(StrategyMismatchError) as error:
        strategy.run(lambda: variable + 1.0)
    assert f"{RULE} Received: in replica 2, 'theirs:0', which has 2 copies, for it was made in the scope of {other!r}." in str(
        error.value
    )
    with pytest.raises(StrategyMismatchError, match=f"{RULE} Received: in a run of .*'theirs:0', made in the scope of"):
        tf.function(lambda: strategy.run(lambda: variable + 1.0))()


def test_a_kind_of_distributed_variable_that_no_strategy_owns() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    variable = values_v2.DistributedVariable([tf.Variable(1.0), tf.Variable(1.0)])
    with pytest.raises(
        StrategyMismatchError, match=rf"{RULE} Received: in a run of .*, 'DistributedVariable:0', a DistributedVariable\. Make"
    ):
        tf.function(lambda: strategy.run(lambda: variable + 1.0))()


@pytest.mark.parametrize("name", WRITES)
def test_a_plain_variable_is_not_written_by_all(name: str) -> None:
    strategy, variable = lockstep.MirroredStrategy(devices(2)), tf.Variable([1.0, 2.0])
    for step in _ways(strategy, lambda: WRITES[name](variable))[1:]:
        with pytest.raises(StrategyMismatchError, match="must be created in the strategy's scope.*which 2 replicas would each"):
            step()
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_a_plain_variable_is_read_by_all(strategy: Any) -> None:
    variable = tf.Variable([1.0, 2.0])
    for step in _ways(strategy, lambda: variable * 2.0):
        for value in strategy.experimental_local_results(step()):
            assert value.numpy().tolist() == [2.0, 4.0]


ROWS: dict[str, Callable[[], tf.IndexedSlices]] = {
    "lists": lambda: tf.IndexedSlices([[1.0, 2.0]], [1]),
    "lists with a shape": lambda: tf.IndexedSlices([[1.0, 2.0]], [1], dense_shape=[2, 2]),
    "arrays": lambda: tf.IndexedSlices(np.array([[1.0, 2.0]], "float32"), np.array([1]), dense_shape=np.array([2, 2])),
    "tensors": lambda: tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([1]), dense_shape=tf.constant([2, 2])),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("uneven", [False, True])
def test_rows_of_lists_are_exchanged(strategy: Any, kind: str, uneven: bool) -> None:
    n = strategy.num_replicas_in_sync
    batch = strategy.split(tf.ones([2 * n + uneven]))

    def fn(_: Any) -> Any:
        reduced = tf.distribute.get_replica_context().all_reduce("SUM", ROWS[kind]())
        return tf.math.unsorted_segment_sum(reduced.values, reduced.indices, 2)

    for step in (lambda: strategy.run(fn, (batch,)), tf.function(lambda: strategy.run(fn, (batch,)))):
        for value in strategy.experimental_local_results(step()):
            assert value.numpy().tolist() == [[0.0, 0.0], [1.0 * n, 2.0 * n]]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_rows_of_lists_are_scattered(strategy: Any, kind: str, aggregation: str) -> None:
    with strategy.scope():
        variable = tf.Variable(tf.zeros([2, 2]), aggregation=getattr(tf.VariableAggregation, aggregation))
    n = strategy.num_replicas_in_sync if aggregation == "SUM" else 1
    for times, step in enumerate(_ways(strategy, lambda: variable.scatter_add(ROWS[kind]()) is None), start=1):
        step()
        for copy in variable.values:
            assert copy.numpy().tolist() == [[0.0, 0.0], [1.0 * n * times, 2.0 * n * times]]
