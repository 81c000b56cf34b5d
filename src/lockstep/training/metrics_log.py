"""`metrics.jsonl`: what training measured, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from lockstep.training.throughput import Throughput

__all__ = ["MetricsLog", "loss_first"]


def loss_first(logs: Iterable[str]) -> list[str]:
    """The names in ``logs``, "loss" before the others; Keras sorts them by name."""
    return sorted(logs, key=lambda name: name != "loss")


class MetricsLog(keras.callbacks.Callback):
    """Writes a line every few steps, at the end of each epoch, and for the final test.

    Lines have ``event`` ("step", "epoch" or "test"), ``step``, ``epoch``, ``wall_s``, and the loss and metrics; those
    of steps and epochs also ``images_per_s``. Loss and metrics of a step are means over its epoch so far, as Keras
    computes them. Each line is flushed, so that a run that is killed leaves every line it finished.

    Args:
        path: the file to write; it must not be there yet.
        throughput: counts steps and examples.
        every_steps: steps from one line to the next.
    """

    def __init__(self, path: Path, throughput: Throughput, every_steps: int = 10) -> None:
        super().__init__()
        self.path = path
        self.throughput = throughput
        self.every_steps = every_steps
        self._file = path.open("x", encoding="utf-8")
        self._pending: tuple[dict[str, Any], dict[str, Any]] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.throughput.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # One step late: reading the tensors of the step that was just launched would wait for the device.
        self._write_pending()
        before = self.throughput.step
        self.throughput.end_batch(batch)
        if before // self.every_steps != self.throughput.step // self.every_steps:
            self._pending = (self._position("step", rate=True), dict(logs or {}))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._write_pending()
        self._write(self._position("epoch", rate=True), logs or {})

    def write_test(self, logs: dict[str, Any]) -> None:
        """Write the results on the held-out examples."""
        self._write(self._position("test", rate=False), logs)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._write_pending()
        self._file.close()

    def _position(self, event: str, rate: bool) -> dict[str, Any]:
        now = self.throughput
        position: dict[str, Any] = {
            "event": event,
            "step": now.step,
            "epoch": now.epoch,
            "wall_s": round(now.wall_s, 6),
        }
        if rate:
            position["images_per_s"] = round(now.images_per_s, 3)
        return position

    def _write_pending(self) -> None:
        if self._pending is not None:
            position, logs = self._pending
            self._pending = None
            self._write(position, logs)

    def _write(self, position: dict[str, Any], logs: dict[str, Any]) -> None:
        values = {name: float(logs[name]) for name in loss_first(logs)}
        self._file.write(json.dumps({**position, **values}) + "\n")
        self._file.flush()
