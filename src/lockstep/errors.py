"""The errors lockstep raises.

Each type subclasses the built-in exception that a caller would reasonably catch, so ``except ValueError`` keeps working.
Texts follow one pattern: what happened, what was received, what is allowed, what to do.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "DeviceError",
    "LockstepError",
    "NonFiniteError",
    "RecipeError",
    "StrategyMismatchError",
    "TooLateError",
    "UnsupportedError",
    "UnsupportedVersionError",
]


class LockstepError(Exception):
    """Base of every error that lockstep raises on purpose."""


class DeviceError(LockstepError, ValueError):
    """The devices asked for do not exist, repeat, mix kinds, or are too few."""


class TooLateError(LockstepError, RuntimeError):
    """TensorFlow has already started, so its devices and threads can no longer be set up."""


class BatchError(LockstepError, ValueError):
    """A batch or dataset cannot be split over the replicas."""


class StrategyMismatchError(LockstepError, ValueError):
    """A variable, model or scope belongs to another strategy."""


class NonFiniteError(LockstepError, FloatingPointError):
    """A loss or gradient is NaN or infinite on some replica (only with ``check_finite=True``)."""


class UnsupportedError(LockstepError, NotImplementedError):
    """A TensorFlow feature that cannot work under lockstep, with the reason and the way around it."""


class UnsupportedVersionError(LockstepError, ImportError):
    """TensorFlow or Keras is a version whose internals lockstep does not know."""


class RecipeError(LockstepError, ValueError):
    """A recipe file has an unknown key or a wrong value."""
