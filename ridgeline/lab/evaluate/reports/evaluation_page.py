"""An evaluation as one self-contained page: every task's metrics, and what was asked."""

from __future__ import annotations

from ridgeline.lab.evaluate.evaluation import Evaluation
from ridgeline.lab.evaluate.reports.samples_part import samples_part
from ridgeline.lab.evaluate.reports.text import metric_text
from ridgeline.lab.page import Cell, facts, heading, notes, page, table


def evaluation_page(found: Evaluation) -> str:
    rows: list[list[str | Cell]] = []
    for task in found.tasks:
        for place, metric in enumerate(task.metrics):
            value, error = metric_text(metric)
            name = Cell(task.task, small=f"{task.items} of {task.of} items") if place == 0 else Cell("")
            look = "good" if metric.name == task.primary else ""
            rows.append([name, Cell(metric.name, look=look), value, f"± {error}"])
    parts = [
        table(["task", "metric", "value", "error"], rows),
        notes([f"{task.task}: {task.note}" for task in found.tasks if task.note]),
        *samples_part(
            [sample for task in found.tasks for sample in task.samples],
            "Spread over each task; results.jsonl has all answers.",
        ),
        heading("What was asked"),
        facts({"seed": found.seed, "limit": found.limit, **found.facts}),
    ]
    return page(f"Evaluation of {found.subject}", parts)
