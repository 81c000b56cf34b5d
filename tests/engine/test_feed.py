"""Splitting a global batch: every row once, in order, sizes within one of each other."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from device_tools import devices
from lockstep.engine import feed
from lockstep.errors import BatchError


@given(size=st.integers(0, 200), replicas=st.integers(1, 8))
def test_bounds_cover_every_row_once(size: int, replicas: int) -> None:
    cuts = feed.bounds(size, replicas)
    sizes = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    assert cuts[0] == 0 and cuts[-1] == size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(size=st.integers(1, 9), replicas=st.integers(2, 4))
def test_split_keeps_rows_in_order(size: int, replicas: int) -> None:
    batch = {
        "dense": np.arange(size * 2).reshape(size, 2),
        "string": np.array([f"row {i}" for i in range(size)]),
        "ragged": tf.ragged.constant([[i] * (i % 3) for i in range(size)], dtype=tf.int32),
        "sparse": tf.sparse.from_dense(np.eye(size, 3)),
    }
    slices = feed.split(batch, replicas)
    dense = np.concatenate([v.numpy() for v in slices["dense"].values])
    np.testing.assert_array_equal(dense, batch["dense"])
    assert [s for v in slices["string"].values for s in v.numpy()] == [s.encode() for s in batch["string"]]
    assert [r for v in slices["ragged"].values for r in v.to_list()] == batch["ragged"].to_list()
    sparse = np.concatenate([tf.sparse.to_dense(v).numpy() for v in slices["sparse"].values])
    np.testing.assert_array_equal(sparse, np.eye(size, 3))


def test_a_shorter_batch_has_the_same_type() -> None:
    long, short = feed.split(np.zeros((8, 3)), 2), feed.split(np.zeros((3, 3)), 2)
    assert long._type_spec == short._type_spec


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (np.float32(1.0), ["first axis", "shape ()", "batch("]),
        ({"a": np.ones((4, 2)), "b": np.ones(3)}, ["same number of examples", "['a']: 4", "['b']: 3"]),
    ],
)
def test_split_refuses(batch: object, words: list[str]) -> None:
    with pytest.raises(BatchError) as error:
        feed.split(batch, 2)
    for word in words:
        assert word in str(error.value)


def _strategy(n: int = 2) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(n))


def test_dataset_refuses_scalars_unknown_rank_and_nothing() -> None:
    strategy = _strategy()
    with pytest.raises(BatchError, match="there is none"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(5))
    unknown = tf.data.Dataset.range(5).batch(2).map(lambda x: tf.py_function(lambda v: v, [x], tf.int64))
    with pytest.raises(BatchError, match="unknown rank"):
        strategy.experimental_distribute_dataset(unknown)
    with pytest.raises(BatchError, match="nothing to train on"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(5).take(0).batch(2))
    with pytest.raises(BatchError, match=r"Only a tf\.data\.Dataset"):
        strategy.experimental_distribute_dataset([1, 2, 3])


def test_dataset_with_axes_that_disagree_at_run_time() -> None:
    signature = (tf.TensorSpec([None, 2]), tf.TensorSpec([None]))
    dataset = tf.data.Dataset.from_generator(lambda: iter([(np.ones((4, 2)), np.ones(3))]), output_signature=signature)
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of examples"):
        list(_strategy().experimental_distribute_dataset(dataset))


def test_function_dataset_ends_in_the_middle_of_a_group() -> None:
    strategy = _strategy(3)
    dataset = strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(7).batch(2))
    got = [[v.numpy().tolist() for v in strategy.experimental_local_results(b)] for b in dataset]
    assert got == [[[0, 1], [2, 3], [4, 5]], [[6], [], []]]


def test_distributed_dataset_is_what_tensorflow_calls_one() -> None:
    strategy = _strategy()
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(5).batch(4))
    assert isinstance(dataset, tf.distribute.DistributedDataset)
    assert isinstance(iter(dataset), tf.distribute.DistributedIterator)
    assert strategy.experimental_distribute_dataset(dataset) is dataset
    sizes = [[int(v.shape[0]) for v in strategy.experimental_local_results(b)] for b in dataset]
    assert sizes == [[2, 2], [1, 0]]
