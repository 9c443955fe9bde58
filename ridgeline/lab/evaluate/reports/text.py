"""Evaluations and gate results as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.lab.evaluate.evaluation import Evaluation
from ridgeline.lab.evaluate.gate import GateResult
from ridgeline.lab.evaluate.scoring.metrics import Metric
from ridgeline.lab.evaluate.statistics.gate_checks import AccuracyCheck, TextCheck

MOST_IDS = 12


def evaluation_text(found: Evaluation) -> str:
    lines = [f"{found.subject}: {found.facts.get('engine') or found.facts.get('model', '')}", ""]
    rows = [["task", "items", "metric", "value", "± error", ""]]
    for task in found.tasks:
        for place, metric in enumerate(task.metrics):
            name, items = (task.task, f"{task.items} of {task.of}") if place == 0 else ("", "")
            value, error = metric_text(metric)
            rows.append([name, items, metric.name, value, error, "tested" * (metric.name == task.primary)])
    lines += aligned_rows(rows)
    lines += ["", *(f"{task.task}: {task.note}" for task in found.tasks if task.note)]
    return "\n".join(lines).rstrip()


def metric_text(metric: Metric) -> tuple[str, str]:
    """Accuracies in per cent with two digits, perplexities with four."""
    if "perplexity" in metric.name or metric.name == "bits_per_byte":
        return f"{metric.value:.4f}", f"{metric.error:.4f}"
    return f"{100 * metric.value:.2f} %", f"{100 * metric.error:.2f}"


def gate_text(found: GateResult) -> str:
    lines = [
        f"reference  {found.reference}: {_engine(found.reference_facts)}",
        f"candidate  {found.candidate}: {_engine(found.candidate_facts)}",
        "",
    ]
    for check in found.checks:
        lines += [f"{check.task}: {check.verdict}", f"  {check.reason}"]
        lines += accuracy_lines(check, found) if isinstance(check, AccuracyCheck) else text_lines(check)
    failed = found.failed_checks
    names = ", ".join(check.task for check in failed)
    lines += ["", "gate: passed" if found.passed else f"gate: FAILED on {names}"]
    return "\n".join(lines)


def accuracy_lines(check: AccuracyCheck, found: GateResult) -> Iterator[str]:
    yield f"  {check.metric}: {100 * check.reference:.2f} % → {100 * check.candidate:.2f} %; " + (
        f"{check.answers_changed} answers changed"
    )
    power, margin = found.settings["power"], found.settings["margin"]
    text = f"  {check.flips.n} items show a loss of {100 * check.detectable:.1f} points with power {power:g}"
    yield text + (f"; a loss of {margin:g} needs {check.needed:,} items" if check.needed else "")
    if check.flips.lost:
        yield f"  lost: {ids_text(check.flips.lost)}"
    if check.flips.gained:
        yield f"  gained: {ids_text(check.flips.gained)}"


def text_lines(check: TextCheck) -> Iterator[str]:
    found = check.divergence
    if found is not None:
        yield (
            f"  {found.positions:,} positions in {found.texts} texts; KL 99 % {found.kl_p99:.5f}, "
            f"99.9 % {found.kl_p999:.5f}; RMS Δp {100 * found.rms_delta_p:.3f} %; "
            f"tail {100 * found.mean_tail:.2f} %"
        )
        yield (
            f"  perplexity {found.reference_ppl:.4f} → {found.reference_ppl * found.ppl_ratio:.4f} "
            f"(Δ {found.delta_ppl:+.4f} ± {found.delta_ppl_error:.4f})"
        )
    if check.worst and check.worst[0][1] > 0:
        yield "  largest: " + ", ".join(f"{id} {value:.5f}" for id, value in check.worst[:5])


def ids_text(ids: tuple[str, ...]) -> str:
    more = f" and {len(ids) - MOST_IDS} more" if len(ids) > MOST_IDS else ""
    return ", ".join(ids[:MOST_IDS]) + more


def aligned_rows(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _engine(facts: dict[str, object]) -> str:
    return str(facts.get("engine") or facts.get("model") or "")
