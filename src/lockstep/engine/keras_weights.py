"""Checks the sample weights that Keras's own steps are given: their shape while tracing, their sign in each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from lockstep.engine.context import TracedContext, current
from lockstep.engine.tf_private import nest
from lockstep.errors import BatchError

NEGATIVE = (
    "lockstep: a sample weight is negative or not a number. No replica was updated. A weight says how often an example counts: "
    "allowed are 0 and above. (To turn a loss around, do it in the loss function.) In the slice of"
)
# How TensorFlow says, at the multiplication by the weights, that shapes do not fit.
_MISMATCHES = ("Dimensions must be equal", "ncompatible shapes", "must be at most rank")


@contextlib.contextmanager
def checked(step: Callable, data: Any) -> Iterator[None]:
    """Around ``step(data)`` in a replica: checks the weights in ``data``.

    Args:
      step: a model's bound ``train_step`` or ``test_step``; unless it is Keras's own, the third part of a batch may mean
        something else, and nothing is checked.
      data: the batch of a replica.

    Raises:
      BatchError: the weights do not fit the loss.
    """
    weights = _weights(step, data)
    if weights:
        _check_sign(weights)
    with mismatch_explained(step, data):
        yield


@contextlib.contextmanager
def mismatch_explained(step: Callable, data: Any) -> Iterator[None]:
    """Says what the shapes of weights may be where Keras says that dimensions must be equal.

    Args:
      step: as in `checked`.
      data: the batch of a replica, or its types.
    """
    try:
        yield
    except ValueError as error:
        weights = _weights(step, data)
        if not weights or not any(words in str(error) for words in _MISMATCHES):
            raise
        shapes = ", ".join(str(leaf.shape) for leaf in weights)
        targets = ", ".join(str(leaf.shape) for leaf in nest.flatten(data[1]) if leaf is not None)
        raise BatchError(
            "The sample weights may not fit the loss. "
            f"Received: sample_weight of shape {shapes} for targets of shape {targets}, as one replica's part. "
            "Allowed: one weight per example, [batch], or one per value of the loss, such as [batch, timesteps]. "
            f"Keras says: {error}"
        ) from error


def is_own_step(step: Callable) -> bool:
    """Whether ``step`` is Keras's own train, test or predict step, bound to a model, and not one that a user has written."""
    return getattr(step, "__func__", None) in (keras.Model.train_step, keras.Model.test_step, keras.Model.predict_step)


def _weights(step: Callable, data: Any) -> list[Any]:
    if not is_own_step(step):
        return []
    _, _, weights = keras.utils.unpack_x_y_sample_weight(data)
    return [leaf for leaf in nest.flatten(weights) if leaf is not None]


def _check_sign(weights: list[tf.Tensor]) -> None:
    right = tf.reduce_all([tf.reduce_all(tf.cast(w, tf.float32) >= 0) for w in weights])
    context = tf.distribute.get_replica_context()
    assert context is not None
    if isinstance(context, TracedContext):
        done = context.trace.mark_check(right, NEGATIVE)
    else:
        done = tf.debugging.Assert(right, [NEGATIVE, "replica", context.replica_id_in_sync_group])
    replica = current()
    if replica is not None and done is not None:
        replica.checks.append(done)
