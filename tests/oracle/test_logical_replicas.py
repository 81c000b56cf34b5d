"""With ``logical_replicas`` the number of devices decides how fast training is, and nothing else: not one bit of the result."""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices
from oracle.models import start_from
from oracle.oracle import Case, compiled, examples, one_device, unequal_copies

LOGICAL = 8
layers = keras.layers


def random_model() -> keras.Model:
    """Everything that could tell replicas apart: augmentation, dropout, statistics of a slice and of the batch, clipping."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.RandomTranslation(0.1, 0.1),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(synchronized=True),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(64, "relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3, global_clipnorm=1.0), loss, metrics=["accuracy"])
    return model


def digest(strategy: Any) -> str:
    """A hash of weights, slots and logs after 50 steps, five of them on batches that do not divide by 8."""
    start_from(3)
    with strategy.scope():
        model = random_model()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(435, 8, 8, 1)).astype("float32"), rng.integers(0, 10, 435)
    logs = model.fit(x, y, batch_size=44, epochs=5, shuffle=False, verbose=0, validation_data=(x[:50], y[:50])).history
    assert int(model.optimizer.iterations.numpy()) == 50
    found = hashlib.sha256(repr(sorted(logs.items())).encode())
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(np.asarray(variable.value).tobytes())
    return found.hexdigest()


def test_any_number_of_devices_gives_the_same_bits() -> None:
    digests = {d: digest(lockstep.MirroredStrategy(devices(d), logical_replicas=LOGICAL)) for d in (1, 2, 4, 8)}
    assert len(set(digests.values())) == 1, digests
    # As many replicas as devices is what a strategy has without logical replicas.
    assert digest(lockstep.MirroredStrategy(devices(LOGICAL))) == digests[1]
    assert digest(lockstep.MirroredStrategy(devices(4))) != digests[4]


@pytest.mark.parametrize("count", [1, 2])
def test_logical_replicas_compute_what_one_device_does(count: int) -> None:
    case = Case("regularized + add_loss", "momentum", "arrays", "remainder 1")
    strategy = lockstep.MirroredStrategy(devices(count), logical_replicas=6)
    assert strategy.num_replicas_in_sync == 6
    start_from(1)
    with strategy.scope():
        model = compiled(case)
    data = examples(case)
    model.fit(data.x, data.y, batch_size=data.sizes.batch, epochs=5, shuffle=False, verbose=0)
    reference = one_device(case).weights
    for variable in model.variables:
        np.testing.assert_allclose(np.asarray(variable.value), reference[variable.path], rtol=1e-5, atol=1e-6)
    assert unequal_copies(strategy, model.variables) == ()


def test_a_loop_by_hand_runs_as_many_replicas() -> None:
    strategy = lockstep.MirroredStrategy(devices(2), logical_replicas=4)

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", 2.0 ** tf.cast(context.replica_id_in_sync_group, tf.float32))

    for call in (tf.function(lambda: strategy.run(replica)), lambda: strategy.run(replica)):
        assert [float(v) for v in strategy.experimental_local_results(call())] == [15.0] * 4
    assert [d.rsplit(":", 1)[1] for d in strategy.extended.worker_devices] == ["0", "0", "1", "1"]
