"""Each field of tf.distribute's option objects does what it does there, or changes no result; anything else is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.errors import BatchError, OptionError, UnsupportedError

InputOptions, RunOptions = tf.distribute.InputOptions, tf.distribute.RunOptions
CommunicationOptions = tf.distribute.experimental.CommunicationOptions
MODE = tf.distribute.InputReplicationMode
HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


def _strategy(n: int = 2) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(n))


def _devices_of(strategy: Any, dataset: Any) -> list[list[str]]:
    local = strategy.experimental_local_results
    parts = [[tf.nest.flatten(v, expand_composites=True) for v in local(leaf)] for e in dataset for leaf in _leaves(e)]
    return [[p.device for p in replica] for leaf in parts for replica in leaf]


def _leaves(element: Any) -> list[Any]:
    return list(element.values()) if isinstance(element, dict) else [element]


def _numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(6)


def _of_all_kinds(batch: int = 5) -> tf.data.Dataset:
    parts = {
        "dense": tf.range(6),
        "string": tf.constant(list("abcdef")),
        "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5], [6]]),
        "sparse": tf.sparse.from_dense(np.eye(6, 2)),
    }
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("options", [None, InputOptions(), InputOptions(experimental_fetch_to_device=True)])
def test_slices_lie_on_their_replicas_device(n: int, options: Any) -> None:
    strategy = _strategy(n)
    for dataset in (
        strategy.experimental_distribute_dataset(_of_all_kinds(), options),
        strategy.distribute_datasets_from_function(lambda context: _of_all_kinds(), options),
        strategy.distribute_datasets_from_function(lambda context: _numbers(), options),
    ):
        element = next(iter(dataset))
        for leaf in _leaves(element):
            for value, device in zip(strategy.experimental_local_results(leaf), strategy.extended.worker_devices, strict=True):
                assert {part.device for part in tf.nest.flatten(value, expand_composites=True)} == {device}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_slices_lie_on_their_replicas_device_in_a_function(n: int) -> None:
    strategy = _strategy(n)
    take = tf.function(lambda iterator: strategy.experimental_local_results(next(iterator)))
    dataset = _numbers()
    for distributed in (
        strategy.experimental_distribute_dataset(dataset.batch(4)),
        strategy.distribute_datasets_from_function(lambda context: dataset),
    ):
        assert tuple(value.backing_device for value in take(iter(distributed))) == strategy.extended.worker_devices


@pytest.mark.parametrize("mode", [MODE.PER_WORKER, MODE.PER_REPLICA])
def test_not_fetched_slices_stay_on_the_host(mode: Any) -> None:
    options = InputOptions(experimental_fetch_to_device=False, experimental_replication_mode=mode)
    made = _strategy(3).distribute_datasets_from_function(lambda context: _numbers(), options)
    assert {device for leaf in _devices_of(_strategy(3), made) for device in leaf} == {HOST}


@pytest.mark.parametrize("fetch", [True, False])
def test_placed_on_device_gives_the_same_there(fetch: bool) -> None:
    strategy = _strategy(2)
    options = InputOptions(
        experimental_fetch_to_device=fetch,
        experimental_place_dataset_on_device=not fetch,
        experimental_replication_mode=MODE.PER_REPLICA,
    )
    for i, x in enumerate(strategy.distribute_datasets_from_function(lambda context: _numbers(), options)):
        values = strategy.experimental_local_results(x)
        assert [int(v) for v in values] == [i, i]
        assert [v.device for v in values] == list(strategy.extended.worker_devices)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_dataset_for_each_replica(n: int) -> None:
    strategy, contexts = _strategy(n), []

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return tf.data.Dataset.range(3).map(lambda x: x + 10 * context.input_pipeline_id)

    options = InputOptions(experimental_replication_mode=MODE.PER_REPLICA)
    made = strategy.distribute_datasets_from_function(make, options)
    assert contexts == [(n, r, n) for r in range(n)]
    got = [[int(v) for v in strategy.experimental_local_results(x)] for x in made]
    assert got == [[i + 10 * r for r in range(n)] for i in range(3)]


@pytest.mark.parametrize("n", [2, 3])
def test_datasets_of_different_lengths_for_each_replica(n: int) -> None:
    """Replica r has r + 1 batches: none is lost, the replicas left over are empty, and the loss weighs each row alike."""
    strategy = _strategy(n)
    options = InputOptions(experimental_replication_mode=MODE.PER_REPLICA)

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return _of_all_kinds(batch=2).take(context.input_pipeline_id + 1)

    made = strategy.distribute_datasets_from_function(make, options)
    assert int(made.cardinality()) == n
    rows = [[[int(x) for x in v] for v in strategy.experimental_local_results(e["dense"])] for e in made]
    # Replica 0 always has rows: once its own dataset has ended, those of the first whose dataset has not.
    assert rows == [[[2 * i, 2 * i + 1] if r == 0 or r > i else [] for r in range(n)] for i in range(n)]
    texts = [[list(v.numpy()) for v in strategy.experimental_local_results(e["string"])] for e in made]
    assert [[len(v) for v in e] for e in texts] == [[len(v) for v in e] for e in rows]
    ragged = [[v.nrows() for v in strategy.experimental_local_results(e["ragged"])] for e in made]
    assert [[int(v) for v in e] for e in ragged] == [[len(v) for v in e] for e in rows]

    @tf.function
    def mean(batch: Any) -> tf.Tensor:
        share = strategy.run(lambda b: tf.nn.compute_average_loss(tf.cast(b["dense"], tf.float32)), (batch,))
        return strategy.reduce("SUM", share, axis=None)

    for batch, parts in zip(made, rows, strict=True):
        np.testing.assert_allclose(float(mean(batch)), np.mean(sum(parts, [])), rtol=1e-6)


def test_the_datasets_of_replicas_must_be_alike() -> None:
    options = InputOptions(experimental_replication_mode=MODE.PER_REPLICA)

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return _numbers() if context.input_pipeline_id else tf.data.Dataset.from_tensor_slices(["a"])

    with pytest.raises(BatchError, match=r"one structure.*replica 0: .*string.*replica 1: .*int64"):
        _strategy().distribute_datasets_from_function(make, options)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("from_function", [False, True])
def test_buffer_size(ahead: int, from_function: bool) -> None:
    """No more is read than the global batch handed out, ``ahead`` more, and the two that tf.data works on at a time."""
    read: list[int] = []

    def rows() -> Any:
        for i in range(40):
            read.append(i)
            yield np.full([2], i, np.int64)

    source = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([2], tf.int64))
    strategy, options = _strategy(2), InputOptions(experimental_per_replica_buffer_size=ahead)
    if from_function:
        dataset = strategy.distribute_datasets_from_function(lambda context: source, options)
    else:
        dataset = strategy.experimental_distribute_dataset(source, options)
    next(iter(dataset))
    per_element = 2 if from_function else 1
    assert len(read) <= per_element * (1 + ahead) + 2


def test_each_replica_apart_is_not_for_global_batches() -> None:
    options = InputOptions(experimental_replication_mode=MODE.PER_REPLICA)
    with pytest.raises(UnsupportedError, match=r"split over the replicas.*distribute_datasets_from_function"):
        _strategy().experimental_distribute_dataset(_of_all_kinds(), options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (InputOptions(experimental_place_dataset_on_device=True), "PER_WORKER.*Leave the first out"),
        (
            InputOptions(experimental_place_dataset_on_device=True, experimental_replication_mode=MODE.PER_REPLICA),
            "need not be fetched.*Set one of them to False",
        ),
        ({"experimental_fetch_to_device": True}, r"wrong type. Received: options=.*InputOptions"),
        (InputOptions(experimental_fetch_to_device="yes"), "experimental_fetch_to_device='yes'. Allowed: True or False"),
        (InputOptions(experimental_replication_mode="PER_REPLICA"), "experimental_replication_mode='PER_REPLICA'"),
        (InputOptions(experimental_place_dataset_on_device=1), "experimental_place_dataset_on_device=1"),
        (InputOptions(experimental_per_replica_buffer_size=-1), "buffer_size=-1. Allowed: a whole number"),
        (InputOptions(experimental_per_replica_buffer_size=1.5), "buffer_size=1.5"),
        (InputOptions(experimental_per_replica_buffer_size=True), "buffer_size=True"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_wrong_input_options(n: int, options: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        _strategy(n).distribute_datasets_from_function(lambda context: _of_all_kinds(), options)
    if getattr(options, "experimental_replication_mode", None) != MODE.PER_REPLICA:
        with pytest.raises(OptionError, match=words):
            _strategy(n).experimental_distribute_dataset(_of_all_kinds(), options)


def test_options_for_what_is_distributed_already() -> None:
    strategy = _strategy()
    dataset = strategy.experimental_distribute_dataset(_of_all_kinds())
    with pytest.raises(OptionError, match="where the dataset is distributed first"):
        strategy.experimental_distribute_dataset(dataset, InputOptions())


@pytest.mark.parametrize(
    "options",
    [
        None,
        RunOptions(),
        RunOptions(experimental_enable_dynamic_batch_size=False),
        RunOptions(experimental_bucketizing_dynamic_shape=True),
        RunOptions(experimental_xla_options=tf.tpu.XLAOptions()),
        RunOptions,
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_run_options_change_nothing(options: Any, traced: bool) -> None:
    strategy = _strategy(2)

    def step() -> Any:
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, (strategy.split(tf.range(5)),), options=options), axis=None)

    assert int(tf.function(step)() if traced else step()) == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"Received: options=\{\}.*RunOptions"),
        (InputOptions(), "Received: options=InputOptions.*Allowed: tf.distribute.RunOptions"),
        (RunOptions(experimental_enable_dynamic_batch_size="no"), "experimental_enable_dynamic_batch_size='no'"),
        (RunOptions(experimental_bucketizing_dynamic_shape=None), "experimental_bucketizing_dynamic_shape=None"),
        (RunOptions(experimental_xla_options=True), "experimental_xla_options=True. Allowed: None or a tf.tpu.XLAOptions"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_wrong_run_options(n: int, options: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        _strategy(n).run(lambda: 1, options=options)


def _reductions(strategy: Any, options: Any) -> list[Any]:
    values = strategy.experimental_distribute_values_from_function(lambda c: tf.constant([1.0 + c.replica_id_in_sync_group]))
    extended, op = strategy.extended, tf.distribute.ReduceOp.SUM
    each = strategy.run(lambda v: tf.distribute.get_replica_context().all_reduce(op, v, options=options), (values,))
    return [
        extended.reduce_to(op, values, destinations=values, options=options),
        *extended.batch_reduce_to(op, [(values, values)], options=options),
        extended._gather_to(values, HOST, axis=0, options=options),
        each,
    ]


@pytest.mark.parametrize(
    "options",
    [
        None,
        CommunicationOptions(),
        CommunicationOptions(bytes_per_pack=4),
        CommunicationOptions(timeout_seconds=0.5),
        CommunicationOptions(implementation=tf.distribute.experimental.CommunicationImplementation.RING),
        CommunicationOptions(implementation="nccl"),
    ],
)
def test_communication_options_change_no_result(options: Any) -> None:
    strategy = _strategy(2)
    reduced, batched, gathered, each = _reductions(strategy, options)
    for total in (reduced, batched, each):
        assert [v.numpy().tolist() for v in strategy.experimental_local_results(total)] == [[3.0], [3.0]]
    assert gathered.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bytes_per_pack": 4}, "Received: options=.*CommunicationOptions"),
        (CommunicationOptions(bytes_per_pack=1.5), "bytes_per_pack=1.5. Allowed: a whole number of bytes"),
        (CommunicationOptions(timeout_seconds=-1), "timeout_seconds=-1. Allowed: None or a number of seconds"),
        (CommunicationOptions(timeout_seconds="1 s"), "timeout_seconds='1 s'"),
    ],
)
def test_wrong_communication_options(options: Any, words: str) -> None:
    strategy = _strategy(2)
    values = strategy.split(tf.range(4.0))
    extended, op = strategy.extended, tf.distribute.ReduceOp.SUM
    calls = [
        lambda: extended.reduce_to(op, values, destinations=values, options=options),
        lambda: extended.batch_reduce_to(op, [(values, values)], options=options),
        lambda: extended._gather_to(values, HOST, axis=0, options=options),
        lambda: strategy.run(lambda v: tf.distribute.get_replica_context().all_reduce(op, v, options=options), (values,)),
    ]
    for call in calls:
        with pytest.raises(OptionError, match=words):
            call()


@pytest.mark.parametrize("n", [1, 2])
def test_what_tensorflow_keeps_for_its_version_1(n: int) -> None:
    strategy = _strategy(n)
    with pytest.raises(UnsupportedError, match=r"make_dataset_iterator.*experimental_distribute_dataset\(dataset\)"):
        strategy.make_dataset_iterator(_of_all_kinds())
    with pytest.raises(UnsupportedError, match=r"make_input_fn_iterator.*distribute_datasets_from_function\(dataset_fn\)"):
        strategy.make_input_fn_iterator(lambda context: _of_all_kinds())
    with pytest.raises(UnsupportedError, match=r"experimental_run_steps_on_iterator.*a loop in a tf\.function"):
        strategy.extended.experimental_run_steps_on_iterator(lambda context, x: x, None, 2)


@pytest.mark.parametrize("n", [1, 2])
def test_wrong_communication_options_in_a_replica(n: int) -> None:
    wrong = CommunicationOptions(bytes_per_pack=1.5)

    def reduced(x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("SUM", x, options=wrong)

    def gathered(x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(x, 0, options=wrong)

    strategy = _strategy(n)
    for replica in (reduced, gathered):
        for run in (strategy.run, tf.function(strategy.run)):
            with pytest.raises(OptionError, match="bytes_per_pack=1.5"):
                run(replica, (tf.constant([1.0]),))
