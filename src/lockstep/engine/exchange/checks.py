"""What replicas hand in at a meeting must fit together: checked while tracing, or in the step where shapes are not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lockstep.errors import ExchangeError


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
        "Values that replicas add up must have equal shapes",
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
        raise ExchangeError(
            f"Values are joined along one of their axes. Received: gather along axis={axis!r} of shapes {shapes}. "
            f"Allowed: {'a Python integer' if number is None else _axes(rank)}. "
            "For a single number of each replica, give it an axis first: x[None]."
        )
    number = int(number)
    shapes = [value.shape for value in values]
    if rank is not None and all(shape.rank == rank for shape in shapes):
        others = [tf.TensorShape([None if i == number % rank else n for i, n in enumerate(shape)]) for shape in shapes]
    else:
        others = shapes
    remedy = "Only the axis along which they are joined may differ: pad the others, or gather another way."
    _check_shapes(others, [], f"Values that replicas join along axis {number} must agree in their other axes", remedy)
    return number


def _axes(rank: int | None) -> str:
    return f"axes {-rank} to {rank - 1}" if rank else "no axis, since the values have none"


def _check_shapes(shapes: list[tf.TensorShape], at_run_time: list[tf.Tensor], rule: str, remedy: str) -> list[tf.Operation]:
    if any(not shape.is_compatible_with(shapes[0]) for shape in shapes):
        each = ", ".join(f"{shape} on replica {r}" for r, shape in enumerate(shapes))
        raise ExchangeError(f"{rule}. Received: {each}. {remedy}")
    if not at_run_time or any(shape.rank is None for shape in shapes) or tf.executing_eagerly():
        return []
    equal = tf.reduce_all([tf.reduce_all(shape == at_run_time[0]) for shape in at_run_time[1:]])
    return [tf.debugging.Assert(equal, [f"lockstep: {rule}. {remedy} The replicas' shapes:", *at_run_time])]
