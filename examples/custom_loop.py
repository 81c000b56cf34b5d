"""A training loop written by hand, on two replicas: handwritten digits. Run with: python examples/custom_loop.py"""

from __future__ import annotations

import lockstep
from lockstep.training import digits

EPOCHS = 25
GLOBAL_BATCH = 64  # 32 examples per replica


def main() -> None:
    # First of all: the strategy sets up devices, which TensorFlow allows only before its first operation.
    strategy = lockstep.MirroredStrategy(replicas=2)

    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(7)
    data = digits.load()
    train = tf.data.Dataset.from_tensor_slices((data.train.inputs, data.train.targets))
    test = tf.data.Dataset.from_tensor_slices((data.test.inputs, data.test.targets))
    # Batches of the dataset are global; distributing it gives each replica its slice.
    train = strategy.experimental_distribute_dataset(train.shuffle(len(data.train), seed=7).batch(GLOBAL_BATCH))
    test = strategy.experimental_distribute_dataset(test.batch(GLOBAL_BATCH))

    with strategy.scope():
        model = digits.model()
        optimizer = keras.optimizers.Adam(0.002)
        optimizer.build(model.trainable_variables)
        # One loss per example: the mean over the global batch is taken below, not by each replica over its slice.
        loss_of_each = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_replica(inputs, targets):
        with tf.GradientTape() as tape:
            losses = loss_of_each(targets, model(inputs, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def test_replica(inputs, targets):
        accuracy.update_state(targets, model(inputs, training=False))

    @tf.function
    def train_step(batch):
        # Each replica's loss is its share of the global batch's mean, so the sum over replicas is that mean.
        return strategy.reduce("SUM", strategy.run(train_replica, args=batch), axis=None)

    @tf.function
    def test_step(batch):
        strategy.run(test_replica, args=batch)

    for epoch in range(1, EPOCHS + 1):
        losses = [train_step(batch) for batch in train]
        print(f"epoch {epoch:>2}/{EPOCHS}  loss {float(tf.add_n(losses)) / len(losses):.4f}")
    for batch in test:
        test_step(batch)
    print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {float(accuracy.result()):.4f}")


if __name__ == "__main__":
    main()
