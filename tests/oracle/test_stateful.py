"""Stateful recurrent layers that are given the global batch size: states go with their examples, as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from oracle.models import start_from
from oracle.oracle import strategy_of, unequal_copies

layers = keras.layers
STEPS = 5
X = np.random.default_rng(35).normal(size=(24, STEPS, 2)).astype("float32")

RECURRENT: dict[str, Callable[[], Any]] = {
    "lstm": lambda: layers.LSTM(3, stateful=True),
    "gru": lambda: layers.GRU(3, stateful=True, return_sequences=True),
    "stacked": lambda: layers.RNN([layers.SimpleRNNCell(3), layers.LSTMCell(2)], stateful=True),
    "bidirectional": lambda: layers.Bidirectional(layers.SimpleRNN(3, stateful=True)),
}


def run(scope: Any, layer: str, batch: int, run_eagerly: bool = False) -> tuple[dict[str, np.ndarray], keras.Model]:
    start_from(3)
    x = X[: 3 * batch]
    with scope:
        model = keras.Sequential([keras.Input(batch_shape=(batch, None, 2)), RECURRENT[layer](), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
    y = np.ones((len(x), STEPS, 1) if layer == "gru" else (len(x), 1), "float32")
    found: dict[str, Any] = {"before": model.predict(x, batch_size=batch, verbose=0)}
    found["loss"] = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history["loss"]
    found["test"] = model.evaluate(x, y, batch_size=batch, verbose=0)
    found.update({f"{i} {v.path}": np.asarray(v) for i, v in enumerate(model.variables)})
    return found, model


@pytest.mark.parametrize(
    ("layer", "replicas", "batch", "run_eagerly"),
    [
        ("lstm", 2, 8, False),
        ("lstm", 3, 8, False),
        ("lstm", 3, 8, True),
        ("lstm", 3, 2, False),
        ("lstm", 2, 1, True),
        ("gru", 3, 7, False),
        ("stacked", 2, 7, False),
        ("bidirectional", 3, 4, False),
    ],
)
def test_states_go_with_their_examples(layer: str, replicas: int, batch: int, run_eagerly: bool) -> None:
    strategy = strategy_of(replicas)
    ours, model = run(strategy.scope(), layer, batch, run_eagerly)
    theirs, _ = run(contextlib.nullcontext(), layer, batch)
    for (name, got), want in zip(ours.items(), theirs.values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)
    assert unequal_copies(strategy, model.variables) == ()


def test_slices_of_known_size() -> None:
    def weights(scope: Any) -> list[np.ndarray]:
        start_from(3)
        with scope:
            model = keras.Sequential([keras.Input(batch_shape=(8, STEPS, 2)), layers.LSTM(3, stateful=True), layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices((X, np.ones((24, 1)))).batch(8, drop_remainder=True)
        model.fit(data, shuffle=False, verbose=0)
        return [np.asarray(v) for v in model.variables]

    for got, want in zip(weights(strategy_of(2).scope()), weights(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("batch", [6, 12])
def test_a_batch_of_another_size(batch: int, run_eagerly: bool) -> None:
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input(batch_shape=(8, None, 2)), layers.LSTM(3, stateful=True, name="recurrent")])
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    told = r"layer .*recurrent.*, made for 8 examples, under 2 replicas\. Allowed: global batches of 8, or of 2 x 8"
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        model.predict(X[:batch], batch_size=batch, verbose=0)


def test_plain_layers_with_a_fixed_batch() -> None:
    def outcome(scope: Any) -> list[np.ndarray]:
        start_from(3)
        with scope:
            x = keras.Input(batch_shape=(8, STEPS, 2))
            rows = layers.Lambda(lambda v: keras.ops.reshape(v, (keras.ops.shape(v)[0], -1)))(layers.Reshape((2, STEPS))(x))
            model = keras.Model(x, layers.Dense(1)(layers.Concatenate()([layers.Flatten()(x), rows])))
            model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(X, np.ones((24, 1)), batch_size=8, shuffle=False, verbose=0)
        return [*model.get_weights(), model.predict(X, batch_size=8, verbose=0)]

    for got, want in zip(outcome(strategy_of(3).scope()), outcome(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
