"""The verdict: both trials, their comparison and, where they part, the likely causes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lockstep.errors import VerifyError
from lockstep.training.verify.causes import CAUSES, Cause, Experiments, likely_causes
from lockstep.training.verify.comparison import Comparison, compare
from lockstep.training.verify.subject import Build, from_function, from_recipe
from lockstep.training.verify.trial import Trial, run_trial

__all__ = ["Verdict", "verify"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of `verify`.

    Attributes:
      target: what was verified.
      replicas: N.
      comparison: one device beside N replicas.
      causes: the likely causes, where the two part.
      allowed: the causes that were taken out.
    """

    target: str
    replicas: int
    comparison: Comparison
    causes: tuple[Cause, ...]
    allowed: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether N replicas compute what one device does, within the tolerance."""
        return self.comparison.parting is None


def verify(
    target: str,
    replicas: int | None = None,
    steps: int = 5,
    tolerance: float = 1e-3,
    allow: Collection[str] = (),
    seed: int = 0,
) -> Verdict:
    """Trains ``target`` on one device and on N replicas, from the same start and on the same data, and compares.

    Args:
      target: the path of a recipe (``*.toml``) or "module:function"; see `Subject` for what the function returns.
      replicas: N; default: the recipe's, or as many as there are GPUs, or 2.
      steps: how many updates to compare.
      tolerance: the relative difference that is allowed: of losses, of gradient norms, and of weights relative to how far they
        have moved.
      allow: causes to take out of the comparison: "dropout" (and other noise) is switched off, "batch-norm" synchronised.
      seed: set before each trial.

    Raises:
      VerifyError: a wrong argument, or a target that is none.
      RecipeError: a wrong recipe.
    """
    _check_arguments(replicas, steps, tolerance, allow)
    trials = _Trials(target, replicas, steps, tolerance, seed, random="dropout" not in allow, sync="batch-norm" in allow)
    found = trials.compare(trials.random, trials.sync)
    causes: list[Cause] = []
    if found.parting is not None:
        experiments = Experiments(lambda: trials.reference(trials.random), trials.compare)
        causes = likely_causes(found, trials.replicas, trials.random, trials.sync, experiments)
    return Verdict(target, trials.replicas, found, tuple(causes), tuple(allow))


def _check_arguments(replicas: int | None, steps: int, tolerance: float, allow: Collection[str]) -> None:
    if replicas is not None and replicas < 2:
        raise VerifyError(f"One device is compared with several. Received: {replicas} replicas. Allowed: 2 or more.")
    if steps < 1:
        raise VerifyError(f"At least one step is compared. Received: {steps} steps. Allowed: 1 or more.")
    if not 0 < tolerance < 1:
        raise VerifyError(f"The tolerance is a relative difference. Received: {tolerance}. Allowed: above 0 and below 1.")
    allowable = [cause.name for cause in CAUSES.values() if cause.allowable]
    unknown = [name for name in allow if name not in allowable]
    if unknown:
        known = ", ".join(allowable)
        raise VerifyError(f"This cannot be taken out of the comparison. Received: {unknown[0]!r}. Allowed: {known}.")


class _Trials:
    """Runs trials of one target; each kind once."""

    def __init__(self, target: str, replicas: int | None, steps: int, tolerance: float, seed: int, random: bool, sync: bool):
        self._steps, self._tolerance, self._seed = steps, tolerance, seed
        self.random, self.sync = random, sync
        self._build, self._options = _prepared(target, replicas)
        self._first: dict[bool, Trial] = {}
        # Made at once, before anything starts TensorFlow.
        self._strategies: dict[bool, Any] = {sync: self._strategy(sync)}
        self.replicas: int = self._strategies[sync].num_replicas_in_sync
        if self.replicas < 2:
            raise VerifyError(f"One device is compared with several. Received: {target}, which asks for one. Use --replicas N.")

    def _strategy(self, sync: bool) -> Any:
        import lockstep

        options = dict(self._options)
        options["sync_batch_norm"] = sync or options.get("sync_batch_norm", False)
        return lockstep.MirroredStrategy(**options)

    def reference(self, random: bool) -> Trial:
        """A new trial on one device."""
        import lockstep

        device = self._strategies[self.sync].extended.worker_devices[0]
        return run_trial(self._build, lockstep.MirroredStrategy([device]), self._steps, self._seed, random=random)

    def compare(self, random: bool, sync: bool) -> Comparison:
        if random not in self._first:
            self._first[random] = self.reference(random)
        if sync not in self._strategies:
            self._strategies[sync] = self._strategy(sync)
        reference = self._first[random]
        other = run_trial(self._build, self._strategies[sync], self._steps, self._seed, reference.start, random)
        return compare(reference, other, self._tolerance)


def _prepared(target: str, replicas: int | None) -> tuple[Build, dict[str, Any]]:
    """How to build the target, and the strategy's arguments for N replicas."""
    from pathlib import Path

    from lockstep.training.build import strategy_options

    if target.endswith(".toml"):
        file, build = from_recipe(Path(target))
        options = strategy_options(file)
    else:
        build, options = from_function(target), {}
    if replicas is not None:
        options.update(devices=None, replicas=replicas, logical_replicas=None)
    elif options.get("devices") is None and options.get("replicas") is None and options.get("logical_replicas") is None:
        options["replicas"] = _default_replicas()
    return build, options


def _default_replicas() -> int:
    import tensorflow as tf

    return max(2, len(tf.config.get_visible_devices("GPU")))
