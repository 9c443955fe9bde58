"""The weight formats of a plan for the terminal and the page: speed, and the verdict of the gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ridgeline.lab.charts import number
from ridgeline.lab.plan.plan_types import Plan
from ridgeline.lab.plan.quantization.figures import FormatFigures

HEAD = "Weight formats, for this traffic and service level"
BASIS = (
    "speed: measured = simulated with step times that `plan fit` measured for this format here; predicted = "
    "by the formula"
)


def format_rows(plan: Plan) -> list[list[str]]:
    """With its head. The chosen format is marked."""
    rows = [["", "format", "chips", "arrivals/s a chip", "speed", "quality gate"]]
    for figures in formats_of(plan):
        is_chosen = figures.precision == plan.chosen_format.precision
        rows.append(
            [
                "→" if is_chosen else "",
                figures.precision,
                "–" if figures.gpus is None else f"{figures.gpus:,}",
                "–" if figures.per_gpu is None else number(figures.per_gpu),
                figures.speed if figures.gpus is not None else "does not do",
                figures.quality.words,
            ]
        )
    return rows


def format_notes(plan: Plan) -> Iterator[tuple[str, str]]:
    """The subject of each verdict; for a format without one, the command that gates it (else "")."""
    for figures in formats_of(plan):
        quality, verdict = figures.quality, figures.quality.verdict
        if verdict is not None:
            served = verdict.served
            figures_of = "; ".join(f"{one.task}: {one.figures}" for one in verdict.checks)
            yield (
                f"{figures.precision}: {served.model.name} as {verdict.candidate} against "
                f"{verdict.reference}, {verdict.date}, {verdict.items:,} items, "
                f"{served.engine or served.backend}, ridgeline {verdict.version}: {figures_of}",
                "",
            )
        elif quality.status == "not gated":
            yield f"{figures.precision} is not gated; this command gates it:", quality.command


def formats_of(plan: Plan) -> tuple[FormatFigures, ...]:
    """As stored first; a requested format that is not among the considered ones is last."""
    known = any(figures.precision == plan.chosen_format.precision for figures in plan.formats)
    return plan.formats if known else (*plan.formats, plan.chosen_format)


def format_facts(plan: Plan) -> list[dict[str, Any]]:
    """For prediction.json."""
    chosen = plan.chosen_format.precision
    return [{**figures.facts(), "chosen": figures.precision == chosen} for figures in formats_of(plan)]
