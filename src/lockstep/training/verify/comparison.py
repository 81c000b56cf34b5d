"""How far two trials are apart, step by step and variable by variable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.training.verify.trial import Trial

__all__ = ["Comparison", "Parting", "compare"]

# A variable whose gradient is this small a part of the whole has none in exact arithmetic (a bias before a normalisation, say).
# Optimizers that normalise gradients make noise of it, on any number of devices.
NO_GRADIENT = 1e-6
# Rounding of the weights themselves, relative to their size.
ROUNDING = 8 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Parting:
    """Where two trials part.

    Attributes:
      step: the number of the step, from 1.
      loss: the relative difference of the losses in it.
      gradient: that of the gradients' norm; None where it is not known.
      variable: the first variable, in the model's order, that is apart after it; None if none is.
      difference: how far, relative to its way from the start.
    """

    step: int
    loss: float
    gradient: float | None
    variable: str | None
    difference: float


@dataclass(frozen=True)
class Comparison:
    """Two trials side by side.

    Attributes:
      reference, other: the trials.
      tolerance: the relative difference that is allowed.
      losses: the relative difference in each step.
      norms: (reference, other) global gradient norm in each step; empty where it is not known.
      weights: by variable, the difference after each step, relative to how far the variable has moved.
      undetermined: variables without a gradient, whose differences say nothing; where there are any, also moving statistics,
        which follow them.
    """

    reference: Trial
    other: Trial
    tolerance: float
    losses: list[float]
    norms: list[tuple[float, float]]
    weights: dict[str, list[float]]
    undetermined: frozenset[str]

    @property
    def gradients(self) -> list[float]:
        """The relative difference of the gradient norms in each step; empty where they are not known."""
        return [_relative(other, reference) for reference, other in self.norms]

    @property
    def worst(self) -> float:
        """The largest difference of all."""
        counted = [d for name, each in self.weights.items() if name not in self.undetermined for d in each]
        return max([*self.losses, *self.gradients, *counted])

    @property
    def parting(self) -> Parting | None:
        """The first step in which something is further apart than allowed; None if there is none."""
        for i, loss in enumerate(self.losses):
            apart = [n for n, each in self.weights.items() if n not in self.undetermined and not each[i] <= self.tolerance]
            gradient = self.gradients[i] if self.norms else None
            if apart or not loss <= self.tolerance or not (gradient or 0.0) <= self.tolerance:
                variable = apart[0] if apart else None
                return Parting(i + 1, loss, gradient, variable, self.weights[variable][i] if variable else 0.0)
        return None

    @property
    def gradient_ratio(self) -> float | None:
        """How many times as large the other's gradient is in the first step; None where it is not known."""
        if not self.norms or not self.norms[0][0]:
            return None
        return self.norms[0][1] / self.norms[0][0]


def compare(reference: Trial, other: Trial, tolerance: float) -> Comparison:
    """Puts ``other`` beside ``reference``."""
    steps = range(len(reference.losses))
    norms = []
    if reference.gradients and other.gradients:
        norms = [(_norm(a), _norm(b)) for a, b in zip(reference.gradients, other.gradients, strict=True)]
    names = [name for name in reference.weights[0] if name in other.weights[0]]
    return Comparison(
        reference,
        other,
        tolerance,
        [_relative(other.losses[i], reference.losses[i]) for i in steps],
        norms,
        {name: [_moved_apart(name, i, reference, other) for i in steps] for name in names},
        _undetermined(reference),
    )


def _norm(gradients: dict[str, float]) -> float:
    return float(np.sqrt(np.sum(np.square(list(gradients.values())))))


def _relative(value: float, reference: float) -> float:
    if value == reference or (np.isnan(value) and np.isnan(reference)):
        return 0.0
    difference = abs(value - reference) / max(abs(reference), np.finfo(np.float32).tiny)
    return float(difference) if np.isfinite(difference) else float("inf")


def _moved_apart(name: str, step: int, reference: Trial, other: Trial) -> float:
    """The distance between the variable's values, relative to how far the reference has moved; rounding does not count."""
    ours, theirs = (np.asarray(t.weights[step][name], "float64") for t in (other, reference))
    if ours.shape != theirs.shape:
        return float("inf")
    start = np.asarray(reference.start[name], "float64") if name in reference.start else np.zeros_like(theirs)
    distance = float(np.linalg.norm(ours - theirs))
    distance = max(distance - ROUNDING * float(np.linalg.norm(theirs)), 0.0) if np.isfinite(distance) else float("inf")
    moved = float(np.linalg.norm(theirs - start))
    return 0.0 if distance == 0.0 else distance / max(moved, float(np.finfo(np.float32).tiny))


def _undetermined(reference: Trial) -> frozenset[str]:
    largest: dict[str, float] = {}
    for gradients in reference.gradients:
        whole = _norm(gradients)
        for name, norm in gradients.items():
            largest[name] = max(largest.get(name, 0.0), norm / whole if whole else 1.0)
    without = frozenset(name for name, share in largest.items() if share < NO_GRADIENT)
    return without | reference.statistics if without else without
