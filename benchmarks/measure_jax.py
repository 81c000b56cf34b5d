"""Measures Keras on JAX with its data-parallel distribution, in this process. Usage: python -m benchmarks.measure_jax TASK

One CPU device per replica (XLA_FLAGS, set by benchmarks/engines.py). Keras compiles the whole step by default on this backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks import workloads
from benchmarks.task import Clock, Task


def batches(task: Task, global_batch: int) -> Iterator[tuple[Any, Any]]:
    """Endless views of arrays in memory: less work than any input pipeline."""
    inputs, classes = task.work.data(global_batch)
    cuts = [slice(i * global_batch, (i + 1) * global_batch) for i in range(workloads.BATCHES)]
    return ((inputs[cut], classes[cut]) for cut in itertools.cycle(cuts))


def main() -> None:
    task = Task.from_arguments()
    # JAX is in an environment of its own (benchmarks/environments.py), not in the project's.
    import jax  # pyright: ignore[reportMissingImports]
    import keras

    from benchmarks import keras_models

    class Waits(keras.callbacks.Callback):
        """Waits for each step: on CPU devices, several at a time can deadlock in the all-reduce."""

        def __init__(self, clock: Clock):
            super().__init__()
            self.clock = clock

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert self.model is not None
            jax.block_until_ready(self.model._jax_state)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.clock.epoch_ended()

    keras.utils.set_random_seed(workloads.SEED)
    devices = keras.distribution.list_devices("cpu")
    assert len(devices) == task.replicas, devices
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    global_batch = task.work.per_replica_batch * task.replicas
    clock = Clock()
    # Keras's hints do not allow the verbose=0 that it documents.
    model: Any = keras_models.compiled(task.workload)
    history = model.fit(
        batches(task, global_batch),
        epochs=1 + workloads.MEASURED_EPOCHS,
        steps_per_epoch=task.epoch_steps,
        callbacks=[Waits(clock)],
        shuffle=False,
        verbose=0,
    )
    clock.answer(task, global_batch, history.history["loss"][-1])


if __name__ == "__main__":
    main()
