"""The exchange inside one process: each tensor is reduced on one device, in replica order, and handed to all.

Reducing in one place and in one order is what keeps the copies bit-equal and runs reproducible. `OwnedSum` spreads the
tensors over the devices by size, so that no device does all the work; `OneDeviceSum` does it all on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lockstep.engine.exchange.checks import check_gather, check_sum
from lockstep.engine.shards import ShardLayout


class Exchange:
    """Reduces per-replica tensors; subclasses say which device owns which tensor."""

    def __init__(self, devices: Sequence[str]):
        self.devices = tuple(devices)

    def owners(self, sizes: Sequence[int]) -> list[int]:
        """The replica that reduces each tensor.

        Args:
          sizes: elements of each tensor; 0 where the shape is not static.
        """
        raise NotImplementedError

    def reduce(self, tensors: Sequence[Sequence[tf.Tensor]], mean: Sequence[bool]) -> list[tf.Tensor]:
        """Sums (or averages) over replicas.

        Args:
          tensors: per tensor, its N per-replica values (equal shapes and dtypes).
          mean: per tensor, whether to divide by N.

        Returns:
          One reduced tensor per input, living on its owner's device.
        """
        sizes = [values[0].shape.num_elements() or 0 for values in tensors]
        reduced = []
        for values, owner, average in zip(tensors, self.owners(sizes), mean, strict=True):
            with tf.control_dependencies(check_sum(values, average)), tf.device(self.devices[owner]):
                total = add(values)
                reduced.append(total / tf.cast(len(values), total.dtype) if average else total)
        return reduced

    def scatter(self, values: Sequence[tf.Tensor], layout: ShardLayout) -> list[tf.Tensor]:
        """Sums over replicas; each replica gets, on its device, its shard of the sum alone (reduce-scatter)."""
        shards = []
        for replica, device in enumerate(self.devices):
            with tf.device(device):
                shards.append(add([layout.own(value, replica) for value in values]))
        return shards

    def join(self, shards: Sequence[Sequence[tf.Tensor]], layouts: Sequence[ShardLayout]) -> list[tf.Tensor]:
        """The whole tensors from one shard per replica of each (all-gather), each put together on one device for all."""
        joined = []
        for values, layout, owner in zip(shards, layouts, self.owners([layout.size for layout in layouts]), strict=True):
            with tf.device(self.devices[owner]):
                joined.append(layout.join(values))
        return joined

    def gather(self, values: Sequence[tf.Tensor], axis: Any, position: int) -> tf.Tensor:
        """Joins per-replica tensors along ``axis``, in replica order; lengths along the axis may differ.

        Args:
          values: a tensor of each replica.
          axis: the axis, a Python integer.
          position: the number of this exchange, which spreads exchanges over the devices.
        """
        axis = check_gather(values, axis)
        with tf.device(self.devices[position % len(self.devices)]):
            return tf.concat(list(values), axis)

    def join_rows(self, slices: Sequence[Sequence[tf.Tensor]], mean: bool, position: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums sparse gradients by joining their rows: per replica (values, indices) -> all values, all indices."""
        with tf.device(self.devices[position % len(self.devices)]):
            values = tf.concat([s[0] for s in slices], 0)
            indices = tf.concat([s[1] for s in slices], 0)
            return (values / tf.cast(len(slices), values.dtype) if mean else values), indices


class OwnedSum(Exchange):
    """Spreads the tensors over all devices, largest first to the least loaded."""

    def owners(self, sizes: Sequence[int]) -> list[int]:
        load = [0] * len(self.devices)
        owner = [0] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            owner[i] = min(range(len(load)), key=lambda r: (load[r], r))
            load[owner[i]] += max(sizes[i], 1)
        return owner


class OneDeviceSum(Exchange):
    """Reduces everything on one device (``tf.distribute.ReductionToOneDevice``)."""

    def __init__(self, devices: Sequence[str], owner: int = 0):
        super().__init__(devices)
        self._owner = owner

    def owners(self, sizes: Sequence[int]) -> list[int]:
        return [self._owner] * len(sizes)


def add(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of ``values`` in order: 16-bit floats in float32; logical values joined by *or*, as a sum of flags would be."""
    dtype = values[0].dtype
    if dtype == tf.bool:
        return tf.reduce_any(tf.stack(list(values)), 0)
    if len(values) == 1:
        return values[0]
    if dtype in (tf.float16, tf.bfloat16):
        return tf.cast(tf.add_n([tf.cast(v, tf.float32) for v in values]), dtype)
    return tf.add_n(list(values))


def choose(cross_device_ops: Any, devices: Sequence[str]) -> Exchange:
    """The exchange for ``MirroredStrategy(cross_device_ops=...)``.

    Args:
      cross_device_ops: None, or one of TensorFlow's ``ReductionToOneDevice``, ``HierarchicalCopyAllReduce``.
      devices: the replicas' devices.

    Raises:
      ValueError: another type.
    """
    if cross_device_ops is None or isinstance(cross_device_ops, tf.distribute.HierarchicalCopyAllReduce):
        return OwnedSum(devices)
    if isinstance(cross_device_ops, tf.distribute.ReductionToOneDevice):
        return OneDeviceSum(devices)
    raise ValueError(
        f"Unknown exchange. Received: cross_device_ops={cross_device_ops!r}. "
        "Allowed: None (each tensor is reduced on one device, spread over all of them by size), "
        "tf.distribute.ReductionToOneDevice(), tf.distribute.HierarchicalCopyAllReduce(). Leave it out for the default."
    )
