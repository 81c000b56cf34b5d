"""Keras on datasets that are distributed already, and their tf.data methods: as one device on the same global batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine.datasets import OF_ELEMENTS, OF_WHOLE, REFUSED, DistributedDataset
from lockstep.errors import BatchError, StrategyMismatchError, UnsupportedError

_random = np.random.default_rng(17)
X = _random.normal(size=(11, 3)).astype("float32")
# Both classes in every batch, but in uneven parts.
Y = np.array([0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1], "float32")[:, None]
CLASS_WEIGHT = {0: 3.0, 1: 1 / 3}
SAMPLE_WEIGHT = np.linspace(0.1, 2.0, 11, dtype="float32")


@functools.cache
def _strategy(n: int) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(n))


def _batches(size: int = 4) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def _fit(scope: Any, kind: str = "binary", **arguments: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    units, loss = {"binary": (1, "mse"), "sparse": (2, "sparse_categorical_crossentropy")}.get(
        kind, (2, "categorical_crossentropy")
    )
    with scope:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, "softmax" if units > 1 else None)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=[loss], weighted_metrics=[loss])
    history = model.fit(**arguments, shuffle=False, epochs=2, verbose=0).history
    return {**history, "weights": np.concatenate([w.ravel() for w in model.get_weights()])}


def _same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@functools.cache
def _alone(kind: str, size: int) -> dict[str, Any]:
    return _fit(contextlib.nullcontext(), kind, x=_of_kind(kind, size), class_weight=CLASS_WEIGHT)


def _of_kind(kind: str, size: int) -> tf.data.Dataset:
    labels = {
        "binary": lambda y: y,
        "sparse": lambda y: y[:, 0],
        "one-hot": lambda y: tf.one_hot(tf.cast(y[:, 0], tf.int32), 2),
    }
    return _batches(size).map(lambda x, y: (x, labels[kind](y)))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["binary", "sparse", "one-hot"])
def test_class_weight_of_a_distributed_dataset(kind: str, n: int) -> None:
    """Uneven batches of 4, 4 and 3; with four replicas the last batch leaves one of them without a row."""
    strategy = _strategy(n)
    want = _alone(kind, 4)
    _same(
        _fit(strategy.scope(), kind, x=strategy.experimental_distribute_dataset(_of_kind(kind, 4)), class_weight=CLASS_WEIGHT),
        want,
    )
    if kind == "binary":
        _same(_fit(strategy.scope(), kind, x=_of_kind(kind, 4), class_weight=CLASS_WEIGHT), want)
        _same(_fit(strategy.scope(), kind, x=X, y=Y, batch_size=4, class_weight=CLASS_WEIGHT), want)


def test_class_weight_by_hand() -> None:
    """One step from zero weights: the gradient is -2/4 of the sum of w(y) x y over the four rows."""
    strategy = _strategy(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    dataset = strategy.experimental_distribute_dataset(_batches(4).take(1))
    model.fit(dataset, class_weight={0: 5.0, 1: 0.5}, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], 2 / 4 * X[:4].T @ (0.5 * Y[:4]), rtol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_class_weight_of_a_dataset_from_a_function(n: int) -> None:
    strategy = _strategy(n)
    dataset = strategy.distribute_datasets_from_function(lambda context: _batches(2))
    _same(_fit(strategy.scope(), x=dataset, class_weight=CLASS_WEIGHT), _alone("binary", 2 * n))


@pytest.mark.parametrize("n", [2, 3])
def test_class_weight_with_sample_weight_is_refused_by_keras(n: int) -> None:
    strategy = _strategy(n)
    weighted = tf.data.Dataset.from_tensor_slices((X, Y, SAMPLE_WEIGHT)).batch(4)
    _same(
        _fit(strategy.scope(), x=strategy.experimental_distribute_dataset(weighted)), _fit(contextlib.nullcontext(), x=weighted)
    )
    with pytest.raises(ValueError, match="class_weight` and `sample_weight"):
        _fit(strategy.scope(), x=strategy.experimental_distribute_dataset(weighted), class_weight=CLASS_WEIGHT)


@pytest.mark.parametrize("n", [2, 3])
def test_evaluate_predict_and_validation(n: int) -> None:
    strategy, results = _strategy(n), []
    for scope, distribute in (
        (contextlib.nullcontext(), lambda d: d),
        (strategy.scope(), strategy.experimental_distribute_dataset),
    ):
        keras.utils.set_random_seed(1)
        with scope:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
        history = model.fit(distribute(_batches()), validation_data=distribute(_batches(5)), shuffle=False, verbose=0).history
        results.append(
            {
                **history,
                "evaluated": model.evaluate(distribute(_batches()), verbose=0),
                "predicted": model.predict(distribute(_batches()), verbose=0),
            }
        )
    _same(results[1], results[0])


def _minus_mean(x: tf.Tensor, y: tf.Tensor) -> tuple:
    return x - tf.reduce_mean(x, 0), y


def _is_full(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    if tf.shape(x)[0] > 3:  # a branch, so that AutoGraph has something to convert
        return tf.constant(True)
    return tf.constant(False)


def _half(x: tf.Tensor, y: tf.Tensor) -> tuple:
    if tf.shape(x)[0] > 0:
        x = x / 2.0
    return x, y


KEPT: dict[str, Callable] = {
    "take": lambda d: d.take(2),
    "skip": lambda d: d.skip(1),
    "repeat": lambda d: d.repeat(2),
    "prefetch": lambda d: d.prefetch(2),
    "cache": lambda d: d.cache(),
    "shuffle": lambda d: d.shuffle(3, seed=1),
    "shard": lambda d: d.shard(2, 0),
    "apply": lambda d: d.apply(lambda d: d.take(1)),
    "concatenate": lambda d: d.concatenate(d.take(1)),
    "take_while": lambda d: d.take_while(lambda *_: True),
    "with_options": lambda d: d.with_options(tf.data.Options()),
    "enumerate": lambda d: d.enumerate().map(lambda i, batch: batch),
    "map, each row by itself": lambda d: d.map(_half, num_parallel_calls=2).prefetch(1),
}
OF_GLOBAL_BATCHES: dict[str, Callable] = {
    "map": lambda d: d.map(_minus_mean),
    "filter": lambda d: d.filter(_is_full),
    "rebatch": lambda d: d.take(2).rebatch(3),
    "flat_map": lambda d: d.flat_map(lambda x, y: tf.data.Dataset.from_tensors((x, y)).repeat(2)),
    "concatenate": lambda d: d.concatenate(_batches(5)),
    "several": lambda d: d.take(2).map(_minus_mean).repeat(2).prefetch(1).skip(1),
}


def _rows(strategy: Any, dataset: Any) -> list[Any]:
    """Each element's rows, of all replicas."""
    local = strategy.experimental_local_results
    return [[np.concatenate(local(leaf)) for leaf in element] for element in dataset]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", [*KEPT, *OF_GLOBAL_BATCHES])
def test_methods(name: str, n: int) -> None:
    """They see the global batches, and what they make stays distributed."""
    strategy, method = _strategy(n), {**KEPT, **OF_GLOBAL_BATCHES}[name]
    if name == "enumerate" and n > 1:
        pytest.skip("what enumerate() adds is no batch; see test_enumerated_elements")
    made = method(strategy.experimental_distribute_dataset(_batches()))
    assert isinstance(made, DistributedDataset)
    got, want = _rows(strategy, made), [[np.asarray(leaf) for leaf in element] for element in method(_batches())]
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        for leaf_a, leaf_b in zip(a, b, strict=True):
            np.testing.assert_allclose(leaf_a, leaf_b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", KEPT)
def test_methods_of_a_dataset_from_a_function(name: str, n: int) -> None:
    strategy, method = _strategy(n), KEPT[name]
    made = method(strategy.distribute_datasets_from_function(lambda context: _batches(2)))
    assert isinstance(made, DistributedDataset)
    got, want = _rows(strategy, made), [[np.asarray(leaf) for leaf in element] for element in method(_batches(2 * n))]
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        for leaf_a, leaf_b in zip(a, b, strict=True):
            np.testing.assert_array_equal(leaf_a, leaf_b)


@pytest.mark.parametrize("n", [2, 3])
def test_enumerated_elements(n: int) -> None:
    strategy = _strategy(n)
    for i, (number, (x, _)) in enumerate(strategy.experimental_distribute_dataset(_batches()).enumerate()):
        assert int(number) == i
        np.testing.assert_array_equal(np.concatenate(strategy.experimental_local_results(x)), X[4 * i : 4 * i + 4])


@pytest.mark.parametrize("n", [2, 3])
def test_zipped(n: int) -> None:
    strategy = _strategy(n)
    x, y = (strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(v).batch(4)) for v in (X, Y))
    zipped = tf.data.Dataset.zip((x, y))
    _same(_fit(strategy.scope(), x=zipped), _fit(contextlib.nullcontext(), x=_batches()))
    again = strategy.experimental_distribute_dataset(zipped)
    _same(_fit(strategy.scope(), x=again, class_weight=CLASS_WEIGHT), _alone("binary", 4))
    half = tf.data.Dataset.zip((x, tf.data.Dataset.from_tensor_slices(Y).batch(4)))
    with pytest.raises(BatchError, match=r"distributed already, and another part is not.*\[1\].*Zip the datasets first"):
        strategy.experimental_distribute_dataset(half)
    with pytest.raises(StrategyMismatchError, match=f"value of {n}, in a strategy with 4"):
        _strategy(4).experimental_distribute_dataset(zipped)


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_leave_no_batch(name: str) -> None:
    for n in (1, 2):
        dataset = _strategy(n).experimental_distribute_dataset(_batches())
        with pytest.raises(UnsupportedError, match=rf"What {name}\(\) makes is no batch.*make batches of the result"):
            getattr(dataset, name)(*[2][: name == "window"])


@pytest.mark.parametrize("name", OF_WHOLE)
def test_methods_that_need_global_batches(name: str) -> None:
    dataset = _strategy(2).distribute_datasets_from_function(lambda context: _batches(2))
    with pytest.raises(UnsupportedError, match=rf"no global batches to apply {name}\(\) to.*Call {name}\(\) in dataset_fn"):
        getattr(dataset, name)()


def test_what_is_made_must_have_a_batch_axis() -> None:
    dataset = _strategy(2).experimental_distribute_dataset(_batches())
    with pytest.raises(BatchError, match="first axis, and there is none"):
        dataset.map(lambda x, y: tf.reduce_sum(x))


def test_every_method_of_tf_data_is_thought_of() -> None:
    apart = {
        "apply",
        "cardinality",
        "concatenate",
        "element_spec",
        "fingerprint",
        "get_single_element",
        "map",
        "options",
        "reduce",
    }
    makers = {"choose_from_datasets", "counter", "from_generator", "from_tensor_slices", "from_tensors", "list_files", "load"}
    makers |= {"random", "range", "sample_from_datasets", "zip"}
    public = {name for name in dir(tf.data.Dataset) if not name.startswith("_")}
    assert public == {*OF_ELEMENTS, *OF_WHOLE, *REFUSED, *apart, *makers, "scan"}


def test_of_a_strategy_with_another_number_of_replicas() -> None:
    dataset = _strategy(3).experimental_distribute_dataset(_batches())
    with pytest.raises(StrategyMismatchError, match="value of 3, in a strategy with 2"):
        _fit(_strategy(2).scope(), x=dataset)


@pytest.mark.parametrize("n", [2, 3])
def test_a_dataset_for_each_replica_the_first_of_which_ends_first(n: int) -> None:
    """Replica r has r + 1 batches of two rows; a replica that has none any more leaves weights and statistics right."""
    strategy, rows = _strategy(n), np.concatenate([X, X[:7]])
    target = rows.sum(1, keepdims=True)

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        replica = context.input_pipeline_id
        own = tf.data.Dataset.from_tensor_slices((rows, target)).shard(n, replica)
        return own.batch(2).take(replica + 1)

    def model(scope: Any) -> keras.Model:
        keras.utils.set_random_seed(1)
        with scope:
            layers = (
                keras.layers.Dense(4, use_bias=False),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(1),
            )
            model = keras.Sequential([keras.Input((3,)), *layers])
            model.compile("adam", "mse")
        return model

    options = tf.distribute.InputOptions(experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA)
    trained, alone = model(strategy.scope()), model(contextlib.nullcontext())
    trained.fit(strategy.distribute_datasets_from_function(make, options), epochs=2, shuffle=False, verbose=0)
    own = [list(make(tf.distribute.InputContext(n, replica, n))) for replica in range(n)]
    for step in [*range(n)] * 2:
        batches = [batches[step] for batches in own if step < len(batches)]
        alone.train_on_batch(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
    for a, b in zip(trained.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
