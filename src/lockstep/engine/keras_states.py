"""The states of stateful recurrent layers, of which each row belongs to one example (a seam of `keras_private`).

The batch size that such a layer is given is either that of a slice, and then every replica's copy holds the states of its own
slice; or it is that of the global batch, as on one device. Then a replica takes the rows of its slice, and all put the new
states together, so that every copy holds those of all examples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from lockstep.engine import feed
from lockstep.engine.context import Replica, TracedContext, current, sum_over_replicas
from lockstep.engine.tf_private import nest


def rnn_call(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(self: Any, sequences: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current()
        if replica is None or not self.stateful:
            return original(self, sequences, *args, **kwargs)
        if replica.replicas == 1 or replica.micro_batch is not None or self.states is None:
            with replica.own_writes():
                return original(self, sequences, *args, **kwargs)
        with replica.own_writes(), _states_of_slice(self, replica, sequences):
            return original(self, sequences, *args, **kwargs)

    return call


@contextlib.contextmanager
def _states_of_slice(layer: Any, replica: Replica, sequences: tf.Tensor) -> Iterator[None]:
    """In this block ``layer``'s states are those of the examples that the replica has."""
    states = layer.states
    rows = _Rows(layer, replica, tf.shape(sequences)[0], int(nest.flatten(states)[0].shape[0]))
    expected = getattr(layer, "_expected_batch_size", None)
    # Without Keras's tracking, which would take what stands here for good.
    object.__setattr__(layer, "states", nest.map_structure(lambda state: _State(state, rows), states))
    object.__setattr__(layer, "_expected_batch_size", None)
    try:
        yield
    finally:
        object.__setattr__(layer, "states", states)
        object.__setattr__(layer, "_expected_batch_size", expected)


class _Rows:
    """Which rows of a layer's states belong to a replica's slice.

    Args:
      layer: the layer.
      replica: the replica.
      count: the examples of its slice, one where it has borrowed one.
      size: the examples that the layer has states for.
    """

    def __init__(self, layer: Any, replica: Replica, count: tf.Tensor, size: int):
        (total,) = sum_over_replicas([count])
        self.of_all = tf.equal(total, size)
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        self.begin = tf.minimum(tf.constant(feed.bounds(size, replica.replicas))[number], tf.maximum(size - count, 0))
        self.count, self.size = count, size
        right = self.of_all | tf.equal(count, size)
        self._checked = _check(right if replica.active is None else right | ~replica.active, _told(layer, replica, size))

    def own(self, states: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(self._checked):
            return tf.identity(states)[self.begin : self.begin + self.count]

    def whole(self, own: tf.Tensor, states: tf.Tensor) -> tf.Tensor:
        """The new states: those of all replicas' examples, or of the replica's alone."""
        rank: Any = own.shape.rank
        around: Any = [[self.begin, self.size - self.begin - self.count], *([[0, 0]] * (rank - 1))]
        padded = tf.pad(own, around)
        (everywhere,) = sum_over_replicas([padded])
        return tf.ensure_shape(tf.where(self.of_all, everywhere, padded), states.shape)


class _State:
    """What a recurrent layer gets in place of one of its states: the rows of the slice, to be read and assigned to."""

    def __init__(self, variable: Any, rows: _Rows):
        self._variable, self._rows = variable, rows

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        own = self._rows.own(tf.convert_to_tensor(self._variable))
        return own if dtype in (None, own.dtype) else tf.cast(own, dtype)

    def assign(self, value: Any) -> None:
        self._variable.assign(self._rows.whole(tf.cast(value, self._variable.dtype), self._variable))


def _told(layer: Any, replica: Replica, size: int) -> str:
    replicas = replica.replicas
    return (
        "lockstep: a stateful layer holds one state for each example, and the batch has more or fewer. Received: layer "
        f"{layer.name!r}, made for {size} examples, under {replicas} replicas. Allowed: global batches of {size}, or of "
        f"{replicas} x {size}, a slice of {size} for each replica. Give the layer the batch size that you train with, as in "
        "keras.Input(batch_shape=(batch_size, ...)), and drop a last batch that is not full. In the slice of"
    )


def _check(right: tf.Tensor, message: str) -> list[Any]:
    context = tf.distribute.get_replica_context()
    assert context is not None
    if isinstance(context, TracedContext):
        return [context.trace.mark_check(right, message)]
    done = tf.debugging.Assert(right, [message, "replica", context.replica_id_in_sync_group])
    return [] if done is None else [done]
