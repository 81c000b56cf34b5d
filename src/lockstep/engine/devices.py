"""Which devices the replicas run on, and how threads are shared between them.

Logical CPU devices and thread counts can only be set before TensorFlow's runtime starts, so this module decides both at once
when a strategy is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lockstep.engine.tf_private import canonical_device, started
from lockstep.errors import DeviceError, TooLateError


def resolve(devices: Sequence[str] | None, replicas: int | None, logical_replicas: int | None = None) -> tuple[str, ...]:
    """The full names of the replicas' devices, one per replica.

    Args:
      devices: device names such as ``["GPU:0", "GPU:1"]``; None for all visible GPUs, else logical CPU devices.
      replicas: how many of them (of the visible GPUs, else logical CPU devices, which are created here if need be).
      logical_replicas: how many replicas to spread evenly over the devices; None for one each.

    Raises:
      DeviceError: unknown, repeated, mixed or too few devices, both arguments at once, or logical replicas that cannot be
        spread evenly.
      TooLateError: CPU devices would have to be created, but TensorFlow has started.
    """
    if logical_replicas is None:
        return _physical(devices, replicas, None)
    _check_count("logical_replicas", logical_replicas, "any multiple of the number of devices")
    names = _physical(devices, replicas, logical_replicas)
    if logical_replicas % len(names):
        divisors = [d for d in range(1, logical_replicas + 1) if logical_replicas % d == 0]
        raise DeviceError(
            f"The logical replicas must be spread evenly over the devices. Received: logical_replicas={logical_replicas} for "
            f"{len(names)} devices. Allowed: a multiple of {len(names)}; or use {_listed(divisors)} devices."
        )
    each = logical_replicas // len(names)
    return tuple(name for name in names for _ in range(each))


def _listed(numbers: Sequence[int]) -> str:
    """1, 2, 4 or 8"""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _check_count(name: str, value: Any, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DeviceError(f"The number of replicas must be a positive integer. Received: {name}={value!r}. Allowed: {allowed}.")


def _physical(devices: Sequence[str] | None, replicas: int | None, sharing: int | None) -> tuple[str, ...]:
    """The devices, each once; CPU threads are shared out between ``sharing`` replicas (default: as many as devices)."""
    if devices is not None and replicas is not None:
        raise DeviceError(
            f"Say which devices or how many replicas, not both. Received: devices={list(devices)!r}, replicas={replicas!r}. "
            f"Leave out replicas= (the {len(devices)} devices give {len(devices)} replicas), or leave out devices=."
        )
    if replicas is not None:
        _check_count(
            "replicas",
            replicas,
            "1, 2, ... up to the number of GPUs, or any number of logical CPU devices where there are none",
        )
    if devices is not None:
        return _named(devices, sharing)
    gpus = tf.config.get_visible_devices("GPU")
    if gpus:
        return _first_gpus(replicas)
    return _cpus(replicas or 1, sharing)


def _named(devices: Sequence[str], sharing: int | None) -> tuple[str, ...]:
    if isinstance(devices, str) or not devices or not all(isinstance(d, str) for d in devices):
        raise DeviceError(
            f"devices must be a list of device names. Received: devices={devices!r}. "
            "Allowed: for example ['GPU:0', 'GPU:1']; leave it out for all visible GPUs."
        )
    names = [_canonical(d) for d in devices]
    for name, given in zip(names, devices, strict=True):
        if names.count(name) > 1:
            raise DeviceError(
                f"Each replica needs a device of its own. Received: {list(devices)!r}, in which {given!r} stands "
                "more than once. Name each device once. Several replicas on each: logical_replicas=N. N logical CPU devices: "
                "replicas=N."
            )
    kinds = {name.rsplit(":", 2)[1] for name in names}
    if len(kinds) > 1:
        raise DeviceError(
            f"All replicas must run on the same kind of device, or the slowest sets the pace. Received: {list(devices)!r}, "
            f"which mixes {' and '.join(sorted(kinds))}. Name only GPUs or only CPUs."
        )
    if kinds == {"CPU"}:
        _prepare_cpus(1 + max(int(name.rsplit(":", 1)[1]) for name in names), sharing or len(names))
    known = [d.name for d in tf.config.list_logical_devices()]
    missing = [given for name, given in zip(names, devices, strict=True) if name not in {canonical_device(k) for k in known}]
    if missing:
        have = [k.removeprefix("/device:") for k in known]
        raise DeviceError(
            f"No such device. Received: {missing}. TensorFlow sees {have}. "
            "Name devices from that list, or check CUDA_VISIBLE_DEVICES and the driver; replicas=N makes N logical CPU devices."
        )
    return tuple(names)


def _canonical(device: str) -> str:
    if not re.fullmatch(r"(/job:\w+)?(/replica:\d+)?(/task:\d+)?/?(device:)?[A-Za-z_]+:\d+", device):
        raise DeviceError(
            f"Not a device name. Received: {device!r}. Allowed: 'GPU:0', '/gpu:0', '/device:CPU:1', "
            "'/job:localhost/replica:0/task:0/device:GPU:0'."
        )
    return canonical_device(device)


def _first_gpus(replicas: int | None) -> tuple[str, ...]:
    names = [canonical_device(d.name) for d in tf.config.list_logical_devices("GPU")]
    if replicas is not None and replicas > len(names):
        raise DeviceError(
            f"There are more replicas than devices. Received: replicas={replicas}. TensorFlow sees {len(names)} GPU(s). "
            f"Use replicas={len(names)} or fewer, or make more GPUs visible (CUDA_VISIBLE_DEVICES)."
        )
    return tuple(names[: replicas or len(names)])


def _cpus(replicas: int, sharing: int | None) -> tuple[str, ...]:
    _prepare_cpus(replicas, sharing or replicas)
    names = [canonical_device(d.name) for d in tf.config.list_logical_devices("CPU")]
    return tuple(names[:replicas])


def _prepare_cpus(count: int, replicas: int) -> None:
    """Makes sure that there are ``count`` logical CPU devices, and shares the threads out, if it is not too late."""
    physical = tf.config.list_physical_devices("CPU")[0]
    if started():
        have = len(tf.config.list_logical_devices("CPU"))
        if have < count:
            raise TooLateError(
                f"TensorFlow has already started with {have} logical CPU device(s), and {count} are needed for "
                f"{replicas} replicas; "
                "they cannot be added any more. Make the strategy first, before any dataset, model, optimizer, tensor or "
                "tf.config.list_logical_devices() call."
            )
        return
    configured = tf.config.get_logical_device_configuration(physical)
    if configured is None or len(configured) < count:
        if configured:
            raise DeviceError(
                f"There are more replicas than devices. Received: {count} CPU devices asked for. "
                f"tf.config.set_logical_device_configuration made {len(configured)}. Make {count} there, or leave "
                "that call out."
            )
        if count > 1:
            tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * count)
    share_threads(replicas)


def share_threads(replicas: int) -> None:
    """Sets TensorFlow's thread pools so that CPU replicas do not fight each other; what the user has set stays.

    One op uses ``cores // replicas`` threads (at least one); as many ops run at a time as there are replicas, up to the cores.
    """
    if replicas == 1:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threading = tf.config.threading
    if threading.get_intra_op_parallelism_threads() == 0 and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        threading.set_intra_op_parallelism_threads(max(1, cores // replicas))
    if threading.get_inter_op_parallelism_threads() == 0 and "TF_NUM_INTEROP_THREADS" not in os.environ:
        threading.set_inter_op_parallelism_threads(max(2, min(replicas, cores)))
