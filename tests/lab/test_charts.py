"""Charts as SVG: scales and ticks by hand, marks where they belong, and text that cannot break out."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from ridgeline.lab.charts import (
    STYLE,
    Axis,
    Line,
    Point,
    Points,
    Row,
    Rule,
    Span,
    cdf,
    chart,
    grouped,
    histogram,
    number,
    roof,
    timeline,
)
from ridgeline.lab.charts.scale import fit_scale
from ridgeline.lab.page import Cell, banner, facts, page, table

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('x')</script>\"&"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in parsed(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.00031, "0.00031"), (0.25, "0.25"), (4.256, "4.26"), (117.4, "117"), (2048, "2048"),
        (9999.4, "9999"), (12_500, "12.5k"), (999_950, "1M"), (9.89e14, "989T"), (1e-6, "1.0e-6"),
        (-3.5, "-3.5"), (float("inf"), "∞"), (100, "100"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_lose_no_zeros(value: float, text: str) -> None:
    assert number(value) == text


def test_milliseconds_are_grouped_rather_than_thousands_of_thousandths() -> None:
    assert [grouped(value) for value in (12_480.4, 999.6, math.inf)] == ["12,480", "1000", "∞"]


def test_linear_ticks_are_round_and_hold_the_data() -> None:
    scale = fit_scale(Axis(""), [3, 97], 0, 500, 75)
    assert scale.ticks == (0, 20, 40, 60, 80, 100)
    assert (scale.low, scale.high) == (0, 100)
    assert scale(50) == pytest.approx(250)
    assert fit_scale(Axis("", low=0, high=1), [0.5], 0, 100, 25).ticks == (0, 0.25, 0.5, 0.75, 1)


def test_logarithmic_ticks_are_powers_and_their_parts() -> None:
    scale = fit_scale(Axis("", log=True, low=1, high=10_000), [], 0, 400, 75)
    assert scale.ticks == (1, 10, 100, 1000, 10_000)
    assert scale(100) == pytest.approx(200)
    assert fit_scale(Axis("", log=True, low=10, high=100), [], 0, 400, 75).ticks == (10, 20, 30, 50, 100)
    # Within half a decade, and for what logarithms do not have.
    assert fit_scale(Axis("", log=True), [18.0, 22.0], 0, 400, 75).ticks == (18, 19, 20, 21, 22)
    assert fit_scale(Axis("", log=True), [0.0, -5.0, 5.0], 0, 400, 75).low > 0


def test_a_cdf_steps_once_per_sample_and_stops_short_where_some_never_came() -> None:
    line = cdf("x", [3.0, 1.0, 2.0, float("inf")], of=4)
    assert line.points == [(1.0, 0.0), (1.0, 0.25), (2.0, 0.5), (3.0, 0.75)]
    assert line.step


def test_a_histograms_shares_sum_to_one_and_hold_both_ends() -> None:
    bars = histogram("x", [1.0, 10.0, 100.0, 100.0], bins=2, log=True)
    assert bars.edges == pytest.approx([1, 10, 100])
    assert bars.heights == [0.25, 0.75]
    assert sum(histogram("x", [5.0, 5.0], bins=4).heights) == 1.0
    assert list(histogram("x", []).heights) == []


def test_a_roof_bends_at_the_ridge() -> None:
    line = roof("h200", 989e12, 4.8e12, 1.0, 1000.0)
    ridge = 989e12 / 4.8e12
    assert line.points == [(1.0, 4.8e12), (ridge, pytest.approx(989e12)), (1000.0, 989e12)]


def test_marks_stand_where_their_axes_say() -> None:
    marks = [Points("p", [Point(0, 0), Point(10, 1, y_range=(0.5, 1.0), label="top")]), Rule("x", 5, "half")]
    drawn = chart("t", Axis("", low=0, high=10), Axis("", low=0, high=1), marks, width=720, height=330)
    dots = [each for each in parsed(drawn).iter(f"{SVG}circle") if each.get("class") == "dot"]
    assert [float(dot.get("cx", 0)) for dot in dots] == [62.0, 698.0]
    assert float(dots[0].get("cy", 0)) > float(dots[1].get("cy", 0))
    rule = next(each for each in parsed(drawn).iter(f"{SVG}line") if each.get("class") == "rule")
    assert float(rule.get("x1", 0)) == pytest.approx((62 + 698) / 2)
    assert "top" in texts(drawn)
    assert "half" in texts(drawn)


def test_names_that_would_overlap_are_left_to_the_hover_texts() -> None:
    crowd = [Point(1, 1 + i / 1000, label=f"name {i}") for i in range(12)]
    drawn = chart("t", Axis(""), Axis("", low=0, high=2), [Points("p", crowd)])
    assert 1 <= sum(text.startswith("name") for text in texts(drawn)) <= 4


def test_any_number_of_points_gives_a_chart_of_bounded_size() -> None:
    line = Line("x", [(i / 1e5, (i % 1000) / 1000 * (i / 1e5)) for i in range(100_000)])
    stairs = cdf("y", [(i * 7919 % 100_003) / 1e5 for i in range(100_000)])
    for mark in (line, stairs):
        assert len(chart("t", Axis(""), Axis(""), [mark])) < 100_000
    rows = [Row(f"r{i}", [Span(i, i + 1, "a")]) for i in range(5000)]
    drawn = timeline("t", rows, ["a"])
    assert len(drawn) < 100_000
    assert "250 of 5000 requests" in drawn
    assert "nothing to show" in chart("t", Axis(""), Axis(""), [Line("x", [(float("nan"), 1.0)])])


def test_nothing_that_comes_from_outside_is_markup() -> None:
    point = Point(1, 1, title=EVIL, label=EVIL)
    marks = [Points(EVIL, [point]), Line(EVIL, [(0, 0), (1, 1)]), Rule("y", 0.5, EVIL)]
    axis = Axis(EVIL, names=[(0.0, EVIL)])
    svgs = [
        chart(EVIL, Axis(EVIL, unit=EVIL), axis, marks, standalone=True),
        timeline(EVIL, [Row(EVIL, [Span(0, 1, EVIL)], EVIL, True)], [EVIL], x_label=EVIL),
    ]
    for svg in svgs:
        assert "<script" not in svg
        assert parsed(svg) is not None
    html = page(
        EVIL,
        [banner(EVIL, [EVIL]), table([EVIL], [[Cell(EVIL, EVIL, "", EVIL)]]), facts({EVIL: {EVIL: [EVIL]}})],
        subtitle=EVIL,
    )
    assert "<script" not in html


def test_a_page_fetches_nothing_and_runs_nothing() -> None:
    html = page("t", [], subtitle="s")
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)\s*=|url\(|@import", html)
    assert STYLE in html


def test_names_of_rules_that_stand_close_do_not_cover_each_other() -> None:
    rules = [Rule("x", 400.0, "SLO P90 400 ms"), Rule("x", 410.0, "SLO P99 410 ms")]
    drawn = chart("t", Axis("ms", low=0, high=1000), Axis("y"), [Line("a", [(0, 0), (1000, 1)]), *rules])
    heights = re.findall(r'class="rule-label" x="[\d.]+" y="([\d.]+)"', drawn)
    assert len(heights) == 2
    assert abs(float(heights[0]) - float(heights[1])) >= 12
