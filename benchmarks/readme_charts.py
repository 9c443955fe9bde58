"""Draw the README's charts from measured figures.

    python benchmarks/readme_charts.py
    python benchmarks/readme_charts.py --measured bench-results/cpu_vs_llamacpp.avx2.json

- docs/figures/peers.svg: ridgeline beside llama.cpp and vLLM. A bar's length is the throughput over the
  limit of its row: bytes over bandwidth or operations over peak, measured in the same run.
- docs/figures/verify.svg: what `ridgeline plan` predicted and what `ridgeline bench` measured.

--measured puts the medians of a run of cpu_vs_llamacpp.py into the panel of its instruction set first.

The figures are in benchmarks/figures; each file names the script that measured and the page that reports it.
"""

from __future__ import annotations

import argparse
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
OURS, PEER_COLOURS = colour(0), (colour(1), colour(2))


def peers(figures: dict[str, Any]) -> str:
    panels = figures["panels"]
    names = dict.fromkeys(panel["peer"] for panel in panels)  # panels of one peer share its colour
    paints = dict(zip(names, PEER_COLOURS, strict=True))
    legend, top = legend_svg([("ridgeline", OURS), *paints.items()], 20, 30, WIDTH - RIGHT)
    parts = [f'<text class="title" x="20" y="18">{TITLE}</text>', legend]
    for panel in panels:
        parts += _panel(panel, paints[panel["peer"]], top)
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


# Rows of cpu_vs_llamacpp.py that the chart shows, by their titles in it.
MEASURED_ROWS = {
    "smollm2.decode.1": "decode, 1 stream",
    "smollm2.decode.8": "decode, 8 streams",
    "smollm2.decode.32": "decode, 32 streams",
    "smollm2.prefill": "prefill 512 tokens",
    "http.output": "HTTP, 16 streams",
}


def with_measured(figures: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """The figures with the rows of this run in the panel of its instruction set."""
    width = "AVX-512" if report["isa"].startswith(("avx512", "amx")) else "AVX2"
    rows = [_measured_row(row) for row in report["rows"] if row["key"] in MEASURED_ROWS]
    if width not in [panel.get("set") for panel in figures["panels"]] or not rows:
        raise SystemExit(f"no panel for {width}, or no row of the chart in the run")
    panels = [{**panel, "rows": rows} if panel.get("set") == width else panel for panel in figures["panels"]]
    return {**figures, "panels": panels}


def _measured_row(row: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = row["ours"], row["theirs"][row["best_variant"]]
    return {
        "case": MEASURED_ROWS[row["key"]],
        "unit": row["unit"],
        "ridgeline": round(ours["median"]),
        "peer": round(theirs["median"]),
        "of_limit": round(ours["percent_of_limit"] / 100, 2),
    }


def figures_text(figures: dict[str, Any]) -> str:
    """JSON with a row on each line."""
    panels = []
    for panel in figures["panels"]:
        head = [
            f"      {json.dumps(key)}: {json.dumps(panel[key], ensure_ascii=False)}"
            for key in panel
            if key != "rows"
        ]
        rows = ",\n".join(f"        {json.dumps(row, ensure_ascii=False)}" for row in panel["rows"])
        panels.append("    {\n" + ",\n".join([*head, f'      "rows": [\n{rows}\n      ]']) + "\n    }")
    return '{\n  "panels": [\n' + ",\n".join(panels) + "\n  ]\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measured", type=Path, action="append", default=[], help="results of cpu_vs_llamacpp.py"
    )
    for measured in parser.parse_args().measured:
        kept = FIGURES / "peers.json"
        figures = with_measured(
            json.loads(kept.read_text(encoding="utf-8")), json.loads(measured.read_text())
        )
        kept.write_text(figures_text(figures), encoding="utf-8")
    CHARTS.mkdir(exist_ok=True)
    for name in DRAWINGS:
        (CHARTS / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        print(f"wrote docs/figures/{name}.svg")
