"""Throughput, metrics.jsonl and progress, driven by hand with a clock that the test moves."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.training.metrics_log import MetricsLog
from lockstep.training.progress import ProgressReport
from lockstep.training.throughput import Throughput

# They are Keras callbacks.
pytestmark = pytest.mark.versions


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Lazy:
    """A value like a tensor on a device: reading it is noted."""

    def __init__(self, value: float, reads: list[float]) -> None:
        self.value = value
        self.reads = reads

    def __float__(self) -> float:
        self.reads.append(self.value)
        return self.value


def test_throughput_counts_steps_and_a_smaller_last_batch() -> None:
    clock = Clock()
    throughput = Throughput(examples=10, global_batch=4, clock=clock)
    assert throughput.steps_per_epoch == 3
    for epoch in range(2):
        throughput.begin_epoch(epoch)
        for batch in range(3):
            clock.now_s += 0.5
            throughput.end_batch(batch)
            assert throughput.step == 3 * epoch + batch + 1
        assert throughput.images_per_s == pytest.approx(10 / 1.5)
    assert throughput.epoch == 2
    assert throughput.wall_s == pytest.approx(3.0)


def test_throughput_counts_every_step_of_one_execution() -> None:
    throughput = Throughput(examples=40, global_batch=4)
    throughput.begin_epoch(0)
    throughput.end_batch(4)  # steps_per_execution=5: Keras names the last of them
    assert throughput.step == 5


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_written_one_step_late_and_flushed(tmp_path: Path) -> None:
    clock, reads = Clock(), []
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, Throughput(10, 4, clock=clock), every_steps=2)
    log.on_epoch_begin(0)
    for batch in range(3):
        clock.now_s += 0.5
        log.on_train_batch_end(batch, {"accuracy": Lazy(0.25, reads), "loss": Lazy(float(batch), reads)})
        # Step 2 is written while step 3 runs; steps 1 and 3 are never read.
        assert reads == ([] if batch < 2 else [1, 0.25])
    step = {"event": "step", "step": 2, "epoch": 1, "wall_s": 1.0, "images_per_s": 8.0, "loss": 1.0, "accuracy": 0.25}
    assert lines(path) == [step]
    assert list(lines(path)[0]) == list(step)

    log.on_epoch_end(0, {"loss": 3.0})
    assert lines(path)[1:] == [{"event": "epoch", "step": 3, "epoch": 1, "wall_s": 1.5, "images_per_s": 6.667, "loss": 3.0}]
    log.write_test({"loss": 4.0})
    log.close()
    assert lines(path)[2:] == [{"event": "test", "step": 3, "epoch": 1, "wall_s": 1.5, "loss": 4.0}]


def test_what_is_pending_is_written_when_training_stops(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, Throughput(10, 4), every_steps=1)
    log.on_epoch_begin(0)
    log.on_train_batch_end(0, {"loss": 1.0})
    log.close()
    assert [line["step"] for line in lines(path)] == [1]


def test_metrics_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    with pytest.raises(FileExistsError):
        MetricsLog(path, Throughput(10, 4))


def report(terminal: bool, clock: Clock, replicas: int = 2) -> tuple[ProgressReport, Throughput, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120, color_system=None)
    throughput = Throughput(10, 4, clock=clock)
    return ProgressReport(throughput, epochs=12, replicas=replicas, console=console, clock=clock), throughput, output


def test_plain_lines_where_there_is_no_terminal() -> None:
    clock = Clock()
    progress, throughput, output = report(terminal=False, clock=clock)
    progress.on_train_begin()
    throughput.begin_epoch(0)
    reads: list[float] = []
    for batch in range(3):
        clock.now_s += 0.5
        throughput.end_batch(batch)
        progress.on_train_batch_end(batch, {"loss": Lazy(1.0, reads)})
    assert reads == [] and output.getvalue() == ""
    progress.on_epoch_end(0, {"accuracy": 0.5, "loss": 1.25})
    progress.on_train_end()
    expected = "epoch  1/12  step 3  loss 1.2500  accuracy 0.5000  7 images/s  2 replicas\n"
    assert output.getvalue() == expected


def test_a_bar_in_a_terminal_shows_the_step_before_and_not_every_step() -> None:
    clock = Clock()
    progress, throughput, output = report(terminal=True, clock=clock, replicas=1)
    progress.on_train_begin()
    throughput.begin_epoch(0)
    reads: list[float] = []
    for batch, passed_s in enumerate([0.1, 0.05, 0.1]):
        clock.now_s += passed_s
        throughput.end_batch(batch)
        progress.on_train_batch_end(batch, {"loss": Lazy(float(batch), reads)})
    assert reads == [1]
    progress.close()
    assert "epoch  1/12" in output.getvalue()
    assert "step 3  loss 1.0000" in output.getvalue()
    assert "1 replica" in output.getvalue()
