"""Sample weights that are wrong, or all zero; and bad data on one replica."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.errors import BatchError

pytestmark = pytest.mark.versions
REPLICAS, COUNT = 3, 12


def _fit(replicas: int | None, weights: Any, count: int = COUNT, **options: Any) -> tuple[keras.Model, list[np.ndarray]]:
    """A model after one step, and its weights before."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(2)
    micro_batches = options.pop("micro_batches", 1)
    scope: Any = contextlib.nullcontext()
    if replicas:
        scope = lockstep.MirroredStrategy(devices(replicas), micro_batches=micro_batches).scope()
    reduction = options.pop("reduction", "sum_over_batch_size")
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        model.compile("adam", loss, weighted_metrics=["accuracy"], **options)
    before = model.get_weights()
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(count, 4)).astype("float32"), rng.integers(0, 3, count)
    try:
        model.history_ = model.fit(x, y, sample_weight=weights, batch_size=count, shuffle=False, verbose=0).history
    except tf.errors.InvalidArgumentError:
        # Nothing may be half applied.
        assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in before]
        assert int(model.optimizer.iterations.numpy()) == 0
        raise
    return model, before


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"micro_batches": 2}], ids=str)
@pytest.mark.parametrize("bad", [-0.5, np.nan])
@pytest.mark.parametrize("replica", range(REPLICAS))
def test_a_weight_that_is_negative_names_its_replica(replica: int, bad: float, options: dict[str, Any]) -> None:
    weights = np.ones(COUNT, "float32")
    weights[4 * replica + 1] = bad
    with pytest.raises(tf.errors.InvalidArgumentError, match="a sample weight is negative or not a number") as error:
        _fit(REPLICAS, weights, **options)
    assert f"[replica] [{replica}]" in str(error.value) or f"b'replica'\n{replica}" in str(error.value)


def test_a_negative_weight_is_refused_on_one_replica_too() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="a sample weight is negative"):
        _fit(1, np.full(COUNT, -1.0))


def test_the_third_part_of_a_batch_of_ones_own_step_is_not_checked() -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            _, _, rewards = data
            return {"reward": tf.reduce_mean(rewards)}

    with lockstep.MirroredStrategy(devices(REPLICAS)).scope():
        model = Own([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile()
    logs = model.fit(np.ones((7, 4)), np.ones(7), sample_weight=-np.arange(7.0), batch_size=7, verbose=0).history
    assert logs["reward"] == [pytest.approx(-3.0)]


@pytest.mark.parametrize("shape", [(COUNT, 2), (COUNT, 5)])
def test_weights_of_a_shape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match=r"Received: sample_weight of shape \(4, [25]\).*Allowed: one weight per example"):
        _fit(REPLICAS, np.ones(shape))


def test_weights_for_another_number_of_examples() -> None:
    with pytest.raises(ValueError, match="'sample_weight' sizes: 11"):
        _fit(REPLICAS, np.ones(COUNT - 1))


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"micro_batches": 3}], ids=str)
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
def test_weights_that_are_all_zero_change_nothing(reduction: str, options: dict[str, Any]) -> None:
    model, before = _fit(REPLICAS, np.zeros(COUNT), reduction=reduction, **options)
    for value, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, want)
    assert {name: values[0] for name, values in model.history_.items()} == {"loss": 0.0, "accuracy": 0.0}


def test_weights_that_are_zero_on_one_replica() -> None:
    weights = np.ones(COUNT)
    weights[4:8] = 0.0
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        ours, _ = _fit(REPLICAS, weights, reduction=reduction)
        theirs, _ = _fit(None, weights, reduction=reduction)
        for value, want in zip(ours.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", range(REPLICAS))
def test_an_error_in_the_data_of_one_replica_names_it(bad: int) -> None:
    with lockstep.MirroredStrategy(devices(REPLICAS)).scope():
        model = keras.Sequential([keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    words, labels = np.ones((6, 2), "int32"), np.ones(6, "int64")
    labels[2 * bad] = 7
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"label value of 7.*\n.*replica_{bad}/compile_loss"):
        model.fit(words, labels, batch_size=6, verbose=0, shuffle=False)
    labels[2 * bad], words[2 * bad] = 1, 50
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"= 50 is not in \[0, 10\)\n.*replica_{bad}/"):
        model.fit(words, labels, batch_size=6, verbose=0, shuffle=False)
