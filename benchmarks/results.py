"""Measurements: kept as JSON, one by one, and summed up as medians and spreads."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.environments import PEERS, REPOSITORY
from benchmarks.workloads import WORKLOADS

FORMAT = 1
_PACKAGES = ("lockstep-tf", "tensorflow-cpu", "tensorflow", "keras", "numpy")


@dataclass(frozen=True)
class Summary:
    """Throughput of one engine on one workload, in examples/s."""

    median: float
    low: float
    high: float


@dataclass
class Results:
    """A run of the benchmark.

    Args:
      started: date and time, ISO 8601.
      about: hardware, system and versions, by what they are.
      settings: replicas, rounds and so on.
      measurements: each with engine, workload, round and either examples_per_s (and more) or error.
    """

    started: str
    about: dict[str, str]
    settings: dict
    measurements: list[dict] = field(default_factory=list)

    @property
    def engines(self) -> list[str]:
        return list(self.settings["engines"])

    @property
    def workloads(self) -> list[str]:
        return list(self.settings["workloads"])

    def summary(self, engine: str, workload: str) -> Summary | None:
        """None if no measurement has succeeded."""
        rates = [m["examples_per_s"] for m in self._of(engine, workload) if "error" not in m]
        return Summary(statistics.median(rates), min(rates), max(rates)) if rates else None

    def error(self, engine: str, workload: str) -> str | None:
        """Why the first measurement that failed did."""
        return next((m["error"] for m in self._of(engine, workload) if "error" in m), None)

    def ratio(self, engine: str, other: str, workload: str) -> float | None:
        """Median of ``engine`` over median of ``other``."""
        ours, theirs = self.summary(engine, workload), self.summary(other, workload)
        return ours.median / theirs.median if ours and theirs else None

    def _of(self, engine: str, workload: str) -> list[dict]:
        return [m for m in self.measurements if (m["engine"], m["workload"]) == (engine, workload)]

    def save(self, path: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        # Written beside and renamed: a run that is interrupted leaves what it has measured so far.
        beside = path.with_suffix(".json.new")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(path)


def load(path: Path) -> Results:
    """The results in a file of `Results.save`.

    Raises:
      ValueError: another format.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ValueError(f"{path} does not hold results of this benchmark, format {FORMAT}.")
    return Results(**values)


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Of those that there are; None without any."""
    logarithms = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def about_this_machine(engines: Iterable[str]) -> dict[str, str]:
    """What a number cannot be read without: hardware, system and versions."""
    facts = {
        "Processor": f"{_processor()}, {os.cpu_count()} cores",
        "Memory": _memory(),
        "System": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
    }
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    facts["Packages"] = ", ".join(versions)
    for environment, packages in PEERS.items():
        if any(environment.removeprefix("bench-") in engine for engine in engines):
            facts[f"Environment {environment}"] = ", ".join(package.replace("==", " ") for package in packages)
    facts["Commit"] = _commit()
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError):
        return "unknown"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def title(workload: str) -> str:
    return WORKLOADS[workload].title if workload in WORKLOADS else workload
