"""Runs one case on one device and on N, from the same start, and compares everything that training leaves behind."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, fields

import keras
import numpy as np
import tensorflow as tf

import lockstep

from .feeds import FEEDS, SIZES, Data
from .models import MODELS, start_from
from .optimizers import OPTIMIZERS, SLOTS

STEPS = 20
# Sums in another order differ by an ulp of their largest terms, not of their result; so an element counts relative to its own
# size, but to no less than a tenth of the largest in its tensor. Rounding is then worth about 1e-6, and the bound 1e-5.
FLOOR = 0.1
HELD_OUT = 23

Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One row of the table, by name."""

    model: str
    optimizer: str
    feed: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.model} | {self.optimizer} | {self.feed} | {self.sizes}"

    @property
    def makes_sense(self) -> bool:
        model = MODELS[self.model]
        if OPTIMIZERS[self.optimizer].build_first and not model.built:
            return False
        return model.simple or not FEEDS[self.feed].by_hand


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind, each part by name.

    Attributes:
      weights: the model's variables.
      slots: the optimizer's variables.
      logs: losses and metrics per epoch, also of held-out examples.
      evaluation: losses and metrics of held-out examples after training.
      predictions: for the held-out examples, in order.
      unequal_copies: paths of the variables whose copies differ between replicas in any bit.
    """

    weights: Values
    slots: Values
    logs: Values
    evaluation: Values
    predictions: Values
    unequal_copies: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A hash of every bit."""
        digest = hashlib.sha256()
        for part in PARTS:
            for name, value in getattr(self, part).items():
                digest.update(name.encode() + value.tobytes())
        return digest.hexdigest()


PARTS = tuple(f.name for f in fields(Outcome) if f.name != "unequal_copies")


def examples(case: Case) -> Data:
    sizes, make = SIZES[case.sizes], MODELS[case.model].examples
    rng = np.random.default_rng(7)
    return Data(*make(rng, sizes.examples), *make(rng, HELD_OUT), sizes)


@functools.cache
def strategy_of(replicas: int) -> lockstep.MirroredStrategy:
    """Strategies are shared by all runs, as by the models of one program."""
    return lockstep.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def compiled(case: Case) -> keras.Model:
    """The case's model, compiled; call it in the scope, after `start_from`."""
    model_case, feed = MODELS[case.model], FEEDS[case.feed]
    model = model_case.build()
    optimizer = OPTIMIZERS[case.optimizer].make()
    if OPTIMIZERS[case.optimizer].build_first:
        optimizer.build(model.trainable_variables)
    model.compile(
        optimizer,
        steps_per_execution=feed.steps_per_execution,
        run_eagerly=feed.run_eagerly,
        **model_case.objective(),
    )
    return model


def run(case: Case, replicas: int | None) -> Outcome:
    """Trains on the case's own data, for about `STEPS` steps.

    Args:
      replicas: N, or None for one device without a strategy.
    """
    return train(case, replicas, examples(case))


def train(case: Case, replicas: int | None, data: Data) -> Outcome:
    """The same on other data."""
    start_from(1)
    if replicas is None:
        model = compiled(case)
    else:
        with strategy_of(replicas).scope():
            model = compiled(case)
    logs = FEEDS[case.feed].train(model, data, math.ceil(STEPS / data.sizes.steps))
    evaluation = model.evaluate(*data.held_out, batch_size=data.sizes.batch, verbose=0, return_dict=True)
    predictions = model.predict(data.held_out_x, batch_size=data.sizes.batch, verbose=0)
    predictions = predictions if isinstance(predictions, dict) else {"output": predictions}
    variables = [*model.variables, *model.optimizer.variables]
    return Outcome(
        weights=by_path(model.variables),
        slots=by_number(model.optimizer.variables),
        logs={name: np.asarray(values) for name, values in logs.items()},
        evaluation={name: np.asarray(value) for name, value in evaluation.items()},
        predictions={name: np.asarray(value) for name, value in predictions.items()},
        unequal_copies=unequal_copies(strategy_of(replicas), variables) if replicas else (),
    )


@functools.lru_cache(maxsize=64)
def one_device(case: Case) -> Outcome:
    return run(case, None)


def by_path(variables: list[keras.Variable]) -> Values:
    return {v.path: np.asarray(v.value) for v in variables}


def by_number(variables: list[keras.Variable]) -> Values:
    """For slots, whose paths are not unique, nor the same in and out of a scope (both with Adafactor)."""
    return {f"{number} {v.name}": np.asarray(v.value) for number, v in enumerate(variables)}


def unequal_copies(strategy: tf.distribute.Strategy, variables: list[keras.Variable]) -> tuple[str, ...]:
    """Paths of the variables that do not have N copies which are equal in every bit."""
    unequal = []
    for variable in variables:
        copies = [copy.numpy().tobytes() for copy in strategy.experimental_local_results(variable.value)]
        if len(copies) != strategy.num_replicas_in_sync or len(set(copies)) != 1:
            unequal.append(variable.path)
    return tuple(unequal)


def relative_difference(value: np.ndarray, reference: np.ndarray) -> float:
    """The worst of |value - reference| / max(|reference|, FLOOR * max|reference|) over the elements."""
    value, reference = (np.asarray(a, "float64") for a in (value, reference))
    assert value.shape == reference.shape, f"shapes differ: {value.shape} and {reference.shape} on one device"
    if not reference.size:
        return 0.0
    size = np.abs(reference)
    scale = np.maximum(size, FLOOR * size.max())
    difference = np.abs(value - reference)
    # A zero on one device must be one on N.
    return float(np.divide(difference, scale, out=np.where(difference > 0, np.inf, 0.0), where=scale > 0).max())


def compare(outcome: Outcome, reference: Outcome, case: Case) -> dict[str, float]:
    """The worst relative difference in each part of the outcome; empty where none is promised."""
    model = MODELS[case.model]
    differences = {}
    for part in PARTS if model.exact else ():
        ours, theirs = getattr(outcome, part), getattr(reference, part)
        assert ours.keys() == theirs.keys(), f"{part}: {sorted(ours)} and {sorted(theirs)} on one device"
        compared = [name for name in theirs if not any(mark in name for mark in model.undetermined)]
        differences[part] = max((relative_difference(ours[name], theirs[name]) for name in compared), default=0.0)
    return differences


def bound_of(case: Case, part: str) -> float:
    """The worst relative difference that is allowed."""
    return OPTIMIZERS[case.optimizer].bound * (SLOTS if part == "slots" else 1)
