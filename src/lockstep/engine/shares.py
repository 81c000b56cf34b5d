"""Which scalars of a replica are *shares*: parts that add up to the global value over all replicas.

A loss that Keras has reduced to the mean of a slice, times the slice's fraction of the global batch, is a share of the
loss; so is a sum of shares, or a multiple of one. A number that is no share is taken for a mean over the slice, and counts
for the slice's fraction. Where both are added, what is linear in shares stays as it is, and the rest is weighed:

  total = a * share + b * mean   ->   its share is   a * share + b * fraction * mean

In a graph this is found out from how a number was computed; in eager mode from a tape that watches all shares.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.engine.context import Replica
from lockstep.engine.variables import weighted

_SHAPE = ("Identity", "Reshape", "Squeeze", "ExpandDims", "CheckNumerics", "EnsureShape")
_TERMS = ("AddV2", "Add", "AddN", "Sub", "Pack", "SelectV2")
_QUOTIENTS = ("RealDiv", "Div", "DivNoNan")
# In eager mode, a tape that has watched all shares of a replica.
_tapes: weakref.WeakKeyDictionary[Replica, tf.GradientTape] = weakref.WeakKeyDictionary()
# Means over the slice that were computed from shares, by id.
_means: weakref.WeakKeyDictionary[Replica, dict[int, tf.Tensor]] = weakref.WeakKeyDictionary()


def record(replica: Replica, x: Any) -> Any:
    """Notes that ``x`` is this replica's share of a global value, and returns it."""
    if tf.executing_eagerly():
        if replica not in _tapes:
            _tapes[replica] = tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
            tape.__enter__()
            weakref.finalize(replica, tape.__exit__, None, None, None)
        _tapes[replica].watch(x)
    else:
        # A function that is called in a trace becomes part of it, so that what it returns can be followed.
        _ = tf.distribute.get_replica_context().replica_id_in_sync_group
    return replica.record_share(x)


def as_share(replica: Replica, x: tf.Tensor) -> tf.Tensor:
    """The replica's share of a number that may hold shares, means over the slice, or both; recorded.

    Args:
      replica: the replica that computed it.
      x: a float scalar.
    """
    return record(replica, share_of(replica, x))


def as_mean(replica: Replica, share: tf.Tensor) -> tf.Tensor:
    """The mean over the slice that ``share`` is this replica's share of."""
    with apart(replica):
        mean = tf.math.divide_no_nan(share, tf.cast(replica.fraction, share.dtype))
    return _means.setdefault(replica, {}).setdefault(id(mean), mean)


def apart(replica: Replica) -> contextlib.AbstractContextManager[Any]:
    """For computing a share from another: each is one on its own account, and not followed back to the other."""
    tape = _tapes.get(replica) if tf.executing_eagerly() else None
    return contextlib.nullcontext() if tape is None else tape.stop_recording()


def share_of(replica: Replica, x: tf.Tensor) -> tf.Tensor:
    """The same, not recorded."""
    share = found(replica, x)
    if share is not None:
        return share
    with apart(replica):
        return weighted(x, replica.fraction)


def found(replica: Replica, x: Any) -> tf.Tensor | None:
    """The replica's share of ``x`` where shares are among what it was computed from; else None.

    Args:
      replica: the replica that computed it.
      x: a number, or a vector of some.
    """
    if not isinstance(x, tf.Tensor) or not replica.shares:
        return None
    if id(x) in replica.shares:
        return x
    return _found_eagerly(replica, x) if tf.executing_eagerly() else _Search(replica).share(x)


def _found_eagerly(replica: Replica, x: tf.Tensor) -> tf.Tensor | None:
    tape = _tapes.get(replica)
    if tape is None or not x.dtype.is_floating or x.shape.rank != 0:
        return None
    known = [share for share in replica.shares.values() if not hasattr(share, "graph") and share.dtype.is_floating]
    with apart(replica):
        factors = tape.gradient(x, known)
        linear = [tf.cast(share * factor, x.dtype) for share, factor in zip(known, factors, strict=True) if factor is not None]
        if not linear:
            return None
        total = tf.add_n(linear)
        return total + weighted(x - total, replica.fraction)


class _Search:
    """Follows a number of a graph back to the shares that it is linear in, and puts it together again from them."""

    def __init__(self, replica: Replica):
        self._replica = replica
        self._known: dict[int, tf.Tensor | None] = {}

    def share(self, x: tf.Tensor) -> tf.Tensor | None:
        """The share of ``x``: itself, if it holds nothing but shares; None, if it holds none."""
        if id(x) in self._replica.shares:
            return x
        if x.shape.rank not in (0, 1) or id(x) in _means.get(self._replica, ()):
            return None
        if id(x) not in self._known:
            self._known[id(x)] = self._computed(x, x.op, list(x.op.inputs))
        return self._known[id(x)]

    def _computed(self, x: tf.Tensor, op: tf.Operation, inputs: list[tf.Tensor]) -> tf.Tensor | None:
        if op.type in _TERMS:
            return self._sum(x, op, inputs)
        if op.type == "IdentityN":
            return self._of(x, inputs[x.value_index], lambda share: share)
        if op.type in ("Mul", "MulNoNan") and self.share(inputs[0]) is None:
            return self._of(x, inputs[1], lambda share: inputs[0] * share)
        if op.type in ("Mul", "MulNoNan"):
            return self._of(x, inputs[0], lambda share: share * inputs[1])
        if op.type in _QUOTIENTS:
            divide = tf.math.divide_no_nan if op.type == "DivNoNan" else tf.divide
            return self._of(x, inputs[0], lambda share: divide(share, inputs[1]))
        if op.type in _SHAPE and x.shape.is_fully_defined():
            return self._of(x, inputs[0], lambda share: tf.reshape(share, x.shape))
        one: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
            "Cast": lambda share: tf.cast(share, x.dtype),
            "Neg": lambda share: -share,
            "StopGradient": tf.stop_gradient,
            "Sum": lambda share: tf.reduce_sum(share, inputs[1], keepdims=op.get_attr("keep_dims")),
            "Mean": lambda share: tf.reduce_mean(share, inputs[1], keepdims=op.get_attr("keep_dims")),
        }
        return self._of(x, inputs[0], one[op.type]) if op.type in one else None

    def _of(self, x: tf.Tensor, source: tf.Tensor, again: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor | None:
        """The share of ``x``, which is ``again(source)``."""
        share = self.share(source)
        return share if share is None else x if share is source else again(share)

    def _sum(self, x: tf.Tensor, op: tf.Operation, inputs: list[tf.Tensor]) -> tf.Tensor | None:
        """The share of ``x``, which is computed from terms of which each may be a share or a mean over the slice."""
        terms = inputs[1:] if op.type == "SelectV2" else inputs
        shares = [self.share(term) for term in terms]
        if all(share is None for share in shares):
            return None
        if all(share is term for share, term in zip(shares, terms, strict=True)):
            return x
        parts = [weighted(t, self._replica.fraction) if s is None else s for s, t in zip(shares, terms, strict=True)]
        if op.type == "SelectV2":
            return tf.where(inputs[0], parts[0], parts[1])
        if op.type == "Pack":
            return tf.stack(parts)
        return parts[0] - parts[1] if op.type == "Sub" else tf.add_n([tf.broadcast_to(p, x.shape) for p in parts])


def is_scalar(x: Any) -> bool:
    """Whether ``x`` is a float scalar, which can be a share."""
    return isinstance(x, tf.Tensor) and x.shape.rank == 0 and x.dtype.is_floating
