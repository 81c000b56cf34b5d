"""Options of the strategy that change how a step is computed: synchronised normalisation, and the dtype of the exchange."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from oracle.models import start_from
from oracle.oracle import Case, bound_of, examples, one_device, relative_difference

layers = keras.layers


def fitted(case: Case, scope: Any, build: Any) -> dict[str, np.ndarray]:
    start_from(1)
    with scope:
        model = build()
    data = examples(case)
    model.fit(data.x, data.y, batch_size=data.sizes.batch, epochs=5, shuffle=False, verbose=0)
    return {v.path: np.asarray(v.value) for v in model.variables}


# sync_batch_norm.


def with_plain_normalization(run_eagerly: bool = False) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, run_eagerly=run_eagerly)
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("sizes", ["remainder 1", "smaller than N"])
def test_plain_normalization_is_exact_with_the_switch(sizes: str, run_eagerly: bool) -> None:
    case = Case("conv + plain BN", "momentum", "arrays", sizes)
    scope = lockstep.MirroredStrategy(devices(3), sync_batch_norm=True).scope()
    ours = fitted(case, scope, lambda: with_plain_normalization(run_eagerly))
    theirs = fitted(case, contextlib.nullcontext(), lambda: with_plain_normalization(run_eagerly))
    for path, want in theirs.items():
        assert relative_difference(ours[path], want) < 1e-5, path


def test_without_the_switch_it_is_not() -> None:
    case = Case("conv + plain BN", "momentum", "arrays", "remainder 1")
    ours = fitted(case, lockstep.MirroredStrategy(devices(3)).scope(), with_plain_normalization)
    theirs = fitted(case, contextlib.nullcontext(), with_plain_normalization)
    assert max(relative_difference(ours[path], want) for path, want in theirs.items()) > 1e-3


def masked_normalization(synchronized: bool) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(12, 6, mask_zero=True),
            layers.BatchNormalization(synchronized=synchronized),
            layers.LSTM(4),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


@pytest.mark.parametrize("by_layer", [True, False], ids=["synchronized=True", "sync_batch_norm=True"])
def test_masked_statistics_are_synchronized_too(by_layer: bool) -> None:
    case = Case("embedding + LSTM, masked", "sgd", "arrays", "remainder N - 1")
    strategy = lockstep.MirroredStrategy(devices(3), sync_batch_norm=not by_layer)
    ours = fitted(case, strategy.scope(), lambda: masked_normalization(by_layer))
    theirs = fitted(case, contextlib.nullcontext(), lambda: masked_normalization(False))
    for path, want in theirs.items():
        assert relative_difference(ours[path], want) < 1e-5, path


# exchange_dtype.


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 0.0)])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_gradients_are_rounded_for_the_exchange_and_summed_in_float32(dtype: str, rounding: float, run_eagerly: bool) -> None:
    replicas = 4
    # With one weight per column and x of one, the gradient of the sum of losses is y's share: what is exchanged is known.
    y = (np.arange(8, dtype="float32")[:, None] * 0.7 + np.array([[0.1, 3.3, 100.7]], "float32")).astype("float32")
    start_from(1)
    with lockstep.MirroredStrategy(devices(replicas), exchange_dtype=dtype).scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(3, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: tf.reduce_sum(-y * p, -1), run_eagerly=run_eagerly)
    model.fit(np.ones((8, 1)), y, batch_size=8, verbose=0)

    shares = [part.mean(0) / replicas for part in np.split(y, replicas)]
    rounded = [tf.cast(tf.cast(share, dtype), tf.float32).numpy() for share in shares]
    total = tf.cast(tf.cast(np.sum(rounded, 0, dtype="float32"), dtype), tf.float32).numpy()
    (kernel,) = model.get_weights()
    np.testing.assert_allclose(kernel[0], total, rtol=1e-6)
    assert relative_difference(kernel[0], y.mean(0)) <= 2 * rounding + 1e-6


def test_sparse_gradients_in_another_dtype() -> None:
    case = Case("embedding + LSTM", "sgd", "arrays", "remainder 1")
    strategy = lockstep.MirroredStrategy(devices(3), exchange_dtype="bfloat16")

    def build() -> keras.Model:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(12, 6), layers.LSTM(5), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        return model

    ours = fitted(case, strategy.scope(), build)
    differences = {path: relative_difference(ours[path], want) for path, want in one_device(case).weights.items()}
    assert bound_of(case, "weights") < max(differences.values()) < 0.05, differences
