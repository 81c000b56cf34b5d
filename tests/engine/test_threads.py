"""Two threads of a program that use one strategy at once get what each gets alone, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine import replicas
from lockstep.engine.tf_private import Function

LIMIT_S = 120.0


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """What each function returns, all of them called at the same time in a thread each."""
    barrier = threading.Barrier(len(functions))
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def call(i: int) -> None:
        try:
            barrier.wait(LIMIT_S)
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


class TakingTurns:
    """Makes two threads take turns: each goes on only when the other has come to a meeting point as well, or has ended."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def meet(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # the other has ended
            self._barrier.wait(LIMIT_S)

    def ended(self) -> None:
        self._barrier.abort()


@pytest.fixture(params=[1, 2, 3])
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _local(strategy: Any, value: Any) -> list[Any]:
    return [v.numpy().tolist() for v in strategy.experimental_local_results(value)]


def _model(strategy: Any, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    return model


X, Y = np.linspace(-1, 1, 33, dtype="float32").reshape(11, 3), np.linspace(0, 1, 11, dtype="float32").reshape(11, 1)


def test_fit_beside_evaluate_of_another_model(strategy: Any) -> None:
    trained, evaluated = _model(strategy, 1), _model(strategy, 2)
    start = trained.get_weights()

    def fit() -> Any:
        return trained.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"]

    def evaluate() -> Any:
        return [evaluated.evaluate(X, Y, batch_size=4, verbose=0) for _ in range(3)]

    together = at_once(fit, evaluate)
    end = trained.get_weights()
    trained, again = _model(strategy, 1), _model(strategy, 2)
    trained.set_weights(start)
    evaluated = again
    np.testing.assert_allclose(together[0], fit(), rtol=1e-6)
    np.testing.assert_allclose(together[1], evaluate(), rtol=1e-6)
    for one, other in zip(end, trained.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_one_traces_with_nested_functions_inlined_while_the_other_calls_functions(strategy: Any) -> None:
    """The first trace is in the middle of an inlined function when the second thread traces and calls the same functions."""
    n = strategy.num_replicas_in_sync
    for _ in range(3):
        turns = TakingTurns()

        @tf.function
        def shared(x: Any) -> Any:
            return x * 2.0

        @tf.function
        def nested(x: Any, turns: Any = turns, shared: Any = shared) -> Any:
            turns.meet()
            x = tf.distribute.get_replica_context().all_reduce("SUM", shared(x))
            turns.meet()
            return shared(x)

        @tf.function
        def plain(x: Any, turns: Any = turns, shared: Any = shared) -> Any:
            turns.meet()
            x = shared(x)
            turns.meet()
            return x + 1.0

        def by_strategy(nested: Any = nested, turns: Any = turns) -> Any:
            try:
                return _local(strategy, tf.function(lambda: strategy.run(nested, (tf.constant(3.0),)))())
            finally:
                turns.ended()

        def by_itself(plain: Any = plain, turns: Any = turns) -> Any:
            try:
                value = float(plain(tf.constant(5.0)))
                # It was not inlined into what called it.
                return value, plain.experimental_get_tracing_count()
            finally:
                turns.ended()

        assert at_once(by_strategy, by_itself) == [[12.0 * n] * n, (11.0, 1)]


def test_two_traces_that_overlap_leave_nothing_behind() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    turns = TakingTurns()
    gc_is_on = gc.isenabled()

    def loop(factor: float) -> Callable[[], Any]:
        @tf.function
        def nested(x: Any) -> Any:
            turns.meet()
            return tf.distribute.get_replica_context().all_reduce("SUM", x * factor)

        def run() -> Any:
            try:
                return _local(strategy, tf.function(lambda: strategy.run(nested, (tf.constant(1.0),)))())
            finally:
                turns.ended()

        return run

    assert at_once(loop(1.0), loop(10.0)) == [[2.0, 2.0], [20.0, 20.0]]
    assert gc.isenabled() == gc_is_on
    _assert_functions_are_called()


def _assert_functions_are_called() -> None:
    """A tf.function in a tf.function is called, not inlined."""

    @tf.function
    def inner(x: Any) -> Any:
        return x + 1.0

    outer = tf.function(lambda x: inner(x)).get_concrete_function(tf.TensorSpec([]))
    assert any("PartitionedCall" in op.type for op in outer.graph.get_operations())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_middle_of_a_trace_leaves_nothing_behind(strategy: Any, error: type[BaseException]) -> None:
    gc_is_on = gc.isenabled()

    @tf.function
    def nested(x: Any, fails: bool) -> Any:
        x = tf.distribute.get_replica_context().all_reduce("SUM", x + 0.0)
        if fails:
            raise error("in the middle")
        return x

    for is_eager in (True, False):
        for fails in (True, False):

            def step(fails: bool = fails) -> Any:
                return strategy.run(nested, (tf.constant(1.0), fails))

            step = step if is_eager else tf.function(step)
            if fails:
                with pytest.raises(error, match="in the middle"):
                    step()
            else:
                assert _local(strategy, step()) == [strategy.num_replicas_in_sync] * strategy.num_replicas_in_sync
            assert gc.isenabled() == gc_is_on
            assert strategy.extended.thread_weights is None
            assert not tf.distribute.has_strategy()
            _assert_functions_are_called()


def test_two_eager_runs_of_batches_with_different_weights() -> None:
    """Each thread stops in its replica function while the other is in its own; neither sees the other's weights."""
    strategy = lockstep.MirroredStrategy(devices(3))
    with strategy.scope():
        states = [tf.Variable(0.0, aggregation=tf.VariableAggregation.NONE) for _ in range(2)]
        counts = [
            tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
            for _ in range(2)
        ]

    def loop(which: int, sizes: list[int], turns: TakingTurns | None) -> Callable[[], Any]:
        def replica(x: Any) -> Any:
            if turns is not None:
                turns.meet()
            loss = tf.nn.compute_average_loss(x)
            context = tf.distribute.get_replica_context()
            total = context.all_reduce("SUM", loss)
            merged = context.merge_call(
                lambda s, v: s.extended.reduce_to("SUM", v, s.extended.worker_devices[0]), args=(tf.reduce_sum(x),)
            )
            if turns is not None:
                turns.meet()
            states[which].assign(total)
            counts[which].assign_add(1.0)
            return total, merged

        def run() -> Any:
            try:
                results = []
                for size in sizes:
                    total, merged = strategy.run(replica, (strategy.split(tf.range(1.0, size + 1.0)),))
                    results.append((_local(strategy, total)[0], _local(strategy, merged)[0], float(states[which])))
                return results
            finally:
                if turns is not None:
                    turns.ended()

        return run

    sizes = [[5, 1, 7], [2, 4, 1]]
    alone = [loop(i, s, None)() for i, s in enumerate(sizes)]
    assert [[total for total, _, _ in results] for results in alone] == [[3.0, 1.0, 4.0], [1.5, 2.5, 1.0]]
    counted = [float(c) for c in counts]
    for _ in range(3):
        turns = TakingTurns()
        assert at_once(*(loop(i, s, turns) for i, s in enumerate(sizes))) == alone
    assert [float(c) for c in counts] == [4 * c for c in counted]


def test_a_traced_and_an_eager_run_with_merge_calls_at_once(strategy: Any) -> None:
    def replica(x: Any) -> Any:
        return tf.distribute.get_replica_context().merge_call(
            lambda s, v: s.extended.reduce_to("SUM", v, s.extended.worker_devices[0]), args=(tf.reduce_sum(x),)
        )

    def batches() -> Any:
        return [strategy.split(tf.range(1.0, size + 1.0)) for size in (4, 1, 5, 2)]

    def traced() -> Any:
        step = tf.function(lambda x: strategy.run(replica, (x,)))
        return [_local(strategy, step(x))[0] for x in batches() * 3]

    def eager() -> Any:
        return [_local(strategy, strategy.run(replica, (x,)))[0] for x in batches() * 3]

    want = [10.0, 1.0, 15.0, 3.0] * 3
    assert at_once(traced, eager, traced, eager) == [want] * 4


def test_a_tf_function_given_to_run_by_two_threads_is_traced_once(strategy: Any) -> None:
    traces: list[int] = []

    @tf.function
    def replica(x: Any) -> Any:
        traces.append(1)
        return x + 1.0

    def call() -> Any:
        return _local(strategy, strategy.run(replica, (tf.constant(1.0),)))

    n = strategy.num_replicas_in_sync
    assert at_once(*[call] * 4) == [[2.0] * n] * 4
    assert len(traces) == 1


def test_garbage_collection_comes_back_with_the_last_of_overlapping_traces() -> None:
    assert gc.isenabled()
    first, second = replicas._no_garbage_collection, replicas._no_garbage_collection
    with first:
        with second:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_strategies_made_at_once_install_the_seams_once() -> None:
    made = at_once(*[lambda: lockstep.MirroredStrategy(devices(2))] * 4)
    assert [s.num_replicas_in_sync for s in made] == [2] * 4


def test_calls_of_functions_are_watched_by_one_wrapper_for_good() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))

    @tf.function
    def nested(x: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    seen = []
    for _ in range(2):
        tf.function(lambda: strategy.run(nested, (tf.constant(1.0),)))()
        seen.append(Function.__call__)
    assert seen[0] is seen[1]
