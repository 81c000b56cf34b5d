"""Parts of a step alone: the exchange by tensor size, the update. Usage: python -m benchmarks.micro [REPLICAS] [SECONDS]

Prints Markdown. Each part is measured in a process of its own, for about SECONDS (default 1) after a warm-up.
"""

from __future__ import annotations

import inspect
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.environments import REPOSITORY
from benchmarks.report import table
from benchmarks.workloads import SEED

SIZES = tuple(1 << shift for shift in range(16, 27, 2))  # bytes per tensor: 64 KiB to 64 MiB
UPDATES = ("mirrored", "sharded")
_MIB = 1 << 20


def median_s(step: Callable[[], Any], seconds: float) -> float:
    """Median seconds of one call of ``step``."""
    for _ in range(3):
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_gb_per_s(size: int, threads: int, seconds: float) -> float:
    """GB/s that a plain copy moves, each byte read and written once, with ``threads`` copying at a time."""
    pairs = [(_page_aligned(size), _page_aligned(size)) for _ in range(threads)]
    # Small copies are repeated, so that starting threads does not count.
    repeats = max(1, 256 * _MIB // size)

    def copy(source: np.ndarray, target: np.ndarray) -> None:
        for _ in range(repeats):
            np.copyto(target, source)

    def together() -> None:
        workers = [threading.Thread(target=copy, args=pair) for pair in pairs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return 2 * size * threads * repeats / median_s(together, seconds) / 1e9


def _page_aligned(size: int) -> np.ndarray:
    """Bytes that begin on a page, as large tensors do: elsewhere, some processors copy at a tenth of the speed."""
    page = 4096
    room = np.ones(size + page, np.uint8)
    start = -room.ctypes.data % page
    return room[start : start + size]


def measure_exchange(replicas: int, seconds: float) -> dict[str, list[float]]:
    """GB/s of each exchange by size: ``replicas`` tensors of that size, each read N times and written once."""
    import tensorflow as tf

    import lockstep
    from lockstep.engine import exchange

    devices = lockstep.MirroredStrategy(replicas=replicas).extended.worker_devices
    found = {kind.__name__: kind(devices) for kind in exchange.Exchange.__subclasses__()}
    rates: dict[str, list[float]] = {}
    for size in SIZES:
        rates.setdefault("plain copy, one thread", []).append(copy_gb_per_s(size, 1, seconds / 4))
        rates.setdefault(f"plain copy, {replicas} threads", []).append(copy_gb_per_s(size, replicas, seconds / 4))
        tensors = []
        for _ in range(replicas):
            values = []
            for device in devices:
                with tf.device(device):
                    values.append(tf.random.stateless_normal([size // 4], (SEED, len(values))))
            tensors.append(values)
        moved = size * replicas * (len(devices) + 1)
        for name, algorithm in found.items():
            step = _compiled_exchange(algorithm, len(tensors))
            rates.setdefault(name, []).append(moved / median_s(lambda step=step, t=tensors: step(t), seconds / 4) / 1e9)
    return rates


def _compiled_exchange(algorithm: Any, count: int) -> Callable:
    import tensorflow as tf

    return tf.function(lambda tensors: algorithm.reduce(tensors, [False] * count))


def measure_update(replicas: int, seconds: float, update: str) -> dict[str, float]:
    """Milliseconds of the exchange and update of the MLP's variables with Adam, and bytes of the slots of one replica."""
    import tensorflow as tf

    import lockstep

    if "update" in inspect.signature(lockstep.MirroredStrategy).parameters:
        options: dict[str, Any] = {"update": update}
        strategy = lockstep.MirroredStrategy(replicas=replicas, **options)
    elif update == "mirrored":
        strategy = lockstep.MirroredStrategy(replicas=replicas)
    else:
        raise SystemExit("this lockstep has no choice of update")
    from benchmarks import keras_models

    with strategy.scope():
        model = keras_models.compiled("mlp")
        variables = model.trainable_variables
        model.optimizer.build(variables)
    # One gradient per replica, as a backward pass leaves them.
    gradients = [
        strategy.experimental_distribute_values_from_function(lambda context, v=v: tf.random.normal(v.shape)) for v in variables
    ]

    def apply(gradients: Any) -> None:
        model.optimizer.apply(gradients, variables)

    step = tf.function(lambda: strategy.run(apply, args=(gradients,)))
    elapsed = median_s(step, 2 * seconds)
    held = 0
    trained = {id(v) for v in variables}
    for variable in model.optimizer.variables:
        own = strategy.experimental_local_results(variable.value)[0]
        held += own.shape.num_elements() * own.dtype.size if id(variable) not in trained else 0
    return {"ms": 1e3 * elapsed, "slot_bytes": held, "parameters": sum(v.value.shape.num_elements() for v in variables)}


def in_a_process(part: str, replicas: int, seconds: float) -> dict:
    """The result of one part; ``{"error": why}`` if it failed."""
    command = [sys.executable, "-m", "benchmarks.micro", str(replicas), str(seconds), part]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
    return {"error": lines[-1]} if done.returncode else json.loads(lines[-1])


def _print_exchange(replicas: int, seconds: float) -> None:
    print(f"## Exchange of {replicas} float32 tensors between {replicas} replicas, GB/s\n")
    print(f"Bytes that must move: {replicas} reads and 1 write per element. A plain copy, 1 read and 1 write, is the limit.\n")
    rates = in_a_process("exchange", replicas, seconds)
    if "error" in rates:
        print(f"not measured: {rates['error']}")
        return
    rows = [[name, *(f"{rate:.1f}" for rate in values)] for name, values in rates.items()]
    sizes = [f"{size // 1024} KiB" if size < _MIB else f"{size // _MIB} MiB" for size in SIZES]
    print("\n".join(table(["size of a tensor", *sizes], rows, 1)))


def _print_update(replicas: int, seconds: float) -> None:
    rows, parameters = [], 0
    for update in UPDATES:
        result = in_a_process(update, replicas, seconds)
        if "error" in result:
            rows.append([update, result["error"], ""])
            continue
        parameters = result["parameters"]
        rows.append([update, f"{result['ms']:.1f}", f"{result['slot_bytes'] / _MIB:.1f}"])
    print(f"\n## Exchange and update of {parameters / 1e6:.1f} million parameters, Adam, {replicas} replicas\n")
    print("\n".join(table(["update", "ms per step", "slots per replica, MiB"], rows, 1)))


def main(arguments: list[str]) -> int:
    replicas = int(arguments[0]) if arguments else 2
    seconds = float(arguments[1]) if len(arguments) > 1 else 1.0
    part = arguments[2] if len(arguments) > 2 else None
    if part == "exchange":
        print(json.dumps(measure_exchange(replicas, seconds)))
    elif part:
        print(json.dumps(measure_update(replicas, seconds, part)))
    else:
        _print_exchange(replicas, seconds)
        _print_update(replicas, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
