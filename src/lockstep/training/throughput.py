"""Counting steps and examples while Keras trains, without looking at any tensor."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Throughput"]


class Throughput:
    """Where training stands: global step, epoch, and images per second since the epoch began.

    Args:
        examples: training examples of one epoch.
        global_batch: examples of one step over all replicas.
        first_step: steps that were done before this run.
        clock: seconds from any fixed moment.
    """

    def __init__(
        self, examples: int, global_batch: int, first_step: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.examples = examples
        self.global_batch = global_batch
        self.steps_per_epoch = -(-examples // global_batch)
        self.step = first_step
        self.epoch = 0
        self._clock = clock
        self._started_s = self._epoch_started_s = clock()
        self._epoch_first_step = first_step

    def begin_epoch(self, epoch: int) -> None:
        """Note the start of ``epoch``, counted from 0 as Keras does."""
        self.epoch = epoch + 1
        self._epoch_first_step = self.step
        self._epoch_started_s = self._clock()

    def end_batch(self, batch: int) -> None:
        """Note the end of ``batch``, the index of the epoch's last finished step."""
        self.step = self._epoch_first_step + batch + 1

    @property
    def wall_s(self) -> float:
        """Seconds since training began."""
        return self._clock() - self._started_s

    @property
    def images_per_s(self) -> float:
        """Examples per second over all replicas, since the epoch began. The epoch's last batch may be smaller."""
        seen = min((self.step - self._epoch_first_step) * self.global_batch, self.examples)
        return seen / max(self._clock() - self._epoch_started_s, 1e-9)
