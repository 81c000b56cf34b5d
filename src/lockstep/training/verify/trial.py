"""One trial: k steps of a subject on a strategy, with loss, gradients and weights noted after each."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep import MirroredStrategy
from lockstep.errors import VerifyError
from lockstep.training.verify.subject import Build, Subject

__all__ = ["Trial", "random_layers", "run_trial", "unsynchronized_layers"]

Weights = dict[str, np.ndarray]


@dataclass
class Trial:
    """What a trial has shown.

    Attributes:
      start: the variables before the first step, by path; empty where they are made in it.
      losses: of each step, for its global batch.
      gradients: of each step, the norm of each trainable variable's gradient; empty where no Keras optimizer shows them.
      weights: after each step, the variables by path.
      statistics: paths of the variables that are not trained.
      warnings: what was warned of.
      random: names of the layers that draw random numbers in training.
      unsynchronized: names of the layers that normalise with the statistics of a slice.
    """

    start: Weights = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, float]] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    statistics: frozenset[str] = frozenset()
    warnings: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    unsynchronized: list[str] = field(default_factory=list)


def run_trial(
    build: Build, strategy: MirroredStrategy, steps: int, seed: int, start: Weights | None = None, random: bool = True
) -> Trial:
    """Sets the subject up on ``strategy`` and trains it for ``steps`` steps.

    Args:
      build: makes the subject.
      strategy: one replica or several.
      steps: how many updates.
      seed: for Python, NumPy and TensorFlow, before the subject is made.
      start: the variables to start from, as another trial's ``start``.
      random: whether layers may draw random numbers; if not, dropout and noise are switched off.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    trial = Trial()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subject = build(strategy)
        model = subject.model
        trial.random = [layer.name for layer in random_layers(model)]
        trial.unsynchronized = [layer.name for layer in unsynchronized_layers(model)]
        if not random:
            _switch_off(model)
        if model.built:
            _restore(model, start or {})
            trial.start = _weights(model)
        norms = _GradientNorms(strategy, model)
        strategy.extended.observers.append(norms)
        try:
            _train(subject, steps, lambda loss: _note(trial, model, norms, loss))
        finally:
            strategy.extended.observers.remove(norms)
    trainable = {id(v) for v in model.trainable_variables}
    trial.statistics = frozenset(path for path, v in _by_path(model.variables) if id(v) not in trainable)
    trial.warnings = [str(warning.message) for warning in caught]
    if len(trial.losses) < steps:
        raise VerifyError(
            f"There are too few batches. Received: {len(trial.losses)} for {steps} steps. "
            "Give more data (repeat the dataset), or take fewer steps: --steps."
        )
    return trial


def _note(trial: Trial, model: keras.Model, norms: _GradientNorms, loss: float) -> None:
    trial.losses.append(loss)
    trial.weights.append(_weights(model))
    if norms.seen:
        trial.gradients.append(norms.by_path())


def _train(subject: Subject, steps: int, note: Any) -> None:
    model = subject.model
    if subject.step is not None:
        for batch in itertools.islice(iter(subject.batches), steps):
            note(float(np.mean(np.asarray(subject.step(batch)))))
    elif isinstance(subject.batches, tf.data.Dataset):
        silent: Any = 0
        model.fit(subject.batches.take(steps), epochs=1, shuffle=False, verbose=silent, callbacks=[_EachStep(model, note)])
    else:
        for batch in itertools.islice(iter(subject.batches), steps):
            model.reset_metrics()
            logs: Any = model.train_on_batch(*(batch if isinstance(batch, tuple) else (batch,)), return_dict=True)
            note(float(logs["loss"]))


class _EachStep(keras.callbacks.Callback):
    """Notes the loss of each step by itself, instead of the epoch's mean so far."""

    def __init__(self, model: keras.Model, note: Any) -> None:
        super().__init__()
        self._trained, self._note = model, note

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._trained.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(float((logs or {}).get("loss", np.nan)))


def _weights(model: keras.Model) -> Weights:
    """All variables but counters and the states of random numbers, which are whole numbers."""
    floats = ((path, v) for path, v in _by_path(model.variables) if keras.backend.is_float_dtype(v.dtype))
    return {path: np.asarray(variable.value) for path, variable in floats}


def _by_path(variables: list[Any]) -> Iterator[tuple[str, Any]]:
    """Variables with their paths, numbered where several have the same."""
    seen: dict[str, int] = {}
    for variable in variables:
        seen[variable.path] = number = seen.get(variable.path, 0) + 1
        yield (variable.path if number == 1 else f"{variable.path} ({number})"), variable


def _restore(model: keras.Model, start: Weights) -> None:
    for path, variable in _by_path(model.variables):
        if path in start:
            variable.assign(start[path])


class _GradientNorms:
    """Watches what a Keras optimizer is given, after the exchange: the norm of each variable's gradient."""

    def __init__(self, strategy: MirroredStrategy, model: keras.Model):
        self.seen = False
        self._paths = {id(v): path for path, v in _by_path(model.trainable_variables)} if model.built else {}
        self._order = list(self._paths.values())
        with strategy.scope():
            self._norms = tf.Variable(
                tf.zeros([len(self._order)]), trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

    def __call__(self, gradients: list[Any], variables: list[Any]) -> None:
        known = [
            (self._order.index(self._paths[id(v)]), g)
            for g, v in zip(gradients, variables, strict=True)
            if g is not None and id(v) in self._paths
        ]
        if not known:
            return
        norms = [tf.norm(tf.cast(tf.convert_to_tensor(g), tf.float32)) for _, g in known]
        old: Any = self._norms.read_value()
        self._norms.assign(tf.tensor_scatter_nd_update(old, [[i] for i, _ in known], tf.stack(norms)))
        self.seen = True

    def by_path(self) -> dict[str, float]:
        return dict(zip(self._order, self._norms.numpy().tolist(), strict=True))


# Layers.

# What makes layers draw random numbers, by the attribute that says how much.
_AMOUNTS = ("rate", "stddev", "dropout", "recurrent_dropout")


def _sublayers(layer: Any, seen: set[int]) -> Iterator[Any]:
    """``layer`` and all layers in it, each once."""
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield layer
    for value in list(vars(layer).values()):
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(part, keras.layers.Layer):
                yield from _sublayers(part, seen)


def random_layers(model: keras.Model) -> list[Any]:
    """The layers of ``model`` that draw random numbers in training."""
    found = []
    for layer in _sublayers(model, set()):
        amounts = [getattr(layer, name, 0) for name in _AMOUNTS]
        draws = any(isinstance(a, (int, float)) and not isinstance(a, bool) and a > 0 for a in amounts)
        if draws or (type(layer).__name__.startswith("Random") and hasattr(layer, "seed")):
            found.append(layer)
    return found


def _switch_off(model: keras.Model) -> None:
    for layer in random_layers(model):
        for name in _AMOUNTS:
            if isinstance(getattr(layer, name, None), (int, float)):
                setattr(layer, name, 0.0)


def unsynchronized_layers(model: keras.Model) -> list[Any]:
    """The BatchNormalization layers of ``model`` that are trained with the statistics of a slice."""
    layers = [layer for layer in _sublayers(model, set()) if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer for layer in layers if layer.trainable and not layer.synchronized]
