"""The option objects of tf.distribute: checked, and made into what the engine does about them.

The table in docs/from-tf-distribute.md says of each field whether it is honoured, cannot change anything here, or is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

import tensorflow as tf

from lockstep.engine.tf_private import CommunicationOptions
from lockstep.errors import OptionError, UnsupportedError

_MODES = tf.distribute.InputReplicationMode


@dataclass(frozen=True)
class Input:
    """How a dataset is to be fed to the replicas.

    Attributes:
      devices: where each replica's slices are to lie once they are taken out eagerly; None for wherever they are made.
      ahead: how many global batches are made ready ahead of time; None for the default.
      per_replica: whether each replica has a dataset of its own.
    """

    devices: tuple[str, ...] | None
    ahead: int | None = None
    per_replica: bool = False


def input_options(options: Any, devices: tuple[str, ...]) -> Input:
    """What `tf.distribute.InputOptions` (or None) asks for.

    Raises:
      OptionError: another type, a field of the wrong type, or fields that contradict each other.
    """
    if options is None:
        return Input(devices)
    _check_type("options", options, tf.distribute.InputOptions, "tf.distribute.InputOptions(...) or None")
    fetch, mode, place, ahead = options
    _check_type("experimental_fetch_to_device", fetch, bool, "True or False")
    _check_type("experimental_replication_mode", mode, _MODES, "a tf.distribute.InputReplicationMode")
    _check_type("experimental_place_dataset_on_device", place, bool, "True or False")
    _check_number("experimental_per_replica_buffer_size", ahead, Integral, "a whole number of batches, 0 or more")
    per_replica = mode == _MODES.PER_REPLICA
    if place and not per_replica:
        raise OptionError(
            "One dataset feeds all replicas, so that it cannot be placed on the device of each. Received: "
            "experimental_place_dataset_on_device=True with experimental_replication_mode=PER_WORKER. Leave the first out, "
            "or give each replica a dataset of its own: PER_REPLICA, with strategy.distribute_datasets_from_function."
        )
    if place and fetch:
        raise OptionError(
            "Elements of a dataset that is on the device need not be fetched to it. Received: "
            "experimental_place_dataset_on_device=True with experimental_fetch_to_device=True. Set one of them to False."
        )
    return Input(devices if fetch or place else None, ahead, per_replica)


def check_run_options(options: Any) -> None:
    """Raises OptionError unless ``options`` is a `tf.distribute.RunOptions` with fields of the right types, or None."""
    if options is None or options is tf.distribute.RunOptions:  # the class stands for its defaults
        return
    _check_type("options", options, tf.distribute.RunOptions, "tf.distribute.RunOptions(...) or None")
    dynamic, bucketizing, xla = options
    _check_type("experimental_enable_dynamic_batch_size", dynamic, bool, "True or False")
    _check_type("experimental_bucketizing_dynamic_shape", bucketizing, bool, "True or False")
    if xla is not None:
        _check_type("experimental_xla_options", xla, tf.tpu.XLAOptions, "None or a tf.tpu.XLAOptions")


def check_communication_options(options: Any) -> None:
    """Raises OptionError unless ``options`` are `CommunicationOptions` with fields of the right types, or None."""
    if options is None:
        return
    allowed = "tf.distribute.experimental.CommunicationOptions(...) or None"
    _check_type("options", options, CommunicationOptions, allowed)
    _check_number("bytes_per_pack", options.bytes_per_pack, Integral, "a whole number of bytes, 0 or more")
    if options.timeout_seconds is not None:
        _check_number("timeout_seconds", options.timeout_seconds, Real, "None or a number of seconds, 0 or more")


def refuse_per_replica() -> NoReturn:
    """For a dataset of global batches, which has to be split."""
    raise UnsupportedError(
        "A dataset of global batches is split over the replicas, so that they cannot have a dataset each. Received: "
        "experimental_replication_mode=PER_REPLICA in experimental_distribute_dataset. Leave it out, or make a dataset for "
        "each replica in strategy.distribute_datasets_from_function(dataset_fn, options), which takes this mode."
    )


def refuse_tf1(method: str, instead: str) -> NoReturn:
    """For what TensorFlow keeps for its version 1 only."""
    raise UnsupportedError(
        f"{method} is a method of TensorFlow 1. Received: a call of it. Allowed: what TensorFlow 2 has for it. Use {instead}."
    )


def _check_type(name: str, value: Any, kind: Any, allowed: str) -> None:
    if not isinstance(value, kind):
        raise OptionError(f"An option has the wrong type. Received: {name}={value!r}. Allowed: {allowed}.")


def _check_number(name: str, value: Any, kind: Any, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= 0:
        raise OptionError(f"An option has a wrong value. Received: {name}={value!r}. Allowed: {allowed}.")
