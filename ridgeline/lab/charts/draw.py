"""chart(): marks on two axes, as one <svg>. Marks on the same pixel are drawn once, to bound the size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise

from ridgeline.lab.charts.marks import Axis, Bars, Line, Mark, Point, Points, Rule
from ridgeline.lab.charts.scale import Scale, fit_scale, number
from ridgeline.lab.charts.style import STYLE, colour

LEFT, RIGHT, BOTTOM = 62.0, 22.0, 42.0
TITLE_HEIGHT, LEGEND_HEIGHT = 22.0, 17.0
GLYPH = 6.1  # width of a letter of the legend, on average
AIMS = 48  # hover spots along a line

Spot = tuple[float, float]


def chart(
    title: str,
    x: Axis,
    y: Axis,
    marks: Sequence[Mark],
    *,
    width: int = 720,
    height: int = 330,
    standalone: bool = False,
) -> str:
    """One <svg>. `standalone` embeds the style, for a separate file; pages include `STYLE` once."""
    coloured = _with_colours(marks)
    entries = [(mark.name, colour(index)) for mark, index in coloured if mark.name]
    left = max(LEFT, 28 + max((len(name) for _, name in y.names), default=0) * GLYPH)
    legend, top = legend_svg(entries, left, TITLE_HEIGHT + 8, width - RIGHT)
    x_scale = fit_scale(x, _values(marks, "x"), left, width - RIGHT, 75)
    y_scale = fit_scale(y, _values(marks, "y"), height - BOTTOM, top, 38)
    parts = [f'<text class="title" x="{left:.0f}" y="16">{escape(title)}</text>', legend]
    parts += _grid(x, y, x_scale, y_scale)
    if not any(x_scale.shows(value) for value in _values([mark for mark, _ in coloured], "x")):
        parts.append(_text(width / 2, (top + height - BOTTOM) / 2, "nothing to show", "middle"))
    rules = [mark for mark in marks if isinstance(mark, Rule)]
    lines, names = _rules([mark for mark in rules if _inside(mark, x_scale, y_scale)], x_scale, y_scale)
    parts += lines
    for mark, index in coloured:
        parts += _drawn(mark, colour(index), x, y, x_scale, y_scale)
    parts += names
    parts += _labels(coloured, x_scale, y_scale)
    return svg(title, width, height, parts, standalone)


def svg(title: str, width: float, height: float, parts: Sequence[str], standalone: bool) -> str:
    style = f"<style>{STYLE}.chart {{ background: var(--paper); }}</style>" if standalone else ""
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img" aria-label="{escape(title)}">{style}{"".join(parts)}</svg>'
    )


def legend_svg(
    entries: Sequence[tuple[str, str]], left: float, top: float, right: float
) -> tuple[str, float]:
    """The legend's rows, and the top of the plot. A single name needs no legend."""
    if len(entries) < 2:
        return "", top + 2
    at, row, parts = left, top + 4, []
    for name, fill in entries:
        needed = 16 + len(name) * GLYPH + 14
        if at > left and at + needed > right:
            at, row = left, row + LEGEND_HEIGHT
        parts.append(
            f'<rect x="{at:.1f}" y="{row - 5:.1f}" width="11" height="11" rx="2" fill="{fill}"/>'
            f'<text class="legend" x="{at + 16:.1f}" y="{row + 4.5:.1f}">{escape(name)}</text>'
        )
        at += needed
    return "".join(parts), row + LEGEND_HEIGHT


def written(axis: Axis, value: float) -> str:
    if axis.percent:
        return f"{number(round(value * 100, 6))} %"
    return f"{number(value)} {axis.unit}".rstrip()


def _with_colours(marks: Sequence[Mark]) -> list[tuple[Line | Points | Bars, int]]:
    coloured: list[tuple[Line | Points | Bars, int]] = []
    following = 0
    for mark in marks:
        if isinstance(mark, Rule):
            continue
        coloured.append((mark, following if mark.colour is None else mark.colour))
        following += mark.colour is None
    return coloured


def _values(marks: Sequence[Mark], side: str) -> Iterator[float]:
    place = 0 if side == "x" else 1
    for mark in marks:
        if isinstance(mark, Rule):
            if mark.axis == side:
                yield mark.at
        elif isinstance(mark, Line):
            yield from (point[place] for point in mark.points)
            for at, low, high in mark.band:
                yield from ((at,) if side == "x" else (low, high))
        elif isinstance(mark, Bars):
            yield from (mark.edges if side == "x" else (0.0, *mark.heights))
        else:
            for spot in mark.points:
                yield spot.x if side == "x" else spot.y
                yield from (spot.x_range if side == "x" else spot.y_range) or ()


def _grid(x: Axis, y: Axis, x_scale: Scale, y_scale: Scale) -> list[str]:
    left, right, bottom, top = x_scale.start, x_scale.end, y_scale.start, y_scale.end
    parts = []
    for tick, words in _ticks(x, x_scale):
        at = x_scale(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{top:.1f}" x2="{at:.1f}" y2="{bottom:.1f}"/>')
        parts.append(_text(at, bottom + 15, words, "middle"))
    for tick, words in _ticks(y, y_scale):
        at = y_scale(tick)
        parts.append(f'<line class="grid" x1="{left:.1f}" y1="{at:.1f}" x2="{right:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 6, at + 3.8, words, "end"))
    middle = (top + bottom) / 2
    parts.append(
        f'<line class="frame" x1="{left:.1f}" y1="{bottom:.1f}" x2="{right:.1f}" y2="{bottom:.1f}"/>'
        + _text((left + right) / 2, bottom + 32, x.label, "middle")
        + f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.label)}</text>"
    )
    return parts


def _ticks(axis: Axis, scale: Scale) -> list[tuple[float, str]]:
    if axis.names:
        return [(at, name) for at, name in axis.names if scale.shows(at) and scale.low <= at <= scale.high]
    return [(tick, written(Axis("", percent=axis.percent), tick)) for tick in scale.ticks]


def _drawn(
    mark: Line | Points | Bars, paint: str, x: Axis, y: Axis, x_scale: Scale, y_scale: Scale
) -> Iterator[str]:
    if isinstance(mark, Line):
        yield from _line(mark, paint, x, y, x_scale, y_scale)
    elif isinstance(mark, Bars):
        yield from _bars(mark, paint, x, y, x_scale, y_scale)
    else:
        yield from _points(mark, paint, x, y, x_scale, y_scale)


def _line(mark: Line, paint: str, x: Axis, y: Axis, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    band = [b for b in mark.band if x_scale.shows(b[0]) and y_scale.shows(b[1]) and y_scale.shows(b[2])]
    if band:
        upper = [(x_scale.clamped(at), y_scale.clamped(high)) for at, _, high in band]
        lower = [(x_scale.clamped(at), y_scale.clamped(low)) for at, low, _ in reversed(band)]
        yield f'<path class="band" fill="{paint}" d="{_path(upper + lower)}Z"/>'
    shown = [(at, value) for at, value in mark.points if x_scale.shows(at) and y_scale.shows(value)]
    if not shown:
        return
    spots = [(x_scale.clamped(at), y_scale.clamped(value)) for at, value in shown]
    kept = _thinned(spots)
    style = "line dashed" if mark.dashed else "line"
    drawn = list(_stairs([spots[i] for i in kept])) if mark.step else [spots[i] for i in kept]
    yield f'<path class="{style}" stroke="{paint}" d="{_path(drawn)}"/>'
    for i in kept[:: max(1, len(kept) // AIMS)]:
        words = f"{mark.name}: {written(x, shown[i][0])}, {written(y, shown[i][1])}"
        at, height = spots[i]
        yield (
            f'<circle class="aim" cx="{at:.1f}" cy="{height:.1f}" r="6"><title>{escape(words)}</title>'
            "</circle>"
        )


def _bars(mark: Bars, paint: str, x: Axis, y: Axis, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    floor = y_scale.start
    for index, height in enumerate(mark.heights):
        low, high = mark.edges[index], mark.edges[index + 1]
        if not (y_scale.shows(height) and height > 0 and x_scale.shows(low)):
            continue
        left, right, top = x_scale.clamped(low), x_scale.clamped(high), y_scale.clamped(height)
        words = f"{mark.name}: {written(x, low)} to {written(x, high)}: {written(y, height)}"
        yield (
            f'<rect class="bar" fill="{paint}" x="{left:.1f}" y="{top:.1f}" '
            f'width="{max(right - left, 0.5):.1f}" height="{max(floor - top, 0.5):.1f}">'
            f"<title>{escape(words)}</title></rect>"
        )


def _points(mark: Points, paint: str, x: Axis, y: Axis, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    shown = [point for point in mark.points if x_scale.shows(point.x) and y_scale.shows(point.y)]
    spots = [(x_scale.clamped(point.x), y_scale.clamped(point.y)) for point in shown]
    if mark.joined and len(spots) > 1:
        yield f'<path class="line" style="stroke-width:1.3" stroke="{paint}" d="{_path(spots)}"/>'
    seen: set[tuple[int, int]] = set()
    for point, (at, height) in zip(shown, spots, strict=True):
        cell = (round(at), round(height))
        if cell in seen:
            continue  # another point is on this pixel
        seen.add(cell)
        yield from _whiskers(point, paint, at, height, x_scale, y_scale)
        words = point.title or f"{mark.name}: {written(x, point.x)}, {written(y, point.y)}"
        look = (
            f'fill="var(--paper)" stroke="{paint}" stroke-width="1.8"' if mark.hollow else f'fill="{paint}"'
        )
        yield (
            f'<circle class="dot" cx="{at:.1f}" cy="{height:.1f}" r="{mark.radius:g}" {look}>'
            f"<title>{escape(words)}</title></circle>"
        )


def _whiskers(
    point: Point, paint: str, at: float, height: float, x_scale: Scale, y_scale: Scale
) -> Iterator[str]:
    if point.y_range and all(map(y_scale.shows, point.y_range)):
        low, high = (y_scale.clamped(value) for value in point.y_range)
        d = f"M{at:.1f} {low:.1f}V{high:.1f}M{at - 3:.1f} {low:.1f}h6M{at - 3:.1f} {high:.1f}h6"
        yield f'<path class="whisker" stroke="{paint}" d="{d}"/>'
    if point.x_range and all(map(x_scale.shows, point.x_range)):
        low, high = (x_scale.clamped(value) for value in point.x_range)
        d = f"M{low:.1f} {height:.1f}H{high:.1f}M{low:.1f} {height - 3:.1f}v6M{high:.1f} {height - 3:.1f}v6"
        yield f'<path class="whisker" stroke="{paint}" d="{d}"/>'


def _inside(mark: Rule, x_scale: Scale, y_scale: Scale) -> bool:
    scale = x_scale if mark.axis == "x" else y_scale
    return scale.shows(mark.at) and scale.low <= mark.at <= scale.high


def _rules(rules: Sequence[Rule], x_scale: Scale, y_scale: Scale) -> tuple[list[str], list[str]]:
    """The lines and their labels; a label that would cover another moves up one line."""
    taken: list[tuple[float, float, float, float]] = []
    lines, names = [], []
    for mark in rules:
        line, x, y, anchor = _rule(mark, x_scale, y_scale)
        long = len(mark.label) * GLYPH
        start = x - long if anchor == "end" else x
        while any(_overlap((start, y - 10, start + long, y + 2), other) for other in taken):
            y -= 13
        taken.append((start, y - 10, start + long, y + 2))
        name = escape(mark.label)
        lines.append(line)
        names.append(f'<text class="rule-label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{name}</text>')
    return lines, names


def _rule(mark: Rule, x_scale: Scale, y_scale: Scale) -> tuple[str, float, float, str]:
    """The line, and the position of its label."""
    left, right, bottom, top = x_scale.start, x_scale.end, y_scale.start, y_scale.end
    if mark.axis == "x":
        at = x_scale(mark.at)
        flip = at + len(mark.label) * GLYPH + 6 > right
        line = f'<line class="rule" x1="{at:.1f}" y1="{top:.1f}" x2="{at:.1f}" y2="{bottom:.1f}"/>'
        spot, anchor = (at - 4 if flip else at + 4, bottom - 6), "end" if flip else "start"
    else:
        at = y_scale(mark.at)
        line = f'<line class="rule" x1="{left:.1f}" y1="{at:.1f}" x2="{right:.1f}" y2="{at:.1f}"/>'
        spot, anchor = (right - 4, at - 4), "end"
    return line, *spot, anchor


def _labels(
    coloured: Sequence[tuple[Line | Points | Bars, int]], x_scale: Scale, y_scale: Scale
) -> Iterator[str]:
    """Labels beside points, each on the first side where it covers no other label or point."""
    named: list[tuple[Point, float, float, float]] = []
    taken: list[tuple[float, float, float, float]] = []
    for mark, _ in coloured:
        for point in mark.points if isinstance(mark, Points) else ():
            if x_scale.shows(point.x) and y_scale.shows(point.y):
                at, height = x_scale.clamped(point.x), y_scale.clamped(point.y)
                taken.append((at - 3, height - 3, at + 3, height + 3))
                if point.label:
                    named.append((point, at, height, len(point.label) * 5.7))
    for point, at, height, long in named:
        sides = (
            (at + 7, height - 6, "start", at + 7),
            (at - 7 - long, height - 6, "end", at - 7),
            (at - long / 2, height - 19, "middle", at),
            (at - long / 2, height + 6, "middle", at),
        )
        for left, top, anchor, x in sides:
            box = (left, top, left + long, top + 12)
            fits = left >= x_scale.start and box[2] <= x_scale.end + 8 and top >= y_scale.end - 14
            if fits and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                yield (
                    f'<text class="mark-label" x="{x:.1f}" y="{top + 9.5:.1f}" text-anchor="{anchor}">'
                    f"{escape(point.label)}</text>"
                )
                break


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _thinned(spots: Sequence[Spot]) -> list[int]:
    """Of neighbours in one pixel column: the first, the lowest, the highest and the last."""
    kept: list[int] = []
    for _, column in groupby(range(len(spots)), key=lambda index: round(spots[index][0])):
        places = list(column)
        height = {place: spots[place][1] for place in places}
        ends = (
            places[0],
            min(places, key=height.__getitem__),
            max(places, key=height.__getitem__),
            places[-1],
        )
        kept += sorted(set(ends))
    return kept


def _stairs(spots: Sequence[Spot]) -> Iterator[Spot]:
    yield spots[0]
    for before, spot in pairwise(spots):
        yield spot[0], before[1]
        yield spot


def _path(spots: Sequence[Spot]) -> str:
    return "M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in spots)


def _text(at: float, height: float, words: str, anchor: str) -> str:
    return f'<text x="{at:.1f}" y="{height:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
