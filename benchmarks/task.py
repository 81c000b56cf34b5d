"""What a measuring process is asked and what it answers: one JSON object each way. Knows no framework."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.workloads import MEASURED_EPOCHS, WORKLOADS, Workload

_MARK = "benchmark result: "


@dataclass(frozen=True)
class Task:
    """One measurement of one engine.

    Args:
      engine, workload: their names.
      replicas: of the engines that have several.
      steps: how many are measured (rounded down to whole epochs).
      cores: those that may be used.
    """

    engine: str
    workload: str
    replicas: int
    steps: int
    cores: tuple[int, ...]

    @property
    def work(self) -> Workload:
        return WORKLOADS[self.workload]

    @property
    def epoch_steps(self) -> int:
        return max(1, self.steps // MEASURED_EPOCHS)

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_arguments() -> Task:
        """The task in this process's arguments; confines the process to its cores."""
        values = json.loads(sys.argv[1])
        task = Task(**{**values, "cores": tuple(values["cores"])})
        pin(task.cores)
        return task


def pin(cores: Sequence[int]) -> None:
    """Confines this process to ``cores``, where the system can do that. To be called before threads are made."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


@dataclass
class Clock:
    """Notes when epochs end; the first, the warm-up, starts the time."""

    times: list[float] = field(default_factory=list)

    def epoch_ended(self) -> None:
        self.times.append(time.perf_counter())

    def answer(self, task: Task, global_batch: int, loss: float) -> None:
        """Prints the result of ``task`` for the process that asked for it."""
        elapsed = [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
        examples = task.epoch_steps * global_batch
        result = {
            "examples_per_s": examples * len(elapsed) / sum(elapsed),
            "epochs_examples_per_s": [examples / each for each in elapsed],
            "elapsed_s": sum(elapsed),
            "steps": task.epoch_steps * len(elapsed),
            "global_batch": global_batch,
            "loss": loss,
        }
        print(_MARK + json.dumps(result), flush=True)


def read_answer(output: str) -> dict | None:
    """The result in what a measuring process printed; None if there is none."""
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return json.loads(lines[-1].removeprefix(_MARK)) if lines else None
