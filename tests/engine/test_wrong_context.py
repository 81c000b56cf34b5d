"""Calls in the wrong place, and results that do not fit together: errors that say what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine.replicas import StepFunction
from lockstep.errors import ReplicaContextError, UnsupportedError


@pytest.fixture(params=[1, 2, 3], scope="module")
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _scoped(strategy: Any) -> Any:
    with strategy.scope():
        return tf.constant(1.0)


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scope": (_scoped, "Leave it out: a variable that a replica function makes has a copy on every replica as it is."),
    "run": (lambda s: s.run(lambda: tf.constant(1.0)), "Call the function itself: it then runs on this replica"),
    "reduce": (lambda s: s.reduce("SUM", tf.constant(1.0), axis=None), "all_reduce(op, value), or reduce what strategy.run"),
    "gather": (lambda s: s.gather(tf.constant([1.0]), axis=0), "all_gather(value, axis), or gather what strategy.run returns"),
}


@pytest.mark.parametrize("method", CALLS)
def test_what_looks_at_all_replicas_is_not_called_in_one(strategy: Any, method: str) -> None:
    call, advice = CALLS[method]

    def replica() -> Any:
        return call(strategy)

    for step in (lambda: strategy.run(replica), tf.function(lambda: strategy.run(replica))):
        with pytest.raises(ReplicaContextError) as error:
            step()
        assert f"strategy.{method} requires being in cross-replica context, outside of the replicas. " in str(error.value)
        assert f"Received: strategy.{method}() in a replica function. " in str(error.value)
        assert advice in str(error.value)
    assert issubclass(ReplicaContextError, RuntimeError)


def test_the_same_calls_are_right_where_replicas_are_merged(strategy: Any) -> None:
    def merged(strategy: Any, x: Any) -> Any:
        with strategy.scope():
            doubled = strategy.run(lambda x: 2.0 * x, (x,))
            return strategy.reduce("SUM", doubled, axis=None)

    def replica() -> Any:
        return tf.distribute.get_replica_context().merge_call(merged, args=(tf.constant(1.0),))

    want = 2.0 * strategy.num_replicas_in_sync
    for step in (lambda: strategy.run(replica), tf.function(lambda: strategy.run(replica))):
        assert {float(v) for v in strategy.experimental_local_results(step())} == {want}


RESULTS: dict[str, Callable[[int], Any]] = {
    "other keys": lambda r: {"a": 1.0} if r == 0 else {"b": 1.0},
    "more elements": lambda r: [tf.constant(1.0)] * (r + 1),
    "flatter": lambda r: (1.0, (2.0, 3.0)) if r == 0 else (1.0, 2.0),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_different_structure(kind: str) -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    with pytest.raises(UnsupportedError) as error:
        strategy.run(lambda: RESULTS[kind](int(tf.distribute.get_replica_context().replica_id_in_sync_group)))
    assert "must return the same structure on every replica. Received: " in str(error.value)
    assert " from replica 0, " in str(error.value) and " from replica 1. " in str(error.value)
    assert "Return the same keys and as many elements everywhere" in str(error.value)


def test_an_assertion_of_the_user_stays_what_it_is() -> None:
    def replica() -> Any:
        raise AssertionError("mine")

    strategy = lockstep.MirroredStrategy(devices(2))
    for step in (lambda: strategy.run(replica), tf.function(lambda: strategy.run(replica))):
        with pytest.raises(AssertionError, match="mine"):
            step()


def test_a_tensor_array_is_returned(strategy: Any) -> None:
    def replica() -> Any:
        made = tf.TensorArray(tf.float32, 2, clear_after_read=False)
        return {"array": made.unstack(tf.constant([1.0, 2.0])), "sum": tf.constant(3.0)}

    @tf.function
    def step() -> Any:
        results = strategy.experimental_local_results(strategy.run(replica))
        return [result["array"].stack() for result in results]

    assert [v.numpy().tolist() for v in step()] == [[1.0, 2.0]] * strategy.num_replicas_in_sync


def test_a_run_in_a_merge_call_is_made_in_its_own_way() -> None:
    """Not with the borrowed rows of the run around it: a replica without examples returns none of its own."""
    strategy = lockstep.MirroredStrategy(devices(3))

    def merged(strategy: Any) -> Any:
        inner = strategy.run(lambda x: x + 1.0, (strategy.split(tf.constant([1.0, 2.0])),))
        return strategy.gather(inner, axis=0)

    def replica(x: Any) -> Any:
        return x, tf.distribute.get_replica_context().merge_call(merged)

    step = StepFunction(replica)
    for run in (lambda x: strategy.run(step, (x,)), tf.function(lambda x: strategy.run(step, (x,)))):
        rows, joined = run(strategy.split(tf.constant([5.0, 6.0])))
        assert [v.numpy().tolist() for v in strategy.experimental_local_results(rows)] == [[5.0], [6.0], [5.0]]
        assert strategy.experimental_local_results(joined)[0].numpy().tolist() == [2.0, 3.0]
