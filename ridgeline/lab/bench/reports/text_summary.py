"""A run as terminal text: every figure with its interval, formula and limit, and whether the run is valid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ridgeline.lab.bench.figures.metrics import Metric, Summary
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.figures.statistics import FEWEST, Estimate
from ridgeline.lab.bench.figures.validity import Validity

COLUMNS = ("p50", "p90", "p95", "p99")
MOMENTS = ("mean", "std", "min", "max")
_WIDE, _NAME = 23, 22
_PERCENT = ("attainment", "cache_hit", "draft_acceptance", "failures")


def text_of(result: BenchResult) -> str:
    return "\n".join(_lines(result))


def verdict(validity: Validity) -> list[str]:
    """The first and the last lines of an invalid run."""
    if validity.valid:
        return []
    return ["!" * 100, *(f"INVALID RUN: {reason}" for reason in validity.reasons), "!" * 100]


def _lines(result: BenchResult) -> Iterator[str]:
    summary = result.summary
    yield from verdict(result.validity)
    yield from _about(result)
    yield ""
    yield from _distributions(summary)
    yield ""
    yield from _values(result)
    if summary.causes:
        yield ""
        yield f"failures ({summary.failed} of {summary.offered}):"
        for cause, count in sorted(summary.causes.items(), key=lambda item: -item[1]):
            example = next((r.error for r in result.records if r.cause == cause and not r.warmup), "")
            yield f"  {count:>6} {cause:<20} {example[:120]}"
    yield ""
    yield "formulas:"
    for metric in summary.metrics.values():
        yield f"  {metric.name:<{_NAME}} {metric.formula}"
    notes = (*summary.notes, *result.validity.warnings, *result.settings.get("warnings", ()))
    if notes:
        yield ""
        yield from (f"note: {note}" for note in notes)
    yield from verdict(result.validity)


def _about(result: BenchResult) -> Iterator[str]:
    settings, summary = result.settings, result.summary
    loop = "open loop" if summary.mode == "open" else f"closed loop, {settings['concurrency']} at once"
    if settings.get("max_concurrency"):
        loop += f", at most {settings['max_concurrency']} in flight"
    yield f"{settings['model']} at {settings['url']} ({settings['server']}, {settings['api']}) · {loop}"
    yield (
        f"{settings['traffic']} · {summary.offered} requests in {result.seconds:.1f} s, {summary.ok} ok, "
        f"{summary.failed} failed"
        + (f", {summary.cancelled} cut off" if summary.cancelled else "")
        + f" · {summary.warmup} warm-up requests apart"
    )
    if result.interrupted:
        yield "STOPPED by the user: figures until then"
    yield f"prefix cache {settings['prefix_cache']} · prompts {settings['prompts']} · seed {settings['seed']}"
    yield f"tokens counted by: {_counting(summary)} · self-test: {selftest_words(result.selftest)}"
    window = summary.window
    words = window.note or "from one median E2E after the first request was due until the last was due"
    yield f"rates over {window.start:.1f}–{window.end:.1f} s ({words})"


def selftest_words(facts: dict[str, Any]) -> str:
    if "skipped" in facts:
        return f"SKIPPED ({facts['skipped']})"
    attempts = f", attempt {facts['attempt']}" if facts.get("attempt", 1) > 1 else ""
    return (
        f"passed at {facts['load']}{attempts}" if facts.get("passed") else f"FAILED: {facts.get('failure')}"
    )


def _counting(summary: Summary) -> str:
    words = {
        "usage/usage": "usage, chunk by chunk",
        "usage/one_each": "usage, one token a chunk",
        "usage/spread": "usage, spread over fewer chunks",
        "chunks/one_each": "CHUNKS (no usage)",
        "tokenizer/one_each": "the tokenizer given (no usage), one token a chunk",
        "tokenizer/spread": "the tokenizer given (no usage), spread over the chunks",
    }
    return (
        ", ".join(f"{words.get(key, key)} ×{count}" for key, count in summary.counting.items()) or "nothing"
    )


def _distributions(summary: Summary) -> Iterator[str]:
    """One row per metric, headlines first; a second row if failures change it."""
    yield (
        f"{'ms':<{_NAME}} "
        + "".join(f"{key.upper() + ' (95 %)':>{_WIDE}}" for key in COLUMNS)
        + "".join(f"{key:>10}" for key in MOMENTS)
    )
    metrics = [metric for metric in summary.metrics.values() if metric.percentiles]
    metrics.sort(key=lambda metric: metric.name not in summary.headline)
    for metric in metrics:
        mark = " *" if metric.name in summary.headline else ""
        cells = "".join(f"{_cell(metric.percentiles[key]):>{_WIDE}}" for key in COLUMNS)
        moments = [getattr(metric, key) for key in MOMENTS]
        said = "".join(f"{'–' if value is None else _number(value):>10}" for value in moments)
        yield f"{metric.name + mark:<{_NAME}} {cells}{said}"
        if summary.failed and metric.adjusted and mark:
            cells = "".join(f"{_cell(metric.adjusted[key]):>{_WIDE}}" for key in COLUMNS)
            yield f"{'  adj_' + metric.name:<{_NAME}} {cells}"
    since = "the planned moment" if summary.mode == "open" else "sending"
    yield f"* headline: counted from {since}. adj_: failed requests at infinity."
    if any(metric.percentiles["p99"] is None for metric in metrics if metric.n):
        yield f"  –: not given below {FEWEST['p99']} independent samples: P99 is the largest or beyond"


def _cell(found: Estimate | None) -> str:
    if found is None:
        return "–"
    low = "…" if found.low is None else _number(found.low)
    high = "…" if found.high is None else _number(found.high)
    return f"{_number(found.value)} ({low}–{high})"


def _values(result: BenchResult) -> Iterator[str]:
    limits = {share.name: share for share in result.shares}
    for metric in result.summary.metrics.values():
        if metric.percentiles:
            continue
        share = limits.pop(metric.name, None)
        beside = (
            f"  {100 * share.share:.0f} % of {share.limit:.0f} {share.unit} ({share.formula})"
            if share
            else ""
        )
        yield f"{metric.name:<{_NAME}} {_value(metric):>14}{_range(metric)}{beside}"
    for share in limits.values():
        value = f"{_number(share.value)} {share.unit}"
        yield (
            f"{share.name:<{_NAME}} {value:>14}  {100 * share.share:.0f} % of the limit, "
            f"{_number(share.limit)} {share.unit} ({share.formula})"
        )
    if not result.settings.get("limits"):
        yield f"{'percent of the limit':<{_NAME}} {'unknown':>14}  the server does not report its limits"


def _value(metric: Metric) -> str:
    if metric.value is None:
        return metric.note or "unknown"
    if metric.name in _PERCENT:
        return f"{100 * metric.value:.2f} %"
    return f"{_number(metric.value)} {metric.unit}"


def _range(metric: Metric) -> str:
    if metric.low is None or metric.high is None or metric.value is None:
        return ""
    return f"  ({100 * metric.low:.2f}–{100 * metric.high:.2f} %)"


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
