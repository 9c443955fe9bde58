"""The style of charts: colours with good contrast on white and black, and the classes of `draw`."""

from __future__ import annotations

COLOURS = 7  # then they repeat

# Each set has the lightness of text on its background; neighbours differ for colour-blind readers too.
STYLE = """\
.chart { --ink: #1a1c1f; --faint: #5d6168; --grid: #e2e0db; --paper: #faf9f7; --alarm: #b3261e;
  --c0: #0b6e66; --c1: #cf5300; --c2: #0b66b8; --c3: #a8438c; --c4: #8a6d00; --c5: #4757c7; --c6: #5f6b7a; }
@media (prefers-color-scheme: dark) { .chart { --ink: #e8e9ea; --faint: #9aa0a8; --grid: #2a2e33;
  --paper: #101214; --alarm: #ff8d84;
  --c0: #55cdbf; --c1: #ff9248; --c2: #5aaef2; --c3: #e58acb; --c4: #d9b938; --c5: #99a5ff; --c6: #a9b4c2; } }
.chart { display: block; width: 100%; height: auto; font: 11px system-ui, sans-serif; }
.chart text { fill: var(--faint); } .chart .title { fill: var(--ink); font-size: 13px; font-weight: 600; }
.chart .mark-label { fill: var(--ink); font-size: 10.5px; paint-order: stroke; stroke: var(--paper);
  stroke-width: 3px; stroke-linejoin: round; }
.chart .legend { fill: var(--ink); } .chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .frame { stroke: var(--faint); stroke-width: 1; } .chart .line { fill: none; stroke-width: 1.8;
  stroke-linejoin: round; } .chart .dashed { stroke-dasharray: 5 4; }
.chart .band { opacity: .16; stroke: none; } .chart .whisker { stroke-width: 1.2; opacity: .75; }
.chart .rule { stroke: var(--alarm); stroke-width: 1.2; stroke-dasharray: 3 3; }
.chart .rule-label { fill: var(--alarm); paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.chart .aim { fill: transparent; stroke: none; }
.chart .aim:hover { fill: var(--ink); fill-opacity: .25; }
.chart .bar { opacity: .8; } .chart .bar:hover, .chart .dot:hover, .chart .span:hover { opacity: .55; }
"""


def colour(index: int) -> str:
    return f"var(--c{index % COLOURS})"
