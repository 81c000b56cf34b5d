"""Distributed datasets and iterators: elements as they are, also in a tf.function; never inside of a replica."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine.datasets import DistributedDataset, DistributedIterator
from lockstep.errors import BatchError, StrategyMismatchError, UnsupportedError

Pair = namedtuple("Pair", ["a", "b"])
RAGGED = tf.ragged.constant([[1], [2, 3], [], [4], [5], [6], [7, 8]])


def _strategy(n: int = 2) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(n))


def _listed(value: Any) -> Any:
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    return value.to_list() if isinstance(value, tf.RaggedTensor) else np.asarray(value).tolist()


def _local(strategy: Any, structure: Any) -> Any:
    """The structure with, for each leaf, the list of its replicas' values."""
    local = strategy.experimental_local_results
    return tf.nest.map_structure(lambda leaf: [_listed(v) for v in local(leaf)], structure, expand_composites=False)


def _range(n: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(n)


SCALARS = {
    "number": (lambda: _range(7), lambda i: i),
    "string": (lambda: tf.data.Dataset.from_tensor_slices([f"{i}" for i in range(7)]), lambda i: f"{i}".encode()),
    "tuple": (lambda: tf.data.Dataset.zip((_range(7), _range(7).map(lambda x: x > 2))), lambda i: (i, i > 2)),
    "one in a tuple": (lambda: tf.data.Dataset.zip((_range(7),)), lambda i: (i,)),
    "named": (lambda: _range(7).map(lambda x: Pair(x, {"b": -x})), lambda i: Pair(i, {"b": -i})),
    "dict": (lambda: _range(7).map(lambda x: {"x": x, "y": (x, x + 1)}), lambda i: {"x": i, "y": (i, i + 1)}),
}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", SCALARS)
def test_scalars_are_given_to_the_replicas_as_they_are(kind: str, n: int) -> None:
    make, value = SCALARS[kind]
    strategy = _strategy(n)
    dataset = strategy.distribute_datasets_from_function(lambda context: make())
    got = [_local(strategy, element) for element in dataset]
    # Scalars cannot be empty: a group that is not whole is left out, as by TensorFlow.
    want = [[value(n * step + r) for r in range(n)] for step in range(7 // n)]
    assert got == [_transposed(group) for group in want]
    assert int(dataset.cardinality()) == 7 // n


def _transposed(group: list[Any]) -> Any:
    return tf.nest.map_structure(lambda *leaves: list(leaves), *group)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("in_function", [False, True])
def test_scalars_in_a_replica(n: int, in_function: bool) -> None:
    strategy = _strategy(n)
    dataset = strategy.distribute_datasets_from_function(lambda context: _range(7).map(lambda x: (x, 2 * x)))

    def total(dataset: Any) -> Any:
        sum_ = tf.constant(0, tf.int64)
        for batch in dataset:
            sum_ += strategy.reduce("SUM", strategy.run(lambda x, y: x * y, batch), axis=None)
        return sum_

    got = tf.function(total)(dataset) if in_function else total(dataset)
    assert int(got) == sum(2 * i * i for i in range(7 // n * n))


def test_rows_beside_a_scalar() -> None:
    """A replica left over gets no rows; of the scalar it gets that of the first."""
    strategy = _strategy(2)

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return _range(5).batch(2).map(lambda x: (x, tf.reduce_sum(x), None))

    dataset = strategy.distribute_datasets_from_function(make)
    got = [_local(strategy, element[:2]) for element in dataset]
    assert got == [([[0, 1], [2, 3]], [1, 5]), ([[4], []], [4, 4])]
    assert [element[2] for element in dataset] == [None, None]

    @tf.function
    def mean(x: Any, scale: Any, none: Any) -> Any:
        assert none is None
        each = strategy.run(lambda x, s: tf.nn.compute_average_loss(tf.cast(x + 0 * s, tf.float32)), (x, scale))
        return strategy.reduce("SUM", each, axis=None)

    assert [float(mean(*element)) for element in dataset] == [1.5, 4.0]


def test_batches_of_all_kinds_from_a_function() -> None:
    strategy = _strategy(3)
    parts = Pair({"r": RAGGED, "s": tf.sparse.from_dense(np.eye(7, 2))}, tf.constant(list("abcdefg")))
    dataset = strategy.distribute_datasets_from_function(lambda c: tf.data.Dataset.from_tensor_slices(parts).batch(2))
    first, second = (_local(strategy, element) for element in dataset)
    assert first.a["r"] == [[[1], [2, 3]], [[], [4]], [[5], [6]]] and second.a["r"] == [[[7, 8]], [], []]
    assert first.a["s"][0] == [[1, 0], [0, 1]] and [len(v) for v in second.a["s"]] == [1, 0, 0]
    assert first.b == [[b"a", b"b"], [b"c", b"d"], [b"e", b"f"]] and second.b == [[b"g"], [], []]


def test_elements_without_end_keep_their_static_shape() -> None:
    dataset = _strategy(2).distribute_datasets_from_function(lambda c: _range(6).batch(2, drop_remainder=True).repeat())
    assert {spec.shape for spec in dataset.element_spec._component_specs} == {tf.TensorShape([None])}
    assert int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert _local(_strategy(2), next(iter(dataset.skip(1)))) == [[4, 5], [0, 1]]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_iterators_and_datasets_as_arguments_of_a_function(n: int) -> None:
    strategy, traced = _strategy(n), []
    dataset = strategy.experimental_distribute_dataset(_range(7).batch(4))

    def summed(x: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, (x,)), axis=None)

    @tf.function
    def step(iterator: Any) -> Any:
        traced.append(iterator)
        return summed(next(iterator))

    @tf.function
    def last(iterator: Any) -> Any:
        optional = iterator.get_next_as_optional()
        return summed(optional.get_value()) if optional.has_value() else tf.constant(-1, tf.int64)

    @tf.function
    def epoch(dataset: Any) -> Any:
        traced.append(dataset)
        total = tf.constant(0, tf.int64)
        for x in dataset:
            total += summed(x)
        return total

    for _ in range(2):
        iterator = iter(dataset)
        assert iterator.element_spec == dataset.element_spec
        assert [int(step(iterator)), int(step(iterator))] == [6, 15]
        assert int(last(iterator)) == -1
        with pytest.raises(tf.errors.OutOfRangeError):
            iterator.get_next()
        with pytest.raises(StopIteration):
            next(iterator)
        assert int(epoch(dataset)) == 21
    assert [type(x) for x in traced] == [DistributedIterator, DistributedDataset]
    assert int(dataset.cardinality()) == 2
    assert int(dataset.reduce(tf.constant(0, tf.int64), lambda total, x: total + summed(x))) == 21


def _next(iterator: Any) -> Any:
    return next(iterator)


def _get_next(iterator: Any) -> Any:
    return iterator.get_next()


def _get_next_as_optional(iterator: Any) -> Any:
    return iterator.get_next_as_optional().get_value()


def _loop(batches: Any) -> Any:
    total = tf.constant(0, tf.int64)
    for x in batches:
        total += tf.reduce_sum(x)
    return total


def _next_of_iter(batches: Any) -> Any:
    return next(iter(batches))


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("use", [_next, _get_next, _get_next_as_optional, _loop, _next_of_iter])
@pytest.mark.parametrize("n", [1, 2])
def test_not_inside_of_a_replica(use: Callable, traced: bool, closure: bool, n: int) -> None:
    strategy = _strategy(n)
    dataset = strategy.experimental_distribute_dataset(_range(8).batch(2))
    iterator = iter(dataset)
    for batches in [iterator] if use in (_next, _get_next, _get_next_as_optional) else [iterator, dataset]:

        def step(batches: Any = batches) -> Any:
            if closure:
                return strategy.run(lambda: use(batches))
            return strategy.run(use, args=(batches,))

        with pytest.raises(BatchError, match=r"another global batch[\s\S]*next\(iterator\) should be called from outside"):
            tf.function(step)() if traced else step()
    assert _local(strategy, next(iterator)) == ([[0], [1]] if n == 2 else [[0, 1]]), "no batch is lost"


def _enumerated(batches: Any) -> Any:
    total = tf.constant(0, tf.int64)
    for i, x in enumerate(batches):
        tf.nest.map_structure(tf.debugging.assert_integer, x)
        total += tf.cast(i, tf.int64)
    return total


@pytest.mark.parametrize("n", [1, 2])
def test_enumerate(n: int) -> None:
    strategy = _strategy(n)
    dataset = strategy.experimental_distribute_dataset(_range(9).batch(2))

    @tf.function
    def of_iterator(dataset: Any) -> Any:
        for i, _ in enumerate(iter(dataset)):
            tf.print(i)

    @tf.function
    def of_argument(iterator: Any) -> Any:
        for i, _ in enumerate(iterator):
            tf.print(i)

    for call in (lambda: of_iterator(dataset), lambda: of_argument(iter(dataset))):
        with pytest.raises(UnsupportedError, match=r"no end[\s\S]*Enumerate the dataset instead[\s\S]*separate counter"):
            call()
    assert [i for i, _ in enumerate(dataset)] == [0, 1, 2, 3, 4]

    @tf.function
    def of_dataset() -> Any:
        total = tf.constant(0, tf.int64)
        for i, x in enumerate(dataset):
            total += i * strategy.reduce("SUM", strategy.run(tf.reduce_sum, (x,)), axis=None)
        return total

    assert int(of_dataset()) == sum(i * (4 * i + 1) for i in range(4)) + 4 * 8


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: {"a": _range(4).batch(2), "b": _range(4).batch(2)}, r"Received: dict.*tf\.data\.Dataset\.zip"),
        (lambda: (_range(4).batch(2), _range(4).batch(2)), r"Received: tuple.*tf\.data\.Dataset\.zip"),
        (lambda: np.ones(3), r"Received: ndarray.*from_tensor_slices"),
        (lambda: None, r"Received: NoneType"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_what_is_no_dataset(make: Callable, words: str, n: int) -> None:
    strategy = _strategy(n)
    with pytest.raises(BatchError, match=r"Only a tf\.data\.Dataset.*" + words):
        strategy.experimental_distribute_dataset(make())
    with pytest.raises(BatchError, match="dataset_fn must return one.*" + words):
        strategy.distribute_datasets_from_function(lambda context: make())


def test_a_function_that_returns_a_distributed_dataset() -> None:
    strategy = _strategy()
    with pytest.raises(BatchError, match="dataset_fn must return one.*that is not distributed"):
        strategy.distribute_datasets_from_function(lambda context: strategy.experimental_distribute_dataset(_range(4).batch(2)))


def test_a_dataset_of_unknown_rank_from_a_function() -> None:
    unknown = _range(5).batch(2).map(lambda x: tf.py_function(lambda v: v, [x], tf.int64))
    with pytest.raises(BatchError, match="unknown rank"):
        _strategy().distribute_datasets_from_function(lambda context: unknown)


@pytest.mark.parametrize(("mine", "others"), [(2, 3), (3, 2), (1, 2)])
def test_of_a_strategy_with_another_number_of_replicas(mine: int, others: int) -> None:
    strategy, other = _strategy(mine), _strategy(others)
    dataset = other.experimental_distribute_dataset(_range(12).batch(6))
    words = f"another number of replicas.*value of {others}, in a strategy with {mine}.*with the strategy that trains"
    with pytest.raises(StrategyMismatchError, match="The dataset was distributed by.*" + words):
        strategy.experimental_distribute_dataset(dataset)
    batch = next(iter(dataset))
    values = other.experimental_distribute_values_from_function(lambda context: 1)
    for argument in (batch, values, {"x": [batch]}):
        for run in (strategy.run, tf.function(strategy.run)):
            with pytest.raises(StrategyMismatchError, match=r"An argument of strategy\.run was made.*" + words):
                run(lambda x: x, args=(argument,))
            with pytest.raises(StrategyMismatchError, match=words):
                run(lambda x: x, kwargs={"x": argument})


def test_of_another_library() -> None:
    theirs = tf.distribute.MirroredStrategy(devices(2)).experimental_distribute_dataset(_range(4).batch(2))
    with pytest.raises(StrategyMismatchError, match=r"by another library.*Pass the tf\.data\.Dataset itself"):
        _strategy().experimental_distribute_dataset(theirs)
