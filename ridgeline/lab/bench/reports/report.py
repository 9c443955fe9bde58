"""The report of a run: one HTML file with its figures, intervals, charts, failures and settings.

Made by `ridgeline bench` after every run and by `ridgeline bench report DIR`. Reads only a BenchResult; an
INVALID run is marked before any figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ridgeline.lab.bench.figures.metrics import Metric
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.figures.statistics import Estimate
from ridgeline.lab.bench.figures.verdict import limit_verdicts
from ridgeline.lab.bench.reports.report_charts import measured, report_charts, timeline_chart, under_way_chart
from ridgeline.lab.bench.reports.text_summary import MOMENTS
from ridgeline.lab.charts import grouped, number
from ridgeline.lab.page import (
    Cell,
    Html,
    banner,
    charts,
    facts,
    heading,
    notes,
    page,
    paragraph,
    table,
    tiles,
)

PERCENTILES = ("p50", "p90", "p95", "p99")
SERVER = ("server_queue_ms", "server_ttft_ms", "server_tpot_ms", "inference_ms", "outside_inference_ms")
RATES = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "goodput_per_s")
SHARES = (
    "attainment",
    "failures",
    "cache_hit",
    "draft_acceptance",
    "tokens_per_step",
    "usd_per_mtok",
    "concurrency_mean",
    "concurrency_peak",
    "client_cpu",
)
LABELS = {
    "ttft_ms": "time to first token",
    "ttft_sched_ms": "time to first token",
    "tpot_ms": "time per output token",
    "e2e_ms": "whole answer",
    "e2e_sched_ms": "whole answer",
    "itl_ms": "between tokens",
    "output_tokens_per_s": "output tokens per second",
    "requests_per_s": "requests per second",
    "goodput_per_s": "requests per second within the SLO",
    "attainment": "of requests within the SLO",
    "failures": "of requests failed",
}
AS_PERCENT = ("attainment", "failures", "cache_hit", "draft_acceptance")


def report_page(result: BenchResult) -> str:
    settings = result.settings
    name = str(settings.get("name") or settings.get("traffic") or "run")
    parts = [*_validity(result), _tiles(result), _slo(result)]
    parts += [heading("Latency", _counted_from(result)), _distributions(result, _headline(result))]
    parts += [heading("Rates and shares"), _values(result), *_inference(result)]
    parts += [heading("Distributions"), charts(report_charts(result))]
    parts += [heading("Timeline of the run"), charts([timeline_chart(result)], wide=True)]
    parts += [charts([under_way_chart(result)], wide=True)]
    parts += [heading("Percent of the limit"), _limits(result)]
    parts += [heading("Failures by cause"), _failures(result)]
    others = [name for name in _latencies(result) if name not in _headline(result) + list(SERVER)]
    parts += [heading("All other latencies"), _distributions(result, others)]
    environment: dict[str, object] = {
        key: settings[key] for key in ("client", "server", "limits") if key in settings
    }
    asked = {key: value for key, value in settings.items() if key not in environment}
    parts += [heading("Settings"), facts(asked), heading("Environment"), facts(environment)]
    parts += [heading("Self-test before the run"), facts(result.selftest)]
    return page(f"Benchmark: {name}", parts, subtitle=_subtitle(result), made_at=result.started_at)


def metric_cells(metric: Metric) -> list[str | Cell]:
    """P50 to P99 with intervals, mean, std, min, max and n: one table row, without its name."""
    cells: list[str | Cell] = [estimate_cell(metric.percentiles.get(key)) for key in PERCENTILES]
    moments = (getattr(metric, key) for key in MOMENTS)
    return [*cells, *("–" if value is None else grouped(value) for value in moments), f"{metric.n:,}"]


def estimate_cell(found: Estimate | None) -> Cell:
    if found is None:
        return Cell("–", title="too few samples")
    low = "?" if found.low is None else grouped(found.low)
    high = "?" if found.high is None else grouped(found.high)
    return Cell(grouped(found.value), title="95 % interval by order statistics", small=f"{low} – {high}")


def value_text(metric: Metric) -> tuple[str, str]:
    """The value with its unit, and its interval if it has one."""
    if metric.value is None:
        return "–", metric.note
    plain = f" {metric.unit}" if metric.unit else ""
    scale, unit = (100.0, " %") if metric.name in AS_PERCENT else (1.0, plain)
    interval = ""
    if metric.low is not None and metric.high is not None:
        interval = f"{number(metric.low * scale)} – {number(metric.high * scale)}{unit}"
    return f"{number(metric.value * scale)}{unit}", interval


# ── sections ─────────────────────────────────────────────────────────────────────────────────────────────


def _subtitle(result: BenchResult) -> str:
    settings = result.settings
    loop = (
        f"closed loop, {settings['concurrency']} at once"
        if settings.get("concurrency")
        else f"{result.summary.mode} loop"
    )
    where = f"{settings.get('model', '?')} at {settings.get('url', '?')}"
    return f"{where} · {loop} · {result.summary.offered:,} requests in {number(result.seconds)} s"


def _validity(result: BenchResult) -> list[Html]:
    validity, found = result.validity, []
    if not validity.valid:
        found.append(banner("INVALID: this run did not measure the server", validity.reasons))
    warned = [*validity.warnings, *result.settings.get("warnings", ()), *result.summary.notes]
    if result.interrupted:
        warned.insert(0, "stopped by the user: the report covers the run until then")
    if result.selftest.get("skipped"):
        warned.append(f"self-test skipped: {result.selftest['skipped']}")
    if result.summary.window.note:
        warned.append(f"rates: {result.summary.window.note}")
    return [*found, notes(warned)]


def _tiles(result: BenchResult) -> Html:
    figures = []
    for name in _headline(result)[:3]:
        metric = result.summary.metrics[name]
        for key in ("p50", "p90"):
            estimate = metric.percentiles.get(key)
            if estimate is not None:
                words = f"{LABELS[name]}, {key.upper()}"
                figures.append((f"{grouped(estimate.value)} ms", words, metric.formula))
    for name in ("output_tokens_per_s", "requests_per_s", "goodput_per_s", "attainment", "failures"):
        if name in result.summary.metrics:
            metric = result.summary.metrics[name]
            figures.append((value_text(metric)[0], LABELS[name], metric.formula))
    return tiles(figures)


def _slo(result: BenchResult) -> Html:
    """Whether the run kept each limit of its service level."""
    found = limit_verdicts(result.summary)
    if not found:
        return Html("")
    kept = all(verdict.kept for verdict in found)
    words = "SLO met" if kept else "SLO missed"
    rows: list[list[str | Cell]] = []
    for verdict in found:
        value = "–" if verdict.value_ms is None else f"{grouped(verdict.value_ms)} ms"
        said, look = ("kept", "good") if verdict.kept else ("missed", "bad")
        answer = Cell(said, look=look, small=verdict.note)
        rows.append([verdict.words, value, f"{grouped(verdict.limit.ms)} ms", answer])
    return Html(heading(words) + table(["", "measured", "limit", ""], rows))


def _headline(result: BenchResult) -> list[str]:
    return [name for name in (*result.summary.headline, "itl_ms") if name in result.summary.metrics]


def _latencies(result: BenchResult) -> list[str]:
    metrics = result.summary.metrics
    return [name for name, metric in metrics.items() if metric.value is None and metric.percentiles]


def _counted_from(result: BenchResult) -> str:
    if result.summary.mode == "open":
        return (
            "Open loop: counted from the planned moment (_sched), so that a client or a server that falls "
            "behind hides nothing. Milliseconds; below each figure its 95 % interval; hover for formulas."
        )
    return "Closed loop: counted from sending. Milliseconds; below each figure its 95 % interval."


def _distributions(result: BenchResult, names: Sequence[str]) -> Html:
    rows: list[list[str | Cell]] = []
    for name in names:
        metric = result.summary.metrics[name]
        rows.append([Cell(name, title=metric.formula, small=metric.formula), *metric_cells(metric)])
        if metric.adjusted and result.summary.failed:
            cells = [estimate_cell(metric.adjusted.get(key)) for key in PERCENTILES]
            adjusted = Cell(f"adj_{name}", title=f"{metric.formula}; failures at +∞")
            empty = [""] * len(MOMENTS)
            rows.append([adjusted, *cells, *empty, f"{metric.n + result.summary.failed:,}"])
    return table(["", "P50", "P90", "P95", "P99", *MOMENTS, "n"], rows)


def _values(result: BenchResult) -> Html:
    metrics = [result.summary.metrics[n] for n in (*RATES, *SHARES) if n in result.summary.metrics]
    rows: list[list[str | Cell]] = []
    for metric in metrics:
        value, interval = value_text(metric)
        words = Cell(metric.formula, look="words")
        rows.append([Cell(metric.name, title=metric.formula), Cell(value, small=interval), words])
    window = result.summary.window
    steady = f"steady window: {number(window.start)} s to {number(window.end)} s"
    return Html(table(["", "", ""], rows) + paragraph(steady, faint=True))


def _inference(result: BenchResult) -> list[Html]:
    """The server's own timings beside those measured by the client, and their difference."""
    metrics = result.summary.metrics
    told = [name for name in SERVER if name in metrics]
    if not told:
        return [
            heading("Inference alone"),
            paragraph("The server does not report timings: everything here is end to end.", faint=True),
        ]
    explanation = (
        "By the server's own clock, beside end to end as the client saw it. outside_inference_ms is the "
        "difference: queueing, HTTP, tokenizing, the network and this client."
    )
    return [heading("Inference alone, and the rest", explanation), _distributions(result, [*told, "e2e_ms"])]


def _limits(result: BenchResult) -> Html:
    if not result.shares:
        return paragraph("The server does not report its machine's limits.", faint=True)
    rows: list[list[str | Cell]] = [
        [
            Cell(share.name, title=share.formula),
            f"{number(share.value)} {share.unit}",
            f"{number(share.limit)} {share.unit}",
            Cell(_bar(share.share), title=share.formula),
            Cell(share.formula, look="words"),
        ]
        for share in result.shares
    ]
    return table(["", "measured", "limit", "reached", Cell("what the limit is", look="words")], rows)


def _bar(share: float) -> Html:
    filled = max(0.0, min(share, 1.0)) * 120
    return Html(
        '<svg width="176" height="14" role="img">'
        '<rect width="120" height="12" y="1" rx="2" fill="var(--line)"/>'
        f'<rect width="{filled:.1f}" height="12" y="1" rx="2" fill="var(--good)"/>'
        f'<text x="126" y="12" font-size="12" fill="var(--ink)">{share:.1%}</text></svg>'
    )


def _failures(result: BenchResult) -> Html:
    failed = [record for record in measured(result) if record.status != "ok"]
    if not failed:
        return paragraph("None.")
    counted = Counter(record.cause or record.status for record in failed)
    rows: list[list[str | Cell]] = []
    for cause, count in counted.most_common():
        first = next(record for record in failed if (record.cause or record.status) == cause)
        share = f"{count / result.summary.offered:.1%}"
        example = f"request {first.index}: {first.error}" if first.error else f"request {first.index}"
        rows.append([cause, f"{count:,}", share, Cell(example[:500], look="words")])
    return table(["cause", "requests", "of all", Cell("for example", look="words")], rows)
