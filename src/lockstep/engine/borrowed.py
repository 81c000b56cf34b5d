"""Takes away what a replica without examples has computed from its borrowed row: zeros, or no rows, in its place."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def masked(xs: list[Any], active: Any | None) -> list[Any]:
    """``xs`` where ``active`` (None: always), else zeros. A branch, not a product: nothing is copied, NaN does not leak."""
    if active is None or not xs:
        return xs
    out = tf.nest.flatten(tf.cond(active, lambda: xs, lambda: [tf.zeros_like(x) for x in xs]))
    for x, y in zip(xs, out, strict=True):
        y.set_shape(x.shape)
    return out


def cut(x: tf.Tensor, active: Any, axis: int = 0) -> tf.Tensor:
    """``x`` where ``active``, else nothing along ``axis``."""
    kept = slice(tf.where(active, tf.shape(x)[axis], 0))
    index: Any = (*[slice(None)] * axis, kept) if axis >= 0 else (..., kept, *[slice(None)] * (-axis - 1))
    return x[index]


def cut_rows(x: tf.IndexedSlices, active: Any) -> tf.IndexedSlices:
    """``x`` where ``active``, else no rows."""
    return tf.IndexedSlices(cut(x.values, active), cut(x.indices, active), x.dense_shape)
