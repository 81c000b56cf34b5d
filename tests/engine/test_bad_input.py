"""Wrong devices, strategies and models: each a clear error that says what was received and what to do."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.errors import DeviceError, StrategyMismatchError
from subprocess_tools import run_snippet

X, Y = np.linspace(0, 1, 33, dtype="float32").reshape(11, 3), np.ones((11, 1), "float32")


def _model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": ["GPU:0"]}, ["No such device", "GPU:0", "CPU:0"]),
        ({"devices": ["CPU:0", "cpu:0"]}, ["more than once", "Name each device once"]),
        ({"devices": ["CPU:0", "GPU:0"]}, ["same kind", "CPU and GPU"]),
        ({"devices": ["processor"]}, ["Not a device name", "processor", "GPU:0"]),
        ({"devices": []}, ["list of device names", "[]"]),
        ({"devices": "CPU:0"}, ["list of device names", "'CPU:0'"]),
        ({"devices": ["CPU:0"], "replicas": 1}, ["not both", "Leave out"]),
        ({"replicas": 0}, ["positive integer", "replicas=0"]),
        ({"replicas": True}, ["positive integer"]),
        ({"devices": ["CPU:0", "CPU:1", "CPU:2"], "logical_replicas": 8}, ["a multiple of 3", "1, 2, 4 or 8 devices"]),
        ({"devices": ["CPU:0", "CPU:1"], "logical_replicas": 1}, ["logical_replicas=1 for 2 devices", "use 1 devices"]),
        ({"logical_replicas": 0}, ["positive integer", "logical_replicas=0"]),
        ({"logical_replicas": -8}, ["positive integer", "logical_replicas=-8"]),
    ],
)
def test_devices(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DeviceError) as error:
        lockstep.MirroredStrategy(**arguments)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("dtype", ["int8", "float64", "half a float", 3.5])
def test_exchange_dtype(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"Received: exchange_dtype=.*Allowed: 'bfloat16', 'float16', 'float32'"):
        lockstep.MirroredStrategy(devices(2), exchange_dtype=dtype)


def test_too_late_for_more_devices() -> None:
    with pytest.raises(lockstep.errors.TooLateError, match="already started with 8 logical CPU"):
        lockstep.MirroredStrategy(replicas=9)


def test_named_cpu_devices_are_created_in_a_fresh_process() -> None:
    result = run_snippet(
        "import lockstep\n"
        "print(lockstep.MirroredStrategy(['CPU:0', 'CPU:1']).num_replicas_in_sync)\n"
        "import tensorflow as tf\n"
        "print(len(tf.config.list_logical_devices('CPU')), tf.config.threading.get_inter_op_parallelism_threads())"
    )
    assert result.stdout.split() == ["2", "2", "2"], result.stderr


def test_nested_scopes() -> None:
    a, b = lockstep.MirroredStrategy(devices(2)), lockstep.MirroredStrategy(devices(2))
    with a.scope(), pytest.raises(StrategyMismatchError, match="Leave the outer scope first"):
        b.scope()


def test_variable_of_another_strategy() -> None:
    a, b = lockstep.MirroredStrategy(devices(2)), lockstep.MirroredStrategy(devices(2))
    with a.scope():
        variable = tf.Variable(1.0)
    with pytest.raises(StrategyMismatchError, match="variables of its own strategy"):
        tf.function(lambda: b.run(lambda: variable + 1.0))()


def test_built_outside_and_compiled_inside() -> None:
    model, strategy = _model(), lockstep.MirroredStrategy(devices(2))
    with strategy.scope():
        model.compile("sgd", "mse")
    with pytest.raises(StrategyMismatchError, match=r"compiled inside of it.*one copy, not 2"):
        model.fit(X, Y, verbose=0)


def test_built_outside_and_updated_in_run() -> None:
    model, optimizer, strategy = _model(), keras.optimizers.SGD(), lockstep.MirroredStrategy(devices(2))

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))

    with pytest.raises(StrategyMismatchError, match="would be updated by 2 replicas"):
        tf.function(lambda: strategy.run(step, (strategy.split(X),)))()


@pytest.mark.parametrize("eager", [False, True])
def test_optimizer_made_outside(eager: bool) -> None:
    strategy, optimizer = lockstep.MirroredStrategy(devices(2)), keras.optimizers.Adam()
    with strategy.scope():
        model = _model()
        model.compile(optimizer, "mse", run_eagerly=eager)
    with pytest.raises(StrategyMismatchError, match=r"optimizer must be created in the scope.*'adam.*'"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("where", ["plain", "branch", "loop", "function"])
def test_a_variable_with_one_copy_is_written(where: str) -> None:
    strategy, total = lockstep.MirroredStrategy(devices(2)), tf.Variable(0.0)
    table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, default_value=-1, empty_key=-2, deleted_key=-3)

    def step(x: tf.Tensor, written: bool) -> tf.Tensor:
        write = (lambda: total.assign_add(x)) if written else (lambda: total + x)
        found = tf.cast(table.lookup(tf.constant(1, tf.int64)), tf.float32)
        if where == "branch":
            return found + tf.cond(x > 0, write, lambda: x)
        if where == "loop":
            return found + tf.while_loop(lambda i: i < 2.0, lambda i: (i + 0.0 * write() + 1.0,), (0.0,))[0]
        return found + (tf.function(write)() if where == "function" else write())

    assert np.isfinite(tf.function(lambda: strategy.reduce("SUM", strategy.run(step, (tf.constant(1.0), False)), axis=None))())
    with pytest.raises(StrategyMismatchError, match=r"must be created in the strategy's scope.*one copy, which 2 replicas"):
        tf.function(lambda: strategy.run(step, (tf.constant(1.0), True)))()


def test_metric_made_outside() -> None:
    metric, strategy = keras.metrics.Mean(), lockstep.MirroredStrategy(devices(2))
    with pytest.raises(StrategyMismatchError, match="created in the strategy's scope"):
        tf.function(lambda: strategy.run(lambda x: metric.update_state(x), (strategy.split(X),)))()


def test_built_in_the_scope_and_trained_outside_is_one_device() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    with strategy.scope():
        mirrored, optimizer = _model(), keras.optimizers.SGD(0.1)
    plain = _model()
    plain.set_weights(mirrored.get_weights())
    for model, sgd in ((mirrored, optimizer), (plain, keras.optimizers.SGD(0.1))):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - Y) ** 2)
        sgd.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
    np.testing.assert_allclose(mirrored.get_weights()[0], plain.get_weights()[0], rtol=1e-6)
    for variable in mirrored.weights:
        first, second = (v.numpy() for v in strategy.experimental_local_results(variable.value))
        np.testing.assert_array_equal(first, second)


def test_a_batch_that_nobody_split_is_reported_once() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))

    def replica_step(x: tf.Tensor) -> tf.Tensor:
        return x * 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(replica_step, (tf.constant(X),))
    texts = [str(w.message) for w in caught if "not split" in str(w.message)]
    assert len(texts) == 1
    for word in ("replica_step", "(11, 3)", "2 times the work", "experimental_distribute_dataset(dataset)", "strategy.split"):
        assert word in texts[0]


def _compiled(strategy: tf.distribute.Strategy, eager: bool = False) -> keras.Model:
    with strategy.scope():
        model = _model()
        model.compile("sgd", "mse", run_eagerly=eager)
    model.set_weights([np.array([[0.5], [-0.5], [0.25]]), np.zeros(1)])
    return model


def _fit_with_inf(model: keras.Model) -> None:
    x = X.copy()
    x[9] = np.inf  # the second batch of six, on replica 1
    model.fit(x, Y, batch_size=6, shuffle=False, verbose=0)


def test_non_finite_loss_is_what_one_device_would_have() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    model, alone = _compiled(strategy), _compiled(tf.distribute.get_strategy())
    _fit_with_inf(model)
    _fit_with_inf(alone)
    for variable, want in zip(model.weights, alone.get_weights(), strict=True):
        assert not np.isfinite(want).any()
        for copy in strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(copy.numpy(), want)


@pytest.mark.parametrize("eager", [False, True])
def test_check_finite_stops_before_the_update(eager: bool) -> None:
    strategy = lockstep.MirroredStrategy(devices(2), check_finite=True)
    model = _compiled(strategy, eager)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        _fit_with_inf(model)
    text = str(error.value)
    assert "not finite" in text and "replica" in text
    assert int(model.optimizer.iterations.numpy()) == 1
    for variable in model.weights:
        copies = [v.numpy() for v in strategy.experimental_local_results(variable.value)]
        assert np.isfinite(copies[0]).all()
        np.testing.assert_array_equal(copies[0], copies[1])


def test_exchange_inside_a_loop() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))

    def step(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return tf.while_loop(lambda x: tf.reduce_sum(x) < 10.0, lambda x: (context.all_reduce("SUM", x),), [x])[0]

    with pytest.raises(lockstep.errors.UnsupportedError, match="Call all_reduce after the loop"):
        tf.function(lambda: strategy.run(step, (strategy.split(X[:2]),)))()


def test_unknown_exchange() -> None:
    with pytest.raises(ValueError, match="Unknown exchange"):
        lockstep.MirroredStrategy(devices(2), cross_device_ops=3)


# Nothing half applied: after an error every variable has the bits that it had before.


def _trained(count: int, **options: Any) -> tuple[keras.Model, list[bytes]]:
    """A model after one good step, whose slots are not zero; and the bits of all its variables."""
    with lockstep.MirroredStrategy(devices(count), **options).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(X, np.arange(11) % 4, batch_size=11, verbose=0)
    return model, _bits(model)


def _bits(model: keras.Model) -> list[bytes]:
    variables = [*model.variables, *model.optimizer.variables]
    return [copy.numpy().tobytes() for v in variables for copy in v.value.values]


@pytest.mark.parametrize("count", [2, 3])
def test_a_value_that_is_not_finite_names_its_replica_and_changes_nothing(count: int) -> None:
    model, before = _trained(count, check_finite=True)
    for replica in range(count):
        x = X.copy()
        x[np.array_split(np.arange(11), count)[replica][1], 0] = np.nan
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"not finite.*\[replica\] \[{replica}\] \[step\] \[1\]"):
            model.fit(x, np.arange(11) % 4, batch_size=11, shuffle=False, verbose=0)
        assert _bits(model) == before


@pytest.mark.parametrize("count", [2, 3])
def test_a_label_out_of_range_names_its_replica_and_changes_nothing(count: int) -> None:
    model, before = _trained(count)
    for replica in range(count):
        labels = np.arange(11) % 4
        labels[np.array_split(np.arange(11), count)[replica][1]] = 9
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"label value of 9.*\n.*replica_{replica}/compile_loss"):
            model.fit(X, labels, batch_size=11, shuffle=False, verbose=0)
        assert _bits(model) == before


@pytest.mark.parametrize("count", [0, -1])
def test_micro_batches_below_one(count: int) -> None:
    told = rf"positive number of micro-batches. Received: micro_batches={count}. Allowed: 1 \(no accumulation\), 2, 3"
    with pytest.raises(ValueError, match=told):
        lockstep.MirroredStrategy(devices(2), micro_batches=count)
    strategy = lockstep.MirroredStrategy(devices(2))
    for traced in (lambda f: f, tf.function):
        step = traced(lambda x: strategy.run(lambda x: strategy.accumulate(tf.reduce_sum, (x,), count), (strategy.split(x),)))
        with pytest.raises(ValueError, match=told):
            step(tf.constant(X))
