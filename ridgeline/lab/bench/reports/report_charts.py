"""The charts of a report, made from a run's records: distributions, timeline, phases of every request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ridgeline.lab.bench.figures.metrics import tpot_s
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.charts import (
    Axis,
    Line,
    Mark,
    Point,
    Points,
    Row,
    Rule,
    Span,
    cdf,
    chart,
    histogram,
    number,
    timeline,
)

WIDE = 1040
STRETCH = 120  # requests of the timeline
SHARE = Axis("share of all requests", low=0.0, high=1.0, percent=True)
STEPS = 120  # time steps of the run
CLIENT, QUEUED, PREFILL, DECODE = "waiting in the client", "queued", "prefill", "decode"
TO_FIRST = "to the first token (queue and prefill)"  # if the server does not report them separately
SAME_CURVE = 0.012  # of an axis: about five pixels, the width of two lines
SHOWN_CLIENT_S = 0.001  # client delay shown as a separate span


def measured(result: BenchResult) -> list[RequestRecord]:
    return [record for record in result.records if not record.warmup and record.status != "cancelled"]


def report_charts(result: BenchResult) -> Iterator[str]:
    """Small charts, in reading order; charts without data are omitted."""
    offered = measured(result)
    ok = [record for record in offered if record.status == "ok"]
    if not ok:
        return
    yield _ttft(result, ok, len(offered))
    yield _e2e(result, ok, len(offered))
    yield _tpot(result, ok)
    yield _gaps(ok)
    if len({record.n_in for record in ok}) > 1:
        yield _by_length(ok)
    yield _rate(result, ok)


def timeline_chart(result: BenchResult) -> str:
    """One row per request. For a long run the busiest segment, where queueing shows."""
    sent = sorted((r for r in measured(result) if r.t_send is not None), key=lambda r: r.t_sched)
    title = "Phases of every request"
    if len(sent) > STRETCH:
        busiest = max(_levels(sent), key=lambda step: step[1], default=(0.0, 0))[0]
        place = sum(record.t_sched <= busiest for record in sent)
        first = max(0, min(place - STRETCH * 2 // 3, len(sent) - STRETCH))
        sent = sent[first : first + STRETCH]
        title = f"Phases of {STRETCH} requests around the run's busiest time"
    rows = [_row(record) for record in sent]
    used = {span.kind for row in rows for span in row.spans}
    kinds = [kind for kind in (CLIENT, QUEUED, TO_FIRST, PREFILL, DECODE) if kind in used]
    palette = {CLIENT: 6, QUEUED: 4, TO_FIRST: 3, PREFILL: 1, DECODE: 0}
    return timeline(title, rows, kinds, colours=[palette[kind] for kind in kinds], width=WIDE)


def _ttft(result: BenchResult, ok: Sequence[RequestRecord], offered: int) -> str:
    curves = {}
    if result.summary.mode == "open":
        curves["from the planned moment"] = _all(ok, lambda r: _ms(r.t_first, r.t_sched))
    curves["from sending"] = _all(ok, lambda r: _ms(r.t_first, r.t_send))
    curves["by the server's own clock"] = _all(ok, lambda r: r.server.ttft_ms if r.server else None)
    marks = [*_curves(curves, offered), *_limits(result, "ttft")]
    return _small("Time to first token", Axis("ms", log=True, unit="ms"), SHARE, marks)


def _e2e(result: BenchResult, ok: Sequence[RequestRecord], offered: int) -> str:
    curves = {}
    if result.summary.mode == "open":
        curves["from the planned moment"] = _all(ok, lambda r: _ms(r.t_last, r.t_sched))
    curves["from sending"] = _all(ok, lambda r: _ms(r.t_last, r.t_send))
    told = _all(ok, lambda r: r.server.inference_ms if r.server else None)
    curves["inference alone (the server's clock)"] = told
    marks = [*_curves(curves, offered), *_limits(result, "e2e")]
    return _small("End to end", Axis("ms", log=True, unit="ms"), SHARE, marks)


def _tpot(result: BenchResult, ok: Sequence[RequestRecord]) -> str:
    """Of answers that have one: an answer of one chunk has no time per token, which is not a failure."""
    curves = {
        "as the client saw it": [took * 1000 for r in ok if (took := tpot_s(r)) is not None],
        "by the server's own clock": _all(ok, lambda r: r.server.tpot_ms if r.server else None),
    }
    marks = [*_curves(curves), *_limits(result, "tpot")]
    share = Axis("share of answers", low=0.0, high=1.0, percent=True)
    return _small("Time per output token", Axis("ms", unit="ms"), share, marks)


def _gaps(ok: Sequence[RequestRecord]) -> str:
    """Logarithmic, since the rare stalls are far to the right."""
    gaps = [np.diff(r.chunk_at) * 1000 for r in ok if len(r.chunk_at) > 1]
    counts = [np.asarray(r.chunk_tokens[1:], dtype=np.int64) for r in ok if len(r.chunk_at) > 1]
    tokens = [np.maximum(count, 1) for count in counts]
    spread = [np.repeat(gap / share, share) for gap, share in zip(gaps, tokens, strict=True)]
    samples = np.concatenate(spread) if spread else np.empty(0)
    worst = f", the longest {number(float(samples.max()))} ms" if len(samples) else ""
    return _small(
        f"Between tokens (ITL): {len(samples):,} gaps{worst}",
        Axis("ms", log=True, unit="ms"),
        Axis("share of gaps", low=0.0, percent=True),
        [histogram("ITL", samples, log=True)],
    )


def _by_length(ok: Sequence[RequestRecord]) -> str:
    points = [
        Point(float(r.n_in), took, f"request {r.index}: {r.n_in} in, {r.n_cached or 0} cached, {took:.1f} ms")
        for r in ok
        if r.n_in and (took := _ms(r.t_first, r.t_send)) is not None
    ]
    axes = Axis("prompt tokens", log=True), Axis("TTFT from sending, ms", log=True, unit="ms")
    return _small("TTFT by prompt length", *axes, [Points("requests", points, radius=2)])


def _rate(result: BenchResult, ok: Sequence[RequestRecord]) -> str:
    """Tokens per second and requests in flight over the run; the steady window is between the rules."""
    end = max(r.t_end or 0.0 for r in ok)
    if end <= 0:
        return _small("Timeline of the run", Axis("seconds"), Axis(""), [])
    edges = np.linspace(0.0, end, STEPS + 1)
    stamps = np.concatenate([np.asarray(r.chunk_at) for r in ok])
    tokens = np.concatenate([np.asarray(r.chunk_tokens, dtype=np.float64) for r in ok])
    per_second = np.histogram(stamps, bins=edges, weights=tokens)[0] / (end / STEPS)
    middles = (edges[1:] + edges[:-1]) / 2
    window = result.summary.window
    rules = [Rule("x", window.start, "steady"), Rule("x", window.end, "")] if not window.note else []
    line = Line("output tokens/s", list(zip(middles.tolist(), per_second.tolist(), strict=True)))
    axes = Axis("seconds from the start", low=0.0, high=end, unit="s"), Axis("output tokens/s", low=0.0)
    return _small("Output tokens per second", *axes, [line, *rules])


def under_way_chart(result: BenchResult) -> str:
    stairs = [(0.0, 0.0), *((moment, float(level)) for moment, level in _levels(measured(result)))]
    end = max(moment for moment, _ in stairs)
    axes = Axis("seconds from the start", low=0.0, high=end or 1.0, unit="s"), Axis("requests", low=0.0)
    return chart("Requests under way", *axes, [Line("under way", stairs, step=True)], width=WIDE, height=260)


def _small(title: str, x: Axis, y: Axis, marks: Sequence[Mark]) -> str:
    """Two fit side by side."""
    return chart(title, x, y, marks, width=520, height=290)


def _levels(records: Sequence[RequestRecord]) -> Iterator[tuple[float, int]]:
    """Requests in flight from each time on."""
    changes = []
    for record in records:
        if record.t_send is not None and record.t_end is not None:
            changes += [(record.t_send, 1), (record.t_end, -1)]
    level = 0
    for moment, change in sorted(changes):
        level += change
        yield moment, level


def _row(record: RequestRecord) -> Row:
    assert record.t_send is not None
    spans = []
    if record.t_send - record.t_sched > SHOWN_CLIENT_S:
        spans.append(Span(record.t_sched, record.t_send, CLIENT))
    until = record.t_first if record.t_first is not None else record.t_end or record.t_send
    queue_ms = record.server.queue_ms if record.server else None
    if queue_ms is None:
        spans.append(Span(record.t_send, until, TO_FIRST))
    else:
        admitted = min(record.t_send + queue_ms / 1000, until)
        spans += [Span(record.t_send, admitted, QUEUED), Span(admitted, until, PREFILL)]
    if record.t_first is not None and record.t_last is not None:
        spans.append(Span(record.t_first, record.t_last, DECODE))
    failed = record.status != "ok"
    note = f"{record.status}: {record.error or record.cause}" if failed else f"{record.n_out} tokens out"
    name = f"request {record.index}, {record.n_in or record.planned_in} tokens in"
    return Row(name, spans, note, failed)


def _all(ok: Sequence[RequestRecord], value: Callable[[RequestRecord], float | None]) -> list[float]:
    return [found for record in ok if (found := value(record)) is not None]


def _curves(samples: Mapping[str, Sequence[float]], offered: int | None = None) -> list[Mark]:
    """One curve each, in turn; curves that coincide are merged and share a label."""
    kept: list[tuple[list[str], Sequence[float]]] = []
    for name, values in samples.items():
        if not values:
            continue
        same = next((names for names, others in kept if _coincide(values, others)), None)
        if same is None:
            kept.append(([name], values))
        else:
            same.append(name)
    return [cdf(" = ".join(names), values, of=offered) for names, values in kept]


def _coincide(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether half of one curve lies within a line's width of the other, on the logarithmic axis."""
    if len(one) != len(other) or min(*one, *other) <= 0:
        return False
    shares = np.linspace(0.02, 0.98, 49)
    a, b = np.log(np.quantile(one, shares)), np.log(np.quantile(other, shares))
    span = max(a.max(), b.max()) - min(a.min(), b.min())
    return bool(np.median(np.abs(a - b)) <= SAME_CURVE * span)


def _limits(result: BenchResult, metric: str) -> list[Mark]:
    slo = result.summary.slo
    if slo is None:
        return []
    limits = [limit for limit in slo.limits if limit.metric.removesuffix("_sched") == metric]
    return [Rule("x", limit.ms, f"SLO P{limit.percentile} {limit.ms:g} ms") for limit in limits]


def _ms(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else (end - start) * 1000
