"""Draw the README's chart: ridgeline beside llama.cpp and vLLM, as shares of the physical limit.

    python benchmarks/peers_chart.py             # benchmarks/figures/peers.json -> docs/figures/peers.svg

The JSON holds medians that the scripts named in it measured; the pages named in it say how. Each bar's
length is the throughput over the limit of the same row: bytes over bandwidth or operations over peak,
measured in the same run.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from ridgeline.lab.charts.draw import legend_svg, svg
from ridgeline.lab.charts.style import colour

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "figures" / "peers.json"
CHART = ROOT / "docs" / "figures" / "peers.svg"

TITLE = "Throughput as a share of the physical limit"
WIDTH, LABELS, RIGHT = 760.0, 200.0, 20.0
BAR, ROW, HEAD = 11.0, 34.0, 46.0
OURS, PEERS = colour(0), (colour(1), colour(2))


def drawn(figures: dict[str, Any]) -> str:
    panels = figures["panels"]
    entries = [("ridgeline", OURS)]
    entries += [(panel["peer"], paint) for panel, paint in zip(panels, PEERS, strict=True)]
    legend, top = legend_svg(entries, 20, 30, WIDTH - RIGHT)
    parts = [f'<text class="title" x="20" y="18">{TITLE}</text>', legend]
    for panel, paint in zip(panels, PEERS, strict=True):
        parts += _panel(panel, paint, top)
        top += HEAD + ROW * len(panel["rows"])
    return svg(TITLE, WIDTH, top + 8, parts, standalone=True) + "\n"


def _panel(panel: dict[str, Any], paint: str, top: float) -> list[str]:
    plot = WIDTH - RIGHT - LABELS
    bottom = top + HEAD + ROW * len(panel["rows"]) - 8
    parts = [f'<text class="legend" x="20" y="{top + 22:.0f}">{escape(panel["title"])}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = LABELS + plot * share
        kind, words = ("rule", "limit") if share == 1 else ("grid", f"{share:.0%}")
        parts.append(
            f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{top + 40:.0f}" y2="{bottom:.0f}"/>'
        )
        parts.append(f'<text x="{at:.1f}" y="{top + 36:.0f}" text-anchor="middle">{words}</text>')
    for number, row in enumerate(panel["rows"]):
        height = top + HEAD + ROW * number
        place = f'x="{LABELS - 8:.0f}" y="{height + BAR + 5:.1f}" text-anchor="end"'
        parts.append(f"<text {place}>{escape(row['case'])}</text>")
        limit = row["ridgeline"] / row["of_limit"]
        for line, (key, fill) in enumerate((("ridgeline", OURS), ("peer", paint))):
            parts += _bar(row[key], limit, row["unit"], plot, height + line * (BAR + 2), fill)
    return parts


def _bar(value: float, limit: float, unit: str, plot: float, height: float, fill: str) -> list[str]:
    length = plot * value / limit
    words = f"{value:,} {unit} · {value / limit:.0%}"
    inside = length > plot * 0.7
    at, anchor = (LABELS + length - 5, "end") if inside else (LABELS + length + 5, "start")
    shade = ' style="fill: var(--paper); stroke: none"' if inside else ""
    box = f'x="{LABELS:.1f}" y="{height:.1f}" width="{length:.1f}" height="{BAR}"'
    place = f'x="{at:.1f}" y="{height + 9.2:.1f}" text-anchor="{anchor}"'
    return [
        f'<rect class="bar" {box} fill="{fill}"/>',
        f'<text class="mark-label" {place}{shade}>{words}</text>',
    ]


if __name__ == "__main__":
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text(drawn(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {CHART.relative_to(ROOT)}")
