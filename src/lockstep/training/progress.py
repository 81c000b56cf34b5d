"""Showing how training goes: a bar in a terminal, one plain line per epoch elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.training.metrics_log import loss_first
from lockstep.training.throughput import Throughput

__all__ = ["ProgressReport"]

_REFRESH_S = 0.2


class ProgressReport(keras.callbacks.Callback):
    """Shows global step, epoch, loss, metrics, images per second and the number of replicas.

    It reads the throughput that another callback (`MetricsLog`) keeps, and must stand after that in the list.

    Args:
        throughput: where training stands.
        epochs: how many epochs there will be.
        replicas: how many replicas train.
        console: where to print; a terminal gets the bar.
        clock: seconds from any fixed moment, to limit how often the bar changes.
    """

    def __init__(
        self,
        throughput: Throughput,
        epochs: int,
        replicas: int,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.throughput = throughput
        self.epochs = epochs
        self.replicas = replicas
        self.console = console
        self._clock = clock
        self._shown_s = clock()
        self._previous: dict[str, Any] = {}
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        total_steps = throughput.step + epochs * throughput.steps_per_epoch
        self._task = self._bar.add_task("epoch", total=total_steps, completed=throughput.step, status="starting")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._bar.start()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.console.is_terminal and self._clock() - self._shown_s >= _REFRESH_S:
            self._shown_s = self._clock()
            # The results of the step before: those of the one just launched may not be computed yet.
            self._show(self._previous)
        self._previous = dict(logs or {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._show(logs or {})
        self.console.print(f"{self._epoch()}  {self._status(logs or {})}", highlight=False)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back; also after training that failed."""
        self._bar.stop()

    def _show(self, logs: dict[str, Any]) -> None:
        self._bar.update(self._task, completed=self.throughput.step, description=self._epoch(), status=self._status(logs))

    def _epoch(self) -> str:
        return f"epoch {self.throughput.epoch:>{len(str(self.epochs))}}/{self.epochs}"

    def _status(self, logs: dict[str, Any]) -> str:
        values = "  ".join(f"{name} {float(logs[name]):.4f}" for name in loss_first(logs))
        replicas = f"{self.replicas} replica{'' if self.replicas == 1 else 's'}"
        parts = [f"step {self.throughput.step}", values, f"{self.throughput.images_per_s:,.0f} images/s", replicas]
        return "  ".join(part for part in parts if part)
