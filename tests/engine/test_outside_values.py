"""A tensor made outside of the replica function is one value for all replicas: a sum counts it once, as one device would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices

pytestmark = pytest.mark.versions
WAYS = ("traced", "in threads", "eager")


@pytest.fixture(scope="module", params=[2, 3])
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _runner(strategy: Any, way: str, replica: Callable) -> Callable:
    def replica_in_thread(*args: Any) -> Any:
        tf.distribute.get_replica_context().merge_call(lambda strategy: None)
        return replica(*args)

    def run(*args: Any) -> Any:
        return strategy.run(replica_in_thread if way == "in threads" else replica, args)

    return run if way == "eager" else tf.function(run)


def _sum(x: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce("SUM", x)


def _all(strategy: Any, value: Any) -> list[float]:
    return [float(v) for v in strategy.experimental_local_results(value)]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_outside(strategy: Any, way: str) -> None:
    closure, n = tf.constant(1.5), strategy.num_replicas_in_sync
    own = strategy.experimental_distribute_values_from_function(lambda context: tf.constant(1.5))
    with strategy.scope():
        variable = tf.Variable(1.5)

    def replica(argument: tf.Tensor, own: tf.Tensor) -> dict[str, Any]:
        return {
            "closure": _sum(closure),
            "argument": _sum(argument),
            "in a structure": _sum({"a": [closure, own]})["a"][0],
            # These are values of each replica.
            "own": _sum(own),
            "computed": _sum(argument * 1.0),
            "inside": _sum(tf.constant(1.5)),
            "variable": _sum(variable),
            "summed": _sum(_sum(own)),
        }

    got = _runner(strategy, way, replica)(closure, own)
    once = ["closure", "argument", "in a structure"]
    want = {name: 1.5 if name in once else 1.5 * n for name in got} | {"summed": 1.5 * n * n}
    assert {name: _all(strategy, value) for name, value in got.items()} == {name: [v] * n for name, v in want.items()}


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_a_sum_of_what_is_outside(strategy: Any, way: str) -> None:
    outside, n = tf.constant(3.0), strategy.num_replicas_in_sync

    def replica() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(outside)
            loss = _sum(outside) * 2.0
        return tape.gradient(loss, outside)

    assert _all(strategy, _runner(strategy, way, replica)()) == [2.0 * n] * n


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "clipped": lambda: keras.optimizers.SGD(1.0, clipnorm=0.5),
    "average": lambda: keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulated": lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0),
}
# The first is updated everywhere, the second in shards.
SHAPES = ((3, 2), (300, 256))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_by_a_gradient_from_outside(strategy: Any, name: str, way: str) -> None:
    rng = np.random.default_rng(5)
    gradients = [[tf.constant(rng.normal(size=shape), tf.float32) for shape in SHAPES] for _ in range(4)]
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([1]), tf.constant([4, 2]))

    def make() -> tuple[Any, list[Any]]:
        variables = [keras.Variable(np.ones(shape, "float32")) for shape in (*SHAPES, (4, 2))]
        optimizer = OPTIMIZERS[name]()
        optimizer.build(variables)
        return optimizer, variables

    alone, want = make()
    with strategy.scope():
        optimizer, got = make()
    sparse = [] if name in ("accumulated", "clipped", "scaled") else [rows]
    for grads in gradients:
        alone.apply([*grads, *sparse], want[: 2 + len(sparse)])
        _runner(strategy, way, lambda grads=grads: optimizer.apply([*grads, *sparse], got[: 2 + len(sparse)]))()
    for ours, theirs in zip(got, want, strict=True):
        for copy in ours.value.values:
            np.testing.assert_allclose(copy.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
