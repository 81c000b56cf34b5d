"""TF1 graphs that a session runs are refused; graphs of functions are not."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.errors import UnsupportedError


@pytest.fixture(params=[1, 2], scope="module")
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _variable(strategy: Any) -> Any:
    with strategy.scope():
        return tf.Variable(1.0)


def _under_init_scope(strategy: Any) -> Any:
    with tf.init_scope():
        return _variable(strategy)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "variable": (_variable, "a variable made in a strategy's scope"),
    "under init_scope": (_under_init_scope, "a variable made in a strategy's scope"),
    "run": (lambda s: s.run(lambda: tf.constant(1.0)), "strategy.run"),
    "run of a function": (lambda s: s.run(tf.function(lambda: tf.constant(1.0))), "strategy.run"),
    "run in a function": (lambda s: tf.function(lambda: s.run(lambda: tf.constant(1.0)))(), "strategy.run"),
    "dataset": (
        lambda s: s.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2)),
        "experimental_distribute_dataset",
    ),
    "datasets": (
        lambda s: s.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(4).batch(2)),
        "distribute_datasets_from_function",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(strategy: Any, name: str) -> None:
    use, what = REFUSED[name]
    with tf.Graph().as_default(), pytest.raises(UnsupportedError) as error:
        use(strategy)
    assert f"Received: {what} while a TF1 graph is built (tf.Graph().as_default()" in str(error.value)
    assert "in a tf.function say, or use tf.distribute.MirroredStrategy for TF1 graphs." in str(error.value)


def test_a_graph_of_its_own_is_left_alone(strategy: Any) -> None:
    """Built under a strategy, in a step or in a replica, but without using the strategy."""

    def replica() -> Any:
        with tf.Graph().as_default() as graph:
            tf.compat.v1.get_variable("v", [2])
            count = len(graph.get_operations())
        return tf.constant(float(count > 1))

    with strategy.scope(), tf.Graph().as_default():
        tf.compat.v1.get_variable("v", [2])
    for step in (lambda: strategy.run(replica), tf.function(lambda: strategy.run(replica))):
        assert {float(v) for v in strategy.experimental_local_results(step())} == {1.0}


def test_a_wrapped_function_is_a_function(strategy: Any) -> None:
    variable = _variable(strategy)

    def add(x: Any) -> Any:
        with strategy.scope():
            made = tf.Variable(10.0)
        return strategy.reduce("MEAN", strategy.run(lambda: variable + made + x), axis=None)

    wrapped = tf.compat.v1.wrap_function(add, [tf.TensorSpec([], tf.float32)])
    assert float(wrapped(tf.constant(100.0))) == 111.0


def test_a_map_function_and_an_export_are_functions(strategy: Any, tmp_path: pathlib.Path) -> None:
    variable = _variable(strategy)
    mapped = tf.data.Dataset.range(2).map(lambda x: tf.cast(x, tf.float32) + variable)
    assert [float(x) for x in mapped] == [1.0, 2.0]
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.export(str(tmp_path / "saved"), verbose=False)
        loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert loaded.serve(tf.ones((1, 2))).numpy().tolist() == [[2.0]]
