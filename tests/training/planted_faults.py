"""Trainings for ``lockstep verify``: right ones, and one for each fault that it must recognise.

Each function takes a strategy and returns (model, batches) or (model, batches, step).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
BATCH, STEPS = 13, 6


def _arrays(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    count = BATCH * STEPS
    return rng.normal(size=(count, *shape)).astype("float32"), rng.integers(0, 3, count)


def _dataset(*shape: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(_arrays(*shape)).batch(BATCH)


def _compiled(strategy: Any, *stack: Callable[[], Any], shape: tuple[int, ...] = (8,), optimizer: str = "adam") -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input(shape), *(make() for make in stack)])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def right(strategy: Any) -> Any:
    """A Keras model with nothing in it that tells slices apart."""
    return _compiled(strategy, lambda: layers.Dense(16, "tanh"), lambda: layers.Dense(3)), _dataset(8)


def right_without_tf_data(strategy: Any) -> Any:
    """Batches as a list; a bias that has no gradient, because a normalisation removes it."""
    x, y = _arrays(6, 6, 1)
    model = _compiled(
        strategy,
        lambda: layers.Conv2D(4, 3),
        lambda: layers.BatchNormalization(synchronized=True),
        lambda: layers.Flatten(),
        lambda: layers.Dense(3),
        shape=(6, 6, 1),
    )
    return model, [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


def _loop(strategy: Any, distribute: bool, average: str) -> Any:
    """A hand-written loop: distributed or not, its loss divided by the global batch or averaged over the slice."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            each = entropy(y, model(x, training=True))
            loss = tf.reduce_mean(each) if average == "slice" else tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        reduction = "MEAN" if average == "slice" or not distribute else "SUM"
        return strategy.reduce(reduction, strategy.run(replica_step, args=batch), axis=None)

    dataset = _dataset(8)
    return model, strategy.experimental_distribute_dataset(dataset) if distribute else dataset, step


def right_loop(strategy: Any) -> Any:
    """The loop of TensorFlow's tutorials."""
    return _loop(strategy, distribute=True, average="global batch")


def undistributed_batch(strategy: Any) -> Any:
    """The same without its line that distributes the dataset."""
    return _loop(strategy, distribute=False, average="global batch")


def local_average(strategy: Any) -> Any:
    """The same with the mean over the slice for a loss."""
    return _loop(strategy, distribute=True, average="slice")


class OwnStep(keras.Sequential):
    """A train_step that takes the mean over what it is given, as on one device."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            scores = self(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def local_average_in_train_step(strategy: Any) -> Any:
    """With Adam, which hides a gradient that is N times too large: only its norm tells."""
    with strategy.scope():
        model = OwnStep([keras.Input((8,)), layers.Dense(3)])
        model.compile("adam")
    return model, _dataset(8)


def plain_batch_normalization(strategy: Any) -> Any:
    model = _compiled(
        strategy,
        lambda: layers.Conv2D(4, 3),
        lambda: layers.BatchNormalization(),
        lambda: layers.Flatten(),
        lambda: layers.Dense(3),
        shape=(6, 6, 1),
    )
    return model, _dataset(6, 6, 1)


def dropout(strategy: Any) -> Any:
    model = _compiled(strategy, lambda: layers.Dense(16, "tanh"), lambda: layers.Dropout(0.4), lambda: layers.Dense(3))
    return model, _dataset(8)


def both(strategy: Any) -> Any:
    """Plain BatchNormalization and dropout."""
    stack = (lambda: layers.Dense(16), lambda: layers.BatchNormalization(), lambda: layers.Dropout(0.4))
    return _compiled(strategy, *stack, lambda: layers.Dense(3)), _dataset(8)


def not_deterministic(strategy: Any) -> Any:
    """An op that draws from a generator that nobody seeded."""
    noise = np.random.default_rng()

    def noisy(x: np.ndarray) -> np.ndarray:
        return x + noise.normal(size=x.shape).astype("float32")

    def disturb(x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(noisy, [x], "float32"), [None, 8])

    return _compiled(strategy, lambda: layers.Dense(3)), _dataset(8).map(lambda x, y: (disturb(x), y))


class Ranked(layers.Layer):
    """Something that lockstep does not recognise: it scales by the largest value in what it is given."""

    def call(self, x: Any) -> Any:
        return x / keras.ops.max(keras.ops.abs(x))


def unknown(strategy: Any) -> Any:
    return _compiled(strategy, lambda: layers.Dense(16), Ranked, lambda: layers.Dense(3), optimizer="sgd"), _dataset(8)
