"""The second table in Markdown: what is worst for each value of each factor."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

from .precision import Difference, Row, compare, run


@dataclass
class Worst:
    """The worst of some rows: per part, separately for float32 and for 16 bit, whose units differ."""

    rows: int = 0
    broken: int = 0
    found: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row, differences: dict[str, Difference], problem: str) -> None:
        self.rows += 1
        self.broken += bool(problem)
        for part, difference in differences.items():
            self._note(f"{_kind(row)} {part}", difference.worst)
            if difference.rounding:
                self._note(f"{_kind(row)} {part}, by rounding", difference.worst / difference.rounding)

    def _note(self, name: str, value: float) -> None:
        self.found[name] = max(self.found.get(name, 0.0), value)

    def cell(self, *names: str) -> str:
        return " / ".join(_number(self.found[name]) if name in self.found else "-" for name in names)


def _kind(row: Row) -> str:
    return "float32" if row.precision == "float32" else "16 bit"


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else f"{value:.0e}" if value else "0"


HEAD = """\
Worst differences between N replicas and one device in the same precision.

- float32: the worst relative difference of an element, in weights / in slots / in logs.
- 16 bit: the distance of all weights relative to the way that they came / a slot's relative to its size / the logged loss's.
- by rounding: the distance of weights / slots, divided by that between one device in 16 bit and one in float32.
- ties: examples of an epoch that count for the accuracy on one side only.

| factor | value | rows | float32 | 16 bit | by rounding | ties | broken |
|---|---|---|---|---|---|---|---|"""


def precision_lines(rows: Iterable[Row]) -> Iterator[str]:
    """The table, and below it, in bold, the rows that break their bound. Ctrl-C ends it with the rows that are done."""
    factors: dict[str, dict[object, Worst]] = {f.name: {} for f in fields(Row)}
    total, broken = Worst(), []
    with contextlib.suppress(KeyboardInterrupt):
        for row in rows:
            problem, differences = _checked(row)
            total.add(row, differences, problem)
            for name, values in factors.items():
                values.setdefault(getattr(row, name), Worst()).add(row, differences, problem)
            if problem:
                broken.append(f"- **{row}: {problem}**")
            print(f"{total.rows}: {row}: {problem or 'as promised'}", file=sys.stderr, flush=True)
    yield HEAD
    yield _line("all", "", total)
    for name, values in factors.items():
        for value in sorted(values, key=str):
            yield _line(name, value, values[value])
    yield ""
    yield f"{len(broken)} of {total.rows} rows break their bound" + (":" if broken else ".")
    yield from broken


def _checked(row: Row) -> tuple[str, dict[str, Difference]]:
    """(what is wrong with it or nothing, its differences)."""
    try:
        outcome = run(row)
        differences = compare(row, outcome)
    except Exception as error:  # a table with a hole says more than none
        return f"{type(error).__name__}: {error}".split("\n")[0][:300], {}
    problems = [f"{part} {d.worst:.1e} > {d.bound:.1e}" for part, d in differences.items() if d.broken]
    if outcome.unequal_copies:
        problems.append("copies differ")
    return ", ".join(problems), differences


def _line(name: str, value: object, worst: Worst) -> str:
    cells = [
        worst.cell("float32 weights", "float32 slots", "float32 logs"),
        worst.cell("16 bit weights", "16 bit slots", "16 bit loss"),
        worst.cell("16 bit weights, by rounding", "16 bit slots, by rounding"),
        worst.cell("16 bit accuracy"),
        f"**{worst.broken}**" if worst.broken else "0",
    ]
    return f"| {name} | {value} | {worst.rows} | " + " | ".join(cells) + " |"
