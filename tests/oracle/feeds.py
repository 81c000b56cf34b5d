"""The ways to feed a model: each trains for a number of epochs and returns logs per epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .models import cross_entropy

Logs = dict[str, list[float]]


@dataclass(frozen=True)
class Sizes:
    """How many examples there are, and how many go into a global batch."""

    examples: int
    batch: int

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return math.ceil(self.examples / self.batch)


@dataclass(frozen=True)
class Data:
    """Structures of arrays: to train on, and held out."""

    x: Any
    y: Any
    held_out_x: Any
    held_out_y: Any
    sizes: Sizes

    @property
    def training(self) -> tuple[Any, Any]:
        return self.x, self.y

    @property
    def held_out(self) -> tuple[Any, Any]:
        return self.held_out_x, self.held_out_y


@dataclass(frozen=True)
class Feed:
    """One way to feed a model.

    Attributes:
      train: (model, data, epochs) -> logs per epoch.
      steps_per_execution: as in ``compile``.
      run_eagerly: as in ``compile``.
      by_hand: whether it trains with a loop of its own, which only knows the sparse cross-entropy.
    """

    train: Callable[[keras.Model, Data, int], Logs]
    steps_per_execution: int = 1
    run_eagerly: bool = False
    by_hand: bool = False


def batches(xy: tuple[Any, Any], size: int) -> Iterator[tuple[Any, Any]]:
    """The global batches of one epoch, in order; the last may be smaller."""
    count = len(tf.nest.flatten(xy)[0])
    for start in range(0, count, size):
        yield tf.nest.map_structure(lambda a, start=start: a[start : start + size], xy)


def dataset(xy: tuple[Any, Any], size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(xy).batch(size)


class Batches(keras.utils.PyDataset):
    """Global batches by index."""

    def __init__(self, xy: tuple[Any, Any], size: int) -> None:
        super().__init__()
        self._batches = list(batches(xy, size))

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._batches[index]


def fit_arrays(model: keras.Model, data: Data, epochs: int) -> Logs:
    history = model.fit(
        data.x, data.y, batch_size=data.sizes.batch, epochs=epochs, shuffle=False, verbose=0, validation_data=data.held_out
    )
    return history.history


def fit_dataset(model: keras.Model, data: Data, epochs: int) -> Logs:
    training, held_out = (dataset(xy, data.sizes.batch) for xy in (data.training, data.held_out))
    return model.fit(training, epochs=epochs, shuffle=False, verbose=0, validation_data=held_out).history


def fit_generator(model: keras.Model, data: Data, epochs: int) -> Logs:
    def forever() -> Iterator[tuple[Any, Any]]:
        while True:
            yield from batches(data.training, data.sizes.batch)

    history = model.fit(
        forever(),
        steps_per_epoch=data.sizes.steps,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        # Not a generator: Keras starts a new iterator for each evaluation, and what the last one had prefetched is lost.
        validation_data=data.held_out,
        validation_batch_size=data.sizes.batch,
    )
    return history.history


def fit_py_dataset(model: keras.Model, data: Data, epochs: int) -> Logs:
    training, held_out = (Batches(xy, data.sizes.batch) for xy in (data.training, data.held_out))
    return model.fit(training, epochs=epochs, shuffle=False, verbose=0, validation_data=held_out).history


def train_on_batch(model: keras.Model, data: Data, epochs: int) -> Logs:
    logs: Logs = {}
    for _ in range(epochs):
        model.reset_metrics()
        for x, y in batches(data.training, data.sizes.batch):
            for name, value in model.train_on_batch(x, y, return_dict=True).items():
                logs.setdefault(name, []).append(float(value))
    return logs


def loop(model: keras.Model, data: Data, epochs: int, *, divisor: Callable[[Sizes], int | None]) -> Logs:
    """The loop of TensorFlow's tutorials, on the strategy in whose scope the model was made (or none).

    Args:
      divisor: the ``global_batch_size`` for ``tf.nn.compute_average_loss``.
    """
    strategy = model.distribute_strategy
    per_example_loss = cross_entropy(reduction=None)
    with strategy.scope() if strategy else tf.init_scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def replica_step(x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.nn.compute_average_loss(per_example_loss(y, outputs), global_batch_size=divisor(data.sizes))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, outputs)
        return loss

    @tf.function
    def step(batch: Any) -> tf.Tensor:
        if strategy is None:
            return replica_step(*batch)
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    training = dataset(data.training, data.sizes.batch)
    if strategy is not None:
        training = strategy.experimental_distribute_dataset(training)
    logs: Logs = {"loss": [], "accuracy": []}
    for _ in range(epochs):
        accuracy.reset_state()
        losses = [step(batch) for batch in training]
        logs["loss"].append(float(np.mean([loss.numpy() for loss in losses])))
        logs["accuracy"].append(float(accuracy.result()))
    return logs


FEEDS: dict[str, Feed] = {
    "arrays": Feed(fit_arrays),
    "tf.data": Feed(fit_dataset),
    "generator": Feed(fit_generator),
    "PyDataset": Feed(fit_py_dataset),
    "arrays, 3 steps per execution": Feed(fit_arrays, steps_per_execution=3),
    "arrays, run eagerly": Feed(fit_arrays, run_eagerly=True),
    "train_on_batch": Feed(train_on_batch),
    # A batch that is not full still divides by the full size here, on one device as on N.
    "loop": Feed(lambda *a: loop(*a, divisor=lambda sizes: sizes.batch), by_hand=True),
    "loop, divisor from the batch": Feed(lambda *a: loop(*a, divisor=lambda sizes: None), by_hand=True),
}

SIZES: dict[str, Sizes] = {
    "even": Sizes(48, 12),
    "last batch of 1": Sizes(37, 12),
    # 13 = 1 modulo 2, 3 and 4: the first batch is uneven already.
    "remainder 1": Sizes(44, 13),
    # 11 = N - 1 modulo N.
    "remainder N - 1": Sizes(40, 11),
    "smaller than N": Sizes(9, 2),
}
