"""What replicas hand in at a meeting must fit together: checked while tracing, or in the step where shapes are not known."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import tensorflow as tf

from lockstep.engine.tf_private import ReduceOp
from lockstep.errors import ExchangeError, UnsupportedError


class _DoNotFit(ExchangeError, tf.errors.InvalidArgumentError):
    """Also the error that TensorFlow raises where it finds shapes that do not fit."""

    _node_def = _op = None
    _error_code = tf.errors.INVALID_ARGUMENT
    _experimental_payloads: dict[str, bytes] = {}
    _message = property(Exception.__str__)
    __str__ = Exception.__str__


def check_sum(values: Sequence[tf.Tensor], mean: bool) -> list[tf.Operation]:
    """Checks that ``values``, one of each replica, can be added up.

    Args:
      values: a tensor of each replica.
      mean: whether their sum is divided.

    Returns:
      What the sum must wait for: checks of shapes that are not known yet.

    Raises:
      ExchangeError: text, flags to be averaged, or shapes that differ.
    """
    dtype = values[0].dtype
    if dtype == tf.string or (dtype == tf.bool and mean):
        what = "text cannot be added up" if dtype == tf.string else "flags cannot be averaged"
        raise ExchangeError(
            f"Between replicas {what}. Received: all_reduce or reduce of dtype {dtype.name}. "
            "Allowed: numbers; flags in a sum, which says whether any is True. Use all_gather or strategy.gather for text, and "
            "tf.cast(x, tf.float32) for flags."
        )
    return _check_shapes(
        [value.shape for value in values],
        [tf.shape(value) for value in values] if not all(value.shape.is_fully_defined() for value in values) else [],
        "values that replicas add up must have equal shapes",
        "Reduce over the examples first (tf.reduce_sum(x, axis=0)), or join rows with all_gather.",
    )


def check_gather(values: Sequence[Any], axis: Any) -> int:
    """The axis along which ``values``, one of each replica, are joined.

    Raises:
      ExchangeError: the axis is not a number known while tracing, there is no such axis, or shapes differ along others.
    """
    number = axis if isinstance(axis, int) else tf.get_static_value(axis)
    rank = next((value.shape.rank for value in values if value.shape.rank is not None), None)
    if number is None or (rank is not None and not -rank <= int(number) < rank):
        shapes = ", ".join(str(value.shape) for value in values)
        raise _DoNotFit(
            f"Values are joined along one of their axes. Received: gather along axis={axis!r} of shapes {shapes}. "
            f"Allowed: {'a Python integer' if number is None else _axes(rank)}. "
            "For a single number of each replica, give it an axis first: x[None]."
        )
    number = int(number)
    shapes = [value.shape for value in values if value.shape.rank is not None]
    others = [tf.TensorShape([None if i == number % shape.rank else n for i, n in enumerate(shape)]) for shape in shapes]
    remedy = "Only the axis along which they are joined may differ: pad the others, or gather another way."
    rule = f"values that replicas join along axis {number} must agree in their other axes"
    differing = [
        i for i, sizes in enumerate(zip(*(shape.as_list() for shape in others), strict=False)) if len({*sizes} - {None}) > 1
    ]
    if differing and len({shape.rank for shape in others}) == 1:
        rule += f" (Dimension {differing[0]} in both shapes must be equal)"
    _check_shapes(others, [], rule, remedy)
    return number


def check_axis(values: Sequence[Any], axis: Any) -> None:
    """Raises ExchangeError if an axis to reduce, or one of several, is not one of ``values``'s, where their shape is known."""
    shapes: list[Any] = [getattr(value, "shape", None) for value in values]
    ranks = [rank for shape in shapes if (rank := tf.TensorShape(shape).rank) is not None]
    for each in axis if isinstance(axis, (list, tuple)) else [axis]:
        is_axis = isinstance(each, Integral) or tf.is_tensor(each)
        if each is None or (is_axis and (tf.is_tensor(each) or all(-rank <= int(each) < rank for rank in ranks))):
            continue
        raise ExchangeError(
            f"Values are reduced along an axis that they have. Received: reduce with axis={axis!r}. "
            f"Allowed: None, {_axes(min(ranks)) if ranks else 'a whole number'}."
        )


def _axes(rank: int | None) -> str:
    return f"axes {-rank} to {rank - 1}" if rank else "no axis, since the values have none"


def _check_shapes(shapes: list[tf.TensorShape], at_run_time: list[tf.Tensor], rule: str, remedy: str) -> list[tf.Operation]:
    if any(not shape.is_compatible_with(shapes[0]) for shape in shapes):
        each = ", ".join(f"{shape} on replica {r}" for r, shape in enumerate(shapes))
        raise _DoNotFit(f"Shape mismatch between replicas: {rule}. Received: {each}. {remedy}")
    if not at_run_time or any(shape.rank is None for shape in shapes) or tf.executing_eagerly():
        return []
    equal = tf.reduce_all([tf.reduce_all(shape == at_run_time[0]) for shape in at_run_time[1:]])
    return [
        tf.debugging.Assert(
            equal, [f"lockstep: Shape mismatch between replicas: {rule}. {remedy} The replicas' shapes:", *at_run_time]
        )
    ]


def reduce_op_of(op: Any) -> ReduceOp:
    """The kind of reduction that a user asks for by its name or member."""
    try:
        return ReduceOp(op.upper()) if isinstance(op, str) else ReduceOp(op)
    except ValueError:
        raise ExchangeError(f"Replicas cannot reduce in this way. Received: {op!r}. Allowed: 'SUM', 'MEAN'.") from None


def as_value(value: Any) -> Any:
    """What a replica hands in, as a tensor or as IndexedSlices of tensors."""
    if not isinstance(value, tf.IndexedSlices):
        return as_dense(value)
    return as_tensors(value)


def as_dense(value: Any) -> tf.Tensor:
    """What a replica hands in, as a tensor."""
    if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
        raise UnsupportedError(
            f"Replicas exchange dense tensors. Received: a {type(value).__name__} of shape {value.shape}. "
            "Allowed: tensors, IndexedSlices in an all_reduce, ragged rows in an all_gather along axis 0. "
            "Exchange its values, or return it from the replica function and use strategy.gather."
        )
    return tf.convert_to_tensor(value)


def as_tensors(slices: tf.IndexedSlices, dtype: Any = None) -> tf.IndexedSlices:
    """``slices`` made of tensors; a user may have made them of lists or arrays."""
    shape = None if slices.dense_shape is None else tf.convert_to_tensor(slices.dense_shape)
    return tf.IndexedSlices(tf.convert_to_tensor(slices.values, dtype), tf.convert_to_tensor(slices.indices), shape)
