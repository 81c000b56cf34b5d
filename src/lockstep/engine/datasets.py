"""Distributed datasets and their iterators: plain ``tf.data`` objects whose elements are per-replica values.

They are native tf.data objects (so iterators, ``for`` inside a ``tf.function`` and Keras's loops need nothing special)
and at the same time ``tf.distribute.DistributedDataset``, which tells Keras not to distribute them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.engine import feed
from lockstep.engine.context import current
from lockstep.engine.tf_options import Input
from lockstep.engine.tf_private import (
    DatasetSpec,
    DatasetWrapper,
    DistributedDatasetInterface,
    DistributedIteratorInterface,
    IteratorSpec,
    OwnedIterator,
    PerReplica,
    converted,
    enumerate_registry,
    nest,
)
from lockstep.errors import BatchError, UnsupportedError


class DistributedIteratorSpec(IteratorSpec):
    """The type of a `DistributedIterator`, so that it is one inside of a ``tf.function`` that it is passed to as well."""

    __slots__ = ("_devices",)
    value_type = property(lambda self: DistributedIterator)

    def __init__(self, element_spec: Any, devices: tuple[str, ...] | None = None):
        super().__init__(element_spec)
        self._devices = devices

    def _serialize(self) -> Any:
        return (self._element_spec, self._devices)

    def _from_components(self, components: Any) -> DistributedIterator:
        iterator = DistributedIterator(components=components, element_spec=self._element_spec)
        iterator._devices = self._devices
        return iterator


class DistributedIterator(OwnedIterator, DistributedIteratorInterface):
    """Iterates over per-replica batches, each copied to its replica's device; also a native ``tf.data`` iterator."""

    _devices: tuple[str, ...] | None = None

    @property
    def _type_spec(self) -> DistributedIteratorSpec:
        return DistributedIteratorSpec(self.element_spec, self._devices)

    def _next_internal(self) -> Any:
        _refuse_inside_replica("next(iterator)")
        element = super()._next_internal()
        return element if self._devices is None else placed(element, self._devices)

    def get_next_as_optional(self) -> Any:
        _refuse_inside_replica("iterator.get_next_as_optional()")
        return super().get_next_as_optional()


class DistributedDatasetSpec(DatasetSpec):
    """The type of a `DistributedDataset`, so that it is one inside of a ``tf.function`` that it is passed to as well."""

    __slots__ = ()
    value_type = property(lambda self: DistributedDataset)

    def _from_components(self, components: Any) -> DistributedDataset:
        return DistributedDataset(super()._from_components(components), Input(None))

    def most_specific_common_supertype(self, others: Any) -> Any:
        common = super().most_specific_common_supertype(others)
        return None if common is None else DistributedDatasetSpec(*common._serialize())


class DistributedDataset(DatasetWrapper, DistributedDatasetInterface):
    """A dataset whose elements are per-replica values.

    The methods of a ``tf.data.Dataset`` see what a program on one device would see: the global batches (`_distributed`).

    Args:
      dataset: yields per-replica values (plain tensors where there is one replica).
      settings: how its elements are fed.
      whole: the dataset of global batches that ``dataset`` was made from; None where there are none, as each replica's
        batches were made apart.
      redistribute: makes a distributed dataset of such a dataset of global batches.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        settings: Input,
        whole: tf.data.Dataset | None = None,
        redistribute: Callable[[tf.data.Dataset], Any] | None = None,
    ):
        super().__init__(dataset, dataset._variant_tensor)
        self.settings, self.whole, self._redistribute = settings, whole, redistribute

    @property
    def _variant_tensor(self) -> Any:
        _refuse_inside_replica("a distributed dataset")
        return super()._variant_tensor

    @_variant_tensor.setter
    def _variant_tensor(self, value: Any) -> None:
        self._variant_tensor_attr = value

    @property
    def element_spec(self) -> Any:
        _refuse_inside_replica("a distributed dataset")  # what a loop over it asks for first
        return super().element_spec

    @property
    def _type_spec(self) -> DistributedDatasetSpec:
        return DistributedDatasetSpec(self.element_spec)

    def __iter__(self) -> Any:
        if not (tf.executing_eagerly() or tf.inside_function()):
            return super().__iter__()  # says that it cannot be done
        iterator = DistributedIterator(self)
        iterator._devices = self.settings.devices
        return iterator

    # What the methods of tf.data.Dataset do.

    def _of_whole(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The method ``name`` of the dataset of global batches, distributed again if a dataset comes of it."""
        if self.whole is None or self._redistribute is None:
            raise UnsupportedError(
                f"A dataset whose batches were made for each replica apart has no global batches to apply {name}() to. "
                f"Received: {name}() of what strategy.distribute_datasets_from_function (or tf.data.Dataset.zip of "
                f"distributed datasets) returned. Allowed there: {', '.join(sorted((*OF_ELEMENTS, 'map', 'reduce')))}. "
                f"Call {name}() in dataset_fn, before the dataset is distributed."
            )
        result = getattr(self.whole, name)(*args, **kwargs)
        return self._redistribute(result) if isinstance(result, tf.data.Dataset) else result

    def _refused(self, name: str, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise UnsupportedError(
            f"What {name}() makes is no batch, so that it cannot be split over the replicas. "
            f"Received: {name}() of a distributed dataset. Call {name}() on the tf.data.Dataset, make batches of the result, "
            "and distribute those."
        )

    def _of_elements(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The method ``name``, which takes elements as they are or leaves them as they are."""
        if self.whole is not None and name != "enumerate":
            return self._of_whole(name, *args, **kwargs)
        return DistributedDataset(getattr(super(), name)(*args, **kwargs), self.settings)

    def map(self, map_func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Applies ``map_func`` to each global batch; where there are none, to each replica's batch."""
        if self.whole is not None:
            return self._of_whole("map", map_func, *args, **kwargs)
        map_func = converted(map_func)
        spec: Any = self.element_spec

        def on_each(*element: Any) -> Any:
            return feed.map_replicas(map_func, whole_element(spec, element), unpack=is_plain_tuple(spec))

        return DistributedDataset(super().map(on_each, *args, **kwargs), self.settings)

    def concatenate(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """The elements of this dataset, and then those of ``dataset``."""
        if not isinstance(dataset, DistributedDataset):
            return self._of_whole("concatenate", dataset, *args, **kwargs)
        if self.whole is not None and dataset.whole is not None:
            return self._of_whole("concatenate", dataset.whole, *args, **kwargs)
        return DistributedDataset(super().concatenate(dataset, *args, **kwargs), self.settings)


# Methods that give the elements back as they are, or some of them. (Of global batches or of slices is the same here.)
OF_ELEMENTS = (
    "cache",
    "enumerate",
    "ignore_errors",
    "prefetch",
    "repeat",
    "shard",
    "shuffle",
    "skip",
    "snapshot",
    "take",
    "take_while",
    "with_options",
)
# Methods that look into the elements: they are given global batches. Not here, since AutoGraph's loops need them of
# per-replica elements, as tf.distribute's own datasets have them: reduce, scan; apply calls what its function calls.
OF_WHOLE = (
    "as_numpy_iterator",
    "batch",
    "bucket_by_sequence_length",
    "filter",
    "flat_map",
    "group_by_window",
    "interleave",
    "padded_batch",
    "ragged_batch",
    "rebatch",
    "rejection_resample",
    "save",
    "sparse_batch",
    "unique",
)
# Methods whose elements have no batch axis, or are no tensors: there would be nothing to split.
REFUSED = ("unbatch", "window")


def _forwarded(name: str, to: str) -> Callable:
    @functools.wraps(getattr(tf.data.Dataset, name))
    def method(self: DistributedDataset, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, to)(name, *args, **kwargs)

    return method


for _name in OF_ELEMENTS:
    setattr(DistributedDataset, _name, _forwarded(_name, "_of_elements"))
for _name in OF_WHOLE:
    setattr(DistributedDataset, _name, _forwarded(_name, "_of_whole"))
for _name in REFUSED:
    setattr(DistributedDataset, _name, _forwarded(_name, "_refused"))


def is_plain_tuple(spec: Any) -> bool:
    """Whether tf.data passes an element's parts one by one; everything else (named tuples too) it passes whole."""
    return isinstance(spec, tuple) and not hasattr(spec, "_make")


def whole_element(spec: Any, arguments: tuple) -> Any:
    """The element that tf.data passed to a function as ``arguments``."""
    return arguments if is_plain_tuple(spec) else arguments[0]


def placed(element: Any, devices: tuple[str, ...]) -> Any:
    """``element`` with each replica's values on its device (with one replica, plain values)."""

    def on(device: str, value: Any) -> Any:
        if all(part.device == device for part in nest.flatten(value, expand_composites=True)):
            return value
        with tf.device(device):
            # An op and not a bare copy: its kernel keeps in host memory what a GPU cannot hold, as strings.
            return tf.identity(value)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            return feed.with_values(leaf, [on(device, v) for device, v in zip(devices, leaf.values, strict=True)])
        return on(devices[0], leaf) if len(devices) == 1 and feed.is_split(leaf) else leaf

    return nest.map_structure(move, element)


def _refuse_inside_replica(what: str) -> None:
    if current() is None:
        return
    raise BatchError(
        f"{what} was used inside of a replica function, where every replica would take another global batch. "
        "Received: a distributed dataset or its iterator, as an argument or a closure of the function given to strategy.run. "
        "next(iterator) should be called from outside of replica_fn: "
        "strategy.run(replica_fn, args=(next(iterator),))"
    )


def _refuse_enumerate(iterator: Any, start: Any) -> Any:
    del start
    raise UnsupportedError(
        "enumerate() of an iterator has no end inside of a tf.function. "
        f"Received: enumerate({type(iterator).__name__}). "
        "Enumerate the dataset instead (for i, batch in enumerate(distributed_dataset)), or use a for loop over the iterator "
        "and keep a separate counter."
    )


enumerate_registry.register(DistributedIterator, _refuse_enumerate)
