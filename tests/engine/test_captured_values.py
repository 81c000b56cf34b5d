"""Per-replica values that a replica function finds in a closure instead of among its arguments: each replica's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.errors import StrategyMismatchError, UnsupportedError


@pytest.fixture(params=[1, 2, 3], scope="module")
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _local(strategy: Any, value: Any) -> list[Any]:
    return [v.numpy().tolist() for v in strategy.experimental_local_results(value)]


USES: dict[str, Callable[[Any], Any]] = {
    "op": tf.reduce_sum,
    "converted": lambda x: tf.convert_to_tensor(x)[0] * 3.0,
    "branch": lambda x: tf.cond(tf.constant(True), lambda: tf.reduce_sum(x), lambda: 0.0),
    "loop": lambda x: tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, tf.reduce_sum(x)), (0, 0.0))[1],
}


@pytest.mark.parametrize("use", USES)
def test_each_replica_finds_its_own(strategy: Any, use: str) -> None:
    value = strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant([1.0, 2.0]) * float(c.replica_id_in_sync_group + 1)
    )

    def fn() -> Any:
        return USES[use](value)

    def given(value: Any) -> Any:
        return strategy.run(lambda: USES[use](value))

    want = [3.0 * (r + 1) for r in range(strategy.num_replicas_in_sync)]
    for step in (lambda: strategy.run(fn), tf.function(lambda: strategy.run(fn)), lambda: strategy.run(tf.function(fn))):
        assert _local(strategy, step()) == want
    assert _local(strategy, tf.function(given)(value)) == want


def test_a_batch_in_a_closure_with_an_exchange(strategy: Any) -> None:
    def total(batch: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(batch))

    step = tf.function(lambda batch: strategy.run(lambda: total(batch)))
    n = strategy.num_replicas_in_sync
    assert _local(strategy, step(strategy.split(tf.range(7.0)))) == [21.0] * n
    assert _local(strategy, step(strategy.split(tf.range(5.0)))) == [10.0] * n


def test_a_nested_function_cannot_hold_it() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))

    @tf.function
    def step(batch: Any) -> Any:
        @tf.function
        def inner() -> Any:
            return tf.reduce_sum(batch)

        return strategy.run(lambda: inner())

    with pytest.raises(UnsupportedError) as error:
        step(strategy.split(tf.range(7.0)))
    assert "a per-replica value of 2 replicas that 'inner' takes in." in str(error.value)
    assert "Pass it as an argument: strategy.run(replica_fn, args=(value,)), and from there" in str(error.value)


def test_outside_of_a_replica_it_is_no_tensor() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    with pytest.raises(ValueError, match="PerReplica object while not inside a replica context"):
        tf.reduce_sum(strategy.split(tf.range(7.0)))


def test_it_has_a_value_for_every_replica(strategy: Any) -> None:
    value = lockstep.MirroredStrategy(devices(4)).split(tf.range(8.0))
    for step in (
        lambda: strategy.run(lambda: tf.reduce_sum(value)),
        tf.function(lambda: strategy.run(lambda: tf.reduce_sum(value))),
    ):
        with pytest.raises(StrategyMismatchError) as error:
            step()
        n = strategy.num_replicas_in_sync
        assert f"as many replicas as it has values. Received: 4 values, in one of {n} replicas. Make it" in str(error.value)
