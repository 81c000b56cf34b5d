"""Per-replica values in cross-replica context: reduce, broadcast, gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.engine.borrowed import cut
from lockstep.engine.exchange import add, as_tensors, check_gather, check_sum
from lockstep.engine.tf_private import (
    CompositeTensor,
    DistributedValues,
    DistributedVariable,
    Mirrored,
    ReduceOp,
    is_mirrored,
    nest,
)
from lockstep.errors import UnsupportedError


def reduce_to(extended: Any, op: ReduceOp, value: Any, destinations: Any) -> Any:
    """Sums or averages a structure over replicas (``tf.distribute.StrategyExtended.reduce_to``).

    Args:
      extended: the strategy's engine.
      op: SUM or MEAN (the plain mean over replicas, as TensorFlow documents it).
      value: structure of per-replica values.
      destinations: a device name, or a distributed variable or value to mirror the result like.

    Raises:
      ValueError: SUM of a value that is not per replica.
    """
    return nest.map_structure(lambda v: _reduce_one(extended, op, v, destinations), value)


def _reduce_one(extended: Any, op: ReduceOp, value: Any, destinations: Any) -> Any:
    if not isinstance(value, DistributedValues):
        return _reduce_plain(extended, op, value)
    if is_mirrored(value) and op == ReduceOp.MEAN:
        return value
    total = sum_or_mean(extended, op, _counted(extended, value), device_of(extended, destinations))
    return mirrored(extended, total) if isinstance(destinations, DistributedValues) else total


def mirrored(extended: Any, value: Any) -> Any:
    """``value`` on every replica, each its own tensor: one tensor on all of them would be taken for a value from outside."""
    copies = []
    for device in extended.devices:
        with tf.device(device):
            copies.append(nest.map_structure(tf.identity, value, expand_composites=True))
    return Mirrored(copies)


def _counted(extended: Any, value: Any) -> list[Any]:
    """What each replica adds to a sum while it runs in a thread. A value from outside of the replicas counts once.

    Variables hold what earlier batches left, so they count whatever this batch holds.
    """
    if not isinstance(value, DistributedValues):
        return [value]
    if _is_one_value(value.values):
        return [value.values[0]]
    each = [as_tensors(v) if isinstance(v, tf.IndexedSlices) else v for v in value.values]
    weights = extended.thread_weights
    if weights is None or isinstance(value, DistributedVariable):
        return each
    return [weights.own(replica, v) for replica, v in enumerate(each)]


def _is_one_value(values: Sequence[Any]) -> bool:
    """Whether all replicas made their rows of the same tensors from outside."""
    first = values[0]
    return isinstance(first, tf.IndexedSlices) and all(v.values is first.values and v.indices is first.indices for v in values)


def _reduce_plain(extended: Any, op: ReduceOp, value: Any) -> Any:
    if op == ReduceOp.MEAN or extended.replicas == 1:
        return value
    if not tf.is_tensor(value) and not isinstance(value, tf.Operation) and np.all(np.asarray(value) == 0):
        return value
    if isinstance(value, tf.Operation) or value is None:
        return value
    raise not_per_replica(value)


def not_per_replica(value: Any) -> ValueError:
    """What to raise where one value for all replicas would be summed over them, as TensorFlow does."""
    return ValueError(
        f"A value that is not per replica cannot be summed over replicas. Received: {value!r}. "
        "Allowed: what strategy.run returned. If every replica has this value, multiply it by strategy.num_replicas_in_sync."
    )


def sum_or_mean(extended: Any, op: ReduceOp, values: list[Any], device: str) -> Any:
    """The sum or mean of one value per replica, computed on ``device``; IndexedSlices stay sparse."""
    mean = op == ReduceOp.MEAN
    if isinstance(values[0], tf.IndexedSlices):
        rows, indices = extended.exchange.join_rows([(v.values, v.indices) for v in values], mean, 0)
        return tf.IndexedSlices(rows, indices, values[0].dense_shape)
    tensors = [tf.convert_to_tensor(v) for v in values]
    with tf.control_dependencies(check_sum(tensors, mean)), tf.device(device):
        total = add(tensors) if len(tensors) > 1 else tf.identity(tensors[0])
        return total / tf.cast(len(tensors), total.dtype) if mean else total


def device_of(extended: Any, destinations: Any) -> str:
    """The device on which a result for ``destinations`` is computed."""
    if isinstance(destinations, str):
        return destinations
    if isinstance(destinations, DistributedValues):
        return extended.devices[0]
    return getattr(destinations, "device", None) or extended.devices[0]


def batch_reduce_to(extended: Any, op: ReduceOp, pairs: Any) -> list[Any]:
    """`reduce_to` for many values at once, mirrored on all replicas: the exchange for replicas that run in threads."""
    results: list[Any] = [None] * len(pairs)
    dense: list[int] = []
    for i, (value, destinations) in enumerate(pairs):
        if isinstance(value.values[0] if isinstance(value, DistributedValues) else value, tf.IndexedSlices):
            total = sum_or_mean(extended, op, _counted(extended, value), device_of(extended, destinations))
            results[i] = mirrored(extended, total)
        else:
            dense.append(i)
    tensors = [[tf.convert_to_tensor(v) for v in _counted(extended, pairs[i][0])] for i in dense]
    totals = extended.exchange.reduce(tensors, [op == ReduceOp.MEAN] * len(dense))
    for i, total in zip(dense, totals, strict=True):
        results[i] = mirrored(extended, total)
    return results


def gather(extended: Any, value: Any, destinations: Any, axis: int) -> Any:
    """Joins per-replica tensors along ``axis``, in replica order; lengths along the axis may differ."""
    if not isinstance(value, DistributedValues):
        return value
    each = list(value.values)
    if isinstance(each[0], tf.IndexedSlices):
        raise UnsupportedError(
            "gather does not support IndexedSlices. Received: rows of a sparse gradient on each replica. "
            "Gather their values and their indices, or use strategy.reduce, which joins the rows of all replicas."
        )
    weights = extended.thread_weights
    if weights is not None and weights.borrowed and not isinstance(value, DistributedVariable):
        each = [cut(tf.convert_to_tensor(v), active, axis) for v, active in zip(each, weights.active, strict=True)]
    with tf.device(device_of(extended, destinations)):
        if isinstance(each[0], tf.SparseTensor):
            return tf.sparse.concat(axis, each)
        if not isinstance(each[0], CompositeTensor):
            each = [tf.convert_to_tensor(v) for v in each]
            axis = check_gather(each, axis)
        return tf.concat(each, axis)


def read(variable: Any) -> tf.Tensor:
    """The value of a variable, aggregated over replicas where it is replica-local."""
    if isinstance(variable, DistributedVariable) and not is_mirrored(variable):
        return variable._get_cross_replica()
    return tf.identity(variable._get() if isinstance(variable, DistributedVariable) else variable)
