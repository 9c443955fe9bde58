"""Prints a Comparison as a terminal table and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.lab.bench.compare.compare import Comparison
from ridgeline.lab.bench.compare.difference import Difference
from ridgeline.lab.charts import Axis, Point, Points, Rule, chart, grouped
from ridgeline.lab.page import Cell, banner, charts, heading, notes, page, paragraph, table

SHARES = ("attainment", "failures", "cache_hit")
INVALID = "A run is INVALID: the figures below are unreliable"


def comparison_text(found: Comparison, *, every: bool = False) -> str:
    """Aligned columns with warnings above and below; suitable for a pipe. `every`: all rows, not only
    headlines.
    """
    lines = []
    if found.invalid:
        lines += [f"{INVALID}:", *(f"  {reason}" for reason in found.invalid), ""]
    lines += [f"A = {found.a}", f"B = {found.b}", how(found), ""]
    rows = [["metric", "A", "B", "B − A (95 %)", "B / A (95 %)", ""]]
    rows += [[row.name, *figures(row), row.verdict] for row in (found.rows if every else found.headline)]
    lines += _aligned(rows)
    if found.changed:
        lines += ["", "settings that differ:"]
        lines += _aligned([["", "A", "B"], *([f"  {name}", a, b] for name, a, b in found.changed)])
    lines += ["", *(f"- {note}" for note in _warned(found))]
    return "\n".join(lines)


def comparison_page(found: Comparison, *, made_at: str = "") -> str:
    parts = [banner(INVALID, found.invalid)] if found.invalid else []
    parts += [paragraph(how(found)), notes(_warned(found))]
    parts.append(charts([_picture(found.headline)], wide=True))
    head = ["metric", "A", "B", "B − A (95 %)", "B / A (95 %)", ""]
    looks = {True: "words good", False: "words bad", None: "words"}
    rows: list[list[str | Cell]] = [
        [Cell(row.name, title=row.formula), *figures(row), Cell(row.verdict, look=looks[row.better])]
        for row in found.rows
    ]
    parts += [heading("All metrics"), table(head, rows)]
    parts.append(heading("Settings that differ"))
    if found.changed:
        changed: list[list[str | Cell]] = [
            [name, Cell(a, look="words"), Cell(b, look="words")] for name, a, b in found.changed
        ]
        parts.append(table(["", "A", "B"], changed))
    else:
        parts.append(paragraph("none that was recorded"))
    return page("Comparison of two runs", parts, subtitle=f"A: {found.a} · B: {found.b}", made_at=made_at)


def how(found: Comparison) -> str:
    if found.pairs:
        return f"{found.pairs} requests, each compared with itself: both runs sent the same traffic"
    return f"Compared as wholes, without pairs: {found.unpaired_because}"


def figures(row: Difference) -> list[str]:
    """A, B, the difference and the ratio, with their intervals."""
    share = row.name in SHARES
    scale, unit = (100.0, " %") if share else (1.0, f" {row.unit}" if row.unit else "")
    change = row.difference
    points = " points" if share else ""
    middle = (
        f"{_signed(change.value * scale)}{points} "
        f"({_signed(change.low * scale)} … {_signed(change.high * scale)})"
    )
    ratio = ""
    if row.ratio is not None:
        ratio = f"{_percent(row.ratio.value)} % ({_percent(row.ratio.low)} … {_percent(row.ratio.high)})"
    return [grouped(row.a * scale) + unit, grouped(row.b * scale) + unit, middle, ratio]


def _warned(found: Comparison) -> list[str]:
    warned = list(found.notes)
    if len(found.changed) > 1:
        warned.insert(
            0, f"{len(found.changed)} settings differ: no difference can be attributed to one of them"
        )
    return warned


def _picture(rows: Sequence[Difference]) -> str:
    """Every ratio with its whisker around 1."""
    given = [row for row in rows if row.ratio is not None]
    groups: dict[str, list[Point]] = {"better": [], "worse": [], "no difference seen": []}
    for place, row in enumerate(given):
        assert row.ratio is not None
        title = f"{row.name}: {_percent(row.ratio.value)} %, {row.verdict}"
        group = {True: "better", False: "worse", None: "no difference seen"}[row.better]
        span = (row.ratio.low, row.ratio.high)
        groups[group].append(Point(row.ratio.value, float(-place), title, x_range=span))
    names = [(float(-place), row.name) for place, row in enumerate(given)]
    colours = {"better": 2, "worse": 1, "no difference seen": 6}
    marks = [Points(name, points, colour=colours[name]) for name, points in groups.items() if points]
    return chart(
        "B relative to A, with intervals",
        Axis("B / A, of A", percent=True),
        Axis("", low=-len(given) + 0.5, high=0.8, names=names),
        [Rule("x", 1.0, "equal"), *marks],
        height=90 + 20 * max(4, len(given)),
        width=900,
    )


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{grouped(abs(value))}"


def _percent(ratio: float) -> str:
    change = (ratio - 1) * 100
    text = f"{abs(change):.0f}" if abs(change) >= 99.5 else f"{abs(change):.1f}"
    return text if float(text) == 0 else ("+" if change > 0 else "−") + text


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """First and last columns left-aligned, figures right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
