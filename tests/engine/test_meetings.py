"""Every way in which replicas meet, in every way of running, for every remainder, against values worked out by hand.

A replica without examples must add nothing of its own: no row, no term, no state. What does not depend on the batch counts on
every replica, and what comes from outside of the replicas counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine.feed import bounds

pytestmark = pytest.mark.versions
SIZES = (8, 7, 5, 3, 2, 1)
OUTSIDE = tf.constant([1.5, 2.5])
VARIABLES = {
    "sum": tf.VariableAggregation.SUM,
    "mean": tf.VariableAggregation.MEAN,
    "first": tf.VariableAggregation.ONLY_FIRST_REPLICA,
    "assigned": tf.VariableAggregation.NONE,
    "added": tf.VariableAggregation.NONE,
    "counter": tf.VariableAggregation.NONE,
}


@dataclass
class Case:
    """What one replica is given: its slice, the number of its first row, the variables."""

    x: tf.Tensor
    first: tf.Tensor
    variables: dict[str, tf.Variable]
    replicas: int

    @property
    def context(self) -> Any:
        return tf.distribute.get_replica_context()


def _rows(case: Case) -> tf.IndexedSlices:
    return tf.IndexedSlices(10.0 * case.x[:, None], tf.cast(case.x, tf.int64), tf.constant([20, 1], tf.int64))


def _table_of_rows(case: Case, op: str) -> tf.Tensor:
    joined = case.context.all_reduce(op, _rows(case))
    return tf.concat([joined.values[:, 0], tf.cast(joined.indices, tf.float32)], 0)


def _gather_gradient(case: Case) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(case.x)
        # The loss of the whole batch, which every replica computes, weighs 1/N in each.
        loss = tf.reduce_sum(case.context.all_gather(case.x, axis=0) ** 2) / case.replicas
    return case.context.all_gather(tape.gradient(loss, case.x), axis=0)


def _sum_gradient(case: Case) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(case.x)
        loss = case.context.all_reduce("SUM", tf.reduce_sum(case.x)) ** 2 / case.replicas
    return case.context.all_gather(tape.gradient(loss, case.x), axis=0)


def _own_rows_among_all(case: Case) -> tf.Tensor:
    whole = case.context.all_gather(case.x, axis=0)
    return case.context.all_gather(tf.gather(whole, case.first + tf.range(tf.shape(case.x)[0])) - case.x, axis=0)


def _offset_by_sizes(case: Case) -> tf.Tensor:
    sizes = case.context.all_gather(tf.shape(case.x)[:1], axis=0)
    start = tf.reduce_sum(sizes[: case.context.replica_id_in_sync_group])
    whole = case.context.all_gather(case.x, axis=0)
    return case.context.all_reduce("SUM", tf.reduce_sum(tf.gather(whole, start + tf.range(tf.shape(case.x)[0]))))


def _with_regularizer(case: Case) -> tf.Tensor:
    weight = tf.constant([3.0])
    with tf.GradientTape() as tape:
        tape.watch(weight)
        loss = tf.reduce_sum(case.x * weight) + tf.reduce_sum(weight**2) / case.replicas
    return case.context.all_reduce("SUM", tape.gradient(loss, weight))


def _with_regularizers(case: Case) -> tf.Tensor:
    """As above, of several gradients in one tensor, in another precision."""
    weights = [tf.constant([3.0]), tf.constant([[1.0, 2.0]])]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_sum(case.x * weights[0]) + sum(tf.reduce_sum(w**2) for w in weights) / case.replicas
        loss += tf.reduce_sum(weights[1]) * tf.reduce_sum(case.x)
    flat = tf.concat([tf.reshape(g, [-1]) for g in tape.gradient(loss, weights)], 0)
    return case.context.all_reduce("SUM", tf.cast(2.0 * tf.transpose(flat[:, None]), tf.float64))[0]


def _written(name: str, method: str, value: Callable[[Case], Any]) -> Callable[[Case], tf.Tensor]:
    def write(case: Case) -> tf.Tensor:
        variable = case.variables[name]
        getattr(variable, method)(value(case))
        return tf.zeros([1])

    return write


Wanted = Callable[[np.ndarray, list[int]], Any]
"""What all replicas get, from the batch and the sizes of its slices."""


def _mean_of_slices(x: np.ndarray, sizes: list[int]) -> Any:
    return sum(sum(part) for part in np.split(x, np.cumsum(sizes)[:-1])) / len(sizes)


KINDS: dict[str, tuple[Callable[[Case], Any], Wanted]] = {
    "sum": (lambda c: c.context.all_reduce("SUM", tf.reduce_sum(c.x)), lambda x, n: sum(x)),
    "sum of means": (lambda c: c.context.all_reduce("SUM", tf.nn.compute_average_loss(c.x)), lambda x, n: np.mean(x)),
    "sum of flags": (
        lambda c: tf.cast(c.context.all_reduce("SUM", tf.reduce_any(c.x > 1.5)), tf.float32),
        lambda x, n: len(x) > 1,
    ),
    "sum of numbers": (lambda c: c.context.all_reduce("SUM", tf.reduce_sum(tf.cast(c.x, tf.int32))), lambda x, n: sum(x)),
    "sum of sizes": (lambda c: c.context.all_reduce("SUM", tf.shape(c.x)[0]), lambda x, n: len(x)),
    "sum in 16 bit": (lambda c: c.context.all_reduce("SUM", tf.reduce_sum(tf.cast(c.x, tf.bfloat16))), lambda x, n: sum(x)),
    "mean": (lambda c: c.context.all_reduce("MEAN", tf.reduce_sum(c.x)), _mean_of_slices),
    "sum of what is made inside": (lambda c: c.context.all_reduce("SUM", tf.ones([2])), lambda x, n: [len(n)] * 2),
    "mean of what is made inside": (lambda c: c.context.all_reduce("MEAN", 2.0 * tf.ones([2])), lambda x, n: [2.0, 2.0]),
    "sum of what is outside": (lambda c: c.context.all_reduce("SUM", OUTSIDE), lambda x, n: [1.5, 2.5]),
    "mean of what is outside": (lambda c: c.context.all_reduce("MEAN", OUTSIDE), lambda x, n: [1.5, 2.5]),
    "sum of what is made of what is outside": (
        lambda c: c.context.all_reduce("SUM", OUTSIDE * 1.0),
        lambda x, n: [1.5 * len(n), 2.5 * len(n)],
    ),
    "rows from outside": (
        lambda c: c.context.all_reduce("SUM", tf.IndexedSlices(OUTSIDE, INDICES, None)).values,
        lambda x, n: [1.5, 2.5],
    ),
    "gather": (lambda c: c.context.all_gather(c.x, axis=0), lambda x, n: x),
    "gather of pairs": (
        lambda c: c.context.all_gather({"x": tf.stack([c.x, -c.x], 1)}, axis=0)["x"],
        lambda x, n: [[v, -v] for v in x],
    ),
    "gather along the last axis": (lambda c: c.context.all_gather(tf.stack([c.x, -c.x]), axis=-1), lambda x, n: [x, -x]),
    "gather of numbers": (lambda c: c.context.all_gather(tf.cast(c.x, tf.int32), axis=0), lambda x, n: x),
    "gather of flags": (lambda c: tf.cast(c.context.all_gather(c.x > 2.5, axis=0), tf.int32), lambda x, n: x > 2.5),
    "gather of strings": (lambda c: tf.strings.to_number(c.context.all_gather(tf.as_string(c.x), axis=0)), lambda x, n: x),
    "gather of sizes": (lambda c: c.context.all_gather(tf.shape(c.x)[:1], axis=0), lambda x, n: n),
    "gather of means": (
        lambda c: tf.reduce_max(-c.context.all_gather(tf.reduce_min(c.x, keepdims=True) + 1.0, axis=0), keepdims=True),
        lambda x, n: [-2.0],
    ),
    "gather of what is made inside": (lambda c: c.context.all_gather(tf.ones([2]), axis=0), lambda x, n: [1.0] * 2 * len(n)),
    "gather of what is outside": (lambda c: c.context.all_gather(OUTSIDE, axis=0), lambda x, n: [1.5, 2.5]),
    "gradient of a gather": (_gather_gradient, lambda x, n: 2 * x),
    "gradient of a sum": (_sum_gradient, lambda x, n: 2 * sum(x) * np.ones(len(x))),
    "own rows among all": (_own_rows_among_all, lambda x, n: 0 * x),
    "rows at an offset by sizes": (_offset_by_sizes, lambda x, n: sum(x)),
    "sum with a regularizer": (_with_regularizer, lambda x, n: [sum(x) + 6.0]),
    "packed sums with regularizers": (
        _with_regularizers,
        lambda x, n: [2 * sum(x) + 12, 2 * sum(x) + 4, 2 * sum(x) + 8],
    ),
    "rows": (lambda c: _table_of_rows(c, "SUM"), lambda x, n: [*(10 * x), *x]),
    "mean of rows": (lambda c: _table_of_rows(c, "MEAN"), lambda x, n: [*(10 * x / len(n)), *x]),
}
INDICES = tf.constant([0, 1], tf.int64)

# What each variable holds after a step; before it holds 10.
WRITES: dict[str, tuple[Callable[[Case], Any], Wanted]] = {
    "sum": (_written("sum", "assign", lambda c: tf.reduce_sum(c.x)), lambda x, n: sum(x)),
    "mean": (_written("mean", "assign", lambda c: tf.reduce_mean(c.x)), lambda x, n: np.mean(x)),
    "first": (_written("first", "assign", lambda c: tf.reduce_sum(c.x)), lambda x, n: sum(x[: n[0]])),
    "assigned": (_written("assigned", "assign", lambda c: tf.reduce_mean(c.x)), lambda x, n: np.mean(x)),
    # N times it is what all replicas have together: 10 each, and what they add.
    "added": (_written("added", "assign_add", lambda c: tf.reduce_sum(c.x)), lambda x, n: 10 + sum(x) / len(n)),
    "counter": (_written("counter", "assign_add", lambda c: 1.0), lambda x, n: 11),
}


def _merged(case: Case) -> None:
    """Makes a trace for all replicas impossible, so that each gets a thread."""
    case.context.merge_call(lambda strategy: None)


def _in_a_cond(body: Callable[[], Any]) -> Any:
    return tf.cond(tf.timestamp() > 0.0, body, body)


@pytest.fixture(scope="module", params=[2, 3])
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _variables(strategy: Any) -> dict[str, tf.Variable]:
    with strategy.scope():
        return {name: tf.Variable(10.0, trainable=False, aggregation=aggregation) for name, aggregation in VARIABLES.items()}


WAYS = ("traced", "in a cond", "in threads", "eager")


@pytest.mark.parametrize("way", WAYS)
def test_meetings(strategy: Any, way: str) -> None:
    replicas = strategy.num_replicas_in_sync
    variables = _variables(strategy)
    functions = {name: fn for name, (fn, _) in [*KINDS.items(), *((f"write {k}", v) for k, v in WRITES.items())]}

    def replica(x: tf.Tensor, first: tf.Tensor) -> dict[str, tf.Tensor]:
        case = Case(x, first, variables, replicas)
        if way == "in threads":
            _merged(case)
        if way == "in a cond":
            return _in_a_cond(lambda: {name: tf.identity(fn(case)) for name, fn in functions.items()})
        return {name: tf.identity(fn(case)) for name, fn in functions.items()}

    def run(x: tf.Tensor, first: Any) -> Any:
        return strategy.run(replica, (strategy.split(x), first))

    step: Any = run if way == "eager" else tf.function(run, reduce_retracing=True)
    wrong = []
    for size in SIZES:
        batch = np.arange(1.0, size + 1, dtype="float32")
        cuts = bounds(size, replicas)
        sizes = np.diff(cuts).tolist()
        first = strategy.experimental_distribute_values_from_function(
            lambda c, cuts=cuts: tf.constant(cuts[c.replica_id_in_sync_group])
        )
        for variable in variables.values():
            variable.assign(10.0)
        results = step(tf.constant(batch), first)
        for name, (_, want) in KINDS.items():
            for r, got in enumerate(strategy.experimental_local_results(results[name])):
                if not _close(got, want(batch, sizes)):
                    wrong.append((name, size, r, np.asarray(got).tolist(), np.asarray(want(batch, sizes)).tolist()))
        for name, (_, want) in WRITES.items():
            for r, copy in enumerate(variables[name].values):
                if not _close(copy, want(batch, sizes)):
                    wrong.append((f"write {name}", size, r, copy.numpy().tolist(), np.asarray(want(batch, sizes)).tolist()))
    assert not wrong, "\n" + "\n".join(map(str, wrong))


def _close(got: Any, want: Any) -> bool:
    got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
    return got.shape == want.shape and bool(np.allclose(got, want, rtol=1e-5))
