"""A gate's result as one self-contained page: verdict, checks, divergence, flips with their items."""

from __future__ import annotations

from ridgeline.lab.charts import Axis, Line, Mark, Point, Points, Rule, chart
from ridgeline.lab.evaluate.gate import GateResult, fails
from ridgeline.lab.evaluate.reports.samples_part import samples_part
from ridgeline.lab.evaluate.statistics.divergence import Divergence
from ridgeline.lab.evaluate.statistics.gate_checks import AccuracyCheck, TextCheck
from ridgeline.lab.page import Cell, Html, banner, charts, facts, heading, page, paragraph, table

LEAST_KL = 1e-9


def gate_page(found: GateResult) -> str:
    texts = [check for check in found.checks if isinstance(check, TextCheck)]
    accuracies = [check for check in found.checks if isinstance(check, AccuracyCheck)]
    parts = [_verdict(found), _checks_table(found)]
    drawn = []
    if found.kl_quantiles:
        drawn.append(kl_chart(found))
    if accuracies:
        drawn.append(difference_chart(accuracies, found))
    if drawn:
        parts.append(charts(drawn))
    for check in texts:
        if check.divergence is not None and check.noise is not None:
            parts += [
                heading(f"{check.task}: divergence", "Candidate, and the reference against itself (A/A)."),
                _divergence_table(check.divergence, check.noise),
                heading(f"{check.task}: items that differ most"),
                table(["item", "mean KL, nats"], [[id, f"{value:.6f}"] for id, value in check.worst]),
            ]
    for task in accuracies:
        if task.flips.lost or task.flips.gained:
            parts += [heading(f"{task.task}: items that flipped"), _flips_table(task)]
    parts += samples_part(
        found.samples, "Items that flipped first, then those whose answer changed, then others of the task."
    )
    parts += [
        heading("What was compared"),
        facts(
            {
                "reference": found.reference_facts,
                "candidate": found.candidate_facts,
                "settings": found.settings,
            }
        ),
    ]
    return page(f"Gate: {found.candidate}", parts, subtitle=f"against {found.reference}")


def _verdict(found: GateResult) -> Html:
    failed = found.failed_checks
    if failed:
        return banner("FAILED", [f"{check.task}: {check.verdict}: {check.reason}" for check in failed])
    return paragraph("Passed: no difference outside the noise floor and the margins.")


def _checks_table(found: GateResult) -> Html:
    strict = bool(found.settings.get("strict"))
    rows: list[list[str | Cell]] = [
        [
            check.task,
            Cell(check.verdict, look="bad" if fails(check, strict) else "good"),
            Cell(check.reason, look="words"),
        ]
        for check in found.checks
    ]
    return table(["task", "verdict", Cell("figures", look="words")], rows)


def _divergence_table(found: Divergence, noise: Divergence) -> Html:
    def row(name: str, formula: str, own: str, other: str) -> list[str | Cell]:
        return [Cell(name, title=formula), own, other]

    def both(name: str, formula: str, write: str, field: str) -> list[str | Cell]:
        return row(name, formula, format(getattr(found, field), write), format(getattr(noise, field), write))

    return table(
        ["", "candidate", "A/A"],
        [
            both("mean KL, nats", "Σ p ln(p/q), top tokens of both and the tail", ".6f", "mean_kl"),
            both("± error", "standard error over texts", ".6f", "kl_error"),
            both("KL, 99 %", "of all positions", ".6f", "kl_p99"),
            both("KL, 99.9 %", "of all positions", ".6f", "kl_p999"),
            both("same top token", "share of positions", ".4%", "same_top"),
            both("RMS Δp", "of the text's own tokens", ".4%", "rms_delta_p"),
            both("Δ perplexity", "per token, paired", "+.5f", "delta_ppl"),
            both("± error", "standard error over texts", ".5f", "delta_ppl_error"),
            both("mass of the tail", "of the reference, outside the common tokens", ".3%", "mean_tail"),
            both("positions", "", ",d", "positions"),
        ],
    )


def _flips_table(check: AccuracyCheck) -> Html:
    rows: list[list[str | Cell]] = [
        ["lost", Cell(", ".join(check.flips.lost) or "none", look="words")],
        ["gained", Cell(", ".join(check.flips.gained) or "none", look="words")],
    ]
    return table(["", Cell("items", look="words")], rows)


def kl_chart(found: GateResult) -> str:
    """The share of positions up to a divergence; log scale, zero shown at the left end."""
    marks: list[Mark] = []
    for name, values in (("candidate", found.kl_quantiles), ("A/A", found.noise_kl_quantiles)):
        shares = [(place + 0.5) / len(values) for place in range(len(values))]
        marks.append(
            Line(name, [(max(kl, LEAST_KL), share) for kl, share in zip(values, shares, strict=True)])
        )
    return chart(
        "Divergence by position",
        Axis("KL, nats", log=True),
        Axis("share of positions", percent=True, low=0.0, high=1.0),
        marks,
    )


def difference_chart(checks: list[AccuracyCheck], found: GateResult) -> str:
    """One row per task: the paired difference with its interval, and the margin."""
    spots = [
        Point(
            check.flips.difference,
            float(len(checks) - row),
            title=check.reason,
            x_range=(check.low, check.high),
        )
        for row, check in enumerate(checks)
    ]
    names = [(float(len(checks) - row), check.task) for row, check in enumerate(checks)]
    margin = float(found.settings["margin"]) / 100
    return chart(
        "Accuracy, candidate minus reference",
        Axis("difference", percent=True),
        Axis("", low=0.4, high=len(checks) + 0.6, names=names),
        [Points("difference", spots), Rule("x", 0.0, "no difference"), Rule("x", -margin, "margin")],
        height=140 + 30 * len(checks),
    )
