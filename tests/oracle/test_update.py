"""The update shared out between replicas: what one device computes, with an Nth of the slots on each replica."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from lockstep.engine import replicas as replicas_
from lockstep.engine.shards import ShardedVariable
from oracle.models import start_from
from oracle.optimizers import NORMALIZED, SLOTS
from oracle.oracle import relative_difference, unequal_copies

layers, optimizers = keras.layers, keras.optimizers
COUNT, BATCH, WORDS = 61, 8, 300
# Where an element's gradient is nearly zero, Adam moves it by what rounding made of it: as far as its epsilon lets it.
EPSILON = 1e-5


def adam(*args: Any, **options: Any) -> optimizers.Adam:
    return optimizers.Adam(*args, **options, epsilon=EPSILON)


# Slots per variable: none for plain SGD, whose update nothing is gained from sharing.
ELEMENTWISE: dict[str, tuple[Callable[[], Any], int]] = {
    "sgd": (lambda: optimizers.SGD(0.1), 0),
    "momentum": (lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True), 1),
    "adam": (lambda: adam(0.003, amsgrad=True), 3),
    "adamw": (lambda: optimizers.AdamW(0.01, weight_decay=0.1, epsilon=EPSILON), 2),
    "rmsprop": (lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5), 3),
    "adagrad": (lambda: optimizers.Adagrad(0.1), 1),
    "adadelta": (lambda: optimizers.Adadelta(1.0), 2),
    "adamax": (lambda: optimizers.Adamax(0.01), 2),
    "nadam": (lambda: optimizers.Nadam(0.01), 2),
    "ftrl": (lambda: optimizers.Ftrl(0.1), 2),
    "lion": (lambda: optimizers.Lion(0.01), 1),
}
BESIDES: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: adam(0.003, clipnorm=0.05),
    "global_clipnorm": lambda: adam(0.003, global_clipnorm=0.05),
    "clipvalue": lambda: adam(0.003, clipvalue=0.01),
    "accumulated": lambda: adam(0.003, gradient_accumulation_steps=3),
    "moving averages": lambda: adam(0.003, use_ema=True, ema_overwrite_frequency=3),
    "loss scale": lambda: optimizers.LossScaleOptimizer(adam(0.003), initial_scale=128.0),
    "loss scale factor": lambda: adam(0.003, loss_scale_factor=8.0),
    "schedule": lambda: adam(optimizers.schedules.ExponentialDecay(0.003, 2, 0.5)),
}
# Each element's update depends on others: Keras's own way, on every replica.
NOT_ELEMENTWISE: dict[str, Callable[[], Any]] = {
    "lamb": lambda: optimizers.Lamb(0.01),
    "muon": lambda: optimizers.Muon(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
}


def dense() -> keras.Model:
    # 40 * 50 and 50 * 33 elements do not divide by 3; the vectors are too small to be shared out.
    hidden = layers.Dense(50, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.6))
    return keras.Sequential([keras.Input((40,)), hidden, layers.Dense(33, "tanh"), layers.Dense(3)])


def words() -> keras.Model:
    embedding = [keras.Input((5,), dtype="int32"), layers.Embedding(WORDS, 8), layers.Flatten()]
    return keras.Sequential([*embedding, layers.Dense(33, "tanh"), layers.Dense(3)])


def data(build: Any, count: int = COUNT) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (count, 5)) if build is words else rng.normal(size=(count, 40)).astype("float32")
    return x, rng.integers(0, 3, count)


def strategy_of(replicas: int, update: str = "sharded", **options: Any) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(devices(replicas), update=update, **options)


def compiled(strategy: Any, build: Any, optimizer: Any, **options: Any) -> keras.Model:
    start_from(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def trained(strategy: Any, build: Any, optimizer: Any, **options: Any) -> keras.Model:
    model = compiled(strategy, build, optimizer, **options)
    model.fit(*data(build), batch_size=BATCH, shuffle=False, verbose=0)
    return model


def assert_equal(model: keras.Model, other: keras.Model, bound: float = NORMALIZED) -> None:
    for kind, slack in (("weights", 1), ("slots", SLOTS)):
        ours, theirs = (m.variables if kind == "weights" else m.optimizer.variables for m in (model, other))
        pairs = {v.path: (np.asarray(v), np.asarray(w)) for v, w in zip(ours, theirs, strict=True)}
        worst = {path: f"{relative_difference(*pair):.1e}" for path, pair in pairs.items()}
        assert max(map(float, worst.values())) <= bound * slack, worst


def sharded_slots(model: keras.Model) -> list[ShardedVariable]:
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [v.value for v in inner.variables if isinstance(v.value, ShardedVariable)]


@pytest.mark.versions
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers(name: str) -> None:
    optimizer, slots = ELEMENTWISE[name]
    strategy = strategy_of(3)
    model = trained(strategy, dense, optimizer)
    assert_equal(model, trained(None, dense, optimizer))
    assert len(sharded_slots(model)) == 2 * slots
    assert unequal_copies(strategy, model.variables) == ()


@pytest.mark.parametrize("name", BESIDES)
def test_what_an_optimizer_does_besides(name: str) -> None:
    model = trained(strategy_of(3), dense, BESIDES[name])
    assert_equal(model, trained(None, dense, BESIDES[name]))
    assert len(sharded_slots(model)) == 4


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_other_optimizers_update_everywhere(name: str) -> None:
    model = trained(strategy_of(2), dense, NOT_ELEMENTWISE[name])
    assert_equal(model, trained(None, dense, NOT_ELEMENTWISE[name]))
    assert sharded_slots(model) == []


def test_an_optimizer_of_ones_own_update_updates_everywhere() -> None:
    class Normalized(optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient / keras.ops.norm(gradient), variable, learning_rate)

    model = trained(strategy_of(2), dense, lambda: Normalized(0.1, momentum=0.9))
    assert_equal(model, trained(None, dense, lambda: Normalized(0.1, momentum=0.9)))
    assert sharded_slots(model) == []


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({"run_eagerly": True}, ELEMENTWISE["adamw"][0]),
        ({"run_eagerly": True}, BESIDES["loss scale"]),
        ({"jit_compile": True}, ELEMENTWISE["adamw"][0]),
        ({"steps_per_execution": 3}, BESIDES["loss scale"]),
    ],
    ids=["eagerly, adamw", "eagerly, loss scale", "XLA, adamw", "several steps, loss scale"],
)
def test_ways_to_run(options: dict[str, Any], optimizer: Callable[[], Any]) -> None:
    model = trained(strategy_of(3), dense, optimizer, **options)
    assert_equal(model, trained(None, dense, optimizer))
    assert len(sharded_slots(model)) == 4


@pytest.mark.parametrize(
    ("name", "run_eagerly"), [("adam", False), ("adam", True), ("loss scale", False), ("accumulated", False)]
)
def test_a_sparse_gradient_gets_whole_slots(name: str, run_eagerly: bool) -> None:
    optimizer = BESIDES[name] if name in BESIDES else ELEMENTWISE[name][0]
    model = trained(strategy_of(2), words, optimizer, run_eagerly=run_eagerly)
    assert_equal(model, trained(None, words, optimizer))
    assert {slot.layout.shape for slot in sharded_slots(model)} == {(40, 33)}


@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"check_finite": True}, {"exchange_dtype": "float32"}])
def test_with_other_options(options: dict[str, Any]) -> None:
    optimizer = ELEMENTWISE["adam"][0]
    model = trained(strategy_of(3, **options), dense, optimizer)
    assert_equal(model, trained(None, dense, optimizer))
    assert len(sharded_slots(model)) == 6


def test_a_variable_left_out_of_weight_decay_does_not_decay() -> None:
    def optimizer() -> optimizers.Optimizer:
        made = optimizers.AdamW(0.01, weight_decay=0.3, epsilon=EPSILON)
        made.exclude_from_weight_decay(var_names=["dense_1"])
        return made

    assert_equal(trained(strategy_of(2), dense, optimizer), trained(None, dense, optimizer))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_variable_that_gets_whole_slots_decays_as_well(scaled: bool) -> None:
    def optimizer() -> optimizers.Optimizer:
        made = optimizers.AdamW(0.01, weight_decay=0.3, epsilon=EPSILON)
        return optimizers.LossScaleOptimizer(made, initial_scale=128.0) if scaled else made

    assert_equal(trained(strategy_of(2), words, optimizer), trained(None, words, optimizer))


def hand_loop(strategy: Any, meet: bool = False, optimizer: Any = ELEMENTWISE["adam"][0], build: Any = dense) -> keras.Model:
    model = compiled(strategy, build, optimizer)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        if meet:
            tf.distribute.get_replica_context().merge_call(lambda strategy: None)
        with tf.GradientTape() as tape:
            losses = keras.ops.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = model.optimizer.scale_loss(tf.nn.compute_average_loss(losses))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    run = tf.function(lambda x, y: strategy.run(step, (x, y)) if strategy else step(x, y))
    for batch in tf.data.Dataset.from_tensor_slices(data(build, 32)).batch(BATCH):
        run(*(strategy.split(batch) if strategy else batch))
    return model


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("name", ["adam", "loss scale"])
def test_a_loop_by_hand_also_where_replicas_are_traced_one_by_one(name: str, meet: bool) -> None:
    optimizer = BESIDES[name] if name in BESIDES else ELEMENTWISE[name][0]
    model = hand_loop(strategy_of(2), meet, optimizer)
    assert_equal(model, hand_loop(None, optimizer=optimizer))
    # In a branch, replicas in threads cannot meet.
    assert bool(sharded_slots(model)) == (name == "adam" or not meet)


@pytest.mark.parametrize("meet", [False, True])
def test_a_sparse_gradient_gets_whole_slots_also_where_they_are_made_in_the_step(meet: bool) -> None:
    model = hand_loop(strategy_of(2), meet, build=words)
    assert_equal(model, hand_loop(None, build=words))
    assert {slot.layout.shape for slot in sharded_slots(model)} == {(40, 33)}


def test_each_replica_holds_an_nth_of_the_slots() -> None:
    replicas = 4
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((200,)), layers.Dense(301), layers.Dense(77)])
        model.compile("adam", "mse")
    model.fit(np.zeros((4, 200)), np.zeros((4, 77)), verbose=0)
    slots = [v for v in model.optimizer.variables if v.path.endswith(("momentum", "velocity"))]
    held = [sum(strategy.experimental_local_results(v.value)[r].shape.num_elements() for v in slots) for r in range(replicas)]
    assert len(set(held)) == 1
    assert held[0] <= (1 / replicas + 0.02) * 2 * model.count_params()


def test_small_variables_are_updated_everywhere_unless_told_to() -> None:
    assert sharded_slots(trained(strategy_of(2, "auto"), dense, ELEMENTWISE["adam"][0])) == []
    assert sharded_slots(trained(strategy_of(2, "mirrored"), dense, ELEMENTWISE["adam"][0])) == []
    with strategy_of(2, "auto").scope():
        optimizer = optimizers.Adam()
        optimizer.build([keras.Variable(np.zeros((300, 300))), keras.Variable(np.zeros(300))])
    assert [isinstance(v.value, ShardedVariable) for v in optimizer.variables[2:]] == [True, True, False, False]


def test_an_unknown_choice() -> None:
    with pytest.raises(ValueError, match=r"Received: update='zero'\. Allowed: 'auto', 'sharded', 'mirrored'"):
        strategy_of(2, "zero")


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras does not take numpy's copy argument.
@pytest.mark.parametrize("kind", ["model.keras", "optimizer.weights.h5", "checkpoint"])
def test_what_is_saved_does_not_depend_on_the_number_of_replicas(kind: str, tmp_path: pathlib.Path) -> None:
    optimizer = ELEMENTWISE["adam"][0]
    saved = trained(strategy_of(3), dense, optimizer)
    path = str(tmp_path / kind)
    checkpoint = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer)
    if kind == "checkpoint":
        path = checkpoint.save(path)
    else:
        (saved.save if kind == "model.keras" else saved.save_weights)(path)
    for strategy in (strategy_of(2), strategy_of(2, "mirrored"), None):
        model = compiled(strategy, dense, optimizer)
        with strategy.scope() if strategy else contextlib.nullcontext():
            if kind == "model.keras":
                model = keras.models.load_model(path)
            elif kind == "checkpoint":
                model.optimizer.build(model.trainable_variables)
                tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path).assert_existing_objects_matched()
            else:
                model.optimizer.build(model.trainable_variables)
                model.load_weights(path)
        assert bool(sharded_slots(model)) == (strategy is not None and strategy.extended.options.update == "sharded")
        assert_equal(model, saved, bound=1e-9)
        model.fit(*data(dense), batch_size=BATCH, shuffle=False, verbose=0)
        want = trained(None, dense, optimizer)
        want.fit(*data(dense), batch_size=BATCH, shuffle=False, verbose=0)
        assert_equal(model, want)


def test_a_saved_model_with_its_optimizer(tmp_path: pathlib.Path) -> None:
    model = trained(strategy_of(2), dense, ELEMENTWISE["adam"][0])
    x = data(dense)[0]
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(loaded.signatures["serving_default"](tf.constant(x))["output_0"], model(x), rtol=1e-6, atol=1e-6)


def test_the_second_step_never_retraces_and_weights_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = strategy_of(2)
    joins: list[int] = []
    traces: list[int] = []
    join, trace = strategy.extended.exchange.join, replicas_.trace_replica

    def counted_join(shards: Any, layouts: Any) -> Any:
        joins.append(len(shards))
        return join(shards, layouts)

    def counted_trace(*args: Any) -> Any:
        traces.append(1)
        return trace(*args)

    monkeypatch.setattr(strategy.extended.exchange, "join", counted_join)
    monkeypatch.setattr(replicas_, "trace_replica", counted_trace)
    trained(strategy, dense, ELEMENTWISE["adam"][0])
    assert len(traces) == 1
    assert [n for n in joins if n] == [2]
