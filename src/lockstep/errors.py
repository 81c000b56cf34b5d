"""The errors lockstep raises.

Each type subclasses the built-in exception that a caller would reasonably catch, so ``except ValueError`` keeps working.
Texts follow one pattern: what happened, what was received, what is allowed, what to do.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "DeviceError",
    "ExchangeError",
    "LockstepError",
    "OptionError",
    "RecipeError",
    "ReplicaContextError",
    "StrategyMismatchError",
    "TooLateError",
    "UnsupportedError",
    "UnsupportedVersionError",
    "VerifyError",
]


class LockstepError(Exception):
    """Base of every error that lockstep raises on purpose."""

    # AutoGraph re-raises an error from converted code as its own type only if it is built like a plain Exception;
    # otherwise the caller would get a StagingError, which no `except BatchError` catches.
    __init__ = Exception.__init__


class DeviceError(LockstepError, ValueError):
    """The devices asked for do not exist, repeat, mix kinds, or are too few."""


class TooLateError(LockstepError, RuntimeError):
    """TensorFlow has already started, so its devices and threads can no longer be set up."""


class BatchError(LockstepError, ValueError):
    """A batch or dataset cannot be split over the replicas."""


class ExchangeError(LockstepError, ValueError):
    """What replicas hand in at an all-reduce or a gather does not fit together."""


class OptionError(LockstepError, ValueError):
    """An option of tf.distribute has the wrong type, or a value that does not go with another."""


class StrategyMismatchError(LockstepError, ValueError, RuntimeError):
    """A variable, model or scope belongs to another strategy."""


class ReplicaContextError(LockstepError, RuntimeError):
    """A call that looks at all replicas from outside was made in one of them."""


class UnsupportedError(LockstepError, NotImplementedError):
    """A TensorFlow feature that cannot work under lockstep, with the reason and the way around it."""


class UnsupportedVersionError(LockstepError, ImportError):
    """TensorFlow or Keras is a version whose internals lockstep does not know."""


class RecipeError(LockstepError, ValueError):
    """A recipe file has an unknown key or a wrong value."""


class VerifyError(LockstepError, ValueError):
    """What is to be verified cannot be."""
