"""The oracle's models: small, quick to trace, and each with something that data parallelism can get wrong.

A model is built from seeded initializers (`start_from`), so that every run of a case starts from the same weights,
also where variables are made on the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

layers = keras.layers

CLASSES = 3
TIMESTEPS = 5
WORDS = 12


@dataclass(frozen=True)
class ModelCase:
    """One model with its data and objective.

    Attributes:
      build: makes the model; called in the strategy's scope.
      examples: (generator, count) -> (x, y), structures of arrays of shape ``[count, ...]``.
      objective: makes the arguments of ``compile``, other than the optimizer.
      built: whether its variables exist before its first call.
      simple: one output, trained with the sparse cross-entropy alone, so that a hand-written loop can train it.
      exact: False where N devices do not compute what one device does, by design; only what holds on N devices is checked.
      undetermined: part of the path of variables whose gradient is zero in exact arithmetic. What an optimizer that
        normalises gradients makes of it is rounding noise on any number of devices, so they are not compared.
    """

    build: Callable[[], keras.Model]
    examples: Callable[[np.random.Generator, int], tuple[Any, Any]]
    objective: Callable[[], dict[str, Any]]
    built: bool = True
    simple: bool = True
    exact: bool = True
    undetermined: tuple[str, ...] = ()


def start_from(seed: int) -> None:
    """Makes the next model's initial weights a function of ``seed`` alone.

    Keras initializers draw their own seed from Python's generator when the layer is made, not when its variables are.
    Layers are numbered afresh, so that the same variable has the same path in every run. Call it outside of any scope:
    it resets TensorFlow's stack of graphs.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)


def cross_entropy(reduction: str | None = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def _classify() -> dict[str, Any]:
    return {"loss": cross_entropy(), "metrics": ["accuracy"]}


def _labels(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, CLASSES, count)


def _vectors(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    return rng.normal(size=(count, 8)).astype("float32"), _labels(rng, count)


def _images(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    return rng.normal(size=(count, 6, 6, 2)).astype("float32"), _labels(rng, count)


def _sequences(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    return rng.normal(size=(count, TIMESTEPS, 8)).astype("float32"), _labels(rng, count)


def _sentences(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Words 1.. followed by padding 0; lengths differ, so slices hold different numbers of valid steps."""
    words = rng.integers(1, WORDS, (count, TIMESTEPS))
    lengths = rng.integers(1, TIMESTEPS + 1, count)
    return np.where(np.arange(TIMESTEPS) < lengths[:, None], words, 0).astype("int32"), _labels(rng, count)


def _tagged_sentences(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    return _sentences(rng, count)[0], rng.integers(0, CLASSES, (count, TIMESTEPS))


def _paired(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    left, right = rng.normal(size=(2, count, 6)).astype("float32")
    scores = rng.normal(size=(count, 1)).astype("float32")
    return {"left": left, "right": right}, {"kind": _labels(rng, count), "score": scores}


def _logits() -> layers.Layer:
    """In float32 under any policy: Keras advises that for what a loss is computed from."""
    return layers.Dense(CLASSES, dtype="float32")


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="tanh"), _logits()])


def _convolution(normalization: layers.Layer) -> keras.Model:
    # No bias before a normalisation: it would cancel, and its gradient would be rounding noise.
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            normalization,
            layers.Activation("tanh"),
            layers.Flatten(),
            _logits(),
        ]
    )


def synchronized() -> keras.Model:
    return _convolution(layers.BatchNormalization(synchronized=True))


def plain() -> keras.Model:
    return _convolution(layers.BatchNormalization())


def recurrent(mask: bool) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((TIMESTEPS,), dtype="int32"),
            layers.Embedding(WORDS, 6, mask_zero=mask),
            layers.LSTM(5),
            _logits(),
        ]
    )


def tagging() -> keras.Model:
    """A loss per step: its mean is over the valid steps of the global batch, which slices share unequally."""
    return keras.Sequential(
        [
            keras.Input((TIMESTEPS,), dtype="int32"),
            layers.Embedding(WORDS, 6, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            _logits(),
        ]
    )


def attention() -> keras.Model:
    inputs = keras.Input((TIMESTEPS, 8))
    x = layers.MultiHeadAttention(num_heads=2, key_dim=4)(inputs, inputs)
    x = layers.LayerNormalization()(x + inputs)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, _logits()(x))


def two_outputs() -> keras.Model:
    inputs = {name: keras.Input((6,), name=name) for name in ("left", "right")}
    x = layers.Dense(8, activation="tanh")(layers.Concatenate()([inputs["left"], inputs["right"]]))
    return keras.Model(inputs, {"kind": layers.Dense(CLASSES, name="kind")(x), "score": layers.Dense(1, name="score")(x)})


class Compact(layers.Layer):
    """Adds a loss that depends on the batch: the mean square of what passes."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.05 * keras.ops.mean(keras.ops.square(x)))
        return x


def regularized() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)),
            Compact(),
            layers.Dense(8, activation="tanh", activity_regularizer=keras.regularizers.L2(0.02)),
            layers.Dense(CLASSES, bias_regularizer=keras.regularizers.L2(0.1)),
        ]
    )


class Unbuilt(keras.Model):
    """A subclass without input shape: its variables are made when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh")
        self.out = layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


def _two_objectives() -> dict[str, Any]:
    return {
        "loss": {"kind": cross_entropy(), "score": keras.losses.Huber()},
        "loss_weights": {"kind": 1.0, "score": 0.3},
        "metrics": {"kind": ["accuracy"], "score": ["mae", keras.metrics.RootMeanSquaredError()]},
    }


MODELS: dict[str, ModelCase] = {
    "dense": ModelCase(dense, _vectors, _classify),
    "conv + synchronized BN": ModelCase(synchronized, _images, _classify),
    "conv + plain BN": ModelCase(plain, _images, _classify, exact=False),
    "embedding + LSTM": ModelCase(lambda: recurrent(mask=False), _sentences, _classify),
    "embedding + LSTM, masked": ModelCase(lambda: recurrent(mask=True), _sentences, _classify),
    "tagging, masked loss": ModelCase(tagging, _tagged_sentences, _classify, simple=False),
    # Softmax is blind to a constant added to all scores, which is all that the keys' bias does. (Adafactor calls
    # some of its slots just "bias".)
    "attention": ModelCase(attention, _sequences, _classify, undetermined=("key/bias", "key_bias", " bias")),
    "two outputs": ModelCase(two_outputs, _paired, _two_objectives, simple=False),
    "regularized + add_loss": ModelCase(regularized, _vectors, _classify, simple=False),
    "subclassed, unbuilt": ModelCase(Unbuilt, _vectors, _classify, built=False),
}
