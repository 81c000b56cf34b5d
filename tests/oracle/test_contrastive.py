"""Losses over the rows of all replicas: a contrastive loss by all_gather, in fit and by hand, against one device."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices

pytestmark = pytest.mark.versions
# Batches of 4, 4 and 1 examples: the last leaves all replicas but one without.
X = np.random.default_rng(60).normal(size=(9, 6, 6, 1)).astype("float32")
BATCH = 4


def _similar(rows: tf.Tensor, whole: tf.Tensor, first: Any) -> tf.Tensor:
    """Sum over ``rows`` of the cross-entropy that each recognises itself among ``whole``."""
    labels = first + tf.range(tf.shape(rows)[0])
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, rows @ tf.transpose(whole)))


class Contrastive(keras.Model):
    """Embeds images by a convolution, which has no kernel for an empty batch, and BatchNormalization."""

    def __init__(self) -> None:
        super().__init__()
        inside = [keras.layers.Conv2D(3, 3), keras.layers.BatchNormalization(synchronized=True), keras.layers.Flatten()]
        self.embed = keras.Sequential([keras.Input((6, 6, 1)), *inside, keras.layers.Dense(5)])

    def call(self, x: Any) -> Any:
        return self.embed(x)

    def train_step(self, x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            rows = self.embed(x, training=True)
            if isinstance(self.distribute_strategy, lockstep.MirroredStrategy):
                whole = context.all_gather(rows, axis=0)
                sizes = context.all_gather(tf.shape(rows)[:1], axis=0)
                first = tf.reduce_sum(sizes[: context.replica_id_in_sync_group])
            else:
                whole, first = rows, 0
            loss = _similar(rows, whole, first) / tf.cast(tf.shape(whole)[0], tf.float32)
        self.optimizer.apply(tape.gradient(loss, self.embed.trainable_variables), self.embed.trainable_variables)
        return {"spread": tf.reduce_max(tf.abs(whole))}


def _train(scope: Any) -> tuple[list[np.ndarray], list[float]]:
    keras.utils.set_random_seed(3)
    with scope:
        model = Contrastive()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    history = model.fit(X, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return [v.numpy() for v in model.variables], history["spread"]


@pytest.mark.parametrize("count", [2, 3])
def test_a_train_step_that_gathers(count: int) -> None:
    want, want_logs = _train(contextlib.nullcontext())
    got, logs = _train(lockstep.MirroredStrategy(devices(count)).scope())
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    np.testing.assert_allclose(logs, want_logs, rtol=1e-5)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_a_loop_in_which_every_replica_computes_the_loss_of_all(count: int, graph: bool) -> None:
    """Each replica computes the loss of the whole batch and weighs it 1/N, as is done where labels are not needed."""
    x = X.reshape(9, 36)
    start = np.random.default_rng(1).normal(size=(36, 3)).astype("float32") / 6
    strategy = lockstep.MirroredStrategy(devices(count))
    with strategy.scope():
        weight = tf.Variable(start)

    def replica_step(batch: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            whole = context.all_gather(batch @ weight, axis=0)
            loss = _similar(whole, whole, 0) / tf.cast(tf.shape(whole)[0], tf.float32) / count
        weight.assign_sub(0.1 * context.all_reduce("SUM", tape.gradient(loss, weight)))
        return loss

    def run(batch: tf.Tensor) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, (strategy.split(batch),)), axis=None)

    step, alone = (tf.function(run) if graph else run), tf.Variable(start)
    for i in range(0, 9, BATCH):
        batch = tf.constant(x[i : i + BATCH])
        with tf.GradientTape() as tape:
            rows = batch @ alone
            loss = _similar(rows, rows, 0) / len(batch)
        np.testing.assert_allclose(step(batch), loss, rtol=1e-5)
        alone.assign_sub(0.1 * tape.gradient(loss, alone))
        np.testing.assert_allclose(weight.numpy(), alone.numpy(), atol=1e-6)
