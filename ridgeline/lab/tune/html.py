"""A ledger as one self-contained page: the front, every trial's effect with its interval, the winner."""

from __future__ import annotations

from html import escape

from ridgeline.lab.charts import Axis, Point, Points, Rule, chart
from ridgeline.lab.page import Cell, Html, facts, heading, page, paragraph, table
from ridgeline.lab.tune.effects import more_is_better, percent
from ridgeline.lab.tune.front import front, points
from ridgeline.lab.tune.ledger import Ledger
from ridgeline.lab.tune.report import (
    change_text,
    header_of,
    settings_text,
    told_metrics,
    winner,
    winner_toml,
)

_COLOURS = {
    "noise": 0,
    "rejected": 1,
    "accepted": 2,
    "refused": 3,
    "died": 3,
    "undecided": 4,
}  # of the palette
_LOOKS = {"accepted": "good", "refused": "bad", "died": "bad"}


def ledger_page(ledger: Ledger, latency: str, usd_per_hour: float | None) -> str:
    header = header_of(ledger)
    runs = list(ledger.runs())
    minutes = sum(run.seconds for run in runs) / 60
    direction = "more" if more_is_better(header.objective) else "less"
    settings, _ = winner(ledger)
    parts = [
        paragraph(
            f"{len(ledger.trials)} trials, {len(runs)} runs, {minutes:.0f} minutes. "
            f"Objective: {header.objective}, {direction} is better; "
            f"{header.rounds} rounds of A and B a trial; intervals of 95 %."
        ),
        heading(
            "Configurations", "The Pareto front: no other is better in throughput, latency and cost at once."
        ),
        Html(front_chart(ledger, latency, usd_per_hour)),
        _front_table(ledger, latency, usd_per_hour),
        heading(
            "Trials",
            "Each changes one setting of its parent; the first compares equal settings (noise).",
        ),
        Html(effects_chart(ledger)),
        _trials_table(ledger),
        heading("Winner", settings_text(settings)),
        Html(f"<pre>{escape(winner_toml(ledger))}</pre>"),
        heading("What was measured"),
        facts({"model": header.model, "from": header.base, "load": header.workload, "limits": header.slo}),
    ]
    made_at = runs[-1].at if runs else ""
    return page(f"Tuning {header.model}", parts, subtitle=str(ledger.folder), made_at=made_at)


def front_chart(ledger: Ledger, latency: str, usd_per_hour: float | None) -> str:
    found = points(ledger, latency, usd_per_hour)
    best = front(found)
    rest = [point for point in found if point not in best]
    marks = [
        Points(
            name,
            [
                Point(point.latency_ms, point.tokens_per_s, title=settings_text(point.settings))
                for point in sorted(group, key=lambda point: point.latency_ms)
            ],
            joined=name == "front",
            hollow=name != "front",
        )
        for name, group in (("front", best), ("beaten", rest))
        if group
    ]
    return chart("Throughput and latency", Axis(f"{latency} (ms)"), Axis("output tokens/s"), marks)


def effects_chart(ledger: Ledger) -> str:
    """One row per decided trial, the first at the top."""
    objective = header_of(ledger).objective
    decided = [
        (trial, verdict)
        for trial in ledger.trials
        if (verdict := ledger.verdict(trial.number)) is not None and objective in verdict.effects
    ]
    groups: dict[str, list[Point]] = {}
    names = []
    for row, (trial, verdict) in enumerate(decided):
        effect, height = verdict.effects[objective], float(len(decided) - row)
        names.append((height, f"{trial.number} {change_text(trial)}"))
        groups.setdefault(verdict.decision, []).append(
            Point(effect.change, height, title=percent(effect), x_range=(effect.low, effect.high))
        )
    marks: list[Points | Rule] = [
        Points(name, places, colour=_COLOURS[name]) for name, places in groups.items()
    ]
    marks.append(Rule("x", 0.0, "no effect"))
    return chart(
        f"Effect on {objective}",
        Axis("change against the parent", percent=True),
        Axis("", low=0.4, high=len(decided) + 0.6, names=names),
        marks,
        height=110 + 30 * len(decided),
    )


def _front_table(ledger: Ledger, latency: str, usd_per_hour: float | None) -> Html:
    rows = [
        [
            settings_text(point.settings),
            f"{point.tokens_per_s:,.1f}",
            f"{point.latency_ms:,.1f}",
            "–" if point.usd_per_mtok is None else f"{point.usd_per_mtok:.3f}",
            str(point.trial),
        ]
        for point in front(points(ledger, latency, usd_per_hour))
    ]
    return table(["settings", "tokens/s", f"{latency} (ms)", "$ per million output tokens", "trial"], rows)


def _trials_table(ledger: Ledger) -> Html:
    told = told_metrics(header_of(ledger))
    rows: list[list[str | Cell]] = []
    for trial in ledger.trials:
        verdict = ledger.verdict(trial.number)
        row: list[str | Cell] = [
            f"{trial.number} {change_text(trial)}",
            str(trial.parent) if trial.key else "",
            Cell("unfinished")
            if verdict is None
            else Cell(verdict.decision, title=verdict.reason, look=_LOOKS.get(verdict.decision, "")),
        ]
        effects = {} if verdict is None else verdict.effects
        row += [percent(effects[name]) if name in effects else "–" for name in told]
        rows.append(row)
    return table(["trial", "parent", "decision", *told], rows)
