"""One replica sees what each of several sees: per-replica values arrive taken apart, whatever kind they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine import feed

STRATEGY: list[Any] = []


def _strategy() -> Any:
    if not STRATEGY:
        STRATEGY.append(lockstep.MirroredStrategy(devices(1)))
    return STRATEGY[0]


def _values(make: Callable[[], Any]) -> Any:
    return _strategy().experimental_distribute_values_from_function(lambda _: make())


def _gathered_gradient(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.distribute.get_replica_context().all_gather(x, 0)
        loss = tf.reduce_sum(y * y)
    return tape.gradient(loss, x)


def _merged(x: Any) -> Any:
    return tf.distribute.get_replica_context().merge_call(lambda s, v: s.reduce("SUM", v, axis=None) * 3.0, args=(x,))


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "tensor": (lambda: _values(lambda: tf.constant([1.0, 2.0])), lambda x: x * 2.0, [2.0, 4.0]),
    "number": (lambda: _values(lambda: 7), lambda x: x * 2, 14),
    "structure": (lambda: {"a": _values(lambda: (tf.constant(1.0), 2.0)), "b": None}, lambda x: x["a"][0] + x["a"][1], 3.0),
    "slices": (lambda: feed.split({"x": tf.range(4)}, 1), lambda x: x["x"] + 1, [1, 2, 3, 4]),
    "ragged": (lambda: _values(lambda: tf.ragged.constant([[1, 2], [3]])), lambda x: x.row_lengths(), [2, 1]),
    "sparse": (lambda: _values(lambda: tf.sparse.from_dense([[0, 3]])), lambda x: tf.sparse.to_dense(x), [[0, 3]]),
    "gathered": (lambda: _values(lambda: tf.constant([1.0, 2.0])), _gathered_gradient, [2.0, 4.0]),
    "merged": (lambda: _values(lambda: tf.constant([1.0, 2.0])), _merged, [3.0, 6.0]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_arrive_taken_apart(name: str) -> None:
    make, fn, want = CASES[name]
    strategy, value = _strategy(), make()
    as_function = tf.function(fn)
    for got in (
        strategy.run(fn, (value,)),
        strategy.run(as_function, (value,)),
        strategy.run(lambda x: fn(x), kwargs={"x": value}),
        tf.function(lambda: strategy.run(fn, (value,)))(),
        tf.function(lambda v: strategy.run(fn, (v,)))(value),
    ):
        assert tf.convert_to_tensor(got).numpy().tolist() == want


def test_variables_stay_whole() -> None:
    strategy = _strategy()
    with strategy.scope():
        variable = tf.Variable(3.0)
    value = _values(lambda: tf.constant(2.0))

    def add(variable: Any, x: Any) -> Any:
        variable.assign_add(x)
        return variable * x

    assert float(strategy.run(add, (variable, value))) == 10.0
    assert float(tf.function(lambda: strategy.run(add, (variable, value)))()) == 14.0
    assert float(variable) == 7.0
