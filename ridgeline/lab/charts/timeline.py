"""timeline(): one row per request and its phases over time; shows queueing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ridgeline.lab.charts.draw import BOTTOM, LEFT, RIGHT, TITLE_HEIGHT, legend_svg, svg
from ridgeline.lab.charts.marks import Axis
from ridgeline.lab.charts.scale import fit_scale, number
from ridgeline.lab.charts.style import colour

MOST_ROWS = 250  # up to this number, a row is two pixels high and can be hovered


@dataclass(frozen=True, slots=True)
class Span:
    start: float
    end: float
    kind: str  # one of the timeline's kinds


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    spans: Sequence[Span]
    note: str = ""  # added to the hover text; a row with `failed` ends in a cross
    failed: bool = False


def timeline(
    title: str,
    rows: Sequence[Row],
    kinds: Sequence[str],
    *,
    colours: Sequence[int] | None = None,
    x_label: str = "seconds from the start",
    y_label: str = "requests",
    width: int = 720,
    standalone: bool = False,
) -> str:
    """Rows from top to bottom; more than `MOST_ROWS` are subsampled evenly, and the title says so."""
    shown = list(rows)
    if len(shown) > MOST_ROWS:
        shown = [rows[index * len(rows) // MOST_ROWS] for index in range(MOST_ROWS)]
        title = f"{title} ({MOST_ROWS} of {len(rows)} {y_label}, evenly chosen)"
    paints = {kind: colour(colours[index] if colours else index) for index, kind in enumerate(kinds)}
    row_height = max(2.0, min(12.0, 360 / max(1, len(shown))))
    legend, top = legend_svg(list(paints.items()), LEFT, TITLE_HEIGHT + 8, width - RIGHT)
    height = top + row_height * max(1, len(shown)) + BOTTOM
    moments = [moment for row in shown for span in row.spans for moment in (span.start, span.end)]
    first, last = min(moments, default=0.0), max(moments, default=1.0)
    ends = Axis("", low=min(first, 0.0) if first < 0.3 * last else first, high=last)
    scale = fit_scale(ends, moments, LEFT, width - RIGHT, 75)
    bottom = height - BOTTOM
    parts = [f'<text class="title" x="{LEFT:.0f}" y="16">{escape(title)}</text>', legend]
    for tick in scale.ticks:
        at = scale(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{top:.1f}" x2="{at:.1f}" y2="{bottom:.1f}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{number(tick)}</text>')
    for index, row in enumerate(shown):
        y = top + index * row_height
        words = "; ".join(
            [row.name, *(_words(span) for span in row.spans), *([row.note] if row.note else [])]
        )
        parts.append(f"<g><title>{escape(words)}</title>")
        for span in row.spans:
            left, right = scale.clamped(span.start), scale.clamped(span.end)
            parts.append(
                f'<rect class="span" fill="{paints[span.kind]}" x="{left:.1f}" y="{y:.1f}" '
                f'width="{max(right - left, 0.4):.1f}" height="{row_height * 0.85:.1f}"/>'
            )
        if row.failed and row.spans:
            at, middle = scale.clamped(row.spans[-1].end), y + row_height / 2
            parts.append(
                f'<path stroke="var(--alarm)" stroke-width="1.6" '
                f'd="M{at - 3:.1f} {middle - 3:.1f}l6 6m0 -6l-6 6"/>'
            )
        parts.append("</g>")
    parts.append(
        f'<text x="{(LEFT + width - RIGHT) / 2:.1f}" y="{bottom + 32:.1f}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
        f'<text transform="translate(14 {(top + bottom) / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return svg(title, width, height, parts, standalone)


def _words(span: Span) -> str:
    return f"{span.kind} {number(span.end - span.start)} s"
