"""State of layers in a replica: sums, seeds and statistics (seams of `keras_private`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lockstep.engine.context import current, sum_over_replicas
from lockstep.engine.tf_private import DistributedVariable
from lockstep.errors import UnsupportedError


def add_of_all(original: Callable) -> Callable:
    @functools.wraps(original)
    def add(self: Any, value: Any) -> Any:
        replica, variable = current(), self._value
        is_sum = (
            isinstance(variable, DistributedVariable)
            and variable.aggregation == tf.VariableAggregation.SUM
            and variable.synchronization != tf.VariableSynchronization.ON_READ
        )
        if replica is None or replica.replicas == 1 or replica.writes_are_equal or not is_sum:
            return original(self, value)
        (total,) = sum_over_replicas([tf.convert_to_tensor(value, variable.dtype)])
        with replica.equal_writes():
            return original(self, total)

    return add


# Randomness: replicas draw different numbers from the same seed state.

_SEED_STRIDE = 1_000_003


def next_seed(original: Callable) -> Callable:
    def next(self: Any, ordered: bool = True) -> Any:
        replica = current()
        if replica is None or replica.replicas == 1:
            return original(self, ordered)
        with replica.equal_writes():
            seed = original(self, ordered)
        replica_id = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([replica_id * tf.cast(_SEED_STRIDE, seed.dtype), tf.zeros([], seed.dtype)])

    return next


# Statistics.


def moments(original: Callable) -> Callable:
    @functools.wraps(original)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        replica = current()
        if replica is None or replica.is_whole:
            return original(self, inputs, mask)
        synchronized = self.synchronized or tf.distribute.get_strategy().extended.options.sync_batch_norm
        if not synchronized:
            return original(self, inputs, mask)
        if replica.micro_batch is not None:
            raise UnsupportedError(
                "Synchronized batch statistics need the whole global batch at once. Received: the synchronized "
                f"BatchNormalization {self.name!r} in a micro-batch. Use micro_batches=1, GroupNormalization or "
                "LayerNormalization, or synchronized=False (each micro-batch is then normalised by itself)."
            )
        if mask is not None:
            return _masked_moments(inputs, mask, self._reduction_axes)
        before, self.synchronized = self.synchronized, True
        try:
            return original(self, inputs, mask)
        finally:
            self.synchronized = before

    return _moments


def _masked_moments(x: tf.Tensor, mask: tf.Tensor, axes: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over what is not masked on any replica, as Keras computes them on one device.

    Args:
      x: of shape ``[batch, ..., channels]``, float32 or wider.
      mask: of shape ``[batch, ...]``.
      axes: all axes but the channels.
    """
    valid = tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(x))
    kept = tf.where(valid, x, tf.zeros_like(x))
    total, count = sum_over_replicas([tf.reduce_sum(kept, axes), tf.reduce_sum(tf.cast(valid, x.dtype), axes)])
    count += keras.config.epsilon()
    mean = total / count
    (squares,) = sum_over_replicas([tf.reduce_sum(tf.square(tf.where(valid, x - mean, tf.zeros_like(x))), axes)])
    return mean, squares / count
