"""Loss scaling: an overflow on one replica skips the step on all, and the scale falls and grows as on one device."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest

from oracle.models import MODELS, start_from
from oracle.oracle import strategy_of, unequal_copies
from oracle.precision import policy

# Slices of 4, 3 and 3 examples.
REPLICAS, BATCH = 3, 10
FIRST_OF_SLICE = (0, 4, 7)
STEPS, OVERFLOWING = 6, 2
# About 1e-3 is float16's rounding; a wrong step is a sixth of the way.
BOUND = 5e-3


def trained(replicas: int | None, data: list[tuple[Any, Any]], optimizer: Any, run_eagerly: bool = False) -> list[dict]:
    """The weights, slots and loss scale before the first and after each step."""
    start_from(1)
    with strategy_of(replicas).scope() if replicas else contextlib.nullcontext():
        with policy("mixed_float16"):
            model = MODELS["dense"].build()
        model.compile(optimizer(), **MODELS["dense"].objective(), run_eagerly=run_eagerly)
        model.optimizer.build(model.trainable_variables)
    states = [state(model)]
    for x, y in data:
        model.train_on_batch(x, y)
        states.append(state(model))
    if replicas:
        assert unequal_copies(strategy_of(replicas), [*model.variables, *model.optimizer.variables]) == ()
    return states


def state(model: keras.Model) -> dict[str, Any]:
    optimizer = model.optimizer
    return {
        "weights": np.concatenate([np.ravel(v) for v in model.get_weights()]),
        "slots": b"".join(np.asarray(v).tobytes() for v in optimizer.inner_optimizer.variables),
        "iterations": int(optimizer.iterations),
        "scale": float(optimizer.dynamic_scale),
        "finite steps": int(optimizer.step_counter),
    }


def batches(huge: int | None = None) -> list[tuple[Any, Any]]:
    """Six batches; in one of them the example ``huge`` is so large that its scaled gradient leaves float16's range."""
    rng = np.random.default_rng(5)
    data = [MODELS["dense"].examples(rng, BATCH) for _ in range(STEPS)]
    if huge is not None:
        data[OVERFLOWING][0][huge] = 1e5
    return data


def assert_as_on_one_device(ours: list[dict], theirs: list[dict]) -> None:
    for step, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("iterations", "scale", "finite steps"):
            assert our[name] == their[name], f"{name} after step {step}"
        travelled = np.linalg.norm(their["weights"] - theirs[0]["weights"])
        assert np.linalg.norm(our["weights"] - their["weights"]) <= BOUND * travelled, f"weights after step {step}"


OPTIMIZERS: dict[str, Any] = {
    # Keras wraps it when it compiles a model in mixed_float16.
    "momentum, wrapped by compile": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.001), initial_scale=2.0**8),
    "momentum, accumulated": lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3),
}


@pytest.mark.parametrize(
    ("optimizer", "replica", "run_eagerly"),
    [
        *((name, replica, False) for name in OPTIMIZERS for replica in (0, 2)),
        ("momentum, wrapped by compile", 1, True),
    ],
)
def test_an_overflow_on_one_replica_skips_the_step_on_all(optimizer: str, replica: int, run_eagerly: bool) -> None:
    data = batches(huge=FIRST_OF_SLICE[replica])
    ours = trained(REPLICAS, data, OPTIMIZERS[optimizer], run_eagerly=run_eagerly)
    before, after, next_step = ours[OVERFLOWING : OVERFLOWING + 3]
    assert after["scale"] == before["scale"] / 2
    assert after["iterations"] == before["iterations"]
    assert after["slots"] == before["slots"]
    np.testing.assert_array_equal(after["weights"], before["weights"])
    assert next_step["slots"] != after["slots"]
    assert np.isfinite(ours[-1]["weights"]).all() and (ours[-1]["weights"] != after["weights"]).any()
    theirs = trained(None, data, OPTIMIZERS[optimizer], run_eagerly=run_eagerly)
    assert_as_on_one_device(ours, theirs)


@pytest.mark.parametrize("huge", [None, FIRST_OF_SLICE[1]], ids=["no overflow", "an overflow"])
def test_the_scale_grows_after_as_many_finite_steps_as_on_one_device(huge: int | None) -> None:
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=16.0, dynamic_growth_steps=2)

    ours = trained(REPLICAS, batches(huge), optimizer)
    scales = [16.0, 16.0, 32.0, 32.0, 64.0, 64.0, 128.0] if huge is None else [16.0, 16.0, 32.0, 16.0, 16.0, 32.0, 32.0]
    assert [state["scale"] for state in ours] == scales
    assert_as_on_one_device(ours, trained(None, batches(huge), optimizer))
