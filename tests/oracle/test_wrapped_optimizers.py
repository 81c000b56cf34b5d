"""Optimizers that drive others, or change what others do: what one device computes, also where slots could be shared out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lockstep.engine.shards import ShardedVariable
from oracle.oracle import relative_difference, unequal_copies
from oracle.test_update import BATCH, adam, assert_equal, compiled, data, dense, strategy_of, trained, words

optimizers = keras.optimizers


def momentum(**options: Any) -> optimizers.SGD:
    return optimizers.SGD(0.1, momentum=0.9, **options)


class Wrapper(optimizers.Optimizer):
    """Has ``inner`` do the work."""

    def __init__(self, inner: Any, **options: Any):
        super().__init__(learning_rate=0.001, **options)
        self.inner = inner

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.inner.build(variables)

    @property
    def variables(self) -> list[Any]:
        return [*self._variables, *self.inner.variables]


class Lookahead(Wrapper):
    """Slow weights, mixed in every second step (Zhang et al. 2019)."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        slow = self.slow[self._get_variable_index(variable)]
        self.assign(slow, tf.where(tf.equal(self._iterations, 0), tf.convert_to_tensor(variable), tf.convert_to_tensor(slow)))
        self.inner.update_step(gradient, variable, self.inner.learning_rate)
        at = tf.cast(tf.equal((self._iterations + 1) % 2, 0), variable.dtype)
        self.assign_add(slow, at * 0.5 * (variable - slow))
        self.assign(variable, at * slow + (1 - at) * variable)


class OneByOne(Wrapper):
    """Has ``inner`` apply the gradient of one variable at a time."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.inner.apply([gradient], [variable])


class Handing(Wrapper):
    """Hands all gradients on in ``apply``, before they are summed."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
            self.built = True
        self.inner.apply([g * 0.5 for g in grads], trainable_variables)


class Later(Wrapper):
    """Hands all summed gradients on, where it would update by itself."""

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        self.inner.apply_gradients(zip(grads, trainable_variables, strict=True))


class Both(optimizers.SGD):
    """Updates by itself, and has another update as well, once in shards and once whole."""

    def __init__(self, inner: Any):
        super().__init__(0.05, momentum=0.9)
        self.inner = inner

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)
        self.inner.apply([g * 0.5 for g in grads], trainable_variables)


class Either(Wrapper):
    """Kernels by one optimizer, biases by another."""

    def __init__(self, inner: Any, other: Any):
        super().__init__(inner)
        self.other = other

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.other.build(variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        chosen = self.inner if len(variable.shape) > 1 else self.other
        chosen.update_step(gradient, variable, chosen.learning_rate)


class Split(Wrapper):
    """The same, each applied to its own variables."""

    def __init__(self, inner: Any, other: Any):
        super().__init__(inner)
        self.other = other

    def build(self, variables: Any) -> None:
        self.inner.build([v for v in variables if len(v.shape) > 1])
        self.other.build([v for v in variables if len(v.shape) == 1])

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        pairs = list(zip(grads, trainable_variables, strict=True))
        for optimizer, axes in ((self.inner, 2), (self.other, 1)):
            optimizer.apply(*zip(*(pair for pair in pairs if len(pair[1].shape) == axes), strict=True))


class Renamed(optimizers.Adam):
    """Changes nothing that concerns the update."""

    def __init__(self) -> None:
        super().__init__(0.003, epsilon=1e-5)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([g - keras.ops.mean(g, axis=0, keepdims=True) for g in grads], trainable_variables)


class Doubled(optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * 2, variable, learning_rate)


class ClippedByUnit(optimizers.SGD):
    """Clips in its own way, which needs whole gradients."""

    def _clip_gradients(self, grads: Any) -> list[Any]:
        return [g / (1 + keras.ops.norm(g)) for g in grads]


class WithSlots(optimizers.SGD):
    """Has slots of its own, which it reads and writes after the update."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.traces = self.add_optimizer_variables(variables, "trace")

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        for gradient, variable, trace in zip(grads, trainable_variables, self.traces, strict=True):
            trace.assign(0.5 * trace + gradient)
            variable.assign_sub(0.01 * trace)


class Alternating(Wrapper):
    """Has ``inner`` apply gradients, and then call its update by hand: slots that are in use as shards already."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.inner.apply(grads, trainable_variables)
        super().apply(grads, trainable_variables)

    def build(self, variables: Any) -> None:
        optimizers.Optimizer.build(self, variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.inner.update_step(gradient, variable, learning_rate)


# How many of the slots of the two large variables are still shared out; those that nobody uses remain so.
WRAPPED: dict[str, tuple[Callable[[], Any], int]] = {
    "update_step, momentum": (lambda: Lookahead(momentum()), 0),
    "update_step, adam": (lambda: Lookahead(adam(0.003)), 0),
    "update_step, twice": (lambda: Lookahead(Lookahead(momentum())), 0),
    "apply, one by one": (lambda: OneByOne(momentum()), 2),
    "apply, one by one, decays": (lambda: OneByOne(momentum(weight_decay=0.1)), 2),
    "apply, one by one, clips": (lambda: OneByOne(momentum(clipnorm=0.05)), 2),
    "apply, before the sum": (lambda: Handing(momentum()), 2),
    "apply, after the sum": (lambda: Later(momentum()), 2),
    "apply, beside its own": (lambda: Both(adam(0.003)), 6),
    "apply, then update_step": (lambda: Alternating(momentum()), 2),
    "several, update_step": (lambda: Either(momentum(), adam(0.003)), 4),
    "several, apply": (lambda: Split(momentum(), adam(0.003)), 2),
    "loss scale outside": (lambda: optimizers.LossScaleOptimizer(Lookahead(momentum()), initial_scale=128.0), 0),
    "loss scale inside": (lambda: Handing(optimizers.LossScaleOptimizer(momentum(), initial_scale=1.0)), 2),
    "accumulated outside": (lambda: Lookahead(momentum(), gradient_accumulation_steps=2), 0),
    "accumulated inside": (lambda: Handing(adam(0.003, gradient_accumulation_steps=3)), 4),
    "averages outside": (lambda: Lookahead(momentum(), use_ema=True, ema_overwrite_frequency=3), 0),
    "averages inside": (lambda: Handing(momentum(use_ema=True, ema_overwrite_frequency=3)), 2),
    "changes gradients": (Renamed, 4),
    "changes the update": (lambda: Doubled(0.1, momentum=0.9), 0),
    "clips in its own way": (lambda: ClippedByUnit(0.1, momentum=0.9), 0),
    "slots of its own": (lambda: WithSlots(0.1, momentum=0.9), 0),
}


def sharded(optimizer: Any) -> int:
    """The number of the slots of an optimizer, and of those in it, of which each replica holds a shard."""
    inner = [getattr(optimizer, name) for name in ("inner", "other", "inner_optimizer") if hasattr(optimizer, name)]
    own = [v for v in optimizer._variables if isinstance(v.value, ShardedVariable)]
    return len(own) + sum(map(sharded, inner))


@pytest.mark.parametrize("name", WRAPPED)
def test_an_optimizer_that_drives_another(name: str) -> None:
    optimizer, slots = WRAPPED[name]
    strategy = strategy_of(3)
    model = trained(strategy, dense, optimizer)
    assert_equal(model, trained(None, dense, optimizer))
    assert sharded(model.optimizer) == slots
    assert unequal_copies(strategy, model.variables) == ()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *[({"run_eagerly": True}, name) for name in ("update_step, momentum", "apply, one by one", "apply, then update_step")],
        ({"run_eagerly": True}, "apply, beside its own"),
        ({"run_eagerly": True}, "loss scale outside"),
        ({"run_eagerly": True}, "accumulated outside"),
        ({"jit_compile": True}, "update_step, momentum"),
        ({"steps_per_execution": 3}, "update_step, momentum"),
        ({"steps_per_execution": 3}, "apply, one by one"),
    ],
)
def test_ways_to_run(options: dict[str, Any], name: str) -> None:
    optimizer, slots = WRAPPED[name]
    model = trained(strategy_of(2), dense, optimizer, **options)
    assert_equal(model, trained(None, dense, optimizer))
    assert sharded(model.optimizer) == slots


@pytest.mark.parametrize("update", ["auto", "mirrored"])
def test_variables_that_are_not_shared_out(update: str) -> None:
    optimizer, _ = WRAPPED["update_step, adam"]
    model = trained(strategy_of(2, update), dense, optimizer)
    assert_equal(model, trained(None, dense, optimizer))
    assert sharded(model.optimizer) == 0


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("inner", ["adam", "adagrad"])
def test_sparse_gradients(inner: str, run_eagerly: bool) -> None:
    def optimizer() -> Any:
        return OneByOne(adam(0.003) if inner == "adam" else optimizers.Adagrad(0.1))

    model = trained(strategy_of(2), words, optimizer, run_eagerly=run_eagerly)
    assert_equal(model, trained(None, words, optimizer))


def test_what_was_saved_is_restored_before_slots_become_whole(tmp_path: Any) -> None:
    optimizer, _ = WRAPPED["update_step, adam"]
    saved = trained(None, dense, optimizer)
    path = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer).save(str(tmp_path / "checkpoint"))
    strategy = strategy_of(3)
    model = compiled(strategy, dense, optimizer)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    model.optimizer.built = True
    assert sharded(model.optimizer) == 4
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path).assert_existing_objects_matched()
    for each in (model, saved):
        each.fit(*data(dense), batch_size=BATCH, shuffle=False, verbose=0)
    assert_equal(model, saved)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("first", ["update", "read"])
def test_slots_that_a_step_reads_are_whole(first: str, eagerly: bool) -> None:
    """Whether they are in use as shards by then, or not."""

    def run(strategy: Any) -> tuple[keras.Model, list[float]]:
        model = compiled(strategy, dense, momentum)
        optimizer = model.optimizer
        with strategy.scope() if strategy else contextlib.nullcontext():
            optimizer.build(model.trainable_variables)

        def norm() -> tf.Tensor:
            return tf.add_n([tf.reduce_sum(tf.square(tf.convert_to_tensor(m))) for m in optimizer.momentums])

        def update(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                losses = keras.ops.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
                loss = tf.nn.compute_average_loss(losses)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            if first == "update":
                update(x, y)
            seen = norm()
            if first == "read":
                update(x, y)
            return seen

        def on_all(x: tf.Tensor, y: tf.Tensor) -> Any:
            return strategy.experimental_local_results(strategy.run(step, (x, y))) if strategy else (step(x, y),)

        function, norms = on_all if eagerly else tf.function(on_all), []
        for batch in tf.data.Dataset.from_tensor_slices(data(dense, 32)).batch(BATCH):
            norms.append([float(n) for n in function(*(strategy.split(batch) if strategy else batch))])
            assert len(set(norms[-1])) == 1
        return model, [n for n, *_ in norms]

    model, norms = run(strategy_of(2))
    want, want_norms = run(None)
    assert_equal(model, want)
    assert relative_difference(np.asarray(norms), np.asarray(want_norms)) < 1e-5
    assert sharded(model.optimizer) == (2 if first == "update" else 0)
