"""The oracle's optimizers: all that Keras ships, with settings that reach their branches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras

Make = Callable[..., keras.optimizers.Optimizer]

# The promise for float32: the worst relative difference after 20 steps.
BOUND = 1e-5

# Slots may differ by more: a momentum near a minimum is a sum of gradients that cancel, so that rounding of the terms is large
# beside what is left (3e-5 in the attention model's biases). The weights, to which it is added, keep the bound.
SLOTS = 10


# These divide a gradient by a measure of its own size. Where one nearly cancels, its rounding is large beside it, and so in the
# step that it makes: 2e-5 of a bias that started from zero.
NORMALIZED = 5e-5


@dataclass(frozen=True)
class OptimizerCase:
    """One optimizer.

    Attributes:
      make: makes a new one, from more arguments of Keras's optimizers; called in the strategy's scope.
      bound: the worst relative difference allowed (`SLOTS` times as much in slots).
      build_first: whether its variables are made before the first step.
    """

    make: Make
    bound: float = BOUND
    build_first: bool = False


optimizers = keras.optimizers

OPTIMIZERS: dict[str, OptimizerCase] = {
    "sgd": OptimizerCase(lambda **more: optimizers.SGD(0.1, **more)),
    "momentum": OptimizerCase(lambda **more: optimizers.SGD(0.05, momentum=0.9, **more)),
    "nesterov, clipped": OptimizerCase(
        lambda **more: optimizers.SGD(0.05, momentum=0.9, nesterov=True, global_clipnorm=0.5, **more)
    ),
    "adam": OptimizerCase(lambda **more: optimizers.Adam(0.001, **more), NORMALIZED),
    "adam, amsgrad": OptimizerCase(lambda **more: optimizers.Adam(0.001, amsgrad=True, **more), NORMALIZED),
    "adamw": OptimizerCase(lambda **more: optimizers.AdamW(0.001, weight_decay=0.1, **more), NORMALIZED),
    # Not centered: Keras cannot do that with the sparse gradient of an embedding, on one device either.
    "rmsprop": OptimizerCase(lambda **more: optimizers.RMSprop(0.001, momentum=0.5, **more), NORMALIZED),
    "adagrad": OptimizerCase(lambda **more: optimizers.Adagrad(0.01, **more)),
    "lion": OptimizerCase(lambda **more: optimizers.Lion(0.001, **more)),
    "lamb": OptimizerCase(lambda **more: optimizers.Lamb(0.001, **more)),
    "muon": OptimizerCase(lambda **more: optimizers.Muon(0.001, **more)),
    "adafactor": OptimizerCase(lambda **more: optimizers.Adafactor(0.001, **more)),
    "adadelta": OptimizerCase(lambda **more: optimizers.Adadelta(1.0, **more)),
    "adamax": OptimizerCase(lambda **more: optimizers.Adamax(0.001, **more)),
    "nadam": OptimizerCase(lambda **more: optimizers.Nadam(0.001, **more), NORMALIZED),
    # A weight is a quotient of two sums, and the one above cancels: 5e-5 in the attention model's biases.
    "ftrl": OptimizerCase(lambda **more: optimizers.Ftrl(0.01, l2_regularization_strength=0.01, **more), 1e-4),
}
if hasattr(optimizers, "ScheduleFreeAdamW"):
    # Keras on one device makes its variables in the first traced step, and then starts its momentum anew in every step.
    OPTIMIZERS["schedule-free adamw"] = OptimizerCase(
        lambda **more: optimizers.ScheduleFreeAdamW(0.001, **more), NORMALIZED, build_first=True
    )
