"""What steps of a user's return: under any name, at any depth, it is what one device logs, for uneven batches too."""

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

pytestmark = pytest.mark.versions
# Batches of 5, 5 and 1 examples.
X = np.random.default_rng(7).normal(size=(11, 6)).astype("float32")
Y = np.random.default_rng(8).normal(size=(11, 1)).astype("float32")


class Stepped(keras.Model):
    """A model whose logs are what the function ``logs`` makes of (model, targets, predictions, loss)."""

    def __init__(self, logs: Callable):
        super().__init__()
        self.logs = logs
        self.dense = keras.layers.Dense(1)
        self.total = keras.metrics.Mean(name="total_loss")
        self.error = keras.metrics.RootMeanSquaredError(name="error")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x, y, predictions)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.logs(self, y, predictions, loss)

    def test_step(self, data: Any) -> Any:
        x, y = data
        predictions = self(x, training=False)
        return self.logs(self, y, predictions, self.compute_loss(x, y, predictions))


def _of_the_guide(model: Any, y: Any, predictions: Any, loss: Any) -> Any:
    for metric in model.metrics:
        if metric.name in ("loss", "total_loss"):
            metric.update_state(loss)
        else:
            metric.update_state(y, predictions)
    return {metric.name: metric.result() for metric in model.metrics}


def _renamed(model: Any, y: Any, predictions: Any, loss: Any) -> Any:
    model.total.update_state(loss)
    model.error.update_state(y, predictions)
    return {"loss": model.total.result(), "deviation": model.error.result()}


def _computed(model: Any, y: Any, predictions: Any, loss: Any) -> Any:
    """Numbers made of a metric's result, and a result from before the update."""
    model.error.update_state(y, predictions)
    before = model.total.result()
    model.total.update_state(loss)
    return {"twice the error": 2.0 * model.error.result(), "before": before}


def _beside(model: Any, y: Any, predictions: Any, loss: Any) -> Any:
    """A name of a metric that nobody updates, beside others that no metric has."""
    return {"loss": loss, "rate": model.optimizer.learning_rate, "shift": keras.ops.mean(predictions - y)}


def _nested(model: Any, y: Any, predictions: Any, loss: Any) -> Any:
    model.error.update_state(y, predictions)
    return {"losses": {"a": loss, "b": [keras.ops.mean(predictions)]}, "metrics": {"deep": model.error.result()}}


class Measured(keras.Sequential):
    """Keras's own steps, with metrics of its own."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.extra.update_state(keras.ops.abs(y_pred))
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "size": self.extra.result(), "mean": keras.ops.mean(y_pred)}


def _measured(logs: Any) -> keras.Model:
    del logs
    model = Measured([keras.Input((6,)), keras.layers.Dense(1)])
    model.extra = keras.metrics.Mean(name="other")
    return model


KINDS: dict[str, tuple[Callable, Any]] = {
    "of the guide": (Stepped, _of_the_guide),
    "renamed": (Stepped, _renamed),
    "computed": (Stepped, _computed),
    "beside": (Stepped, _beside),
    "nested": (Stepped, _nested),
    "compute_metrics": (_measured, None),
}


def _logs(scope: Any, kind: str, eager: bool) -> list[Any]:
    make, logs = KINDS[kind]
    keras.utils.set_random_seed(2)
    with scope:
        model = make(logs)
        # Keras asks for the results of all of a model's metrics, so that each must have been updated.
        metrics = ["mae", keras.metrics.RootMeanSquaredError()] if kind in ("of the guide", "compute_metrics") else None
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics, run_eagerly=eager)
    history = model.fit(X, Y, batch_size=5, shuffle=False, epochs=2, verbose=0).history
    return [history, model.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logs_are_those_of_one_device(kind: str, eager: bool) -> None:
    if eager and kind == "computed":
        return  # an eager tensor does not tell what it was computed from: docs/exactness.md
    want = _logs(contextlib.nullcontext(), kind, eager)
    for count in (2, 3):
        got = _logs(lockstep.MirroredStrategy(devices(count)).scope(), kind, eager)
        tf.nest.assert_same_structure(got, want)
        for ours, theirs in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
