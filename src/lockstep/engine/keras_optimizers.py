"""Optimizers in a replica: gradients are summed first, so that clipping, accumulation and loss-scale checks see the whole
gradient (seams of `keras_private`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.engine import keras_scope, keras_steps, update
from lockstep.engine.context import current, sum_over_replicas


def apply(original: Callable) -> Callable:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = current()
        if replica is None:
            return original(self, grads, trainable_variables)
        strategy = tf.distribute.get_strategy()
        if replica.replicas > 1:
            keras_scope.check_optimizer(self, strategy)
        if replica.writes_are_equal:
            # Another optimizer drives this one. It was given the sums, of whole variables.
            with replica.equal_writes():
                return original(self, grads, trainable_variables)
        if replica.held is not None:
            replica.held.append((self, list(grads), trainable_variables))
            return None
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if replica.replicas > 1:
            keras_scope.check_variables(trainable_variables or self._trainable_variables, strategy)
        checked = list(replica.checks)
        if strategy.extended.options.check_finite:
            checked += keras_steps.check_finite(self, replica, grads)
        if replica.replicas == 1:
            _observe(strategy, self, grads, trainable_variables)
            with tf.control_dependencies(checked):
                return original(self, grads, trainable_variables)
        handed_in = {i: _cast(g, strategy.extended.options.exchange_dtype) for i, g in enumerate(grads) if g is not None}
        variables = trainable_variables or self._trainable_variables
        shards = {} if strategy.extended.observers else update.scatter(self, handed_in, variables)
        whole = [i for i in handed_in if i not in shards]
        sums = dict(zip(whole, sum_over_replicas([handed_in[i] for i in whole]), strict=True)) if whole else {}
        totals = {**sums, **shards}
        for i, total in totals.items():
            grads[i] = _cast(total, grads[i].dtype)
        # All of the update comes after the exchange, also what needs no gradient: counting the iteration.
        exchanged = tf.group(*checked, *totals.values())
        with replica.equal_writes(scattered=bool(shards)), tf.control_dependencies([exchanged]):
            _observe(strategy, self, grads, trainable_variables)
            return original(self, grads, trainable_variables)

    return apply


def _observe(strategy: Any, optimizer: Any, grads: list[Any], variables: list[Any] | None) -> None:
    for observe in strategy.extended.observers:
        observe(grads, variables if variables is not None else optimizer._trainable_variables)


def _cast(gradient: Any, dtype: Any) -> Any:
    """``gradient`` in a floating ``dtype``; None leaves it as it is."""
    if dtype is None or gradient.dtype == dtype or not gradient.dtype.is_floating:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)


def all_reduce_sum_gradients(original: Callable) -> Callable:
    def all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        replica = current()
        if replica is not None and replica.writes_are_equal:
            return list(grads_and_vars)
        return original(self, grads_and_vars)

    return all_reduce_sum_gradients
