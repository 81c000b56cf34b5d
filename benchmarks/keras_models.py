"""The models in Keras, on any of its backends. Sizes are those of benchmarks/workloads.py."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from benchmarks import workloads


def mlp() -> keras.Model:
    units = workloads.MLP_UNITS
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(units, activation="relu"),
            layers.Dense(units, activation="relu"),
            layers.Dense(workloads.CLASSES),
        ]
    )


def cnn() -> keras.Model:
    first, second = workloads.CNN_FILTERS
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(first, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(second, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(workloads.CNN_UNITS, activation="relu"),
            layers.Dense(workloads.CLASSES),
        ]
    )


def resnet20() -> keras.Model:
    """ResNet-20 for 32x32 images (He et al. 2015, arXiv 1512.03385, section 4.2), with 1x1 convolutions where sizes change."""

    def convolution(x: Any, filters: int, size: int, stride: int = 1) -> Any:
        return layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)

    image = keras.Input((32, 32, 3))
    x = layers.ReLU()(layers.BatchNormalization()(convolution(image, workloads.RESNET_FILTERS[0], 3)))
    for group, filters in enumerate(workloads.RESNET_FILTERS):
        for block in range(workloads.RESNET_BLOCKS):
            stride = 2 if group and not block else 1
            y = layers.ReLU()(layers.BatchNormalization()(convolution(x, filters, 3, stride)))
            y = layers.BatchNormalization()(convolution(y, filters, 3))
            x = layers.ReLU()(layers.Add()([convolution(x, filters, 1, stride) if stride > 1 else x, y]))
    return keras.Model(image, layers.Dense(workloads.CLASSES)(layers.GlobalAveragePooling2D()(x)))


def encoder() -> keras.Model:
    """Encoder blocks with layer normalisation after each residual (Vaswani et al. 2017, arXiv 1706.03762), then a mean."""
    width = workloads.WIDTH
    tokens = keras.Input((workloads.SEQUENCE,), dtype="int32")
    x = layers.Embedding(workloads.VOCABULARY, width)(tokens)
    for _ in range(workloads.ENCODER_BLOCKS):
        attention = layers.MultiHeadAttention(workloads.HEADS, width // workloads.HEADS)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attention]))
        hidden = layers.Dense(workloads.FEED_FORWARD, activation="relu")(x)
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(width)(hidden)]))
    return keras.Model(tokens, layers.Dense(workloads.CLASSES)(layers.GlobalAveragePooling1D()(x)))


MODELS = {"mlp": mlp, "cnn": cnn, "resnet20": resnet20, "encoder": encoder}


def compiled(name: str) -> keras.Model:
    """A model, an Adam optimizer and the mean loss, in the strategy or distribution in force."""
    model = MODELS[name]()
    model.compile(keras.optimizers.Adam(workloads.LEARNING_RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
