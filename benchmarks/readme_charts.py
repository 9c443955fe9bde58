"""Draw the README's charts from measured figures.

    python benchmarks/readme_charts.py

- docs/figures/peers.svg: ridgeline beside llama.cpp and vLLM. A bar's length is the throughput over the
  limit of its row: bytes over bandwidth or operations over peak, measured in the same run.
- docs/figures/verify.svg: what `ridgeline plan` predicted and what `ridgeline bench` measured.

The figures are in benchmarks/figures; each file names the script that measured and the page that reports it.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from ridgeline.lab.charts.draw import legend_svg, svg
from ridgeline.lab.charts.style import colour

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "figures"
CHARTS = ROOT / "docs" / "figures"

TITLE = "Throughput as a share of the physical limit"
WIDTH, LABELS, RIGHT = 760.0, 200.0, 20.0
BAR, ROW, HEAD = 11.0, 34.0, 46.0
OURS, PEERS = colour(0), (colour(1), colour(2))


def peers(figures: dict[str, Any]) -> str:
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


def verified(figures: dict[str, Any]) -> str:
    """One row for each metric, in shares of its prediction: the interval, the prediction, the measurement."""
    plot, most, rows = 300.0, 2.0, figures["rows"]
    bottom = 58.0 + 26 * len(rows)
    entries = [("80 % interval", colour(6)), ("predicted", OURS), ("measured", colour(1))]
    legend, _ = legend_svg(entries, 20, 30, WIDTH - RIGHT)
    parts = [f'<text class="title" x="20" y="18">{escape(figures["title"])}</text>', legend]
    for share in (0.5, 1.0, 1.5, 2.0):
        at = 150 + plot * share / most
        kind = "frame" if share == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="62" y2="{bottom:.0f}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 13:.0f}" text-anchor="middle">{share:g} ×</text>')
    for number, row in enumerate(rows):
        parts += _verified_row(row, plot / most, 74.0 + 26 * number)
    return svg(figures["title"], WIDTH, bottom + 22, parts, standalone=True) + "\n"


def _verified_row(row: dict[str, Any], scale: float, height: float) -> list[str]:
    low, here, high = (150 + scale * row[key] / row["predicted"] for key in ("low", "measured", "high"))
    predicted, measured = (f"{row[key]:,}{row['unit']}" for key in ("predicted", "measured"))
    words = f"predicted {predicted}, measured {measured} ({row['error']})"
    return [
        f'<text x="142" y="{height + 4:.1f}" text-anchor="end">{row["metric"]}</text>',
        f'<rect class="bar" x="{low:.1f}" y="{height - 5:.1f}" width="{high - low:.1f}" height="10" '
        f'fill="{colour(6)}" style="opacity: .3"/>',
        f'<circle cx="{150 + scale:.1f}" cy="{height:.1f}" r="4" fill="{OURS}"/>',
        f'<circle cx="{here:.1f}" cy="{height:.1f}" r="4" fill="{colour(1)}"/>',
        f'<text class="legend" x="470" y="{height + 4:.1f}">{words}</text>',
    ]


DRAWINGS = {"peers": peers, "verify": verified}


def drawn(name: str) -> str:
    return DRAWINGS[name](json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    CHARTS.mkdir(exist_ok=True)
    for name in DRAWINGS:
        (CHARTS / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        print(f"wrote docs/figures/{name}.svg")
