"""How a tensor is cut into shards, and the variables of which each replica holds one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from device_tools import devices
from lockstep.engine.shards import ShardedVariable, ShardLayout, by_shards

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([tf.float32, tf.float64, tf.bfloat16])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=shapes, replicas=st.integers(1, 8), dtype=dtypes)
def test_shards_put_together_are_the_whole(shape: tuple[int, ...], replicas: int, dtype: tf.DType) -> None:
    layout = ShardLayout(shape, replicas, dtype)
    whole = tf.cast(tf.reshape(tf.range(layout.size) % 251, shape), dtype)
    shards = [layout.own(whole, replica) for replica in range(replicas)]
    assert {tuple(shard.shape) for shard in shards} == {(layout.length,)}
    np.testing.assert_array_equal(layout.join(shards), whole)


@given(shape=shapes, replicas=st.integers(1, 8), dtype=dtypes)
def test_shards_begin_and_end_on_a_cache_line(shape: tuple[int, ...], replicas: int, dtype: tf.DType) -> None:
    layout = ShardLayout(shape, replicas, dtype)
    begins = [layout.begin(replica) for replica in range(replicas)]
    assert begins == sorted(begins) and begins[0] == 0 and begins[-1] + layout.length == layout.size
    # All but the last ones, which end with the tensor.
    assert all(begin * dtype.size % 64 == 0 for begin in begins if begin + layout.length < layout.size)


@given(replicas=st.integers(1, 8), elements=st.integers(1, 10_000_000))
def test_shards_are_balanced(replicas: int, elements: int) -> None:
    layout = ShardLayout((elements,), replicas, tf.float32)
    assert layout.length * replicas < elements + 16 * replicas
    if elements >= 320 * replicas:
        assert 0 <= layout.overhead <= 0.05


def test_a_position_may_be_a_tensor() -> None:
    layout = ShardLayout((1000,), 3, tf.float32)
    assert [int(layout.begin(tf.constant(r))) for r in range(3)] == [layout.begin(r) for r in range(3)]


def sharded(strategy: lockstep.MirroredStrategy, value: np.ndarray) -> ShardedVariable:
    layout = ShardLayout(value.shape, strategy.num_replicas_in_sync, tf.float32)
    with strategy.scope(), strategy.extended.sharded(layout, "whose"):
        variable = tf.Variable(value, trainable=False, name="slot")
    assert isinstance(variable, ShardedVariable)
    return variable


@pytest.mark.parametrize("replicas", [2, 3])
def test_outside_of_replicas_it_is_the_whole_tensor(replicas: int) -> None:
    strategy = lockstep.MirroredStrategy(devices(replicas))
    value = np.arange(100, dtype="float32").reshape(20, 5)
    variable = sharded(strategy, value)
    assert variable.shape == (20, 5)
    for read in (variable.numpy(), variable.read_value(), variable.value(), tf.identity(variable), variable + 0):
        np.testing.assert_array_equal(read, value)
    for change, want in [
        (lambda: variable.assign(2 * value), 2 * value),
        (lambda: variable.assign_add(value), 3 * value),
        (lambda: variable.assign_sub(value), 2 * value),
    ]:
        change()
        np.testing.assert_array_equal(variable.numpy(), want)
    with pytest.raises(ValueError, match="Shapes"):
        variable.assign(np.zeros(100, "float32"))


@pytest.mark.parametrize("in_function", [False, True])
def test_while_it_is_updated_it_is_the_replicas_shard(in_function: bool) -> None:
    strategy = lockstep.MirroredStrategy(devices(3))
    value = np.arange(96, dtype="float32").reshape(8, 12)
    variable = sharded(strategy, value)

    def step() -> tf.Tensor:
        with by_shards():
            before = variable.read_value()
            with tf.control_dependencies([before]):
                variable.assign_add(tf.ones([32]))
        return before

    def on_each() -> Any:
        return strategy.run(step)

    results = strategy.experimental_local_results((tf.function(on_each) if in_function else on_each)())
    np.testing.assert_array_equal(results, value.reshape(3, 32))
    np.testing.assert_array_equal(variable.numpy(), value + 1)
    assert [component.shape for component in strategy.experimental_local_results(variable)] == [(32,)] * 3


@pytest.mark.parametrize("in_function", [False, True])
def test_in_a_replica_it_is_whole(in_function: bool) -> None:
    strategy = lockstep.MirroredStrategy(devices(3))
    value = np.arange(100, dtype="float32").reshape(20, 5)
    variable = sharded(strategy, value)
    rows = tf.IndexedSlices(tf.ones([3, 5]), tf.constant([2, 7, 2]), tf.constant([20, 5]))
    last = tf.IndexedSlices(tf.zeros([1, 5]), tf.constant([19]), tf.constant([20, 5]))

    def step() -> tf.Tensor:
        before = variable.read_value()
        variable.assign_add(tf.ones([20, 5]))
        variable.assign_sub(0.5 * value)
        variable.scatter_add(rows)
        variable.scatter_sub(rows)
        variable.scatter_add(rows)
        variable.scatter_update(last)
        with tf.control_dependencies([before]):
            return before + variable

    def on_each() -> Any:
        return strategy.run(step)

    after = 0.5 * value + 1
    after[2], after[7], after[19] = after[2] + 2, after[7] + 1, 0
    results = strategy.experimental_local_results((tf.function(on_each) if in_function else on_each)())
    np.testing.assert_allclose(results, [value + after] * 3)
    np.testing.assert_allclose(variable.numpy(), after)


def test_it_cannot_be_put_together_in_a_loop() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    variable = sharded(strategy, np.zeros((8, 12), "float32"))

    def step() -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total + variable), (0, tf.zeros([8, 12])))[1]

    with pytest.raises(lockstep.errors.UnsupportedError, match=r"cannot be put together in a loop.*update=\"mirrored\""):
        tf.function(lambda: strategy.run(step))()


def test_a_checkpoint_does_not_depend_on_the_number_of_replicas(tmp_path: object) -> None:
    value = np.random.default_rng(0).normal(size=(30, 7)).astype("float32")
    path = tf.train.Checkpoint(v=sharded(lockstep.MirroredStrategy(devices(2)), value)).save(f"{tmp_path}/ckpt")
    other = sharded(lockstep.MirroredStrategy(devices(3)), 0 * value)
    plain = tf.Variable(0 * value)
    for variable in (other, plain):
        tf.train.Checkpoint(v=variable).restore(path).assert_consumed()
        np.testing.assert_array_equal(variable.numpy(), value)
