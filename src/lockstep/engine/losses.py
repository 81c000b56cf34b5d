"""``tf.nn.compute_average_loss`` without ``global_batch_size``: exact for uneven slices.

TensorFlow takes the slice's size times N for the global batch, which is wrong as soon as slices differ. Under a
lockstep strategy the slice's mean is weighed by its fraction of the global batch instead. Elsewhere the function is
TensorFlow's.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from lockstep.engine import shares
from lockstep.engine.context import current


@functools.cache
def install() -> None:
    """Wraps ``tf.nn.compute_average_loss``, once per process."""
    original = tf.nn.compute_average_loss

    @functools.wraps(original)
    def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
        replica = current()
        if replica is None or replica.is_whole:
            return original(per_example_loss, sample_weight, global_batch_size)
        if global_batch_size is not None or (replica.active is None and replica.micro_batch is None):
            return shares.record(replica, original(per_example_loss, sample_weight, global_batch_size))
        size: Any = tf.maximum(tf.shape(per_example_loss)[0], 1)  # a replica in a thread may have no example
        mean = original(per_example_loss, sample_weight, global_batch_size=size)
        return shares.record(replica, mean * tf.cast(replica.fraction, mean.dtype))

    tf.nn.compute_average_loss = compute_average_loss
