"""The report of a sweep: throughput against latency, point by point, and where the knee is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.figures.statistics import Estimate
from ridgeline.lab.bench.reports.report import estimate_cell, value_text
from ridgeline.lab.bench.reports.report_charts import WIDE
from ridgeline.lab.bench.sweeps.sweep import Point as Measured
from ridgeline.lab.bench.sweeps.sweep import SweepResult
from ridgeline.lab.charts import Axis, Line, Mark, Point, Points, Rule, cdf, chart, number
from ridgeline.lab.page import Cell, Html, banner, charts, facts, heading, notes, page, paragraph, table

UNITS = {"rate": "requests/s", "concurrency": "at once"}


@dataclass(frozen=True)
class Run:
    point: Measured
    result: BenchResult


def sweep_page(sweep: SweepResult, folder: Path) -> str:
    """Reads the points' folders for their intervals."""
    runs = [Run(point, BenchResult.load(folder / point.folder)) for point in sweep.points]
    unit = UNITS[sweep.over]
    parts: list[Html] = []
    late = [run for run in runs if not run.point.valid]
    if late:
        reasons = [f"{number(r.point.load)} {unit}: {why}" for r in late for why in r.result.validity.reasons]
        parts.append(banner("INVALID points: they measured the client, not the server", reasons))
    parts += [paragraph(_knee(sweep, unit)), notes([] if sweep.ended else ["the sweep is not finished"])]
    if runs:
        parts += [
            heading("Throughput and latency", _reading(runs)),
            charts(_curves(runs, sweep, unit), wide=True),
        ]
        parts += [heading("By load"), charts(_by_load(runs, sweep, unit))]
        parts += [heading("Points"), _table(runs, unit), heading("Common settings of all points")]
    parts.append(facts(sweep.identity))
    name = str(sweep.identity.get("model") or sweep.identity.get("url") or "server")
    subtitle = f"{len(runs)} points" + (f" · SLO {sweep.slo}" if sweep.slo else "")
    return page(f"Sweep over {sweep.over}: {name}", parts, subtitle=subtitle, made_at=sweep.started_at)


def _knee(sweep: SweepResult, unit: str) -> str:
    rule = "keeps the SLO" if sweep.slo else "the server keeps up with"
    if sweep.best is None:
        return f"No load that was tried {rule}. {sweep.ended}".strip()
    return f"The knee: {number(sweep.best)} {unit} is the largest load that {rule}. {sweep.ended}".strip()


def _reading(runs: Sequence[Run]) -> str:
    name = _first(runs)
    return (
        f"To the right is more throughput, upwards is worse latency ({name}). Whiskers are 95 % intervals, "
        "hollow points are loads that the server did not sustain; the number beside each is its load."
    )


def _first(runs: Sequence[Run]) -> str:
    return runs[0].result.summary.headline[0]


def _curves(runs: Sequence[Run], sweep: SweepResult, unit: str) -> list[str]:
    ttft = _first(runs)
    x = Axis("output tokens/s", low=0.0)
    drawn = []
    for name, log in ((ttft, True), ("tpot_ms", False)):
        marks: list[Mark] = []
        for colour, key in enumerate(("p50", "p90")):
            marks += _points(key, runs, name, colour, unit)
        marks += _limits(runs, name)
        y = Axis(f"{name}, ms", log=log, low=None if log else 0.0, unit="ms")
        drawn.append(chart(f"{name} against throughput", x, y, marks, width=WIDE, height=400))
    return drawn


def _points(key: str, runs: Sequence[Run], name: str, colour: int, unit: str) -> list[Mark]:
    """One line through all points; overloaded ones are hollow; the upper curve's points are labelled with
    their loads.
    """
    carried: list[Point] = []
    not_carried: list[Point] = []
    through: list[tuple[float, float]] = []
    label = key.upper()
    for run in runs:
        found = run.result.summary.metrics[name].percentiles.get(key)
        rate = run.point.metrics.get("output_tokens_per_s")
        if found is None or rate is None:
            continue
        title = f"{number(run.point.load)} {unit}: {number(rate)} tok/s, {name} {label} {_written(found)}"
        title += "" if run.point.carried else f"; not carried: {run.point.why_not}"
        above = number(run.point.load) if key == "p90" else ""
        point = Point(rate, found.value, title, above, y_range=_range(found))
        (carried if run.point.carried else not_carried).append(point)
        through.append((rate, found.value))
    drawn: list[Mark] = [Line("", through, colour=colour), Points(label, carried, colour=colour)]
    return [*drawn, Points("", not_carried, hollow=True, colour=colour)] if not_carried else drawn


def _by_load(runs: Sequence[Run], sweep: SweepResult, unit: str) -> list[str]:
    x = Axis(f"load, {unit}", low=0.0, unit=unit)
    rules = [Rule("x", sweep.best, "knee")] if sweep.best is not None else []
    drawn = []
    for title, names in (
        ("Output tokens per second", ("output_tokens_per_s",)),
        ("Requests per second", ("requests_per_s", "goodput_per_s")),
        ("Requests under way", ("concurrency_mean",)),
    ):
        marks: list[Mark] = []
        for name in names:
            points = [
                Point(run.point.load, run.point.metrics[name]) for run in runs if name in run.point.metrics
            ]
            marks += [Points(name, points, joined=True)] if points else []
        drawn.append(chart(title, x, Axis("", low=0.0), [*marks, *rules], width=520, height=280))
    first = _first(runs)
    shown = runs if len(runs) <= 7 else runs[:: len(runs) // 7 + 1]
    curves = [_cdf(run, first, unit) for run in shown]
    share = Axis("share of all requests", low=0.0, high=1.0, percent=True)
    axes = Axis("ms", log=True, unit="ms"), share
    drawn.append(chart(f"{first} at each load", *axes, curves, width=520, height=280))
    return drawn


def _cdf(run: Run, name: str, unit: str) -> Mark:
    records = [r for r in run.result.records if not r.warmup and r.status != "cancelled"]
    since = "t_sched" if name == "ttft_sched_ms" else "t_send"
    samples = []
    for record in records:
        start = record.t_sched if since == "t_sched" else record.t_send
        if record.status == "ok" and record.t_first is not None and start is not None:
            samples.append((record.t_first - start) * 1000)
    return cdf(f"{number(run.point.load)} {unit}", samples, of=len(records))


def _limits(runs: Sequence[Run], name: str) -> list[Mark]:
    slo = runs[0].result.summary.slo
    metric = name.removesuffix("_ms").removesuffix("_sched")
    limits = [] if slo is None else [limit for limit in slo.limits if limit.metric == metric]
    return [Rule("y", limit.ms, f"SLO P{limit.percentile} {limit.ms:g} ms") for limit in limits]


def _table(runs: Sequence[Run], unit: str) -> Html:
    ttft = _first(runs)
    e2e = runs[0].result.summary.headline[-1]
    columns = ((ttft, "p50"), (ttft, "p90"), ("tpot_ms", "p50"), ("tpot_ms", "p90"), (e2e, "p90"))
    head: list[str | Cell] = [unit, "tok/s", "req/s"]
    head += [Cell(key.upper(), small=name) for name, key in columns]
    head += ["failures", Cell("carried", look="words")]
    rows: list[list[str | Cell]] = []
    for run in runs:
        metrics = run.result.summary.metrics
        cells: list[str | Cell] = [number(run.point.load)]
        cells += [
            number(run.point.metrics.get(n, float("nan"))) for n in ("output_tokens_per_s", "requests_per_s")
        ]
        for name, key in columns:
            cells.append(estimate_cell(metrics[name].percentiles.get(key)))
        failures, interval = value_text(metrics["failures"])
        verdict = "yes" if run.point.carried else f"no: {run.point.why_not}"
        look = "words" if run.point.carried else "words bad"
        invalid = "" if run.point.valid else "INVALID"
        rows.append([*cells, Cell(failures, title=interval), Cell(verdict, look=look, small=invalid)])
    return table(head, rows)


def _range(found: Estimate) -> tuple[float, float] | None:
    return None if found.low is None or found.high is None else (found.low, found.high)


def _written(found: Estimate) -> str:
    span = _range(found)
    return f"{number(found.value)} ms" + (f" ({number(span[0])} – {number(span[1])})" if span else "")
