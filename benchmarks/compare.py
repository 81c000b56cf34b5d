"""Compares two runs. Usage: python -m benchmarks.compare OLD.json NEW.json"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.engines import ENGINES
from benchmarks.report import table
from benchmarks.results import Results, Summary, load


def remark(old: Summary | None, new: Summary | None) -> str:
    """What became of the throughput: a change counts where the two spreads do not touch."""
    if old is None or new is None:
        return "not measured" if old is new else "no longer measured" if new is None else "newly measured"
    if new.low > old.high:
        return "**faster**"
    return "**slower**" if new.high < old.low else ""


def comparison(old: Results, new: Results) -> list[str]:
    """A table, one row per engine and workload."""
    rows = []
    for engine in dict.fromkeys([*old.engines, *new.engines]):
        for workload in dict.fromkeys([*old.workloads, *new.workloads]):
            before, after = (results.summary(engine, workload) for results in (old, new))
            ratio = f"{after.median / before.median:.2f}" if before and after else ""
            name = ENGINES[engine].title if engine in ENGINES else engine
            rows.append([name, workload, _median(before), _median(after), ratio, remark(before, after)])
    return table(["engine", "workload", "old", "new", "new / old", "beyond the spread"], rows)


def _median(summary: Summary | None) -> str:
    return f"{summary.median:,.0f}" if summary else ""


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    old, new = (load(Path(path)) for path in arguments)
    for what in dict.fromkeys([*old.about, *new.about]):
        before, after = old.about.get(what, "none"), new.about.get(what, "none")
        if before != after:
            print(f"{what}: {before} -> {after}")
    print("\n".join(comparison(old, new)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
