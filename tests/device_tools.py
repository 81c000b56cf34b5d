"""The logical CPU devices that tests run on. They exist once per process, so every test shares them."""

from __future__ import annotations

import os

NUM_LOGICAL_DEVICES = 8

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def configure_tensorflow() -> None:
    """Give this process eight logical CPU devices and few threads. Must run before any TensorFlow operation."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * NUM_LOGICAL_DEVICES)


def devices(count: int) -> list[str]:
    """The names of ``count`` devices for a strategy, as in ``lockstep.MirroredStrategy(devices(2))``."""
    if not 1 <= count <= NUM_LOGICAL_DEVICES:
        raise ValueError(f"Tests have 1 to {NUM_LOGICAL_DEVICES} logical CPU devices. Received: count={count}.")
    return [f"CPU:{index}" for index in range(count)]
