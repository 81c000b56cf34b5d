"""strategy.run: traced once, the same results as a trace per replica or as plain arithmetic."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine import keras_private, tf_private
from lockstep.errors import UnsupportedError, UnsupportedVersionError

pytestmark = pytest.mark.versions


def _context() -> Any:
    return tf.distribute.get_replica_context()


def _local(strategy: Any, value: Any) -> list[Any]:
    return [v.numpy().tolist() for v in strategy.experimental_local_results(value)]


@pytest.fixture(params=[2, 3])
def strategy(request: pytest.FixtureRequest) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(request.param))


def _ids(strategy: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(lambda c: tf.constant([c.replica_id_in_sync_group + 1.0, 2.0]))


def test_a_step_is_traced_once_for_all_replicas_and_never_again(strategy: Any) -> None:
    traces: list[int] = []

    @tf.function
    def step(batch: Any) -> Any:
        def replica_step(x: tf.Tensor) -> tf.Tensor:
            traces.append(1)
            return tf.reduce_sum(x)

        return strategy.reduce("SUM", strategy.run(replica_step, (batch,)), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices(np.arange(11, dtype="float32")).batch(4)
    totals = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    assert totals == [6.0, 22.0, 27.0]
    assert len(traces) == 1


def test_fit_does_not_retrace_for_the_last_batch(strategy: Any) -> None:
    traces: list[int] = []

    class Counted(keras.Model):
        def train_step(self, data: Any) -> Any:
            traces.append(1)
            return super().train_step(data)

    with strategy.scope():
        # Built ahead; else its variables are made in the first step, for which TensorFlow traces a function twice.
        inputs = keras.Input((3,))
        model = Counted(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    model.fit(np.ones((11, 3)), np.ones((11, 1)), batch_size=4, epochs=2, verbose=0)
    assert len(traces) == 1


def test_merge_call_falls_back_with_the_same_results(strategy: Any) -> None:
    def merged(strategy: Any, x: Any) -> Any:
        return strategy.extended.reduce_to("SUM", x, strategy.extended.worker_devices[0])

    def with_merge_call(x: tf.Tensor) -> tf.Tensor:
        return _context().merge_call(merged, args=(x,))

    def with_all_reduce(x: tf.Tensor) -> tf.Tensor:
        return _context().all_reduce("SUM", x)

    values = _ids(strategy)
    n = strategy.num_replicas_in_sync
    want = [[sum(range(1, n + 1)), 2.0 * n]] * n
    assert _local(strategy, tf.function(lambda: strategy.run(with_all_reduce, (values,)))()) == want
    assert _local(strategy, strategy.run(with_all_reduce, (values,))) == want
    merged_result = tf.function(lambda: strategy.run(with_merge_call, (values,)))()
    assert _local(strategy, merged_result)[0] == want[0]


def test_all_gather_of_uneven_values_and_its_gradient(strategy: Any) -> None:
    values = strategy.experimental_distribute_values_from_function(
        lambda c: tf.range(c.replica_id_in_sync_group + 1, dtype=tf.float32)
    )

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            whole = _context().all_gather(x, axis=0)
            loss = tf.reduce_sum(whole * whole)
        return whole, tape.gradient(loss, x)

    whole, gradient = tf.function(lambda: strategy.run(step, (values,)))()
    n = strategy.num_replicas_in_sync
    want = [float(i) for r in range(n) for i in range(r + 1)]
    assert _local(strategy, whole) == [want] * n
    # Every replica adds the same loss, so the gradient is n times that of one.
    assert _local(strategy, gradient) == [[2.0 * n * i for i in range(r + 1)] for r in range(n)]


def test_gradient_through_all_reduce(strategy: Any) -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(_context().all_reduce("MEAN", x) ** 2)
        return tape.gradient(loss, x)

    n = strategy.num_replicas_in_sync
    mean = (n + 1) / 2
    got = _local(strategy, tf.function(lambda: strategy.run(step, (_ids(strategy),)))())
    np.testing.assert_allclose(got, [[2 * mean, 4.0]] * n, rtol=1e-6)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_gradients_without_a_tape(strategy: Any, op: str) -> None:
    def step(x: tf.Tensor) -> Any:
        return tf.gradients(_context().all_reduce(op, x) * (x + 1.0), [x])[0]

    n = strategy.num_replicas_in_sync
    got = _local(strategy, tf.function(lambda: strategy.run(step, (_ids(strategy),)))())
    # y_r = R (x_r + 1): R itself, and of R what all replicas add to it.
    share = 1.0 if op == "SUM" else 1.0 / n
    numbers = np.array([[r + 1.0, 2.0] for r in range(n)])
    np.testing.assert_allclose(got, share * (numbers.sum(0) + (numbers + 1).sum(0)) * np.ones((n, 1)), rtol=1e-6)


def test_exchange_in_a_nested_function_and_in_a_loop(strategy: Any) -> None:
    @tf.function
    def nested(x: tf.Tensor) -> tf.Tensor:
        return _context().all_reduce("SUM", x) + tf.cast(_context().replica_id_in_sync_group, tf.float32)

    def looped(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            x = _context().all_reduce("SUM", x)
        return x

    values = _ids(strategy)
    n = strategy.num_replicas_in_sync
    got = _local(strategy, tf.function(lambda: strategy.run(nested, (values,)))())
    assert got == [[n * (n + 1) / 2 + r, 2.0 * n + r] for r in range(n)]
    with pytest.raises(UnsupportedError, match="around strategy.run"):
        tf.function(lambda: strategy.run(looped, (values,)))()


def test_seeded_random_ops_differ_between_replicas_and_repeat_from_the_seed(strategy: Any) -> None:
    def draw() -> list[Any]:
        tf.random.set_seed(3)
        return _local(strategy, tf.function(lambda: strategy.run(lambda: tf.random.uniform([4])))())

    first, second = draw(), draw()
    assert first == second
    assert len({tuple(numbers) for numbers in first}) == strategy.num_replicas_in_sync


def test_dropout_masks_differ_between_replicas_and_steps(strategy: Any) -> None:
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=1)
    step = tf.function(lambda: strategy.run(lambda: layer(tf.ones([64]), training=True)))
    first, second = _local(strategy, step()), _local(strategy, step())
    masks = {tuple(mask) for mask in [*first, *second]}
    assert len(masks) == 2 * strategy.num_replicas_in_sync


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [("SUM", lambda v: sum(v)), ("MEAN", lambda v: sum(v) / len(v)), ("ONLY_FIRST_REPLICA", lambda v: v[0])],
)
@pytest.mark.parametrize("graph", [True, False])
def test_aggregated_variables(strategy: Any, aggregation: str, want: Any, graph: bool) -> None:
    with strategy.scope():
        variable = tf.Variable(0.0, aggregation=tf.VariableAggregation[aggregation])

    def run() -> None:
        strategy.run(lambda x: variable.assign(x[0]), (_ids(strategy),))

    (tf.function(run) if graph else run)()
    numbers = [r + 1.0 for r in range(strategy.num_replicas_in_sync)]
    assert _local(strategy, variable) == pytest.approx([want(numbers)] * len(numbers))


@pytest.mark.parametrize("graph", [True, False])
def test_variables_written_locally_become_equal(strategy: Any, graph: bool) -> None:
    with strategy.scope():
        mean, count = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)

    def step(x: tf.Tensor) -> None:
        mean.assign(tf.reduce_mean(x))
        count.assign_add(1)

    batch = strategy.split(np.arange(7, dtype="float32"))
    run = tf.function(lambda b: strategy.run(step, (b,))) if graph else (lambda b: strategy.run(step, (b,)))
    run(batch)
    n = strategy.num_replicas_in_sync
    # The mean over replicas, weighted by their slices, is the mean of the batch.
    assert _local(strategy, mean) == pytest.approx([3.0] * n)
    assert _local(strategy, count) == [1] * n


FIRST_VALUES = {
    "callable": lambda x: lambda: tf.zeros_like(0.0) + 5.0,
    "tensor": lambda x: tf.constant(5.0),
    "random": lambda x: lambda: tf.random.stateless_uniform((), (1, 2), 5.0, 5.001),
    "from the step": lambda x: lambda: x * 0.0 + 5.0,
}


@pytest.mark.parametrize("first", FIRST_VALUES)
def test_a_variable_made_in_the_step_starts_before_the_step_writes_it(strategy: Any, first: str) -> None:
    values = strategy.experimental_distribute_values_from_function(lambda c: tf.constant(float(c.replica_id_in_sync_group)))
    want = [5.0 + r for r in range(strategy.num_replicas_in_sync)]
    # The order was a race, so once is not enough.
    for _ in range(4):
        made: list[tf.Variable] = []

        def step(x: tf.Tensor, made: list[tf.Variable] = made) -> None:
            if not made:
                made.append(
                    tf.Variable(
                        FIRST_VALUES[first](x),
                        trainable=False,
                        synchronization=tf.VariableSynchronization.ON_READ,
                        aggregation=tf.VariableAggregation.SUM,
                    )
                )
            made[0].assign_add(x)

        with strategy.scope():
            tf.function(lambda x, step=step: strategy.run(step, (x,)))(values)
        np.testing.assert_allclose(_local(strategy, made[0]), want, rtol=1e-3)


def test_reduce_and_gather_of_uneven_slices(strategy: Any) -> None:
    slices = strategy.split(np.arange(10, dtype="float32").reshape(5, 2))
    np.testing.assert_allclose(strategy.reduce("SUM", slices, axis=0), [20.0, 25.0])
    np.testing.assert_allclose(strategy.reduce("MEAN", slices, axis=0), [4.0, 5.0])
    np.testing.assert_array_equal(strategy.gather(slices, axis=0), np.arange(10).reshape(5, 2))


def test_average_loss_of_uneven_slices(strategy: Any) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.compute_average_loss(x)

    for size in (5, 1):
        values = np.arange(size, dtype="float32") + 1
        dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(values))
        run = tf.function(lambda batch: strategy.reduce("SUM", strategy.run(step, (batch,)), axis=None))
        assert [float(run(batch)) for batch in dataset] == pytest.approx([values.mean()])


def test_a_replica_without_examples_returns_no_rows_and_adds_nothing(strategy: Any) -> None:
    with strategy.scope():
        steps = tf.Variable(7.0)

    one = tf.constant(1.0)

    def step(x: tf.Tensor) -> dict[str, Any]:
        total = _context().all_reduce("SUM", tf.reduce_sum(x))
        return {
            "one": one,
            "rows": x * 2,
            "sum": tf.reduce_sum(x),
            "mean": tf.reduce_mean(x),
            "all": total,
            "steps": steps.read_value(),
        }

    got = tf.function(lambda x: strategy.run(step, (strategy.split(x),)))(tf.constant([[3.0]]))
    idle = strategy.num_replicas_in_sync - 1
    assert _local(strategy, got["rows"]) == [[[6.0]], *[[]] * idle]
    assert _local(strategy, got["sum"]) == _local(strategy, got["mean"]) == [3.0, *[0.0] * idle]
    assert _local(strategy, got["all"]) == [3.0] * (idle + 1)
    assert set(_local(strategy, got["one"])) == {1.0}
    assert _local(strategy, got["steps"]) == [7.0] * (idle + 1)


def test_one_replica_takes_the_plain_path() -> None:
    strategy = lockstep.MirroredStrategy(devices(1))
    step = tf.function(lambda x: strategy.run(lambda v: _context().all_reduce("SUM", v * 2), (x,)))
    assert step(tf.constant([1.0, 2.0])).numpy().tolist() == [2.0, 4.0]
    graph = step.get_concrete_function(tf.constant([1.0, 2.0])).graph
    assert not any(op.type == "StatefulPartitionedCall" for op in graph.get_operations())


def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedVersionError, match=r"tensorflow 2\.99\.0.*Supported: 2\.20"):
        tf_private.check_version("2.99.0")
    monkeypatch.setattr(keras_private, "KNOWN", dict.fromkeys(keras_private.KNOWN, frozenset()))
    with pytest.raises(UnsupportedVersionError, match="differs at keras.src.losses.loss:scale_loss_for_distribution"):
        keras_private.install.__wrapped__()
