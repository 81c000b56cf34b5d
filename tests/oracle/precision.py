"""The second table: optimizers in each precision, with Keras's gradient accumulation and batches that do not divide by N."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

import keras
import numpy as np

from .models import MODELS, start_from
from .optimizers import OPTIMIZERS, SLOTS
from .oracle import Values, by_number, by_path, relative_difference, strategy_of, unequal_copies

# Two epochs of seven steps, the last of them short: with three steps accumulated, four updates and two steps towards the next.
FULL_BATCHES, LAST_BATCH, EPOCHS = 6, 3, 2

# The global batch for each remainder; it is the same one for N = 2, 3 and 4, so one reference serves all of them.
BATCHES: dict[str, int] = {"0": 12, "1": 13, "N - 1": 11}

FACTORS: dict[str, tuple] = {
    "model": ("dense", "conv + synchronized BN", "embedding + LSTM, masked", "attention"),
    "optimizer": ("sgd", "momentum", "adam", "adamw", "lion", "rmsprop", "adagrad", "lamb", "muon", "adafactor"),
    "precision": ("float32", "mixed_bfloat16", "mixed_float16"),
    "accumulation": (1, 3),
    "remainder": tuple(BATCHES),
    "replicas": (2, 3, 4),
}

# Small enough never to overflow by itself, and doubled in every row.
INITIAL_SCALE, GROWTH_STEPS = 2.0**8, 5


# In 16 bit no element-wise 1e-5 can be promised: activations and the gradients of a slice are rounded, and to round two halves
# is not to round their sum. The yardstick is what rounding does on one device: how far training in 16 bit takes it from
# training in float32. If N replicas are no further from float32 than one device is, they are within twice that of one device
# (the triangle inequality). The yardstick is one draw of rounding, and N replicas another, which may be larger: hence three.
FACTOR = 3.0
# A yardstick may by chance be smaller than a rounding.
ROUNDING = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}
# What is allowed whatever the yardstick: a wrong scale is further off.
CAPS = {"mixed_bfloat16": 0.1, "mixed_float16": 0.02}
# These make steps of about the learning rate from a gradient of any size. Where one nearly cancels, rounding decides which way
# the step goes, and one that turns round is 2 learning rates in that weight: one element in one step of 14 was 4e-2 of the way
# of all weights (in the dense model's first bias with Muon, which moves biases as Adam does). So a few such steps are allowed,
# up to a cap of their own. Their slots, which are sums of gradients, have no such excuse.
BY_DIRECTION = {"adam", "adamw", "lion", "rmsprop", "lamb", "muon", "adafactor"}
TURNED, TURNED_CAP = 4, 0.1
# Examples of an epoch whose two best classes may change places.
NEAR_TIES = 1.5


@dataclass(frozen=True)
class Row:
    """One row; the fields are `FACTORS`. Without replicas (None) it stands for one device."""

    model: str
    optimizer: str
    precision: str
    accumulation: int
    remainder: str
    replicas: int | None

    def __str__(self) -> str:
        return " | ".join(str(value) for value in astuple(self)[:-1]) + f" | N={self.replicas}"

    @property
    def reference(self) -> Row:
        return replace(self, replicas=None)

    @property
    def in_float32(self) -> Row:
        return replace(self, replicas=None, precision="float32")


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind; parts as in `oracle.Outcome`, and the weights that it started from."""

    start: Values
    weights: Values
    slots: Values
    logs: Values
    counters: dict[str, float]
    unequal_copies: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """How much one part of an outcome differs from one device's.

    Attributes:
      worst: the difference; in units that depend on the part.
      bound: what is allowed.
      rounding: what 16 bit alone make of it on one device; None where nothing is rounded to 16 bit.
    """

    worst: float
    bound: float
    rounding: float | None = None

    @property
    def broken(self) -> bool:
        return not self.worst <= self.bound


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    """Layers made in this block have the dtype policy ``name``."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def count(row: Row) -> int:
    return FULL_BATCHES * BATCHES[row.remainder] + LAST_BATCH


def examples(row: Row) -> tuple[Any, Any]:
    return MODELS[row.model].examples(np.random.default_rng(7), count(row))


def compiled(row: Row, more: dict[str, Any]) -> keras.Model:
    with policy(row.precision):
        model = MODELS[row.model].build()
    # Keras has no 1: no accumulation is None.
    accumulation = {"gradient_accumulation_steps": row.accumulation if row.accumulation > 1 else None}
    optimizer = OPTIMIZERS[row.optimizer].make(**accumulation | more)
    if row.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, INITIAL_SCALE, GROWTH_STEPS)
    model.compile(optimizer, **MODELS[row.model].objective())
    return model


def run(row: Row, **more: Any) -> Outcome:
    """Trains as ``row`` says; ``more`` are further arguments for its optimizer."""
    start_from(1)
    with strategy_of(row.replicas).scope() if row.replicas else contextlib.nullcontext():
        model = compiled(row, more)
    start = by_path(model.variables)
    (x, y), batch = examples(row), BATCHES[row.remainder]
    logs = model.fit(x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0).history
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    counters = {"iterations": optimizer.iterations, "learning rate": optimizer.learning_rate}
    if inner is not optimizer:
        counters |= {"loss scale": optimizer.dynamic_scale, "steps since it grew": optimizer.step_counter}
    return Outcome(
        start=start,
        weights=by_path(model.variables),
        # Scalars are counters or constant. (Adafactor also has scalar stand-ins, which Keras tracks or not.)
        slots=by_number([v for v in inner.variables if len(v.shape)]),
        logs={name: np.asarray(values) for name, values in logs.items()},
        counters={name: float(np.asarray(value)) for name, value in counters.items()},
        unequal_copies=unequal_copies(strategy_of(row.replicas), [*model.variables, *optimizer.variables])
        if row.replicas
        else (),
    )


@functools.lru_cache(maxsize=512)
def one_device(row: Row) -> Outcome:
    return run(row)


def compare(row: Row, outcome: Outcome) -> dict[str, Difference]:
    """What is compared with one device, each part by name."""
    theirs = one_device(row.reference)
    assert outcome.counters == theirs.counters, f"{outcome.counters}; {theirs.counters} on one device"
    if row.precision == "float32":
        return _in_float32(row, outcome, theirs)
    exact = one_device(row.in_float32)
    rounding, cap = ROUNDING[row.precision], CAPS[row.precision]
    found: dict[str, Difference] = {}
    for part, measure in {"weights": _way_off, "slots": _relative_norm, "loss": _loss}.items():
        made = measure(row, theirs, exact)
        bound = min(cap, max(FACTOR * made, rounding))
        if part == "weights" and row.optimizer in BY_DIRECTION:
            bound = max(bound, min(TURNED_CAP, _turned(row, theirs)))
        found[part] = Difference(measure(row, outcome, theirs), bound, made)
    examples_off = np.abs(outcome.logs["accuracy"] - theirs.logs["accuracy"]).max() * count(row)
    found["accuracy"] = Difference(float(examples_off), NEAR_TIES)
    return found


def _in_float32(row: Row, ours: Outcome, theirs: Outcome) -> dict[str, Difference]:
    bound = OPTIMIZERS[row.optimizer].bound
    found = {}
    for part, allowed in {"weights": bound, "slots": SLOTS * bound, "logs": bound}.items():
        pairs = [(value, want) for _, value, want in _compared(row, getattr(ours, part), getattr(theirs, part))]
        found[part] = Difference(max((relative_difference(*pair) for pair in pairs), default=0.0), allowed)
    return found


def _compared(row: Row, ours: Values, theirs: Values) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    assert ours.keys() == theirs.keys(), f"{sorted(ours)} and {sorted(theirs)} on one device"
    for name, want in theirs.items():
        if not any(mark in name for mark in MODELS[row.model].undetermined):
            yield name, np.asarray(ours[name], "float64"), np.asarray(want, "float64")


def _way_off(row: Row, ours: Outcome, theirs: Outcome) -> float:
    """How far apart all weights are, relative to the way that they came in training.

    Not by variable: one step that turns round (see `BY_DIRECTION`) would be large beside the way of a bias of three elements.
    """
    pairs = _compared(row, ours.weights, theirs.weights)
    return _ratio(np.concatenate([np.ravel(value - want) for _, value, want in pairs]), _way(row, theirs))


def _way(row: Row, outcome: Outcome) -> np.ndarray:
    """From the start to where the weights are."""
    steps = _compared(row, outcome.weights, outcome.start)
    return np.concatenate([np.ravel(end - start) for _, end, start in steps])


def _turned(row: Row, theirs: Outcome) -> float:
    """`TURNED` steps that turn round, each in another weight, relative to the way of all weights."""
    step = 2 * theirs.counters["learning rate"]
    return float(np.sqrt(TURNED) * step / np.linalg.norm(_way(row, theirs)))


def _relative_norm(row: Row, ours: Outcome, theirs: Outcome) -> float:
    """How far apart a slot is, relative to its size; most start from zero."""
    return max((_ratio(value - want, want) for _, value, want in _compared(row, ours.slots, theirs.slots)), default=0.0)


def _loss(row: Row, ours: Outcome, theirs: Outcome) -> float:
    return float((np.abs(ours.logs["loss"] - theirs.logs["loss"]) / np.abs(theirs.logs["loss"])).max())


def _ratio(difference: np.ndarray, size: np.ndarray) -> float:
    distance, way = float(np.linalg.norm(difference)), float(np.linalg.norm(size))
    return distance / way if way else float("inf") if distance else 0.0
