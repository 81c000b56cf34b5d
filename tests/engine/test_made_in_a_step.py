"""Variables that a replica function makes when it is called for the first time, under ``tf.init_scope`` and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices

pytestmark = pytest.mark.versions

A, S = tf.VariableAggregation, tf.VariableSynchronization


@pytest.fixture(params=[1, 2, 3], scope="module")
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _local(strategy: Any, value: Any) -> list[Any]:
    return [v.numpy().tolist() for v in strategy.experimental_local_results(value)]


def _twice(strategy: Any, how: str, fn: Callable[[], Any]) -> list[list[Any]]:
    """What ``fn`` returns on each replica in a first and a second step."""
    if how == "eager":
        return [_local(strategy, strategy.run(fn)) for _ in range(2)]
    if how == "given":
        function = tf.function(fn)
        return [_local(strategy, strategy.run(function)) for _ in range(2)]
    step = tf.function(lambda: strategy.run(tf.function(fn) if how == "nested" else fn))
    return [_local(strategy, step()) for _ in range(2)]


class Lazy:
    """Makes its variable once, at the first call."""

    def __init__(self, make: Callable[[], Any], init_scope: bool):
        self._make, self._init_scope, self.variable = make, init_scope, None

    def __call__(self) -> Any:
        if self.variable is None:
            if self._init_scope:
                with tf.init_scope():
                    self.variable = self._make()
            else:
                self.variable = self._make()
        return self.variable


FIRST: dict[str, Any] = {
    "number": lambda: 2.0,
    "tensor": lambda: tf.constant(2.0),
    "computed": lambda: tf.reduce_sum(tf.ones([2])),
    "callable": lambda: lambda: tf.constant(2.0),
    "drawn": lambda: tf.random.stateless_uniform([], [1, 2]) * 0.0 + 2.0,
}


@pytest.mark.parametrize("how", ["traced", "given", "nested", "eager"])
@pytest.mark.parametrize("init_scope", [True, False])
def test_first_values(strategy: Any, how: str, init_scope: bool) -> None:
    lazy = {name: Lazy(lambda first=first: tf.Variable(first()), init_scope) for name, first in FIRST.items()}

    def fn() -> Any:
        for variable in lazy.values():
            variable().assign_add(1.0)
        return tf.stack([variable().read_value() for variable in lazy.values()])

    n, k = strategy.num_replicas_in_sync, len(FIRST)
    assert _twice(strategy, how, fn) == [[[3.0] * k] * n, [[4.0] * k] * n]


@pytest.mark.parametrize("init_scope", [True, False])
@pytest.mark.parametrize(
    ("synchronization", "aggregation"),
    [(S.ON_WRITE, A.MEAN), (S.ON_WRITE, A.ONLY_FIRST_REPLICA), (S.ON_READ, A.SUM), (S.ON_READ, A.MEAN), (S.ON_READ, A.NONE)],
)
def test_kinds(strategy: Any, synchronization: Any, aggregation: Any, init_scope: bool) -> None:
    def make() -> Any:
        return tf.Variable(2.0, synchronization=synchronization, aggregation=aggregation)

    lazy = Lazy(make, init_scope)

    def fn() -> Any:
        lazy().assign_add(1.0)
        return lazy().read_value()

    n = strategy.num_replicas_in_sync
    assert _twice(strategy, "traced", fn) == [[3.0] * n, [4.0] * n]


@pytest.mark.parametrize("init_scope", [True, False])
@pytest.mark.parametrize("how", ["traced", "eager"])
def test_of_any_shape(strategy: Any, how: str, init_scope: bool) -> None:
    lazy = Lazy(lambda: tf.Variable([1.0, 2.0], shape=tf.TensorShape(None)), init_scope)

    def fn() -> Any:
        lazy().assign([1.0, 2.0, 3.0])
        return lazy().read_value()

    assert _twice(strategy, how, fn) == [[[1.0, 2.0, 3.0]] * strategy.num_replicas_in_sync] * 2


@pytest.mark.parametrize("how", ["traced", "given", "nested", "eager"])
def test_read_at_once_and_used_as_the_next_first_value(strategy: Any, how: str) -> None:
    made: list[Any] = []

    def fn() -> Any:
        if not made:
            with tf.init_scope():
                first = tf.Variable(3.0)
                read = first.read_value()
                made.extend([first, tf.Variable(read + 1.0), tf.Variable(first * 2.0)])
                assert read.numpy() == 3.0
                assert first.shape == made[1].shape == made[2].shape == ()
        made[0].assign_add(1.0)
        return tf.stack([variable + 0.0 for variable in made])

    n = strategy.num_replicas_in_sync
    assert _twice(strategy, how, fn) == [[[4.0, 4.0, 6.0]] * n, [[5.0, 4.0, 6.0]] * n]


@pytest.mark.parametrize("how", ["traced", "given"])
def test_written_at_once(strategy: Any, how: str) -> None:
    """What init_scope writes while the one trace is made, all copies get."""
    made: list[Any] = []
    n = strategy.num_replicas_in_sync

    def fn() -> Any:
        if not made:
            with tf.init_scope():
                made.extend(tf.Variable([1.0, 1.0], aggregation=a) for a in (A.NONE, A.MEAN, A.SUM))
                made.append(tf.Variable([1.0, 1.0], synchronization=S.ON_READ, aggregation=A.SUM))
                for variable in made:
                    variable.assign_add([1.0, 2.0])
                made[0].scatter_add(tf.IndexedSlices(tf.constant([10.0]), tf.constant([0])))
        return tf.stack([variable + 0.0 for variable in made])

    want = [[12.0, 3.0], [2.0, 3.0], [1.0 + n, 1.0 + 2 * n], [2.0, 3.0]]
    assert _twice(strategy, how, fn) == [[want] * n] * 2
    assert made[3].numpy().tolist() == [2.0 * n, 3.0 * n]


@pytest.mark.parametrize("init_scope", [True, False])
@pytest.mark.parametrize("where", ["cond", "loop"])
def test_made_in_a_branch_or_loop(strategy: Any, where: str, init_scope: bool) -> None:
    lazy = Lazy(lambda: tf.Variable(3.0), init_scope)

    def added(i: Any) -> Any:
        lazy().assign_add(1.0)
        return i + 1

    def fn() -> Any:
        if where == "cond":
            tf.cond(tf.constant(1) > 0, lambda: added(0), lambda: 0)
        else:
            tf.while_loop(lambda i: i < 2, lambda i: [added(i)], [tf.constant(0)])
        return lazy().read_value()

    n, each = strategy.num_replicas_in_sync, 1.0 if where == "cond" else 2.0
    assert _twice(strategy, "traced", fn) == [[3.0 + each] * n, [3.0 + 2 * each] * n]


@pytest.mark.parametrize("how", ["traced", "eager"])
def test_a_layer_built_in_the_step(strategy: Any, how: str) -> None:
    lazy = Lazy(lambda: keras.layers.Dense(1, kernel_initializer="ones"), init_scope=False)
    got = _twice(strategy, how, lambda: lazy()(tf.ones((1, 2))))
    assert got == [[[[2.0]]] * strategy.num_replicas_in_sync] * 2
    assert len({v.numpy().tobytes() for v in strategy.experimental_local_results(lazy().kernel.value)}) == 1
