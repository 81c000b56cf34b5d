"""jit_compile: each replica's stages are compiled with the results of one device, and what cannot be is said."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine import replicas
from lockstep.errors import UnsupportedError

layers = keras.layers
BATCHES = (5, 5, 1)  # slices of 3 and 2, or of 2, 2 and 1; and the last leaves replicas without an example

rng = np.random.default_rng(0)
X, LABELS = rng.normal(size=(sum(BATCHES), 4)).astype("float32"), rng.integers(0, 3, sum(BATCHES))
WORDS = rng.integers(0, 9, X.shape).astype("int32")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every step that is placed, whether it is compiled."""
    seen: list[bool] = []
    emit = replicas.emit

    def noting(*args: Any) -> Any:
        seen.append(args[-1])
        return emit(*args)

    monkeypatch.setattr(replicas, "emit", noting)
    return seen


def _scope(strategy: Any) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    return strategy.scope() if strategy else contextlib.nullcontext()


# Loops by hand.


class Loop:
    """A linear model and its training step, some functions of which ask to be compiled.

    Args:
      strategy: None for one device.
      which: "nothing", "forward", "gradients", "update", "replica function" or "step".
    """

    def __init__(self, strategy: Any, which: str):
        self.strategy = strategy
        with _scope(strategy):
            self.model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh")])
            self.optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
            self.optimizer.build(self.model.trainable_variables)

        def compiled(name: str, function: Callable) -> Callable:
            return tf.function(function, jit_compile=True) if name == which else function

        self.forward = compiled("forward", lambda x: self.model(x))
        self.gradients = compiled("gradients", self._gradients)
        self.update = compiled("update", lambda grads: self.optimizer.apply(grads, self.model.trainable_variables))
        self.replica_step = compiled("replica function", self._replica_step)
        self.step = compiled("step", self._step)

    def _gradients(self, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(tf.reduce_sum((self.forward(x) - 1.0) ** 2, -1))
        return loss, tape.gradient(loss, self.model.trainable_variables)

    def _replica_step(self, x: tf.Tensor) -> Any:
        loss, grads = self.gradients(x)
        self.update(grads)
        return {"loss": loss, "rows": 2.0 * x}

    def _step(self, x: tf.Tensor) -> Any:
        if self.strategy is None:
            return self.replica_step(x)
        results = self.strategy.run(self.replica_step, (self.strategy.split(x),))
        return {
            "loss": self.strategy.reduce("SUM", results["loss"], axis=None),
            "rows": self.strategy.gather(results["rows"], axis=0),
        }

    def train(self, eager: bool = False) -> list[np.ndarray]:
        step = self.step if eager else tf.function(self.step)
        results = [step(x) for x in np.split(X, np.cumsum(BATCHES)[:-1])]
        found = [value.numpy() for result in results for value in result.values()]
        return [*found, *self.model.get_weights(), *(v.numpy() for v in self.optimizer.variables)]


def _assert_close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for value, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_the_replica_function(count: int, asked: list[bool]) -> None:
    ours = Loop(lockstep.MirroredStrategy(devices(count)), "replica function").train()
    _assert_close(ours, Loop(None, "nothing").train())
    assert set(asked) == {True}


def test_the_replica_function_of_an_eager_call(asked: list[bool]) -> None:
    _assert_close(
        Loop(lockstep.MirroredStrategy(devices(2)), "replica function").train(eager=True), Loop(None, "nothing").train()
    )
    assert set(asked) == {True}


@pytest.mark.parametrize(("which", "count"), [("forward", 2), ("gradients", 3)])
def test_a_function_before_the_exchange_is_compiled_on_each_device(which: str, count: int) -> None:
    loop = Loop(lockstep.MirroredStrategy(devices(count)), which)
    _assert_close(loop.train(), Loop(None, "nothing").train())
    graph = tf.function(loop.step).get_concrete_function(tf.TensorSpec([5, 4])).graph
    library = graph.as_graph_def().library.function
    assert any(function.attr["_XlaMustCompile"].b for function in library)


@pytest.mark.parametrize("count", [2, 3])
def test_a_function_with_an_exchange_runs_without_and_says_so_once(count: int) -> None:
    loop = Loop(lockstep.MirroredStrategy(devices(count)), "update")
    with pytest.warns(UserWarning, match="replicas meet in it") as caught:
        ours = loop.train()
    _assert_close(ours, Loop(None, "nothing").train())
    assert len(caught) == 1
    for word in ("jit_compile=True has no effect", "test_xla.py:", "strategy.run(tf.function(replica_step, jit_compile=True)"):
        assert word in str(caught[0].message)


def test_a_step_of_several_replicas_is_not_one_program() -> None:
    with pytest.raises(
        UnsupportedError, match=r"(?s)cannot be compiled as a whole.*_replica_step.*2 replicas.*Leave jit_compile"
    ):
        Loop(lockstep.MirroredStrategy(devices(2)), "step").train()
    _assert_close(Loop(lockstep.MirroredStrategy(devices(1)), "step").train(), Loop(None, "nothing").train())


def _printing(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x[0] > 0.0, lambda: x + tf.numpy_function(np.sum, [x], tf.float32), lambda: x)


def _merging(x: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().merge_call(lambda _, x: x, args=(x,))


@pytest.mark.parametrize(
    ("function", "why", "want"),
    [(_printing, "XLA has no PyFunc, which is an op in it", [2.0, 4.0]), (_merging, "merge_call", [1.0, 2.0])],
)
def test_what_cannot_be_compiled_runs_without_and_says_why(function: Callable, why: str, want: list[float]) -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    compiled = tf.function(function, jit_compile=True)
    with pytest.warns(UserWarning, match=rf"no effect on {function.__name__}, .*test_xla.py:\d+: .*{why}"):
        result = strategy.run(compiled, (strategy.split(np.array([1.0, 2.0], "float32")),))
    assert strategy.gather(result, axis=0).numpy().tolist() == want


def test_under_a_tape_it_runs_without() -> None:
    strategy = lockstep.MirroredStrategy(devices(2))
    with strategy.scope():
        w = tf.Variable(3.0)
    x = tf.constant([1.0, 2.0, 3.0])
    square = tf.function(lambda x: tf.reduce_sum(w * x * x), jit_compile=True)
    with tf.GradientTape() as tape, pytest.warns(UserWarning, match="GradientTape outside of strategy.run"):
        tape.watch(x)
        total = strategy.reduce("SUM", strategy.run(square, (strategy.split(x),)), axis=None)
    assert float(total) == 42.0
    np.testing.assert_array_equal(tape.gradient(total, x), [6.0, 12.0, 18.0])


# Keras fit.


class Counting(layers.Layer):
    """Changes nothing, by way of Python, which XLA cannot compile."""

    def call(self, x: Any) -> Any:
        return x + tf.ensure_shape(tf.numpy_function(np.zeros_like, [tf.stop_gradient(x)], tf.float32), x.shape)


class Ranged(layers.Layer):
    """Changes nothing; the shape of something in it depends on the data."""

    def call(self, x: Any) -> Any:
        return x + 0.0 * tf.cast(tf.reduce_sum(tf.range(tf.cast(tf.reduce_sum(x * x), tf.int32))), tf.float32)


def _dense(*between: layers.Layer) -> keras.Sequential:
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, use_bias=False), *between, layers.Dense(3)])


def _words() -> keras.Sequential:
    inputs = keras.Input((4,), dtype="int32")
    return keras.Sequential([inputs, layers.Embedding(9, 2), layers.Flatten(), layers.Dense(3)])


def _recurrent() -> keras.Sequential:
    return keras.Sequential([keras.Input((4,)), layers.Reshape((4, 1)), layers.LSTM(2), layers.Dense(3)])


def _fit(strategy: Any, build: Callable, optimizer: Callable, jit_compile: Any, **options: Any) -> list[np.ndarray]:
    with _scope(strategy):
        model, loss = build(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, jit_compile=jit_compile, **options)
    x = WORDS if build is _words else X
    # A last batch that is shorter is as much to compile again; where sizes are known, loops are simpler.
    count = sum(BATCHES) if build is _recurrent else sum(BATCHES[:2])
    history = model.fit(x[:count], LABELS[:count], batch_size=BATCHES[0], epochs=2, shuffle=False, verbose=0).history
    return [*(np.asarray(values) for values in history.values()), *(w.numpy() for w in model.trainable_variables)]


def _sgd(**options: Any) -> Callable:
    return lambda: keras.optimizers.SGD(0.5, momentum=0.9, **options)


CASES: dict[str, tuple[Callable, Callable, dict[str, Any], dict[str, Any]]] = {
    "several steps a call": (_dense, _sgd(), {}, {"steps_per_execution": 2}),
    "micro-batches": (_dense, _sgd(), {"micro_batches": 2}, {}),
    "accumulation in the optimizer": (_dense, _sgd(gradient_accumulation_steps=2), {}, {}),
    "synchronized statistics": (
        lambda: _dense(layers.BatchNormalization(synchronized=True)),
        _sgd(),
        {"sync_batch_norm": True, "check_finite": True},
        {},
    ),
    "a loop and its gradient": (_recurrent, _sgd(), {}, {}),
    "sparse gradients": (_words, _sgd(global_clipnorm=0.5), {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_fit(name: str, asked: list[bool]) -> None:
    build, optimizer, choices, options = CASES[name]
    ours = _fit(lockstep.MirroredStrategy(devices(2), **choices), build, optimizer, True, **options)
    assert set(asked) == {True}
    _assert_close(ours, _fit(None, build, optimizer, False, **options))


def test_auto_is_off_under_a_strategy(asked: list[bool]) -> None:
    _fit(lockstep.MirroredStrategy(devices(2)), _dense, _sgd(), "auto")
    assert set(asked) == {False}


def test_a_model_with_an_op_that_xla_does_not_know_trains_without() -> None:
    with pytest.warns(UserWarning, match=r"no effect on train_step, .*: XLA has no PyFunc"):
        ours = _fit(lockstep.MirroredStrategy(devices(2)), lambda: _dense(Counting()), _sgd(), True)
    _assert_close(ours, _fit(None, _dense, _sgd(), False))


@pytest.mark.parametrize(
    ("count", "choices", "layer"), [(2, {}, Ranged), (1, {}, Counting), (1, {"micro_batches": 2}, Counting)]
)
def test_what_xla_says_only_when_it_compiles_is_readable(count: int, choices: dict[str, Any], layer: Callable) -> None:
    strategy = lockstep.MirroredStrategy(devices(count), **choices)
    with pytest.raises(UnsupportedError, match=r"XLA cannot compile this model. Received: jit_compile=True.*jit_compile=False"):
        _fit(strategy, lambda: _dense(layer()), _sgd(), True)


def test_a_layer_that_keras_does_not_compile_is_said_by_keras() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _scope(lockstep.MirroredStrategy(devices(2))):
            layer = layers.StringLookup(vocabulary=["a", "b"])
            model = keras.Sequential([keras.Input((1,), dtype="string"), layer, layers.Embedding(4, 1), layers.Flatten()])
            model.compile("sgd", "mse", jit_compile=True)
        model.fit(tf.constant([["a"], ["b"], ["a"]]), np.ones((3, 1)), batch_size=3, verbose=0)
    texts = [str(w.message) for w in caught]
    assert any("Model doesn't support `jit_compile=True`" in text for text in texts)
    assert not any("lockstep" in text for text in texts)
