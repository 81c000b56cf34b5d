"""Engines side by side: measures, and writes a report, a chart and every measurement. Usage: python -m benchmarks --help"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.chart import chart
from benchmarks.engines import ENGINES, available_cores, measure
from benchmarks.environments import REPOSITORY
from benchmarks.report import report
from benchmarks.results import Results, about_this_machine
from benchmarks.workloads import MEASURED_EPOCHS, WORKLOADS

ROUNDS = 5


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of %(default)s")
    parser.add_argument("--engines", default=",".join(ENGINES), help="some of %(default)s")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS)
    parser.add_argument("--steps", type=_positive, help="measured steps (default: some seconds of each workload)")
    parser.add_argument("--replicas", type=_positive, default=2)
    parser.add_argument("--output", type=Path, help="folder (default: benchmarks/reports; runs/bench for a part)")
    options = parser.parse_args(arguments)
    options.workloads = _names(parser, "--workloads", options.workloads, WORKLOADS)
    options.engines = _names(parser, "--engines", options.engines, ENGINES)
    cores = len(available_cores())
    if options.replicas > cores:
        print(f"warning: {options.replicas} replicas share {cores} core(s)", file=sys.stderr)
    if options.output is None:
        # A part is not to take the place of a whole report of the same day.
        part = set(options.workloads) != set(WORKLOADS) or set(options.engines) != set(ENGINES) or options.steps
        part = part or options.rounds < ROUNDS or options.replicas != 2
        options.output = REPOSITORY / ("runs/bench" if part else "benchmarks/reports")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _names(parser: argparse.ArgumentParser, option: str, text: str, allowed: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        parser.error(f"argument {option}: unknown {', '.join(unknown) or 'empty list'}. Allowed: {', '.join(allowed)}")
    return names


def write(results: Results, folder: Path, name: str) -> None:
    """Measurements, chart and report so far: a run that is interrupted leaves what it has."""
    results.save(folder / f"{name}.json")
    (folder / f"{name}.svg").write_text(chart(results), encoding="utf-8")
    (folder / f"{name}.md").write_text(report(results, name), encoding="utf-8")


def run(options: argparse.Namespace) -> int:
    """Measures everything, one by one; 1 if nothing could be measured."""
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    steps = {name: max(options.steps or WORKLOADS[name].steps, MEASURED_EPOCHS) for name in options.workloads}
    settings = {
        "workloads": options.workloads,
        "engines": options.engines,
        "rounds": options.rounds,
        "replicas": options.replicas,
        "steps": steps,
    }
    results = Results(started, about_this_machine(options.engines), settings)
    options.output.mkdir(parents=True, exist_ok=True)
    name = started[:10]
    for turn in range(options.rounds):
        for workload in options.workloads:
            first = turn % len(options.engines)
            for engine in options.engines[first:] + options.engines[:first]:
                load = os.getloadavg()[0]
                answer = measure(ENGINES[engine], workload, options.replicas, steps[workload])
                measurement = {"engine": engine, "workload": workload, "round": turn + 1, "load_before": load, **answer}
                results.measurements.append(measurement)
                write(results, options.output, name)
                found = answer.get("error") or f"{answer['examples_per_s']:,.0f} examples/s"
                print(f"round {turn + 1}/{options.rounds}  {workload:9} {engine:20} {found}", flush=True)
    print(options.output / f"{name}.md")
    return 0 if any("error" not in measurement for measurement in results.measurements) else 1


if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))
