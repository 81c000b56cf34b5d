"""Keras ``fit`` on two replicas: handwritten digits. Run with: python examples/keras_fit.py"""

from __future__ import annotations

import lockstep
from lockstep.training import digits

EPOCHS = 25
GLOBAL_BATCH = 64  # 32 examples per replica


def main() -> None:
    # First of all: the strategy sets up devices, which TensorFlow allows only before its first operation.
    strategy = lockstep.MirroredStrategy(replicas=2)

    import keras

    keras.utils.set_random_seed(7)
    data = digits.load()
    with strategy.scope():
        model = digits.model()
        model.compile(keras.optimizers.Adam(0.002), "sparse_categorical_crossentropy", metrics=["accuracy"])

    model.fit(data.train.inputs, data.train.targets, batch_size=GLOBAL_BATCH, epochs=EPOCHS, verbose=2)
    loss, accuracy = model.evaluate(data.test.inputs, data.test.targets, batch_size=GLOBAL_BATCH, verbose=0)
    print(f"{strategy.num_replicas_in_sync} replicas: test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
