"""Measures one engine that is Keras on TensorFlow, in this process. Usage: python -m benchmarks.measure_tensorflow TASK"""

from __future__ import annotations

import inspect
from typing import Any

from benchmarks import workloads
from benchmarks.task import Clock, Task


def strategy_of(task: Task) -> Any:
    """The engine's strategy (None: one device). Decides on devices and threads, so before anything else of TensorFlow."""
    import tensorflow as tf

    if task.engine.startswith("lockstep"):
        return _lockstep(task)
    threads = {"one-core": (1, 1), "tf-distribute-tuned": (1, task.replicas)}.get(task.engine)
    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads[0])
        tf.config.threading.set_inter_op_parallelism_threads(threads[1])
    if not task.engine.startswith("tf-distribute"):
        return None
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * task.replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{r}" for r in range(task.replicas)])


def _lockstep(task: Task) -> Any:
    import lockstep

    options = {}
    if task.engine == "lockstep-mirrored":
        if "update" not in inspect.signature(lockstep.MirroredStrategy).parameters:
            raise SystemExit("this lockstep has no choice of update")
        options["update"] = "mirrored"
    return lockstep.MirroredStrategy(replicas=task.replicas, **options)


def dataset(task: Task, global_batch: int) -> Any:
    import tensorflow as tf

    slices = tf.data.Dataset.from_tensor_slices(task.work.data(global_batch))
    return slices.batch(global_batch, drop_remainder=True).cache().repeat().prefetch(tf.data.AUTOTUNE)


def fit(task: Task, global_batch: int, model: Any, clock: Clock) -> float:
    """Trains in ``fit``; returns the last epoch's loss."""
    import keras

    # A callback of epochs alone leaves batches to run as they do without one.
    ends = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: clock.epoch_ended())
    history = model.fit(
        dataset(task, global_batch),
        epochs=1 + workloads.MEASURED_EPOCHS,
        steps_per_epoch=task.epoch_steps,
        callbacks=[ends],
        shuffle=False,
        verbose=0,
    )
    return history.history["loss"][-1]


def hand_written(task: Task, global_batch: int, model: Any, clock: Clock, strategy: Any) -> float:
    """Trains in a loop around one ``tf.function`` per step; returns the last epoch's loss."""
    import keras
    import tensorflow as tf

    optimizer = model.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)
        loss_of_each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        mean: Any = keras.metrics.Mean()

    def train_replica(inputs: Any, classes: Any) -> None:
        with tf.GradientTape() as tape:
            losses: Any = loss_of_each(classes, model(inputs, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean.update_state(losses)

    @tf.function
    def step(iterator: Any) -> None:
        strategy.run(train_replica, args=next(iterator))

    iterator = iter(strategy.experimental_distribute_dataset(dataset(task, global_batch)))
    loss = float("nan")
    for _ in range(1 + workloads.MEASURED_EPOCHS):
        mean.reset_state()
        for _ in range(task.epoch_steps):
            step(iterator)
        loss = float(mean.result())
        clock.epoch_ended()
    return loss


def main() -> None:
    task = Task.from_arguments()
    strategy = strategy_of(task)
    import keras
    import tensorflow as tf

    from benchmarks import keras_models

    keras.utils.set_random_seed(workloads.SEED)
    global_batch = task.work.per_replica_batch * (1 if task.engine == "one-core" else task.replicas)
    clock = Clock()
    with strategy.scope() if strategy else tf.device(None):
        model = keras_models.compiled(task.workload)
    if task.engine == "lockstep-loop":
        loss = hand_written(task, global_batch, model, clock, strategy)
    else:
        loss = fit(task, global_batch, model, clock)
    clock.answer(task, global_batch, loss)


if __name__ == "__main__":
    main()
