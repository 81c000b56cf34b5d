"""The report of a run in Markdown: what was measured where, the table, and the ratios."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.engines import ENGINES
from benchmarks.results import Results, geometric_mean, title

# (engine, what it is held against)
_RATIOS = (
    ("lockstep", "tf-distribute"),
    ("lockstep", "tf-distribute-tuned"),
    ("lockstep", "torch-ddp"),
    ("lockstep", "keras-jax"),
    ("lockstep", "one-device"),
    ("lockstep", "one-core"),
    ("lockstep", "lockstep-mirrored"),
    ("lockstep", "lockstep-loop"),
)
_PEERS = ("tf-distribute", "tf-distribute-tuned", "torch-ddp", "keras-jax")


def report(results: Results, name: str) -> str:
    """The report of ``results``, with the chart ``name.svg`` and the measurements ``name.json`` beside it."""
    settings = results.settings
    return "\n".join(
        [
            f"# Data-parallel training, {settings['replicas']} replicas: {results.started[:10]}",
            "",
            f"Examples per second: the median of {settings['rounds']} rounds, and in brackets the lowest and the highest. "
            f"Every measurement is in [{name}.json]({name}.json).",
            "",
            f"![Throughput of each engine]({name}.svg)",
            "",
            *_throughput(results),
            "",
            *_ratios(results),
            *_failures(results),
            "## Where",
            "",
            *table(["", ""], [[what, value] for what, value in results.about.items()]),
            "",
            *_how(results),
            "",
        ]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 99) -> list[str]:
    """A Markdown table; the columns from ``numbers_from`` on are aligned to the right."""
    rule = ["---:" if i >= numbers_from else "---" for i in range(len(head))]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (head, rule, *rows)]


def _throughput(results: Results) -> list[str]:
    rows = []
    for engine in results.engines:
        row = [ENGINES[engine].title]
        for workload in results.workloads:
            summary = results.summary(engine, workload)
            if summary:
                row.append(f"{summary.median:,.0f} ({summary.low:,.0f}-{summary.high:,.0f})")
            else:
                row.append(results.error(engine, workload) or "not measured")
        rows.append(row)
    return table(["examples/s", *map(title, results.workloads)], rows, 1)


def _ratios(results: Results) -> list[str]:
    rows = []
    for engine, other in _RATIOS:
        ratios = [results.ratio(engine, other, workload) for workload in results.workloads]
        if any(ratios):
            name = f"{ENGINES[engine].title} / {ENGINES[other].title}"
            rows.append([name, *map(_number, ratios), _number(geometric_mean(ratios))])
    best = [_best_peer(results, workload) for workload in results.workloads]
    if any(best):
        rows.append(["lockstep / the fastest peer", *map(_number, best), _number(geometric_mean(best))])
    if not rows:
        return []
    head = ["ratio of medians", *results.workloads, "geometric mean"]
    return ["## Ratios", "", *table(head, rows, 1), ""]


def _best_peer(results: Results, workload: str) -> float | None:
    ratios = [results.ratio("lockstep", peer, workload) for peer in _PEERS]
    return min((ratio for ratio in ratios if ratio), default=None)


def _number(ratio: float | None) -> str:
    return f"{ratio:.2f}" if ratio else ""


def _failures(results: Results) -> list[str]:
    """Measurements that failed where others of the same cell did not, which the table does not show."""
    lines = []
    for engine in results.engines:
        for workload in results.workloads:
            error = results.error(engine, workload)
            if error and results.summary(engine, workload):
                lines.append(f"- {ENGINES[engine].title}, {workload}: a round failed: {error}")
    return ["## Failed rounds", "", *lines, ""] if lines else []


def _how(results: Results) -> list[str]:
    steps = ", ".join(f"{workload} {count}" for workload, count in results.settings["steps"].items())
    return [
        "## How",
        "",
        "Each measurement is a process of its own; engines take turns within a round, beginning with another in each round. "
        "float32, synthetic data from a fixed seed held in memory, Adam, sparse cross-entropy from logits, the same layers and "
        "sizes in every engine. An epoch of warm-up, then four that are measured; measured steps: "
        f"{steps}. Keras engines train in `fit`; those on TensorFlow read one `batch().cache().repeat().prefetch()` pipeline. "
        "No engine may use more cores than there are replicas.",
        "",
        *(f"- **{ENGINES[engine].title}**: {ENGINES[engine].about}." for engine in results.engines),
    ]
