"""Distributed datasets: plain ``tf.data`` pipelines whose elements are `Slices`.

They are native tf.data objects (so iterators, ``for`` inside a ``tf.function`` and Keras's loops need nothing special)
and at the same time ``tf.distribute.DistributedDataset``, which tells Keras not to distribute them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.engine import feed
from lockstep.engine.tf_private import (
    DatasetWrapper,
    DistributedDatasetInterface,
    DistributedIteratorInterface,
    InputContext,
    OwnedIterator,
    nest,
)
from lockstep.errors import BatchError


class DistributedIterator(OwnedIterator, DistributedIteratorInterface):
    """Iterates over per-replica batches; also a native ``tf.data`` iterator."""


class DistributedDataset(DatasetWrapper, DistributedDatasetInterface):
    """A dataset of global batches, already split over the replicas."""

    def __init__(self, dataset: tf.data.Dataset):
        super().__init__(dataset, dataset._variant_tensor)

    def __iter__(self) -> Any:
        return DistributedIterator(self) if tf.executing_eagerly() else super().__iter__()


def distribute(dataset: Any, replicas: int) -> Any:
    """Splits every global batch of ``dataset`` over the replicas.

    Args:
      dataset: yields global batches; every leaf has shape ``[global_batch, ...]``. The last batch may be shorter.
      replicas: N. With one replica the elements stay plain tensors, as under ``tf.distribute``.

    Raises:
      BatchError: the dataset is empty, not batched, of unknown rank, or its leaves disagree about the batch size.
    """
    if isinstance(dataset, DistributedDatasetInterface):
        return dataset
    if not isinstance(dataset, tf.data.Dataset):
        raise BatchError(
            f"Only a tf.data.Dataset can be distributed. Received: {type(dataset).__name__}. "
            "Wrap arrays with tf.data.Dataset.from_tensor_slices(...).batch(global_batch_size), one batch with "
            "strategy.split(batch)."
        )
    check_not_empty(dataset)
    feed.check_leaves(feed.named_leaves(dataset.element_spec))
    if replicas == 1:
        return DistributedDataset(dataset)
    return DistributedDataset(_mapped(dataset, lambda batch: feed.split(batch, replicas)))


def check_not_empty(dataset: tf.data.Dataset) -> None:
    if int(dataset.cardinality()) == 0:
        raise BatchError(
            "There is nothing to train on. Received: an empty dataset (0 batches). "
            "Check the filter, the file pattern and drop_remainder=True, which drops a batch that is not full."
        )


def from_function(make: Callable[[Any], tf.data.Dataset], replicas: int) -> Any:
    """A dataset of *per-replica* batches, made by ``make(tf.distribute.InputContext)``; consecutive ones go to replicas 0..N-1.

    Where the dataset ends in the middle of a group, the replicas left over get empty batches, and every other its exact weight.
    """
    dataset = make(InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=replicas))
    check_not_empty(dataset)
    if replicas == 1:
        return DistributedDataset(dataset)
    feed.check_leaves(feed.named_leaves(dataset.element_spec))
    spec = dataset.element_spec

    def group(*window: Any) -> Any:
        batches = window[0] if len(window) == 1 else tf.data.Dataset.zip(window)
        return _grouped(batches, spec, replicas)

    return DistributedDataset(dataset.window(replicas).map(group).prefetch(tf.data.AUTOTUNE))


def _grouped(batches: tf.data.Dataset, spec: Any, replicas: int) -> Any:
    """Up to N consecutive per-replica batches -> one structure of Slices."""
    if isinstance(batches, dict):
        batches = tf.data.Dataset.zip(batches)
    count = batches.reduce(tf.constant(0), lambda n, *_: n + 1)
    first = batches.take(1).get_single_element()

    def one(replica: int) -> Any:
        def element() -> Any:
            return nest.flatten(batches.skip(replica).take(1).get_single_element(), expand_composites=True)

        def empty() -> Any:
            none = nest.map_structure(lambda leaf: feed.rows(leaf, 0, 0), first)
            return nest.flatten(none, expand_composites=True)

        return nest.pack_sequence_as(spec, tf.cond(replica < count, element, empty), expand_composites=True)

    values = [first, *(one(r) for r in range(1, replicas))]
    return nest.map_structure(lambda *leaves: feed.Slices(leaves), *values)


def _mapped(dataset: tf.data.Dataset, split: Callable[[Any], Any]) -> tf.data.Dataset:
    """``split`` over every element, ahead of time and in order."""

    spec: Any = dataset.element_spec

    def one(*element: Any) -> Any:
        # tf.data passes the parts of a plain tuple one by one, and everything else (named tuples too) whole.
        return split(element if isinstance(spec, tuple) and not hasattr(spec, "_make") else element[0])

    # One batch ahead hides the splitting. More would only be lost where a generator is read by one fit after the other.
    return dataset.map(one).prefetch(1)
