"""What replicas hand in and does not fit together is refused in words of ours, in every way of running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.errors import ExchangeError, UnsupportedError


def _context() -> Any:
    return tf.distribute.get_replica_context()


def _in_a_loop(x: tf.Tensor) -> tf.Tensor:
    whole = x
    for _ in tf.range(2):
        whole = _context().all_gather(x, axis=0)
    return whole


ERRORS: dict[str, tuple[Callable[[tf.Tensor], Any], type, str]] = {
    "sum of rows": (
        lambda x: _context().all_reduce("SUM", x),
        ExchangeError,
        r"equal shapes. Received: \(2,\) on replica 0, \(1,\) on replica 1",
    ),
    "sum of text": (lambda x: _context().all_reduce("SUM", tf.as_string(x[:1])), ExchangeError, "text cannot be added up"),
    "mean of flags": (lambda x: _context().all_reduce("MEAN", x[:1] > 0), ExchangeError, "flags cannot be averaged"),
    "gather of scalars": (
        lambda x: _context().all_gather(tf.reduce_sum(x), axis=0),
        ExchangeError,
        r"no axis, since .* x\[None\]",
    ),
    "gather along no axis": (lambda x: _context().all_gather(x, axis=3), ExchangeError, "axis=3 .* Allowed: axes -1 to 0"),
    "gather of rows": (
        lambda x: _context().all_gather(tf.IndexedSlices(x, tf.cast(x, tf.int32)), axis=0),
        NotImplementedError,
        "does not support IndexedSlices",
    ),
}
TRACED_ERRORS: dict[str, tuple[Callable[[tf.Tensor], Any], type, str]] = {
    "another reduction": (
        lambda x: _context().all_reduce("MAX", x[:1]),
        ExchangeError,
        "Received: 'MAX'. Allowed: 'SUM', 'MEAN'",
    ),
    "gather in a loop": (_in_a_loop, UnsupportedError, "cannot meet inside a tf.while_loop.*Received: all_gather"),
    "sparse": (lambda x: _context().all_gather(tf.sparse.from_dense(x), axis=0), UnsupportedError, "Received: a SparseTensor"),
}


@pytest.fixture(scope="module")
def strategy() -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(2))


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", [*ERRORS, *TRACED_ERRORS])
def test_what_does_not_fit(strategy: Any, name: str, graph: bool) -> None:
    if not graph and name in TRACED_ERRORS:
        return
    fn, error, told = (ERRORS | TRACED_ERRORS)[name]

    def run(x: tf.Tensor) -> Any:
        return strategy.run(fn, (strategy.split(x),))

    with pytest.raises(error, match=told):
        (tf.function(run) if graph else run)(tf.range(3.0))


@pytest.mark.parametrize("graph", [True, False])
def test_gathers_of_what_differs_elsewhere(strategy: Any, graph: bool) -> None:
    values = strategy.experimental_distribute_values_from_function(lambda c: tf.zeros([2, c.replica_id_in_sync_group + 3]))
    told = r"must agree in their other axes .Dimension 1 in both .*Received: \(None, 3\) on replica 0, \(None, 4\) on replica 1"
    with pytest.raises(ExchangeError, match=told):
        strategy.gather(values, axis=0)

    def run() -> Any:
        return strategy.run(lambda x: _context().all_gather(x, axis=0), (values,))

    if not graph:
        with pytest.raises(ExchangeError, match=told):
            run()


def test_sums_of_sizes_that_are_not_known_while_tracing(strategy: Any) -> None:
    """As many rows on each replica: right. Otherwise the step stops with the shapes."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x: tf.Tensor) -> Any:
        return strategy.run(lambda x: _context().all_reduce("SUM", x), (strategy.split(x),))

    assert strategy.experimental_local_results(step(tf.range(4.0)))[0].numpy().tolist() == [2.0, 4.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"lockstep: .*add up must have equal shapes.*\[2\].*\[1\]"):
        step(tf.range(3.0))


@pytest.mark.parametrize("graph", [True, False])
def test_gathers_of_other_ranks(strategy: Any, graph: bool) -> None:
    """An error of ours that is the one TensorFlow raises, too."""
    values = strategy.experimental_distribute_values_from_function(lambda c: tf.ones(range(1, c.replica_id_in_sync_group + 2)))

    def run() -> Any:
        return strategy.gather(values, axis=0)

    for error in (ExchangeError, ValueError, tf.errors.InvalidArgumentError):
        with pytest.raises(error, match=r"Shape mismatch.*Received: \(None,\) on replica 0, \(None, 2\) on replica 1"):
            (tf.function(run) if graph else run)()


@pytest.mark.parametrize(
    ("op", "axis", "told"),
    [
        (None, None, "Received: None. Allowed: 'SUM', 'MEAN'"),
        ("max", None, "Received: 'max'"),
        ("SUM", 5, "axis=5. Allowed: None, axes -1 to 0"),
        ("MEAN", "x", "axis='x'"),
    ],
)
def test_reductions_of_what_was_returned(strategy: Any, op: Any, axis: Any, told: str) -> None:
    with pytest.raises(ExchangeError, match=told):
        strategy.reduce(op, strategy.split(tf.range(4.0)), axis=axis)


def test_gathers_of_returned_rows(strategy: Any) -> None:
    rows = strategy.run(lambda: tf.IndexedSlices(tf.ones([1]), tf.constant([0])))
    with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
        strategy.gather(rows, axis=0)


@pytest.mark.parametrize("graph", [True, False])
def test_whole_numbers_have_a_mean(strategy: Any, graph: bool) -> None:
    def run() -> Any:
        return strategy.run(lambda: _context().all_reduce("MEAN", _context().replica_id_in_sync_group + tf.constant(3)))

    (first, second) = strategy.experimental_local_results((tf.function(run) if graph else run)())
    assert float(first) == float(second) == 3.5


@pytest.mark.parametrize("graph", [True, False])
def test_one_value_for_all_is_not_added_to_a_sum(strategy: Any, graph: bool) -> None:
    """As under tf.distribute, which cannot know whether it is meant to count once or N times."""
    outside = tf.constant(2.0)
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    for value in (outside, 2.0):

        def run(value: Any = value) -> None:
            strategy.run(lambda: variable.assign_add(value))

        with pytest.raises(ValueError, match="not per replica cannot be summed"):
            (tf.function(run) if graph else run)()
    assert [float(v) for v in variable.values] == [1.0, 1.0]
