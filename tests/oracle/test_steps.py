"""Losses, metrics and train_steps that users write themselves: what is trained and logged is what one device says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from oracle.models import start_from
from oracle.oracle import strategy_of

ops = keras.ops
REPLICAS = 3
# The slices of a batch hold 5, 4 and 4 examples; those of the last batch 1, 1 and 0.
COUNT, BATCH = 28, 13

Build = Callable[[], keras.Model]


def examples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(COUNT, 6)).astype("float32")
    x[-2:] *= 5.0
    return x, x[:, :2] + rng.normal(size=(COUNT, 2)).astype("float32")


def outcome(build: Build, scope: Any) -> dict[str, np.ndarray]:
    """Logs, evaluation and weights after training the model that ``build`` makes."""
    start_from(5)
    with scope:
        model = build()
    x, y = examples()
    logs = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0).history
    found = {name: np.asarray(values) for name, values in logs.items()}
    if type(model).test_step is keras.Model.test_step and type(model).call is not keras.Model.call:
        evaluation = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        found.update({f"evaluate {name}": np.asarray(value) for name, value in evaluation.items()})
    found.update({f"{i} {v.path}": np.asarray(v) for i, v in enumerate(model.variables)})
    return found


def assert_as_on_one_device(build: Build, rtol: float = 2e-6) -> None:
    ours, theirs = outcome(build, strategy_of(REPLICAS).scope()), outcome(build, contextlib.nullcontext())
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        np.testing.assert_allclose(ours[name], want, rtol=rtol, atol=1e-6, err_msg=name)


def linear(activation: str | None = None) -> keras.Sequential:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation)])


# Metrics and losses given to compile.


class Rows(keras.metrics.Metric):
    """Counts rows; its result is its variable itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(name="rows")
        self.total = self.add_weight(shape=shape, initializer="zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.broadcast_to(ops.cast(ops.shape(y_true)[0], "float32"), self.total.shape))

    def result(self) -> Any:
        return self.total


def mean_square(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred))


METRICS: dict[str, Callable[[], Any]] = {
    "a scalar variable": lambda: Rows(()),
    "a vector variable": lambda: Rows((4,)),
    "several thresholds": lambda: keras.metrics.TruePositives(thresholds=[0.3, 0.6]),
    "a function that returns a scalar": lambda: mean_square,
    "a wrapped function that returns a scalar": lambda: keras.metrics.MeanMetricWrapper(mean_square, name="wrapped"),
}


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("metric", METRICS)
def test_metrics(metric: str, run_eagerly: bool) -> None:
    def build() -> keras.Model:
        model = linear("sigmoid")
        model.compile("sgd", "mse", metrics=[METRICS[metric]()], run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build)


LOSSES: dict[str, Any] = {
    "a function that returns a scalar": mean_square,
    "reduction=None": keras.losses.MeanSquaredError(reduction=None),
    "reduction='sum'": keras.losses.MeanSquaredError(reduction="sum"),
}


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, run_eagerly: bool) -> None:
    def build() -> keras.Model:
        model = linear()
        model.compile(keras.optimizers.SGD(0.001), LOSSES[loss], run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build)


# compute_loss.


class Linear(keras.Model):
    """A model that subclasses change in one method."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.1))
        self.tracker = keras.metrics.Mean(name="tracked")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, self.tracker]


class LossByHand(Linear):
    """As in Keras's documentation of compute_loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean(ops.square(y_pred - y))
        loss += ops.sum(self.losses)
        self.tracker.update_state(loss)
        return loss


class LossAndMore(Linear):
    """Terms that Keras has weighed for the slice, and terms that nobody has."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 0.5 * loss - 0.1 * ops.mean(y_pred) + 0.2 * ops.mean(ops.abs(y_pred))


@pytest.mark.parametrize(
    ("make", "run_eagerly"), [(LossByHand, False), (LossByHand, True), (LossAndMore, False)], ids=lambda v: str(v)
)
def test_compute_loss(make: Build, run_eagerly: bool) -> None:
    def build() -> keras.Model:
        model = make()
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build)


# train_step.


class Tracking(Linear):
    """As in Keras's guide to custom steps, with values that no metric holds in what it returns."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result(), "last": loss, "tripled": 3.0 * loss, "mean": ops.mean(x)}


class Adversarial(keras.Model):
    """Two models, two optimizers, no call()."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = linear()
        self.critic = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.generator_loss, self.critic_loss = keras.metrics.Mean(name="g"), keras.metrics.Mean(name="c")

    @property
    def metrics(self) -> list[Any]:
        return [self.generator_loss, self.critic_loss]

    def compile(self) -> None:
        super().compile()
        self.generator_optimizer, self.critic_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.02)
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data: Any) -> dict[str, Any]:
        noise, real = data
        count = tf.shape(noise)[0]
        with tf.GradientTape() as tape:
            scores = self.critic(tf.concat([self.generator(noise), real], 0))
            critic_loss = self.entropy(tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], 0), scores)
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            generator_loss = self.entropy(tf.zeros((count, 1)), self.critic(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(generator_loss, weights), weights, strict=True))
        self.generator_loss.update_state(generator_loss)
        self.critic_loss.update_state(critic_loss)
        return {"g": self.generator_loss.result(), "c": self.critic_loss.result()}


def test_a_train_step_that_returns_more_than_metrics() -> None:
    def build() -> keras.Model:
        model = Tracking()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    assert_as_on_one_device(build)


def test_a_train_step_of_two_models_without_a_call() -> None:
    def build() -> keras.Model:
        model = Adversarial()
        model.compile()
        return model

    assert_as_on_one_device(build, rtol=2e-5)


class MeanOfSlice(Linear):
    """Predicts one number for all that it is given."""

    def predict_step(self, data: Any) -> Any:
        return ops.mean(self(data))


def test_predictions_that_are_not_per_example_are_one_a_slice() -> None:
    start_from(5)
    with strategy_of(REPLICAS).scope():
        model = MeanOfSlice()
        model.compile("sgd", "mse")
    x, _ = examples()
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    batches = [x[:13], x[13:26], x[26:]]
    slices = [part if len(part) else batch[:1] for batch in batches for part in np.array_split(batch, REPLICAS)]
    np.testing.assert_allclose(predicted, [np.mean(model(part)) for part in slices], rtol=1e-5)


# State.


class Seen(keras.layers.Layer):
    """Counts the examples that it has been trained on, up and down."""

    def build(self, shape: Any) -> None:
        del shape
        self.up = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")
        self.down = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.up.assign_add(ops.sum(ops.ones_like(x[:, 0])))
            self.down.assign_sub(ops.sum(x))
        return x


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_layer_that_adds_up_over_examples(run_eagerly: bool) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), Seen(), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build, rtol=1e-5)
