"""The weight of each replica's slice in the global batch.

With ``b_r`` of ``b`` examples, replica r's mean loss enters the global mean with the fraction ``f_r = b_r / b``. Using that
fraction instead of ``1/N`` is what makes any remainder exact. A replica without examples is *inactive*: its fraction is 0,
it contributes nothing to a sum, and it writes no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lockstep.engine import feed
from lockstep.engine.context import masked
from lockstep.engine.feed import batch_size
from lockstep.engine.tf_private import nest, select_replica


@dataclass(frozen=True)
class Weights:
    """Per replica: the fraction of the global batch (float32 scalars) and whether there is an example (bool scalars)."""

    fractions: list[Any]
    active: list[Any]


def find_slices(structure: Any) -> list[feed.Slices]:
    """The leaves of ``structure`` that were split from a global batch."""
    return [leaf for leaf in nest.flatten(structure) if isinstance(leaf, feed.Slices)]


def weights_of(args: Any, replicas: int) -> Weights | None:
    """The weights of the batch among a replica function's arguments; None where all slices are known to be equal.

    Args:
      args: the structure passed to ``strategy.run``.
      replicas: N.
    """
    slices = find_slices(args)
    if not slices or replicas == 1:
        return None
    statics = {spec.shape[0] for spec in slices[0]._type_spec._component_specs}
    if len(statics) == 1 and None not in statics:
        return None
    sizes = [tf.convert_to_tensor(batch_size(value)) for value in slices[0].values]
    total = tf.maximum(tf.add_n(sizes), 1)
    return Weights(
        fractions=[tf.cast(size, tf.float32) / tf.cast(total, tf.float32) for size in sizes],
        active=[size > 0 for size in sizes],
    )


def with_borrowed_rows(args: Any, weights: Weights, replicas: int) -> Any:
    """``args`` in which a replica without examples borrows row 0 of replica 0, so that no layer meets an empty batch.

    The borrowed row has weight 0 everywhere, so it changes nothing but keeps reshapes, statistics and GPU kernels defined.
    """

    def borrow(leaf: Any) -> Any:
        if not isinstance(leaf, feed.Slices):
            return leaf
        first = leaf.values[0]
        values = [first]
        for r in range(1, replicas):
            value = leaf.values[r]

            def own(value: Any = value) -> list:
                return nest.flatten(value, expand_composites=True)

            def borrowed() -> list:
                return nest.flatten(feed.rows(first, 0, 1), expand_composites=True)

            flat = tf.cond(weights.active[r], own, borrowed)
            flat = flat if isinstance(flat, (list, tuple)) else [flat]
            values.append(nest.pack_sequence_as(value, list(flat), expand_composites=True))
        return feed.Slices(values)

    return nest.map_structure(borrow, args)


def without_borrowed_rows(trace: Any, arguments: Any) -> Any:
    """A traced function's results as a replica without examples returns them: no rows, and zeros instead of sums over rows.

    Only what was computed from the borrowed rows is changed. State, and what has been exchanged, is as good there as
    anywhere.

    Args:
      trace: a `Trace` whose function has just returned, in its graph.
      arguments: the (args, kwargs) it was traced with.
    """
    computed = _computed_from(trace, _batch_positions(arguments))

    def own(value: Any) -> Any:
        if not isinstance(value, (tf.Tensor, tf.RaggedTensor)) or isinstance(value, tf.Variable):
            return value
        parts = [part for part in nest.flatten(value, expand_composites=True) if getattr(part, "graph", None) is trace.graph]
        if not any(part.op.name in computed for part in parts):
            return value
        if value.shape.rank and value.shape[0] is None:
            return value[: tf.where(trace.active, batch_size(value), 0)]
        return value if isinstance(value, tf.RaggedTensor) or value.dtype == tf.string else masked([value], trace.active)[0]

    return nest.map_structure(own, trace.outputs)


def _batch_positions(arguments: Any) -> set[int]:
    """The positions of the tensors that belong to the batch among one replica's flat arguments."""
    positions: set[int] = set()
    count = 0
    for leaf in nest.flatten(arguments):
        size = len(nest.flatten(select_replica(0, leaf), expand_composites=True))
        if isinstance(leaf, feed.Slices):
            positions.update(range(count, count + size))
        count += size
    return positions


def _computed_from(trace: Any, positions: set[int]) -> set[str]:
    """The names of the ops whose values come from the arguments at ``positions``, other than by way of an exchange."""
    computed = {placeholder.op.name for position, placeholder in trace.arguments if position in positions}
    exchanged = {name for mark in trace.region.marks for name in mark.ops}
    for op in trace.graph.get_operations():
        if op.name not in exchanged and any(x.op.name in computed for x in op.inputs):
            computed.add(op.name)
    return computed
