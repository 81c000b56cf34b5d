"""Trace and first step of ResNet-20 for N replicas, lockstep against tf.distribute.

Usage: python -m benchmarks.startup [ROUNDS]. Each measurement is a process of its own; engines take turns; the table shows
medians.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

REPLICAS = (1, 2, 4, 8)
PER_REPLICA_BATCH = 4


def measure(engine: str, replicas: int) -> float:
    """Seconds from the call of fit to the end of its first step, in this process."""
    import keras
    import numpy as np
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    devices = [f"CPU:{r}" for r in range(replicas)]
    if engine == "lockstep":
        import lockstep

        strategy = lockstep.MirroredStrategy(devices)
    else:
        strategy = tf.distribute.MirroredStrategy(devices)
    from benchmarks import keras_models

    with strategy.scope():
        model: Any = keras_models.resnet20()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    batch = PER_REPLICA_BATCH * replicas
    images, labels = np.zeros((batch, 32, 32, 3), "float32"), np.zeros(batch, "int64")
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(batch, drop_remainder=True)
    start = time.perf_counter()
    model.fit(dataset, steps_per_epoch=1, verbose=0)
    return time.perf_counter() - start


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in ("lockstep", "tf.distribute"):
        print(measure(sys.argv[1], int(sys.argv[2])))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for replicas in REPLICAS:
            for engine in ("lockstep", "tf.distribute"):
                command = [sys.executable, "-m", "benchmarks.startup", engine, str(replicas)]
                run = subprocess.run(
                    command, capture_output=True, text=True, check=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
                )
                times.setdefault((engine, replicas), []).append(float(run.stdout.split()[-1]))
    print(f"ResNet-20, trace + first step in s, median of {rounds}; {platform.machine()}, {os.cpu_count()} cores\n")
    print("| N | lockstep | tf.distribute | ratio | lockstep N / lockstep 1 |\n| --- | --- | --- | --- | --- |")
    one = statistics.median(times["lockstep", 1])
    for replicas in REPLICAS:
        ours, theirs = (statistics.median(times[engine, replicas]) for engine in ("lockstep", "tf.distribute"))
        print(f"| {replicas} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} | {ours / one:.2f} |")


if __name__ == "__main__":
    main()
