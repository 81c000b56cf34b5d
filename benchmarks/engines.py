"""The engines that are compared, and how one measurement of one of them is made: in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, field

from benchmarks.environments import REPOSITORY, EnvironmentFailed, interpreter
from benchmarks.task import Task, read_answer

TIMEOUT_S = 600


@dataclass(frozen=True)
class Engine:
    """One way to train.

    Args:
      name: as in ``--engines``.
      title: its column in a report.
      about: what a report says about it.
      module: what measures it.
      environment: one of `environments.PEERS`, or None for the project's own.
      variables: environment variables; ``{replicas}`` is filled in.
      cores: how many it may use; 0 means one per replica.
    """

    name: str
    title: str
    about: str
    module: str = "benchmarks.measure_tensorflow"
    environment: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    cores: int = 0


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "one-core",
            "one core",
            "Keras on TensorFlow, one device, one thread in and between ops, pinned to one core; the batch of one replica",
            cores=1,
        ),
        Engine("one-device", "one device", "Keras on TensorFlow as it comes, one device with all cores; the global batch"),
        Engine("tf-distribute", "tf.distribute", "tf.distribute.MirroredStrategy as it comes, one CPU device per replica"),
        Engine(
            "tf-distribute-tuned",
            "tf.distribute, tuned",
            "the same, with threads as an expert sets them: one in an op, as many between ops as replicas",
        ),
        Engine("lockstep", "lockstep", "lockstep.MirroredStrategy(replicas=N), everything else by default"),
        Engine("lockstep-mirrored", "lockstep, mirrored", 'the same with update="mirrored": every replica repeats the update'),
        Engine("lockstep-loop", "lockstep, hand loop", "the same as lockstep, in a hand-written tf.function in place of fit"),
        Engine(
            "torch-ddp",
            "torch DDP",
            "PyTorch's DistributedDataParallel over gloo, one process per replica, pinned to one core, one thread each; "
            "gradient_as_bucket_view, static_graph, fused Adam, channels last for images; a hand-written loop over batches "
            "cut in advance",
            module="benchmarks.measure_torch",
            environment="bench-torch",
        ),
        Engine(
            "keras-jax",
            "Keras on JAX",
            "keras.distribution.DataParallel, one CPU device per replica, the whole step compiled; each step is waited for, "
            "because several in flight deadlock on CPU devices; batches cut in advance",
            module="benchmarks.measure_jax",
            environment="bench-jax",
            variables={"KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count={replicas}"},
        ),
    )
}


def available_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def measure(engine: Engine, workload: str, replicas: int, steps: int) -> dict:
    """One measurement: what benchmarks/task.py's `Clock.answer` says, or ``{"error": why}``."""
    cores = tuple(available_cores()[: engine.cores or replicas])
    task = Task(engine.name, workload, replicas, steps, cores)
    try:
        python = interpreter(engine.environment)
    except EnvironmentFailed as error:
        return {"error": str(error)}
    variables = {name: value.format(replicas=replicas) for name, value in engine.variables.items()}
    # Messages of the libraries are kept out of the way of a failure's reason.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", **os.environ, **variables}
    process = subprocess.Popen(
        [str(python), "-m", engine.module, task.encoded()],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A group of its own, so that ending it also ends the processes that it has started.
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"not done after {TIMEOUT_S} s"}
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    answer = read_answer(output)
    if process.returncode or answer is None:
        lines = [line for line in errors.strip().splitlines() if line.strip()]
        return {"error": lines[-1].strip()[:200] if lines else f"exit code {process.returncode}"}
    return answer
