"""The copies of a variable: what TensorFlow makes for one device, on each of them."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine.tf_private import CopiedVariable

KINDS: dict[str, Callable[[], tf.Variable]] = {
    "float32": lambda: tf.Variable(np.arange(6, dtype="float32").reshape(2, 3), name="weights"),
    "frozen": lambda: tf.Variable([1.5, 2.5], trainable=False, name="outer/frozen"),
    "drawn": lambda: tf.Variable(lambda: tf.random.normal([3]), name="drawn"),
    "int64 scalar": lambda: tf.Variable(3, dtype="int64", trainable=False),
    "bool": lambda: tf.Variable([True, False]),
    "string": lambda: tf.Variable(["a", "b"]),
    "bfloat16": lambda: tf.Variable([1.0, 2.0], dtype="bfloat16"),
    "of any length": lambda: tf.Variable([1.0, 2.0], shape=[None]),
    "constrained": lambda: tf.Variable([1.0, -2.0], constraint=tf.nn.relu),
    "added up": lambda: tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM),
    "read together": lambda: tf.Variable(
        0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.MEAN
    ),
}


@contextlib.contextmanager
def no_copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every component is made by TensorFlow's own creator."""
    with monkeypatch.context() as patch:
        patch.setattr(CopiedVariable, "can_copy", staticmethod(lambda first: False))
        yield


def described(variable: Any) -> dict[str, Any]:
    names = ("name", "dtype", "trainable", "synchronization", "aggregation", "constraint", "device", "in_graph_mode")
    of_handle = variable.handle._handle_data.SerializeToString()
    return {
        **{name: getattr(variable, name, None) for name in names},
        "shape": variable.shape.as_list(),
        "handle": (of_handle, variable.handle._name, variable.handle.shape),
        "parent": variable.handle._parent_trackable() is variable,
        "unique": variable._unique_id.rsplit("_", 1)[0],
        "strategy": variable._distribute_strategy,
    }


@pytest.mark.versions
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_what_the_creator_makes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = lockstep.MirroredStrategy(devices(3))
    with strategy.scope(), tf.name_scope("scope"):
        copied = KINDS[kind]()
        with no_copying(monkeypatch):
            made = KINDS[kind]()
    assert [type(c) for c in copied.values[1:]] == [CopiedVariable] * 2
    assert not any(isinstance(c, CopiedVariable) for c in made.values)
    for one, other in zip(copied.values, made.values, strict=True):
        assert described(one) == described(other)
    assert len({c._unique_id for c in copied.values}) == 3
    assert len({c.numpy().tobytes() if kind != "string" else str(c.numpy()) for c in copied.values}) == 1


def test_each_replica_writes_its_own() -> None:
    strategy = lockstep.MirroredStrategy(devices(3))
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    for replica, component in enumerate(variable.values):
        component.assign_add([replica, 10.0 * replica])
    assert [c.numpy().tolist() for c in variable.values] == [[1.0, 2.0], [2.0, 12.0], [3.0, 22.0]]
    with pytest.raises(ValueError, match="shape"):
        variable.values[1].assign([1.0, 2.0, 3.0])


def test_a_checkpoint_holds_one_copy_and_restores_all(tmp_path: pathlib.Path) -> None:
    strategy = lockstep.MirroredStrategy(devices(3))
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    variable.assign([5.0, 7.0])
    path = tf.train.Checkpoint(v=variable).save(str(tmp_path / "c"))
    assert sum("VARIABLE_VALUE" in name and "v/" in name for name, _ in tf.train.list_variables(path)) == 1
    variable.assign([0.0, 0.0])
    tf.train.Checkpoint(v=variable).restore(path).assert_consumed()
    assert [c.numpy().tolist() for c in variable.values] == [[5.0, 7.0]] * 3


def test_a_creator_of_the_user_decides() -> None:
    """A component that is not a plain variable is left to who made it."""
    asked: list[str] = []

    def creator(next_creator: Callable, **kwargs: Any) -> Any:
        asked.append(kwargs["name"])
        return next_creator(**{**kwargs, "caching_device": "/cpu:0"})

    strategy = lockstep.MirroredStrategy(devices(2))
    with tf.variable_creator_scope(creator), strategy.scope():
        variable = tf.Variable(1.0, name="cached")
    assert asked == ["cached", "cached/replica_1/"]
    assert not isinstance(variable.values[1], CopiedVariable)
    assert [c.numpy() for c in variable.values] == [1.0, 1.0]


@pytest.mark.parametrize("graph", [True, False])
def test_what_a_write_to_a_local_variable_gives_back(graph: bool) -> None:
    """Each replica's own value, also where it is returned as it is."""
    strategy = lockstep.MirroredStrategy(devices(2))
    with strategy.scope():
        local = tf.Variable(
            1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM, trainable=False
        )

    def replica() -> Any:
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        return local.assign_add(number + 1.0)

    got = (tf.function(lambda: strategy.run(replica)) if graph else lambda: strategy.run(replica))()
    assert [float(v) for v in strategy.experimental_local_results(got)] == [2.0, 3.0]


def test_a_per_replica_value_in_a_closure_is_added_to_a_sum() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    values = strategy.experimental_distribute_values_from_function(lambda c: tf.constant(c.replica_id_in_sync_group + 2.0))
    with strategy.scope():
        total = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    for run in (
        lambda: strategy.run(lambda: total.assign(values)),
        tf.function(lambda: strategy.run(lambda: total.assign(values))),
    ):
        total.assign(0.0)
        run()
        assert [float(v) for v in total.values] == [5.0, 5.0]
