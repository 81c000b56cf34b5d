"""The bar chart of a report as SVG: one panel per workload, one bar per engine, a line from the lowest to the highest round.

Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from html import escape

from benchmarks.engines import ENGINES
from benchmarks.results import Results, title

WIDTH = 860
_LABELS, _VALUES = 170, 120
_BAR, _GAP, _HEAD, _MARGIN = 20, 7, 46, 20

# Plain colours, overridden in the dark: programs that know no variables or media queries draw the light chart.
_STYLE = """
  text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 15px; }
  .soft { fill: #59636e; }
  .paper { fill: #ffffff; }
  .bar { fill: #b3bfcb; }
  .own { fill: #4c9be8; }
  .range { stroke: #1f2328; stroke-width: 1.5; fill: none; }
  .rule { stroke: #d1d9e0; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .soft { fill: #9198a1; }
    .paper { fill: #0d1117; }
    .bar { fill: #4d5a68; }
    .own { fill: #1f6feb; }
    .range { stroke: #e6edf3; }
    .rule { stroke: #3d444d; }
  }
"""


def chart(results: Results) -> str:
    """The chart of ``results``, a whole SVG document."""
    parts, top = [], _MARGIN
    for workload in results.workloads:
        panel, height = _panel(results, workload, top)
        parts += panel
        top += height
    height = top + 24
    described = "Throughput in examples per second of each engine, one panel per workload"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" aria-label="{described}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
            *parts,
            _text(_MARGIN, height - 12, "Bars: median of the rounds. Lines: lowest to highest. Longer is faster.", "soft"),
            "</svg>\n",
        ]
    )


def _panel(results: Results, workload: str, top: int) -> tuple[list[str], int]:
    """The elements of one panel, and its height."""
    summaries = {engine: results.summary(engine, workload) for engine in results.engines}
    longest = max((summary.high for summary in summaries.values() if summary), default=1.0)
    scale = (WIDTH - _LABELS - _VALUES - 2 * _MARGIN) / longest
    left = _MARGIN + _LABELS
    bottom = top + _HEAD + len(summaries) * (_BAR + _GAP)
    parts = [
        _text(_MARGIN, top + 18, title(workload), "title"),
        _text(WIDTH - _MARGIN, top + 18, "examples/s", "soft", "end"),
        f'<line class="rule" x1="{left}" y1="{top + _HEAD - 12}" x2="{left}" y2="{bottom}"/>',
    ]
    for row, (engine, summary) in enumerate(summaries.items()):
        y = top + _HEAD - 8 + row * (_BAR + _GAP)
        parts.append(_text(left - 10, y + 15, ENGINES[engine].title, "", "end"))
        if summary is None:
            parts.append(_text(left + 8, y + 15, "not measured", "soft"))
            continue
        kind = "own" if engine.startswith("lockstep") else "bar"
        low, high = left + summary.low * scale, left + summary.high * scale
        middle = y + _BAR / 2
        parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{summary.median * scale:.1f}" height="{_BAR}" rx="2"/>')
        parts.append(
            f'<path class="range" d="M{low:.1f} {middle - 4}v8M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 4}v8"/>'
        )
        parts.append(_text(high + 8, y + 15, f"{summary.median:,.0f}"))
    return parts, bottom - top + _MARGIN


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
