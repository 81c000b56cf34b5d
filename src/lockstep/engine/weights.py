"""The weight of each replica's slice in the global batch.

With ``b_r`` of ``b`` examples, replica r's mean loss enters the global mean with the fraction ``f_r = b_r / b``. Using that
fraction instead of ``1/N`` is what makes any remainder exact. A replica without examples is *inactive*: its fraction is 0,
it contributes nothing to a sum, and it writes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lockstep.engine import feed
from lockstep.engine.borrowed import cut, cut_rows, masked
from lockstep.engine.context import current
from lockstep.engine.feed import batch_size
from lockstep.engine.tf_private import CompositeTensor, DistributedVariable, nest


@dataclass(frozen=True)
class Weights:
    """What the replicas' slices weigh in the global batch.

    Attributes:
      fractions: per replica, the fraction of the global batch (a float32 scalar).
      active: per replica, whether it has an example (a bool scalar).
      borrowed: whether a replica without examples works on a borrowed row; else on an empty slice.
    """

    fractions: list[Any]
    active: list[Any]
    borrowed: bool = True

    def own(self, replica: int, x: Any, otherwise: Callable[[], tf.Tensor] | None = None) -> Any:
        """``x`` of a replica that runs in a thread, without what only a replica without examples would add to others'.

        What it computed from a borrowed row is ``otherwise()`` (default zeros), whatever it is: that a tensor does not
        depend on the batch shows in a trace alone. Of an empty slice sums are right as they are, and what is not finite (a
        mean over no rows) is replaced. Rows that it borrowed are cut off.
        """
        active = self.active[replica]
        if isinstance(x, tf.IndexedSlices):
            return cut_rows(x, active) if self.borrowed else x
        x = tf.convert_to_tensor(x)
        if self.borrowed:
            return masked([x], active)[0] if otherwise is None else tf.where(active, x, otherwise())
        if not (x.dtype.is_floating or x.dtype.is_complex):
            return x
        finite = tf.math.is_finite(tf.math.real(x)) if x.dtype.is_complex else tf.math.is_finite(x)
        return tf.where(active | finite, x, tf.zeros_like(x) if otherwise is None else otherwise())


def find_slices(structure: Any) -> list[feed.Slices]:
    """The leaves of ``structure`` that were split from a global batch."""
    return [leaf for leaf in nest.flatten(structure) if isinstance(leaf, feed.Slices)]


def weights_of(args: Any, devices: Sequence[str], borrowed: bool) -> Weights | None:
    """The weights of the batch among a replica function's arguments; None where all slices are known to be equal.

    Args:
      args: the structure passed to ``strategy.run``.
      devices: the replicas' devices.
      borrowed: as in `Weights`.
    """
    slices = find_slices(args)
    if not slices or len(devices) == 1:
        return None
    statics = {spec.shape[0] for spec in slices[0]._type_spec._component_specs}
    if len(statics) == 1 and None not in statics:
        return None
    sizes = []
    for value, device in zip(slices[0].values, devices, strict=True):
        with tf.device(device):  # where the slice lies, so that it is not copied to be measured
            sizes.append(tf.convert_to_tensor(batch_size(value)))
    total = tf.maximum(tf.add_n(sizes), 1)
    return Weights(
        fractions=[tf.cast(size, tf.float32) / tf.cast(total, tf.float32) for size in sizes],
        active=[size > 0 for size in sizes],
        borrowed=borrowed,
    )


def with_borrowed_rows(args: Any, weights: Weights, devices: Sequence[str]) -> Any:
    """``args`` in which a replica without examples borrows row 0 of replica 0, so that no layer meets an empty batch.

    The borrowed row has weight 0 everywhere, so it changes nothing but keeps reshapes, statistics and GPU kernels defined.
    """

    def borrow(leaf: Any) -> Any:
        if not isinstance(leaf, feed.Slices):
            return leaf
        with tf.device(devices[0]):
            borrowed = nest.flatten(feed.rows(leaf.values[0], 0, 1), expand_composites=True)
        values = [leaf.values[0]]
        for value, active, device in zip(leaf.values[1:], weights.active[1:], devices[1:], strict=True):
            own = nest.flatten(value, expand_composites=True)
            with tf.device(device):
                flat = tf.nest.flatten(tf.cond(active, lambda own=own: own, lambda: borrowed))
            spec = feed.open_batch_axis(tf.type_spec_from_value(value))
            values.append(nest.pack_sequence_as(spec, flat, expand_composites=True))
        return feed.Slices(values)

    return nest.map_structure(borrow, args)


def without_borrowed_rows(trace: Any) -> Any:
    """A traced function's results as a replica without examples returns them: no rows, and zeros instead of sums over rows.

    Only what was computed from the borrowed rows is changed. State, and what has been exchanged, is as good there as
    anywhere.

    Args:
      trace: a `Trace` whose function has just returned, in its graph.
    """

    replica = current()
    assert replica is not None

    def own(value: Any) -> Any:
        if not isinstance(value, (tf.Tensor, CompositeTensor)) or isinstance(value, (tf.Variable, DistributedVariable)):
            return value
        parts = nest.flatten(value, expand_composites=True)
        if not any(isinstance(part, tf.Tensor) and trace.origins.is_from_batch(part) for part in parts):
            return value
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return feed.rows(value, 0, tf.where(trace.active, batch_size(value), 0))
        if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] is None:
            return cut(value, trace.active)
        return replica.own(value) if isinstance(value, (tf.Tensor, tf.IndexedSlices)) else value

    return nest.map_structure(own, trace.outputs)
