"""Losses and metrics in a replica: each slice's share of the mean over the global batch (seams of `keras_private`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from lockstep.engine import shares
from lockstep.engine.accumulate import sum_over_batch
from lockstep.engine.context import Replica, current
from lockstep.engine.variables import weighted


def _share_of(replica: Replica, loss: Any) -> Any:
    replica.losses.append(loss)
    return loss if replica.is_whole else shares.record(replica, weighted(loss, replica.fraction))


def scale_loss(original: Callable) -> Callable:
    def scale_loss_for_distribution(value: Any) -> Any:
        replica = current()
        if replica is None:
            return original(value)
        return _share_of(replica, value)

    return scale_loss_for_distribution


def unscale_loss(original: Callable) -> Callable:
    def unscale_loss_for_distribution(value: Any) -> Any:
        replica = current()
        if replica is None:
            return original(value)
        if replica.is_whole or value.shape.rank != 0:  # reduction=None: one loss per example, never scaled
            return value
        return shares.as_mean(replica, value)

    return unscale_loss_for_distribution


def compute_loss(original: Callable) -> Callable:
    @functools.wraps(original)
    def _compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current()
        loss = original(self, *args, **kwargs)
        if replica is None or replica.is_whole or not shares.is_scalar(loss):
            return loss
        return loss if type(self).compute_loss is keras.Model.compute_loss else shares.as_share(replica, loss)

    return _compute_loss


def mean_update(original: Callable) -> Callable:
    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> None:
        replica = current()
        if replica is None or replica.is_whole:
            return original(self, values, sample_weight)
        share = shares.found(replica, values)
        if share is not None:
            values = shares.as_mean(replica, share)
        if sample_weight is None and (share is not None or getattr(values, "shape", None) == ()):
            # A scalar counts once a batch on one device, so each slice's counts for its share.
            sample_weight = replica.fraction
        return original(self, values, sample_weight)

    return update_state


def apply_mask(original: Callable) -> Callable:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = original(sample_weight, mask, dtype, reduction)
        replica = current()
        if mask is None or replica is None or replica.is_whole or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        # Keras has multiplied by total/valid of this slice; the mean over the global batch needs those of all slices.
        total = tf.cast(tf.size(mask), weights.dtype)
        valid = tf.reduce_sum(tf.cast(mask, weights.dtype))
        all_total, all_valid = sum_over_batch([total, valid])
        here = tf.math.divide_no_nan(total, valid)
        factor = tf.math.divide_no_nan(tf.math.divide_no_nan(all_total, all_valid), here)
        return tf.where(valid > 0, weights * factor, tf.zeros_like(weights))

    return apply_mask


def reduce_values(original: Callable) -> Callable:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        loss = original(values, sample_weight, reduction)
        replica = current()
        if replica is not None and tuple(values.shape) == () and reduction not in ("sum", "none", None):
            # Computed by the user from the whole slice; Keras takes it as it is.
            replica.losses.append(loss)
            return loss if replica.is_whole else shares.as_share(replica, loss)
        if replica is not None and reduction == "sum" and not replica.is_whole:
            return shares.record(replica, loss)
        by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None and len(values.shape) > 0
        if not by_weight or replica is None or replica.is_whole:
            return loss
        # The divisor is the sum of all slices' weights: from sum/here*fraction to sum/all.
        weights: Any = sample_weight
        here = tf.reduce_sum(tf.cast(weights, loss.dtype))
        (everywhere,) = sum_over_batch([here])
        with shares.apart(replica):
            loss *= tf.math.divide_no_nan(here, everywhere * tf.cast(replica.fraction, loss.dtype))
        return shares.record(replica, loss)

    return reduce_values
