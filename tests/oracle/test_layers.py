"""Layers with a state, statistics or random numbers of their own: as on one device, or reproducible where that is not meant."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from oracle.models import start_from
from oracle.oracle import relative_difference, strategy_of, unequal_copies

layers, ops = keras.layers, keras.ops
# Slices of 5, 4 and 4 examples (7 and 6 on two replicas); those of the last batch 1, 1 and 0.
COUNT, BATCH = 28, 13

rng = np.random.default_rng(4)
X, LABELS = rng.normal(size=(COUNT, 4, 4, 2)).astype("float32"), rng.integers(0, 3, COUNT)


@pytest.fixture(params=[2, 3])
def count(request: pytest.FixtureRequest) -> int:
    return request.param


def image_model(*between: layers.Layer) -> keras.Sequential:
    head = [keras.Input((4, 4, 2)), layers.Conv2D(4, 2, use_bias=False)]
    return keras.Sequential([*head, *between, layers.Activation("tanh"), layers.Flatten(), layers.Dense(3)])


def trained(build: Callable[[], keras.Model], replicas: int | None, run_eagerly: bool = False) -> tuple[keras.Model, Any]:
    """A model after two epochs, and its logs, weights and slots by name."""
    start_from(5)
    with strategy_of(replicas).scope() if replicas else contextlib.nullcontext():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], run_eagerly=run_eagerly)
    logs = model.fit(X, LABELS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    found = {name: np.asarray(values) for name, values in logs.items()}
    found |= {f"{i} {v.path}": v.numpy() for i, v in enumerate([*model.variables, *model.optimizer.variables])}
    return model, found


def assert_as_on_one_device(build: Callable[[], keras.Model], replicas: int, run_eagerly: bool = False) -> None:
    (model, ours), (_, theirs) = trained(build, replicas, run_eagerly), trained(build, None, run_eagerly)
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        assert relative_difference(ours[name], want) <= 1e-5, name
    assert not unequal_copies(strategy_of(replicas), [*model.variables, *model.optimizer.variables])


# Normalisation.

NORMALIZATIONS: dict[str, Callable[[], keras.Model]] = {
    "group and layer": lambda: image_model(
        layers.GroupNormalization(groups=2), layers.Activation("tanh"), layers.Reshape((36,)), layers.LayerNormalization()
    ),
    "spectral and unit": lambda: image_model(
        layers.SpectralNormalization(layers.Conv2D(3, 2, use_bias=False)), layers.UnitNormalization()
    ),
}


@pytest.mark.parametrize(("name", "count"), [("group and layer", 2), ("group and layer", 3), ("spectral and unit", 3)])
def test_normalization(name: str, count: int) -> None:
    assert_as_on_one_device(NORMALIZATIONS[name], count)


@pytest.mark.parametrize("kind", ["array", "dataset"])
def test_adapt_in_scope(kind: str, count: int) -> None:
    strategy, data = strategy_of(count), X[:, 0, 0]
    with strategy.scope():
        ours = layers.Normalization()
        ours.adapt(data if kind == "array" else tf.data.Dataset.from_tensor_slices(data).batch(5))
    np.testing.assert_allclose(ours.adapt_mean.numpy(), data.mean(0), rtol=1e-5)
    np.testing.assert_allclose(ours.adapt_variance.numpy(), data.var(0), rtol=1e-5)
    assert not unequal_copies(strategy, ours.variables)


@pytest.mark.parametrize(("kind", "count"), [("array", 2), ("dataset", 3)])
def test_a_model_that_starts_with_what_was_adapted(kind: str, count: int) -> None:
    def build() -> keras.Model:
        normalization = layers.Normalization()
        normalization.adapt(X * 3.0 + 1.0 if kind == "array" else tf.data.Dataset.from_tensor_slices(X * 3.0 + 1.0).batch(5))
        return keras.Sequential([keras.Input((4, 4, 2)), normalization, layers.Flatten(), layers.Dense(3)])

    assert_as_on_one_device(build, count)


# Random numbers.


class Recording(layers.Layer):
    """Passes on what it gets, and keeps each replica's last batch of examples, padded to `BATCH` rows."""

    def build(self, shape: Any) -> None:
        self.seen = tf.Variable(
            tf.zeros([BATCH, *shape[1:]]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign(tf.pad(x, [[0, BATCH - tf.shape(x)[0]], [0, 0], [0, 0], [0, 0]]))
        return x


# By name: the layers, and how often training is repeated. Threads must not have a say in the numbers.
RANDOM: dict[str, tuple[Callable[[], list[layers.Layer]], int]] = {
    "dropout": (lambda: [layers.Dropout(0.5)], 5),
    "noise and spatial dropout": (lambda: [layers.GaussianNoise(0.1), layers.SpatialDropout2D(0.5)], 2),
    "augmentation": (
        lambda: [
            layers.RandomFlip(),
            layers.RandomTranslation(0.3, 0.3),
            layers.RandomBrightness(0.5, (0, 1)),
            layers.RandomContrast(0.5, (0, 1)),
        ],
        2,
    ),
}


def random_run(name: str, replicas: int, seed: int) -> tuple[str, list[np.ndarray]]:
    """A hash of every bit that training on equal examples leaves behind, and what the random layers made of the last batch."""
    start_from(seed)
    same = np.broadcast_to(np.linspace(0.1, 0.9, 32, dtype="float32").reshape(1, 4, 4, 2), X.shape)
    with strategy_of(replicas).scope():
        random, recording = RANDOM[name][0](), Recording()
        model = keras.Sequential([keras.Input((4, 4, 2)), *random, recording, layers.Flatten(), layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(same, LABELS, batch_size=COUNT // 2, epochs=2, shuffle=False, verbose=0).history
    digest = hashlib.sha256(repr(history).encode())
    seen = [copy.numpy() for copy in recording.seen.values]
    for value in [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables), *seen]:
        digest.update(value.tobytes())
    return digest.hexdigest(), seen


@pytest.mark.parametrize(("name", "count"), [("dropout", 3), ("noise and spatial dropout", 2), ("augmentation", 3)])
def test_random_layers_differ_between_replicas_and_repeat_from_the_seed(name: str, count: int) -> None:
    digest, seen = random_run(name, count, 3)
    assert len({part.tobytes() for part in seen}) == count
    assert {random_run(name, count, 3)[0] for _ in range(RANDOM[name][1] - 1)} == {digest}
    assert random_run(name, count, 4)[0] != digest


# State written in call.


class Stateful(layers.Layer):
    """Counts steps, and keeps a moving mean of what passes."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1)
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=(0, 1, 2)))
        return x - ops.stop_gradient(self.mean)


@pytest.mark.parametrize(("run_eagerly", "count"), [(False, 2), (True, 3)])
def test_a_counter_and_a_moving_mean(run_eagerly: bool, count: int) -> None:
    def build() -> keras.Model:
        # What the layer gives depends on what it has just written, which differs between slices until the step ends; so
        # what is compared is the state, and it must not reach the weights.
        inputs = keras.Input((4, 4, 2))
        seen = Stateful(name="stateful")(inputs)
        return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(inputs)) + 0.0 * ops.sum(seen, axis=(1, 2, 3))[:, None])

    assert_as_on_one_device(build, count, run_eagerly)


class Drawing(layers.Layer):
    """Notes one random number a replica, from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(7)

    def build(self, shape: Any) -> None:
        sync, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
        self.drawn = tf.Variable(0.0, trainable=False, synchronization=sync, aggregation=total)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.drawn.assign(keras.random.uniform((), seed=self.generator))
        return x


def test_a_seed_generator_in_a_layer() -> None:
    count = 3

    def run() -> tuple[list[float], list[int], list[float]]:
        start_from(5)
        with strategy_of(count).scope():
            model = keras.Sequential([keras.Input((4, 4, 2)), Drawing(), layers.Flatten(), layers.Dense(3)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(X, LABELS, batch_size=BATCH, shuffle=False, verbose=0)
        (layer,) = (layer for layer in model.layers if isinstance(layer, Drawing))
        assert not unequal_copies(strategy_of(count), [layer.generator.state])
        return [float(c) for c in layer.drawn.values], layer.generator.state.numpy().tolist(), model.get_weights()[0].tolist()

    drawn, state, weights = run()
    # The last batch leaves the last replica without an example, and its note as it was: from the batch before.
    assert len(set(drawn)) == count
    # Three steps, each of which drew once.
    assert state == [7, 3]
    assert run() == (drawn, state, weights)


# Variables with an explicit aggregation: replica r writes r + 1, so that the result is known.

AGGREGATED: dict[str, Callable[[list[float]], float]] = {
    "SUM": sum,
    "MEAN": lambda v: sum(v) / len(v),
    "ONLY_FIRST_REPLICA": lambda v: v[0],
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_variables_that_are_aggregated_when_read(aggregation: str, graph: bool, count: int) -> None:
    strategy = strategy_of(count)
    with strategy.scope():
        variable = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation[aggregation],
        )
    values = strategy.experimental_distribute_values_from_function(lambda c: tf.constant(c.replica_id_in_sync_group + 1.0))

    def step(x: tf.Tensor) -> tf.Tensor:
        variable.assign(x)
        variable.assign_add(2.0 * x)
        return variable.read_value()

    run = tf.function(lambda: strategy.run(step, (values,))) if graph else lambda: strategy.run(step, (values,))
    inside = [float(v) for v in strategy.experimental_local_results(run())]
    own = [3.0 * (r + 1) for r in range(count)]
    assert inside == own
    with strategy.scope():
        assert float(variable.read_value()) == pytest.approx(AGGREGATED[aggregation](own))


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_adding_to_variables_that_are_aggregated_when_written(aggregation: str, graph: bool, count: int) -> None:
    strategy = strategy_of(count)
    with strategy.scope():
        variable = tf.Variable(10.0, aggregation=tf.VariableAggregation[aggregation])
    values = strategy.experimental_distribute_values_from_function(lambda c: tf.constant(c.replica_id_in_sync_group + 1.0))

    def run() -> None:
        strategy.run(lambda x: variable.assign_add(x), (values,))
        strategy.run(lambda x: variable.assign_sub(3.0 * x), (values,))

    (tf.function(run) if graph else run)()
    total = AGGREGATED[aggregation]([r + 1.0 for r in range(count)])
    assert [float(v) for v in variable.values] == pytest.approx([10.0 - 2.0 * total] * count)
