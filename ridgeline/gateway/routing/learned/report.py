"""Prints an evaluation: a table and a plot as text, JSON, the curves as CSV, and one small page."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from pathlib import Path

from ridgeline.gateway.routing.learned.evaluation import GRID, Evaluation, Way

PLOT_WIDTH, PLOT_HEIGHT = 61, 16
MARKS = {"random": ".", "oracle": "o", "kNN": "k", "router": "#"}  # later curves are drawn over earlier ones
COLOURS = {"random": "#999999", "oracle": "#3b7d3b", "kNN": "#c07818", "router": "#2050b0"}


def lines_of(found: Evaluation) -> list[str]:
    weak, strong = found.models[0], found.models[-1]
    rows = [("", "saved, % of cost", "area under curve")]
    rows += [(way.name, _estimate(way, "saved"), _estimate(way, "area")) for way in found.ways]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [
        f"{found.split}; {found.rows_fitted} rows to fit, {found.rows_held} to judge; seed {found.seed}",
        "right: " + ", ".join(f"{name} {value:.1%}" for name, value in found.quality.items()),
        f"at {found.gap:.0%} of the gap between {weak} and {strong} "
        f"(always {weak} saves 100 % at 0 % of it, always {strong} 0 % at 100 %):",
        "",
        *[line.rstrip() for line in table],
        "",
        *[
            f"router saves {ahead.text()} points more than {name}" + _verdict(ahead.low, ahead.high)
            for name, ahead in found.ahead.items()
        ],
        f"with the fitted threshold: keeps {found.at_threshold['gap_kept'].text()} % of the gap, "
        f"saves {found.at_threshold['cost_saved'].text()} %",
        "calibration error: "
        + ", ".join(
            f"{name} {error:.3f}" for name, error in zip(found.models, found.calibration_error, strict=True)
        ),
        "kNN: mean outcome of the k nearest, k by cross-validation: "
        + ", ".join(map(str, found.baseline_k[:5])),
        "In brackets: the middle 95 % of a paired bootstrap over the held-back rows.",
        "",
        *plot(found),
    ]


def plot(found: Evaluation) -> list[str]:
    """Quality over cost; both run from the cheapest model (0) to the strongest (1)."""
    top = max(1.0, *(point.value for way in found.ways if way.name != "oracle" for point in way.gap))
    canvas = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for name, mark in MARKS.items():
        way = next(way for way in found.ways if way.name == name)
        for column in range(PLOT_WIDTH):
            height = _at(way, column / (PLOT_WIDTH - 1)) / top
            row = PLOT_HEIGHT - 1 - round(height * (PLOT_HEIGHT - 1))
            if 0 <= row < PLOT_HEIGHT:
                canvas[row][column] = mark
    labels = {0: f"{top:>4.0%}", PLOT_HEIGHT - 1: "  0%"}
    return [
        "quality over cost: # router, k kNN, . random, o oracle",
        *[f"{labels.get(number, '    ')} |{''.join(row).rstrip()}" for number, row in enumerate(canvas)],
        "     +" + "-" * PLOT_WIDTH,
        "      0%" + "100%".rjust(PLOT_WIDTH - 2),
    ]


def curve_csv(found: Evaluation) -> str:
    names = [way.name for way in found.ways]
    head = ["cost", *(f"{name}{end}" for name in names for end in ("", "_low", "_high"))]
    rows = [",".join(head)]
    for place, cost in enumerate(GRID):
        points = [way.gap[place] for way in found.ways]
        cells = [f"{number:.4f}" for point in points for number in (point.value, point.low, point.high)]
        rows.append(",".join([f"{cost:.2f}", *cells]))
    return "\n".join(rows) + "\n"


def write(found: Evaluation, folder: Path) -> list[Path]:
    """evaluation.json, curve.csv and evaluation.html."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "evaluation.json": json.dumps(asdict(found) | {"costs": GRID}, indent=1) + "\n",
        "curve.csv": curve_csv(found),
        "evaluation.html": page(found),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def page(found: Evaluation) -> str:
    left, top, width, height = 50, 20, 620, 360
    most = max(1.0, *(point.high for way in found.ways for point in way.gap))

    def at(cost: float, gap: float) -> str:
        return f"{left + cost * width:.1f},{top + height - max(gap, 0.0) / most * height:.1f}"

    shapes = []
    for way in found.ways:
        colour = COLOURS[way.name]
        upper = [at(cost, point.high) for cost, point in zip(GRID, way.gap, strict=True)]
        lower = [at(cost, point.low) for cost, point in zip(GRID, way.gap, strict=True)]
        line = " ".join(at(cost, point.value) for cost, point in zip(GRID, way.gap, strict=True))
        shapes.append(
            f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{colour}" opacity="0.15"/>'
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    goal = f'<path d="M{at(0, found.gap)} L{at(1, found.gap)}" stroke="#000" stroke-dasharray="4"/>'
    axes = f'<path d="M{at(0, most)} L{at(0, 0)} L{at(1, 0)}" stroke="#000" fill="none"/>'
    key = " ".join(f'<b style="color:{COLOURS[way.name]}">{way.name}</b>' for way in found.ways)
    text = html.escape("\n".join(lines_of(found)))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Model router</title>'
        '<body style="font-family:sans-serif;max-width:50em;margin:2em auto">'
        f"<h1>Quality over cost</h1><p>{key}; bands: 95 %; dashed: {found.gap:.0%} of the gap</p>"
        f'<svg viewBox="0 0 700 420" role="img" aria-label="quality over cost">{axes}{goal}{"".join(shapes)}'
        f'<text x="{left}" y="410">cost: 0 %</text><text x="{left + width - 40}" y="410">100 %</text></svg>'
        f"<pre>{text}</pre></body></html>\n"
    )


def _estimate(way: Way, measure: str) -> str:
    value = way.saved if measure == "saved" else way.area
    unit, digits = (100.0, 1) if measure == "saved" else (1.0, 3)
    return f"{value.value * unit:.{digits}f}" if way.name == "random" else value.text(unit, digits)


def _verdict(low: float, high: float) -> str:
    if low > 0:
        return ""
    return ": less" if high < 0 else ": within chance"


def _at(way: Way, cost: float) -> float:
    place = min(int(cost * (len(GRID) - 1)), len(GRID) - 2)
    share = cost * (len(GRID) - 1) - place
    return way.gap[place].value * (1 - share) + way.gap[place + 1].value * share
