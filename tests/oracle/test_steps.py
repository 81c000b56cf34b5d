"""Losses, metrics and train_steps that users write themselves: what is trained and logged is what one device says."""

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


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("make", [LossByHand, LossAndMore])
def test_compute_loss(make: Build, reduction: str, run_eagerly: bool) -> None:
    def build() -> keras.Model:
        model = make()
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.001), loss, run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build)


# Totals of Keras's losses (a, b: shares of what all replicas compute) and of means over the slice (m).
TOTALS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda a, b, m: a + m,
    "plain first": lambda a, b, m: m + a,
    "difference": lambda a, b, m: m - a,
    "weighted": lambda a, b, m: 0.3 * a + 0.7 * m + b * 0.5,
    "weighted by tensors": lambda a, b, m: tf.constant(0.3) * a + m * tf.constant(0.7),
    "weighted together": lambda a, b, m: 0.5 * (a + 0.1 * m) / 4.0,
    "negated": lambda a, b, m: -(a - 0.5 * m),
    "with a constant": lambda a, b, m: a + 1.5,
    "sum of a list": lambda a, b, m: sum([a, m, b]),
    "add_n": lambda a, b, m: tf.add_n([a, m, b]),
    "mean of stacked": lambda a, b, m: ops.mean(ops.stack([a, m, b])),
    "sum of stacked, weighted": lambda a, b, m: ops.sum(ops.stack([a, m, b]) * tf.constant([0.5, 2.0, -1.0])),
    "mean of a number": lambda a, b, m: ops.mean(ops.mean(a) + m),
    "reshaped and cast": lambda a, b, m: tf.cast(tf.reshape(tf.cast(tf.reshape(a, [1]), "float64"), []), "float32") + m,
    "not differentiated": lambda a, b, m: tf.stop_gradient(a) + m + b,
    "chosen": lambda a, b, m: tf.where(tf.constant(True), a + m, 0.0),
    "divided without nan": lambda a, b, m: tf.math.divide_no_nan(a + m, 2.0),
    "through custom_gradient": lambda a, b, m: tf.custom_gradient(lambda x, y: ((x, y), lambda dx, dy: (dx, dy)))(a, m)[0] + m,
    "plain only": lambda a, b, m: 2.0 * m,
    "shares only": lambda a, b, m: a - 2.0 * b,
}


class Totals(Linear):
    """Each of some `TOTALS` goes into a metric and into the logs, and one is trained on."""

    def __init__(self, trained: str, *names: str):
        super().__init__()
        self.trained = trained
        self.trackers = {name: keras.metrics.Mean(name=name) for name in names or [trained]}
        self.first, self.second = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, *self.trackers.values()]

    def terms(self, y: Any, y_pred: Any) -> tuple[Any, Any, Any]:
        return self.first(y, y_pred), self.second(y, y_pred), ops.mean(ops.square(y_pred - 1.0))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        terms = self.terms(y, y_pred)
        for name, tracker in self.trackers.items():
            tracker.update_state(TOTALS[name](*terms))
        return TOTALS[self.trained](*terms)

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        terms = self.terms(data[1], self(data[0]))
        return {**logs, **{f"last {name}": TOTALS[name](*terms) for name in self.trackers}}


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_totals_of_losses_and_means(run_eagerly: bool) -> None:
    # In eager mode a tape follows the shares, and nothing is seen of them beyond a stop_gradient.
    names = [name for name in TOTALS if not (run_eagerly and name == "not differentiated")]

    def build() -> keras.Model:
        model = Totals("weighted", *names)
        model.compile(keras.optimizers.SGD(0.01), run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build, rtol=2e-5)


@pytest.mark.parametrize(
    ("trained", "run_eagerly"), [("negated", False), ("mean of stacked", True), ("not differentiated", False)]
)
def test_the_gradient_of_a_total(trained: str, run_eagerly: bool) -> None:
    def build() -> keras.Model:
        model = Totals(trained)
        model.compile(keras.optimizers.SGD(0.01), run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build, rtol=2e-5)


def test_totals_of_micro_batches() -> None:
    def build() -> keras.Model:
        model = Totals("weighted")
        model.compile(keras.optimizers.SGD(0.01))
        return model

    strategy = lockstep.MirroredStrategy(devices(2), micro_batches=2)
    ours, theirs = outcome(build, strategy.scope()), outcome(build, contextlib.nullcontext())
    for name, want in theirs.items():
        if not name.startswith("last "):  # read after the update, of the whole batch
            np.testing.assert_allclose(ours[name], want, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_loss_function_that_calls_a_loss(run_eagerly: bool) -> None:
    def loss(y: Any, y_pred: Any) -> Any:
        return keras.losses.MeanSquaredError()(y, y_pred) + 0.5 * ops.mean(ops.abs(y_pred))

    def build() -> keras.Model:
        model = linear()
        model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build)


@pytest.mark.parametrize("jit_compile", [None, False])
def test_a_loss_that_a_nested_function_computes(jit_compile: bool | None) -> None:
    """Also where slices are known to be equal, so that nothing in the function depends on the replica."""
    squares = keras.losses.MeanSquaredError()

    class Nested(Linear):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = tf.function(lambda a, b: squares(a, b), jit_compile=jit_compile)(y, y_pred) + ops.mean(y_pred)
            self.tracker.update_state(loss)
            return loss

    def train(scope: Any) -> dict[str, Any]:
        start_from(5)
        with scope:
            model = Nested()
            model.compile(keras.optimizers.SGD(0.01))
        batches = tf.data.Dataset.from_tensor_slices(examples()).batch(9, drop_remainder=True)
        logs = model.fit(batches, epochs=2, shuffle=False, verbose=0).history
        return {**logs, **{v.path: np.asarray(v) for v in model.variables}}

    ours, theirs = train(strategy_of(REPLICAS).scope()), train(contextlib.nullcontext())
    np.testing.assert_allclose(ours.pop("loss"), theirs.pop("loss"), rtol=1e-5)
    for (name, got), want in zip(ours.items(), theirs.values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)


@pytest.mark.skipif(not hasattr(keras, "distillation"), reason="this Keras has no Distiller")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_distiller(run_eagerly: bool) -> None:
    def build() -> keras.Model:
        teacher, student = (
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(2)]) for units in (8, 4)
        )
        likeness = keras.distillation.LogitsDistillation(temperature=3.0)
        model = keras.distillation.Distiller(teacher, student, distillation_losses=likeness, student_loss_weight=0.3)
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(), metrics=["mae"], run_eagerly=run_eagerly)
        return model

    assert_as_on_one_device(build, rtol=2e-5)


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
