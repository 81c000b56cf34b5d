"""Models whose train_step does not look like Keras's: what it is given is not what call() takes, and layers are built in it."""

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

layers, ops = keras.layers, keras.ops
# The slices of a batch hold 4, 3 and 3 examples; those of the last batch 1, 1 and 0.
COUNT, BATCH, REPLICAS = 22, 10, 3


def images(columns: int = 6) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(COUNT, columns)).astype("float32")


def dense(*units: int) -> keras.Sequential:
    """Not built before it is called."""
    return keras.Sequential([layers.Dense(u, "tanh") for u in units])


def descend(optimizer: Any, loss: Callable[[], Any], weights: Callable[[], list[Any]]) -> Any:
    with tf.GradientTape() as tape:
        value = loss()
    optimizer.apply_gradients(zip(tape.gradient(value, weights()), weights(), strict=True))
    return value


def mean(losses: Any) -> Any:
    return tf.nn.compute_average_loss(losses)


class Gan(keras.Model):
    """Data are images, call() takes noise; two optimizers, a penalty of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = dense(6), dense(8, 1)

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.by_generator, self.by_critic = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.SGD(0.05)

    def call(self, noise: Any) -> Any:
        return self.generator(noise)

    def penalty(self, middle: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(middle)
            score = self.critic(middle)
        return (tf.sqrt(tf.reduce_sum(tape.gradient(score, middle) ** 2, 1) + 1e-12) - 1.0) ** 2

    def train_step(self, data: Any) -> dict[str, Any]:
        noise = data[:, :3] * 2.0

        def wrong() -> Any:
            fake = self.generator(noise)
            return mean((self.critic(fake) - self.critic(data))[:, 0] + 10.0 * self.penalty((data + fake) / 2))

        critic = descend(self.by_critic, wrong, lambda: self.critic.trainable_variables)
        generator = descend(
            self.by_generator,
            lambda: mean(-self.critic(self.generator(noise))[:, 0]),
            lambda: self.generator.trainable_variables,
        )
        return {"critic": critic, "generator": generator}


class Diffusion(keras.Model):
    """The network takes (images, steps) of which the data hold only the first; call() makes images from a number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = dense(8, 6)
        self.tracker = keras.metrics.Mean(name="noise_loss")

    def call(self, count: int) -> Any:
        return self.network(tf.zeros([count, 7]))

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def step(self, data: Any) -> Any:
        at = tf.abs(data[:, :1])
        noise = tf.sin(data * 3.0)
        guess = self.network(tf.concat([data + at * noise, at], 1))
        return mean(tf.reduce_mean((guess - noise) ** 2, 1))

    def train_step(self, data: Any) -> dict[str, Any]:
        loss = descend(self.optimizer, lambda: self.step(data), lambda: self.network.trainable_weights)
        self.tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.tracker.update_state(self.step(data))
        return {m.name: m.result() for m in self.metrics}


class Contrastive(keras.Model):
    """Two views of each image in a dict; call() takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = dense(8, 4), dense(4)
        self.similarity = keras.losses.CosineSimilarity()

    def call(self, view: Any) -> Any:
        return self.encoder(view)

    def train_step(self, data: Any) -> dict[str, Any]:
        def loss() -> Any:
            one, other = self.encoder(data["one"]), self.encoder(data["other"])
            return self.similarity(tf.stop_gradient(one), self.head(other)) + self.similarity(one, other)

        return {"similarity": descend(self.optimizer, loss, lambda: self.trainable_variables)}


class Vae(keras.Model):
    """Two losses, of which one is added by a layer; a metric and a loss given to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = dense(4), dense(6)

    def call(self, x: Any) -> Any:
        code = self.encoder(x)
        self.add_loss(0.1 * ops.mean(ops.square(code)))
        return self.decoder(code)

    def train_step(self, data: Any) -> dict[str, Any]:
        (x,) = data
        with tf.GradientTape() as tape:
            y = self(x, training=True)
            loss = self.compute_loss(x, x, y)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {**self.compute_metrics(x, x, y), "loss": loss}


class Distiller(keras.Model):
    """Only the student is trained, and only the optimizer knows of its first layer, which no attribute of a model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = dense(8, 3), dense(3)
        self.teacher.trainable = False
        self.hidden = (lambda layer: lambda: layer)(dense(5))

    def call(self, x: Any) -> Any:
        return self.student(self.hidden()(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data

        def loss() -> Any:
            return keras.losses.MeanSquaredError()(self.teacher(x), self(x)) + mean(tf.reduce_sum(self(x) ** 2, 1))

        def weights() -> list[Any]:
            return [*self.hidden().trainable_weights, *self.student.trainable_weights]

        return {"loss": descend(self.optimizer, loss, weights)}


class Half(keras.Model):
    """The data fit call() in rank and type, and yet it is trained on half of the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        return super().train_step((x[:, :3], y[:, :1]))

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        return super().test_step((x[:, :3], y[:, :1]))


class Nested(Half):
    """Trains a model within, that was compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense(4, 1)
        self.inner.compile(keras.optimizers.Adam(0.01, epsilon=1e-4), "mse", metrics=["mae"])

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.inner.train_step((x, y[:, :1]))
        return {"seen": ops.mean(x)}


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[[], Any]]] = {
    "gan": (Gan, {}, images),
    "diffusion": (Diffusion, {"optimizer": "sgd"}, images),
    "contrastive": (Contrastive, {"optimizer": "sgd"}, lambda: {"one": images(), "other": images() * 0.9 + 0.1}),
    "vae": (Vae, {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}, lambda: (images(),)),
    "distiller": (Distiller, {"optimizer": "sgd"}, lambda: (images(), None)),
    "half": (Half, {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]}, lambda: (images(), images())),
    "nested": (Nested, {"optimizer": "sgd"}, lambda: (images(), images())),
}


def batches(data: Any) -> tf.data.Dataset:
    if isinstance(data, tuple) and data[-1] is None:
        return tf.data.Dataset.from_tensor_slices(data[0]).batch(BATCH).map(lambda x: (x, None))
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


def outcome(name: str, scope: Any, fit: Callable[[Any, tf.data.Dataset], Any], **options: Any) -> dict[str, np.ndarray]:
    build, compiled, data = MODELS[name]
    start_from(5)
    with scope:
        model = build()
        model.compile(**compiled, **options)
    found = dict(fit(model, batches(data())) or {})
    hidden = model.hidden().weights if name == "distiller" else []
    return {**found, **{f"{i} {v.name}": np.asarray(v) for i, v in enumerate([*model.weights, *hidden])}}


def fitted(model: Any, data: tf.data.Dataset) -> Any:
    return model.fit(data, epochs=2, shuffle=False, verbose=0).history


def assert_as_on_one_device(
    name: str, strategy: Any, fit: Callable[[Any, tf.data.Dataset], Any] = fitted, **options: Any
) -> None:
    ours = outcome(name, strategy.scope(), fit, **options)
    theirs = outcome(name, contextlib.nullcontext(), fit)
    assert ours.keys() == theirs.keys()
    for key, want in theirs.items():
        np.testing.assert_allclose(ours[key], want, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    assert_as_on_one_device(name, strategy_of(REPLICAS))


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_ways_to_run(name: str, options: dict[str, Any]) -> None:
    assert_as_on_one_device(name, strategy_of(2), **options)


def test_validation_and_metrics_before_the_first_step() -> None:
    """evaluate() and predict() build the model, by what they are given."""

    def fit(model: Any, data: tf.data.Dataset) -> dict[str, Any]:
        before = model.evaluate(data, verbose=0, return_dict=True)
        logs = model.fit(data, epochs=2, shuffle=False, validation_data=data, verbose=0).history
        return {**logs, **{f"before {name}": value for name, value in before.items()}}

    for name in ("half", "diffusion"):
        assert_as_on_one_device(name, strategy_of(REPLICAS), fit)


@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called on layer 'gan'")  # Its critic is built later.
def test_predicting_from_noise_before_training_on_images() -> None:
    def fit(model: Any, data: tf.data.Dataset) -> dict[str, Any]:
        noise = images(3)
        before = model.predict(noise, batch_size=BATCH, verbose=0)
        logs = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        return {**logs, "before": before, "after": model.predict(noise, batch_size=BATCH, verbose=0)}

    assert_as_on_one_device("gan", strategy_of(REPLICAS), fit)


def test_batch_by_batch() -> None:
    def fit(model: Any, data: tf.data.Dataset) -> dict[str, Any]:
        logs = [model.train_on_batch(*batch, return_dict=True) for batch in data]
        return {**logs[-1], **{f"test {k}": v for k, v in model.test_on_batch(images(), images(), return_dict=True).items()}}

    assert_as_on_one_device("half", strategy_of(REPLICAS), fit)


def test_micro_batches() -> None:
    strategy = lockstep.MirroredStrategy(devices(2), micro_batches=2)
    for name in ("half", "vae", "distiller"):
        assert_as_on_one_device(name, strategy)


class Fails(keras.Model):
    """Keras's own step, and a call() that only works in training, or in eager mode."""

    def __init__(self, where: str):
        super().__init__()
        self.layer, self.where = layers.Dense(1), where

    def call(self, x: Any, training: bool = False) -> Any:
        if self.where == "training" and not training:
            raise ValueError("there is nothing to see")
        if self.where == "eagerly":
            x = x + float(tf.zeros([]).numpy())
        return self.layer(x)


@pytest.mark.parametrize("where", ["training", "eagerly"])
def test_what_fails_ahead_of_the_first_step_only_is_no_failure(where: str) -> None:
    def train(scope: Any) -> list[np.ndarray]:
        start_from(5)
        with scope:
            model = Fails(where)
            model.compile("adam", "mse", metrics=["mae"], run_eagerly=where == "eagerly")
        logs = model.fit(images(), images(1), batch_size=BATCH, shuffle=False, verbose=0).history
        return [*logs["loss"], *logs["mae"], *model.get_weights()]

    ours, theirs = train(strategy_of(REPLICAS).scope()), train(contextlib.nullcontext())
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
