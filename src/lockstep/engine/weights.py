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
from lockstep.engine.tf_private import nest


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
    sizes = [tf.convert_to_tensor(feed.batch_size(value)) for value in slices[0].values]
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
