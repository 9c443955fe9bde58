"""Charts as SVG text: lines, stairs, bands, points with whiskers, bars, timelines; linear and log axes.

For self-contained pages: no library, no script. Colours are CSS variables (`STYLE`), light and dark; hovering
shows <title>s. Report, plan and tune compose marks; all input is escaped here.
"""

from ridgeline.lab.charts.draw import chart
from ridgeline.lab.charts.marks import (
    Axis,
    Bars,
    Line,
    Mark,
    Point,
    Points,
    Rule,
    cdf,
    histogram,
    roof,
)
from ridgeline.lab.charts.scale import grouped, number
from ridgeline.lab.charts.style import STYLE
from ridgeline.lab.charts.timeline import Row, Span, timeline

__all__ = [
    "STYLE",
    "Axis",
    "Bars",
    "Line",
    "Mark",
    "Point",
    "Points",
    "Row",
    "Rule",
    "Span",
    "cdf",
    "chart",
    "grouped",
    "histogram",
    "number",
    "roof",
    "timeline",
]
