"""Why N replicas and one device part: found by taking a suspect away and trying again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.training.verify.comparison import Comparison
from lockstep.training.verify.trial import Trial

__all__ = ["CAUSES", "Cause", "Experiments", "likely_causes"]


@dataclass(frozen=True)
class Cause:
    """Something that makes N replicas compute something else than one device.

    Attributes:
      name: a short name, as for ``--allow``.
      what: what it is.
      remedy: what to do about it.
      allowable: whether it can be taken out of the comparison.
    """

    name: str
    what: str
    remedy: str
    allowable: bool = False


CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            "non-deterministic",
            "The training is not reproducible: repeated on one device, from the same start, it gives other numbers.",
            "Look for random numbers without a seed, a py_function or dataset that draws its own, or the time of day. "
            "Until it is found, no comparison says anything.",
        ),
        Cause(
            "undistributed-batch",
            "A batch was passed to strategy.run without being split: every replica computes all of it, and the gradient is N "
            "times too large.",
            "Add dataset = strategy.experimental_distribute_dataset(dataset) before the loop, or pass strategy.split(batch).",
        ),
        Cause(
            "local-average",
            "The gradient is about N times too large: the loss is averaged over the replica's slice, instead of divided by the "
            "global batch.",
            "Use tf.nn.compute_average_loss(per_example_loss, global_batch_size=...), or a Keras loss.",
        ),
        Cause(
            "batch-norm",
            "BatchNormalization normalises each slice with its own statistics.",
            "Make the strategy with sync_batch_norm=True (in a recipe: sync_batch_norm = true in [strategy]), or accept it: "
            "--allow batch-norm.",
            allowable=True,
        ),
        Cause(
            "dropout",
            "Layers that draw random numbers draw others on other slices.",
            "This is as it should be. To compare the rest: --allow dropout. For the same numbers on any number of devices: "
            "logical_replicas.",
            allowable=True,
        ),
    )
}


@dataclass(frozen=True)
class Experiments:
    """The trials that can be repeated under other conditions.

    Attributes:
      repeat: the reference once more.
      compare: (randomness, synchronized) -> one device and N replicas compared again, with layers that draw random numbers
        or not, and with all statistics synchronised or not.
    """

    repeat: Callable[[], Trial]
    compare: Callable[[bool, bool], Comparison]


def likely_causes(found: Comparison, replicas: int, random: bool, synchronized: bool, experiments: Experiments) -> list[Cause]:
    """What makes the trials in ``found`` part, as far as it can be recognised.

    Args:
      found: a comparison whose trials part.
      replicas: N.
      random: whether layers could draw random numbers in it.
      synchronized: whether all statistics were synchronised in it.
      experiments: to take suspects away with.
    """
    if any("is not split over the replicas" in warning for warning in found.other.warnings):
        return [CAUSES["undistributed-batch"]]
    if _differ(experiments.repeat(), found.reference):
        return [CAUSES["non-deterministic"]]
    ratio = found.gradient_ratio
    if ratio is not None and abs(ratio / replicas - 1) < 0.25:
        return [CAUSES["local-average"]]
    normalises = bool(found.other.unsynchronized) and not synchronized
    draws = bool(found.other.random) and random
    if normalises and experiments.compare(random, True).parting is None:
        return [CAUSES["batch-norm"]]
    if draws and experiments.compare(False, synchronized).parting is None:
        return [CAUSES["dropout"]]
    if draws and normalises and experiments.compare(False, True).parting is None:
        return [CAUSES["batch-norm"], CAUSES["dropout"]]
    return []


def _differ(one: Trial, other: Trial) -> bool:
    """Whether two trials of the same kind differ in any bit."""
    if one.losses != other.losses:
        return True
    pairs = zip(one.weights, other.weights, strict=True)
    return any(a[name].tobytes() != b[name].tobytes() for a, b in pairs for name in a)
