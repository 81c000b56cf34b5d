"""Micro-batches: the large batch's result, whatever it is cut into, with one exchange per update."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import lockstep
from device_tools import devices
from lockstep.engine.exchange.algorithm import OwnedSum
from oracle.models import start_from
from oracle.oracle import relative_difference

layers = keras.layers
COUNT, BATCH, STEPS, WORDS, CLASSES = 37, 15, 5, 12, 3


def dense() -> keras.Model:
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "tanh", kernel_regularizer="l2"), layers.Dense(CLASSES)],
    )


def tagger(mask: bool) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            layers.Embedding(WORDS, 6, mask_zero=mask),
            layers.LSTM(4, return_sequences=True),
            layers.Dense(CLASSES),
        ]
    )


def data(build: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    if build not in (masked, unmasked):
        return rng.normal(size=(COUNT, 5)).astype("float32"), rng.integers(0, CLASSES, COUNT)
    words = rng.integers(1, WORDS, (COUNT, STEPS))
    lengths = rng.integers(1, STEPS + 1, COUNT)
    return np.where(np.arange(STEPS) < lengths[:, None], words, 0), rng.integers(0, CLASSES, (COUNT, STEPS))


def masked() -> keras.Model:
    return tagger(mask=True)


def unmasked() -> keras.Model:
    return tagger(mask=False)


def trained(strategy: Any, build: Any, reduction: str = "sum_over_batch_size", **options: Any) -> dict[str, np.ndarray]:
    """Logs, weights and slots after four epochs on batches whose last one is short."""
    start_from(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        rate = 0.01 if reduction == "sum" else 0.1
        optimizer = options.pop("optimizer", lambda: keras.optimizers.SGD(rate, momentum=0.9))()
        model.compile(optimizer, loss, metrics=["accuracy"], **options)
    x, y = data(build)
    weights = np.random.default_rng(2).uniform(0.1, 2.0, y.shape).astype("float32") if "weight" in reduction else None
    logs = model.fit(
        x, y, sample_weight=weights, batch_size=BATCH, epochs=4, shuffle=False, verbose=0, validation_data=(x[:9], y[:9])
    )
    found = {name: np.asarray(values) for name, values in logs.history.items()}
    found.update({f"{i} {v.path}": np.asarray(v) for i, v in enumerate(model.variables)})
    found.update({f"{i} {v.name}": np.asarray(v) for i, v in enumerate(optimizer.variables)})
    return found


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], bound: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    worst = {name: relative_difference(ours[name], want) for name, want in theirs.items()}
    assert max(worst.values()) < bound, worst


def several(replicas: int, micro_batches: int = 4, **options: Any) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(replicas), micro_batches=micro_batches, **options)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("build", "reduction"),
    [
        (dense, "sum_over_batch_size"),
        (dense, "sum"),
        (dense, "mean_with_sample_weight"),
        (unmasked, "sum_over_batch_size"),
        (masked, "sum_over_batch_size"),
        (masked, "mean_with_sample_weight"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_fit(build: Any, reduction: str, replicas: int) -> None:
    assert_equal(trained(several(replicas), build, reduction), trained(None, build, reduction))


@pytest.mark.parametrize("replicas", [1, 3])
def test_fit_in_eager_mode(replicas: int) -> None:
    assert_equal(trained(several(replicas), dense, run_eagerly=True), trained(None, dense))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.2, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=128.0),
        lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    ],
    ids=["clipped, accumulated", "loss scale", "moving averages"],
)
def test_what_an_optimizer_does_besides(optimizer: Any) -> None:
    assert_equal(trained(several(2), dense, optimizer=optimizer), trained(None, dense, optimizer=optimizer))


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_loss_that_is_not_finite_in_one_micro_batch_is_seen(run_eagerly: bool) -> None:
    # With loss scaling only the loss is looked at: gradients may overflow.
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    def poisoned() -> keras.Model:
        model = dense()
        weights = model.get_weights()
        weights[0][0, 0] = np.nan
        model.set_weights(weights)
        return model

    with pytest.raises(tf.errors.InvalidArgumentError, match="the loss or a gradient is not finite"):
        trained(several(2, check_finite=True), poisoned, optimizer=optimizer, run_eagerly=run_eagerly)


def test_there_is_one_exchange_per_update() -> None:
    calls: list[int] = []

    class Counting(OwnedSum):
        def reduce(self, tensors: Any, mean: Any) -> Any:
            calls.append(len(tensors))
            return super().reduce(tensors, mean)

    strategy = several(3)
    strategy.extended.exchange = Counting(strategy.extended.devices)
    trained(strategy, dense)
    # Two kernels and two biases, once while the step is traced.
    assert calls == [4]


# Any sizes.


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    replicas=st.sampled_from([1, 2, 3, 4]),
    micro_batches=st.integers(1, 7),
    size=st.integers(1, 17),
    static=st.booleans(),
)
def test_any_slice_in_any_number_of_parts(replicas: int, micro_batches: int, size: int, static: bool) -> None:
    strategy = lockstep.MirroredStrategy(devices(replicas))
    rng = np.random.default_rng(size)
    x, y = rng.normal(size=(size, 3)).astype("float32"), rng.normal(size=size).astype("float32")
    w0 = rng.normal(size=3).astype("float32")
    with strategy.scope():
        w = tf.Variable(w0)

    def part(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            errors = tf.linalg.matvec(x, w) - y
            loss = tf.nn.compute_average_loss(tf.square(errors))
        return {"gradient": tape.gradient(loss, w), "loss": loss, "count": tf.shape(x)[0], "nothing": None}

    def replica(x: tf.Tensor, y: tf.Tensor) -> Any:
        found = strategy.accumulate(part, (x, y), micro_batches)
        assert found.pop("nothing") is None
        return found

    shape = [size] if static else [None]

    @tf.function(input_signature=[tf.TensorSpec([*shape, 3]), tf.TensorSpec(shape)])
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        results = strategy.run(replica, strategy.split((x, y)))
        return {name: strategy.reduce("SUM", value, axis=None) for name, value in results.items()}

    errors = x @ w0 - y
    for found in (step(x, y), step.python_function(x, y)):
        np.testing.assert_allclose(found["loss"], np.mean(errors**2), rtol=1e-5)
        np.testing.assert_allclose(found["gradient"], 2 * errors @ x / size, rtol=1e-4, atol=1e-5)
        assert int(found["count"]) == size


@pytest.mark.parametrize("in_function", [True, False], ids=["tf.function", "eager"])
def test_sparse_gradients_and_16_bit_sums(in_function: bool) -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    with strategy.scope():
        table = tf.Variable(tf.ones([5, 2]))
        small = tf.Variable(tf.constant(1.0, tf.bfloat16))

    def part(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
            loss = tf.reduce_sum(rows * tf.cast(ids + 1, tf.float32)[:, None]) + tf.cast(small, tf.float32) * 1.001
        return tape.gradient(loss, [table, small])

    ids = np.array([0, 3, 3, 4, 1, 0, 3])

    def whole(ids: Any) -> Any:
        return strategy.run(lambda x: strategy.accumulate(part, (x,), 3), strategy.split((ids,)))

    sparse, sixteen = (tf.function(whole) if in_function else whole)(ids)
    total = tf.convert_to_tensor(strategy.reduce("SUM", sparse, axis=None))
    want = np.zeros((5, 2), "float32")
    np.add.at(want, ids, ids[:, None] + 1.0)
    np.testing.assert_allclose(total, want)
    # Three times 1.001, in bfloat16 1.0: summed in float32 and rounded once.
    assert [v.dtype for v in strategy.experimental_local_results(sixteen)] == [tf.bfloat16] * 2
    assert [float(v) for v in strategy.experimental_local_results(sixteen)] == [3.0] * 2


# A train_step of one's own.


class Returning(keras.Sequential):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"own": 2.0 * loss, "mean": keras.ops.mean(x)}


@pytest.mark.parametrize("replicas", [1, 3])
def test_what_a_train_step_returns(replicas: int) -> None:
    found = []
    for strategy in (several(replicas), None):
        start_from(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = Returning([keras.Input((5,)), layers.Dense(CLASSES)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = data(dense)
        found.append(model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history)
    for name in ("own", "mean"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-7)


# What cannot be.


class Twice(Returning):
    def train_step(self, data: Any) -> dict[str, Any]:
        super().train_step(data)
        return super().train_step(data)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4"])
def test_a_count_that_is_none(count: Any) -> None:
    with pytest.raises(ValueError, match=r"positive number of micro-batches. Received: micro_batches="):
        several(2, micro_batches=count)


def fit_once(strategy: Any, model: Any, **options: Any) -> None:
    x, y = data(dense if model.input_shape[-1] == 5 and not options.get("words") else masked)
    options.pop("words", None)
    with strategy.scope():
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    model.fit(x, y, batch_size=BATCH, verbose=0)


def test_updates_that_depend_on_each_other() -> None:
    strategy = several(2)
    with strategy.scope():
        model = Twice([keras.Input((5,)), layers.Dense(CLASSES)])
    with pytest.raises(lockstep.errors.UnsupportedError, match="2 calls of an optimizer's apply in Twice.train_step"):
        fit_once(strategy, model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_synchronized_statistics(replicas: int) -> None:
    strategy = several(replicas, sync_batch_norm=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(name="norm"), layers.Dense(CLASSES)])
    with pytest.raises(lockstep.errors.UnsupportedError, match="BatchNormalization 'norm' in a micro-batch"):
        fit_once(strategy, model)


def test_a_masked_loss_in_eager_mode() -> None:
    strategy = several(2)
    with strategy.scope():
        model = masked()
    with pytest.raises(lockstep.errors.UnsupportedError, match="must be known before the first micro-batch"):
        fit_once(strategy, model, run_eagerly=True, words=True)


def test_outside_of_a_replica_and_without_a_batch() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    with pytest.raises(lockstep.errors.UnsupportedError, match="outside of a replica"):
        strategy.accumulate(lambda x: x, (tf.ones([4]),), 2)
    with pytest.raises(lockstep.errors.BatchError, match="no tensor in args"):
        strategy.run(lambda: strategy.accumulate(lambda: 1.0, (), 2))
    with pytest.raises(lockstep.errors.BatchError, match="there is none"):
        strategy.run(lambda: strategy.accumulate(lambda x: x, (tf.constant(1.0),), 2))


def test_results_that_cannot_be_summed() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))

    def replica(x: tf.Tensor) -> Any:
        return strategy.accumulate(lambda x: x > 0, (x,), 2)

    with pytest.raises(lockstep.errors.UnsupportedError, match="a Tensor of dtype bool|a SymbolicTensor of dtype bool"):
        tf.function(lambda x: strategy.run(replica, (strategy.split(x),)))(tf.ones([4]))
