"""A comparison as text and as one self-contained page: the Pareto picture, and all figures in a table."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.lab.charts import Axis, Point, Points, chart
from ridgeline.lab.evaluate.compare import Comparison, Entry
from ridgeline.lab.evaluate.reports.text import aligned_rows, metric_text
from ridgeline.lab.page import Cell, Html, charts, facts, heading, page, paragraph, table

GIB = 1 << 30
MTOK_TITLE = "price per hour ÷ tokens per second, without pause"


def comparison_text(found: Comparison) -> str:
    front = found.front
    rows = [["subject", "quality", "tok/s", "memory", "$/Mtok", ""]]
    rows += [[*_cells(entry), "front" if entry in front else ""] for entry in found.entries]
    return "\n".join(aligned_rows(rows))


def _cells(entry: Entry) -> list[str]:
    return [
        entry.subject,
        f"{100 * entry.quality:.2f} ± {100 * entry.error:.2f}",
        "–" if entry.tokens_per_s is None else f"{entry.tokens_per_s:,.1f}",
        "–" if entry.memory_bytes is None else f"{entry.memory_bytes / GIB:.2f} GiB",
        "–" if entry.usd_per_mtok is None else f"{entry.usd_per_mtok:.3f}",
    ]


def comparison_page(found: Comparison) -> str:
    front = found.front
    pictures = [
        pareto_chart(found, "tokens per second", lambda entry: entry.tokens_per_s),
        pareto_chart(found, "memory, GiB", _memory_gib),
        pareto_chart(found, "$ per million output tokens", lambda entry: entry.usd_per_mtok),
    ]
    rows: list[list[str | Cell]] = [
        [*_cells(entry), Cell("front", look="good") if entry in front else ""] for entry in found.entries
    ]
    parts = [
        paragraph(
            "Quality is the mean over tasks of the tested metric (a text: 1 − bits per byte / 8). The front: "
            "no other subject is at least as good in quality, speed, memory and price, and better in one."
        ),
        charts([picture for picture in pictures if picture]),
        table(["subject", "quality, %", "tok/s", "memory", Cell("$/Mtok", title=MTOK_TITLE), ""], rows),
        heading("Metrics"),
        _metrics_table(found),
        heading("Settings"),
        facts(found.settings),
    ]
    return page("Models compared", parts, subtitle=", ".join(entry.subject for entry in found.entries))


def pareto_chart(found: Comparison, label: str, cost: Callable[[Entry], float | None]) -> str:
    """Quality over one cost; "" if no subject knows it."""
    front = found.front
    groups: dict[str, list[Point]] = {"front": [], "beaten": []}
    for entry in found.entries:
        x = cost(entry)
        if x is None:
            continue
        spread = (entry.quality - entry.error, entry.quality + entry.error)
        title = " · ".join(_cells(entry))
        groups["front" if entry in front else "beaten"].append(
            Point(x, entry.quality, title=title, label=entry.subject, y_range=spread)
        )
    marks = [
        Points(name, sorted(spots, key=lambda spot: spot.x), joined=name == "front", hollow=name != "front")
        for name, spots in groups.items()
        if spots
    ]
    return chart(f"Quality and {label}", Axis(label), Axis("quality", percent=True), marks) if marks else ""


def _memory_gib(entry: Entry) -> float | None:
    return None if entry.memory_bytes is None else entry.memory_bytes / GIB


def _metrics_table(found: Comparison) -> Html:
    rows: list[list[str | Cell]] = []
    for entry in found.entries:
        for task in entry.evaluation.tasks:
            for metric in task.metrics:
                value, error = metric_text(metric)
                rows.append([entry.subject, task.task, metric.name, value, f"± {error}"])
    return table(["subject", "task", "metric", "value", "error"], rows)
