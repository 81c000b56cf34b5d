"""Which scalars of a replica are *shares*: parts that add up to the global value over all replicas.

A loss that Keras has reduced to the mean of a slice, times the slice's fraction of the global batch, is a share of the
loss; so is a sum of shares, or a multiple of one. A scalar that is no share is taken for a mean over the slice, and counts
for the slice's fraction. In a graph the question is answered by looking at how a scalar was computed.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lockstep.engine.context import Replica
from lockstep.engine.variables import weighted

_SAME = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Neg", "StopGradient", "CheckNumerics", "EnsureShape")
_TERMS = ("AddV2", "Add", "AddN", "Sub", "Pack")


def is_share(replica: Replica, x: Any) -> bool:
    """Whether ``x`` is a share: one that was recorded, or a sum or multiple of such.

    Args:
      replica: the replica that computed it.
      x: a tensor. In eager mode only recorded tensors are known.
    """
    if id(x) in replica.shares:
        return True
    if tf.executing_eagerly() or not isinstance(x, tf.Tensor):
        return False
    return _is_share_by_origin(replica, x.op)


def _is_share_by_origin(replica: Replica, op: tf.Operation) -> bool:
    if op.type in _SAME or (op.type == "Sum" and op.inputs[0].op.type == "Pack"):
        return is_share(replica, op.inputs[0])
    if op.type in _TERMS:
        return all(is_share(replica, term) for term in op.inputs)
    if op.type in ("Mul", "RealDiv"):
        return is_share(replica, op.inputs[0]) or (op.type == "Mul" and is_share(replica, op.inputs[1]))
    return False


def as_share(replica: Replica, x: tf.Tensor) -> tf.Tensor:
    """The replica's share of a loss that may hold, beside shares, terms that are means over the slice.

    Args:
      replica: the replica that computed it.
      x: the loss, a float scalar.
    """
    if is_share(replica, x):
        return x
    terms = _terms_with_shares(replica, x)
    if not terms:
        return replica.record_share(weighted(x, replica.fraction))
    total = tf.add_n([sign * as_share(replica, term) for sign, term in terms])
    return replica.record_share(tf.cast(total, x.dtype))


def _terms_with_shares(replica: Replica, x: tf.Tensor) -> list[tuple[int, tf.Tensor]]:
    """The signed terms that ``x`` is the sum of, if some share is hidden among them; else none."""
    if tf.executing_eagerly():
        return []
    op = x.op
    if op.type == "Sum" and op.inputs[0].op.type == "Pack":
        op = op.inputs[0].op
    if op.type not in _TERMS or any(term.shape.rank != 0 for term in op.inputs):
        return []
    if not any(is_share(replica, term) or _terms_with_shares(replica, term) for term in op.inputs):
        return []
    return [(-1 if op.type == "Sub" and i == 1 else 1, term) for i, term in enumerate(op.inputs)]


def is_scalar(x: Any) -> bool:
    """Whether ``x`` is a float scalar, which can be a share."""
    return isinstance(x, tf.Tensor) and x.shape.rank == 0 and x.dtype.is_floating


def share_of(replica: Replica, x: tf.Tensor) -> tf.Tensor:
    """The replica's share of what one device would have computed: ``x`` if it is one, else its part of the mean by examples."""
    return x if is_share(replica, x) else weighted(x, replica.fraction)
