"""What was made outside of the scope and is used in it: read as it is, or an error that says what to make where."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.errors import StrategyMismatchError
from oracle.models import start_from

layers = keras.layers
RNG = np.random.default_rng(45)
X, Y = RNG.normal(size=(15, 3)).astype("float32"), RNG.normal(size=(15, 1)).astype("float32")
WAYS = ["fit", "fit eagerly", "train_on_batch"]
UPDATED = r"would be updated by 2 replicas of MirroredStrategy\. .*`with strategy\.scope\(\):`"


def two() -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(2))


def base(trainable: bool = True) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh", name="below")], name="base")
    model.trainable = trainable
    return model


def head(below: Any, optimizer: Any = None, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), below, layers.Dense(1, name="above")])
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), options.pop("loss", "mse"), **options)
    return model


def train(model: Any, way: str) -> list[np.ndarray]:
    model.run_eagerly = way == "fit eagerly"
    if way == "train_on_batch":
        model.train_on_batch(X, Y)
    else:
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_base_model_that_would_be_trained(optimizer: str, way: str) -> None:
    below = base()
    with two().scope():
        model = head(below, getattr(keras.optimizers, optimizer)())
    with pytest.raises(StrategyMismatchError, match=rf"variable 'base/below/kernel', .* outside of any scope .*{UPDATED}"):
        train(model, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_is_built_already(way: str) -> None:
    below = layers.Dense(4, name="built")
    below.build((None, 3))
    with two().scope():
        model = head(below)
    with pytest.raises(StrategyMismatchError, match=rf"variable 'built/kernel', .* {UPDATED}"):
        train(model, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [lambda: base(False), lambda: layers.Dense(4)], ids=["frozen", "a layer that is not built"])
def test_what_is_only_read_or_has_no_variables_yet(make: Callable[[], Any], way: str) -> None:
    def weights(scope: Any) -> list[np.ndarray]:
        start_from(1)
        below = make()
        with scope:
            model = head(below)
        return train(model, way)

    for got, want in zip(weights(two().scope()), weights(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_base_model_is_evaluated() -> None:
    below = base()
    with two().scope():
        model = head(below)
    want = np.mean((np.asarray(model(X)) - Y) ** 2)
    np.testing.assert_allclose(model.evaluate(X, Y, batch_size=8, verbose=0), want, rtol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), model(X), rtol=1e-5)


def test_a_variable_of_another_strategy() -> None:
    with lockstep.MirroredStrategy(devices(3)).scope():
        below = base()
    with two().scope():
        optimizer = keras.optimizers.SGD(momentum=0.9)
        with pytest.raises(StrategyMismatchError, match=r"'base/below/kernel', which was created in the scope of <lockstep"):
            optimizer.build(below.trainable_variables)


def test_an_optimizer_is_built_for_a_variable_of_no_scope() -> None:
    below = base()
    with two().scope():
        optimizer = keras.optimizers.SGD(momentum=0.9)
        with pytest.raises(StrategyMismatchError, match=rf"variable 'base/below/kernel', .* {UPDATED}"):
            optimizer.build(below.trainable_variables)


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer(way: str) -> None:
    optimizer = keras.optimizers.Adam(name="mine")
    with two().scope():
        model = head(layers.Dense(4), optimizer)
    with pytest.raises(StrategyMismatchError, match=r"Received: 'mine', created outside of it: .*`with strategy\.scope\(\):`"):
        train(model, way)


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_another_drives(way: str) -> None:
    class Driving(keras.optimizers.Optimizer):
        def __init__(self, inner: Any):
            super().__init__(0.1)
            self.inner = inner

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.inner.apply([gradient], [variable])

    inner = keras.optimizers.Adam(name="inner")
    with two().scope():
        model = head(layers.Dense(4), Driving(inner))
    with pytest.raises(StrategyMismatchError, match=r"Received: 'inner', created outside of it: "):
        train(model, way)


@pytest.mark.parametrize("what", ["metric", "variable in a loss"])
def test_a_variable_that_replicas_write(what: str) -> None:
    metric, variable = keras.metrics.MeanSquaredError(name="outside"), keras.Variable(0.0, name="outside")

    def loss(y: Any, y_pred: Any) -> Any:
        variable.assign_add(1.0)
        return keras.ops.mean((y - y_pred) ** 2)

    with two().scope():
        model = head(layers.Dense(4), **({"metrics": [metric]} if what == "metric" else {"loss": loss}))
    wanted = "outside/total" if what == "metric" else "outside"
    with pytest.raises(
        StrategyMismatchError,
        match=rf"variable '[^']*{wanted}[^']*' with one copy, which 2 replicas .*`with strategy\.scope\(\):`",
    ):
        train(model, "fit")


def test_a_variable_in_a_loss_is_read() -> None:
    variable = keras.Variable(2.0)

    def weights(scope: Any) -> list[np.ndarray]:
        start_from(1)
        with scope:
            model = head(layers.Dense(4), loss=lambda y, y_pred: keras.ops.mean((y - y_pred) ** 2) * variable)
        return train(model, "fit")

    for got, want in zip(weights(two().scope()), weights(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_loop_by_hand(eagerly: bool) -> None:
    strategy, variable = two(), tf.Variable([1.0, 2.0], name="mine")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * tf.reduce_sum(x)
        optimizer.apply(tape.gradient(loss, [variable]), [variable])

    def on_each(x: tf.Tensor) -> None:
        strategy.run(step, (strategy.split(x),))

    with pytest.raises(StrategyMismatchError, match=rf"variable 'mine:0', .* {UPDATED}"):
        (on_each if eagerly else tf.function(on_each))(tf.constant(X))
