"""GuideLLM's benchmarks.json: metadata and one benchmark with its metrics and requests by status.

Its TPOT is E2E/n_out, first token included, and its ITL is (last − first)/(n − 1); both are weighted by
tokens, so a long answer counts more than a short one. Its percentiles are observed values, not interpolated.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ridgeline import __version__
from ridgeline.lab.bench.exports.facts import RunFacts, Values, e2e_s, sent, ttft_s
from ridgeline.lab.bench.figures.record import RequestRecord

PERCENTILES = {
    "p001": 0.001,
    "p01": 0.01,
    "p05": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p999": 0.999,
}
MERGED_S = 1e-4  # events closer than this are merged, to avoid rates over zero time

Weighted = list[tuple[float, float]]  # values and weights, or times and amounts


def to_guidellm(run: RunFacts) -> dict[str, Any]:
    groups = {"successful": run.ok, "incomplete": run.cancelled, "errored": run.failed}
    start = min((sent(record) for record in run.records), default=0.0)
    end = max((record.t_end for record in run.records if record.t_end is not None), default=start)
    zero = run.started_at
    totals = {name: len(group) for name, group in groups.items()} | {"total": len(run.records)}
    return {
        "metadata": {
            "version": 1,
            "guidellm_version": f"exported by ridgeline {__version__}",
            "python_version": platform.python_version(),
            "platform": platform.platform(),
        },
        "args": {"target": run.url, "model": run.model, "random_seed": run.seed, **_profile(run)},
        "benchmarks": [
            {
                "type_": "generative_benchmark",
                "config": {"strategy": _profile(run)},
                "scheduler_metrics": {
                    "start_time": zero,
                    "request_start_time": zero + start,
                    "measure_start_time": zero + start,
                    "measure_end_time": zero + end,
                    "request_end_time": zero + end,
                    "end_time": zero + end,
                    "requests_made": totals,
                },
                "metrics": {"request_totals": totals, **_metrics(run, groups, start, end)},
                "requests": {
                    name: [_request(record, zero) for record in group] for name, group in groups.items()
                }
                | {"total": None},
                "start_time": zero + start,
                "end_time": zero + end,
                "duration": end - start,
                "warmup_duration": 0.0,
                "cooldown_duration": 0.0,
            }
        ],
    }


def _profile(run: RunFacts) -> dict[str, Any]:
    if run.concurrency is not None:
        return {"profile": "concurrent", "rate": [run.concurrency]}
    return {
        "profile": "poisson" if run.rate is not None else "trace",
        "rate": [run.rate] if run.rate else None,
    }


def _metrics(
    run: RunFacts, groups: dict[str, list[RequestRecord]], start: float, end: float
) -> dict[str, Any]:
    def of(values: Callable[[RequestRecord], Weighted]) -> dict[str, Any]:
        return _by_status(groups, lambda group: [pair for record in group for pair in values(record)])

    def single(value: Callable[[RequestRecord], float | None]) -> dict[str, Any]:
        return of(lambda record: [] if (found := value(record)) is None else [(found, 1.0)])

    def rates(events: Callable[[RequestRecord], Weighted]) -> dict[str, Any]:
        return _by_status(
            groups,
            lambda group: _rates([e for record in group for e in events(record)], start, end),
            count=lambda group: sum(amount for record in group for _, amount in events(record)),
        )

    scheduled = run.concurrency is None
    return {
        "requests_per_second": rates(lambda record: [(_end(record), 1.0)]),
        "request_concurrency": _by_status(groups, lambda group: _levels(group, start, end), len),
        "request_latency": single(_latency_s),
        "request_dispatch_delay": single(lambda r: sent(r) - r.t_sched) if scheduled else None,
        "request_scheduled_latency": single(lambda r: _end(r) - r.t_sched) if scheduled else None,
        "request_streaming_iterations_count": single(lambda r: float(len(r.chunk_at))),
        "prompt_token_count": single(lambda r: float(r.n_in or 0)),
        "output_token_count": single(lambda r: float(r.n_out)),
        "total_token_count": single(lambda r: float((r.n_in or 0) + r.n_out)),
        "time_to_first_token_ms": single(lambda r: _ms(ttft_s(r))),
        "time_to_first_output_token_ms": single(
            lambda r: None if r.t_first_visible is None else _ms(r.t_first_visible - sent(r))
        ),
        "time_per_output_token_ms": of(lambda r: _weighted(_tpot_ms(r), r.n_out)),
        "inter_token_latency_ms": of(lambda r: _weighted(_itl_ms(r), r.n_out - 1)),
        "prompt_tokens_per_second": rates(lambda r: [(r.t_first or _end(r), float(r.n_in or 0))]),
        "output_tokens_per_second": rates(_token_events),
        "tokens_per_second": rates(lambda r: [(r.t_first or _end(r), float(r.n_in or 0)), *_token_events(r)]),
        "output_tokens_per_iteration": of(lambda r: [(float(n), 1.0) for n in r.chunk_tokens]),
        "iter_tokens_per_iteration": of(lambda r: [(float(n), 1.0) for n in r.chunk_tokens[1:]]),
        **_goodput(run, start, end),
    }


def _goodput(run: RunFacts, start: float, end: float) -> dict[str, Any]:
    """Its "tpot" objective is judged by its ITL. Requests without a value are not counted."""
    objectives = {name: bound for name, bound in run.bounds_ms.items() if name in _OBJECTIVES}
    if not objectives:
        return {"slo_attainment": None, "slo_determined_requests": 0, "request_goodput": None}
    judged = [(record, [_OBJECTIVES[name](record) for name in objectives]) for record in run.ok]
    bounds = list(objectives.values())
    determined = [(record, took) for record, took in judged if None not in took]
    good = [
        record
        for record, took in determined
        if all(value is not None and value <= bound for value, bound in zip(took, bounds, strict=True))
    ]
    total = len(determined) + len(run.failed)
    groups = {"successful": good, "incomplete": [], "errored": []}
    return {
        "slo_attainment": len(good) / total if total else None,
        "slo_determined_requests": total,
        "request_goodput": _by_status(
            groups, lambda group: _rates([(_end(record), 1.0) for record in group], start, end), len
        ),
    }


def _request(record: RequestRecord, zero: float) -> dict[str, Any]:
    def moment(at: float | None) -> float | None:
        return None if at is None else zero + at

    latency = _latency_s(record)
    status = {"ok": "completed", "cancelled": "cancelled"}.get(record.status, "errored")
    prompt = record.n_in or 0
    return {
        "type_": "generative_request_stats",
        "request_id": str(record.index),
        "response_id": None,
        "request_args": None,
        "output": None,
        "info": {
            "request_id": str(record.index),
            "conversation_id": None if record.conversation is None else str(record.conversation),
            "turn_index": record.turn,
            "status": status,
            "error": record.error or None,
            "timings": {
                "targeted_start": moment(record.t_sched),
                "request_start": moment(record.t_send),
                "first_token_iteration": moment(record.t_first),
                "first_output_token_iteration": moment(record.t_first_visible),
                "last_token_iteration": moment(record.t_last),
                "token_iterations": len(record.chunk_at),
                "request_iterations": len(record.chunk_at),
                "request_end": moment(record.t_end),
                "resolve_end": moment(record.t_end),
            },
        },
        "input_metrics": {"text_tokens": record.n_in, "cached_tokens": record.n_cached},
        "output_metrics": {"text_tokens": record.n_out},
        "request_start_time": moment(record.t_send),
        "request_end_time": moment(_end(record)),
        "request_latency": latency,
        "request_dispatch_delay": sent(record) - record.t_sched,
        "request_scheduled_latency": _end(record) - record.t_sched,
        "prompt_tokens": record.n_in,
        "cached_tokens": record.n_cached,
        "output_tokens": record.n_out,
        "total_tokens": prompt + record.n_out,
        "time_to_first_token_ms": _ms(ttft_s(record)),
        "time_per_output_token_ms": _tpot_ms(record),
        "inter_token_latency_ms": _itl_ms(record),
        "tokens_per_second": (prompt + record.n_out) / latency if latency else None,
        "output_tokens_per_second": record.n_out / latency if latency else None,
    }


def _end(record: RequestRecord) -> float:
    return record.t_end if record.t_end is not None else sent(record)


def _latency_s(record: RequestRecord) -> float | None:
    """To the end of the stream, later than the last token by the usage and [DONE]."""
    return None if record.t_end is None else record.t_end - sent(record)


def _tpot_ms(record: RequestRecord) -> float | None:
    took = e2e_s(record)
    return None if took is None or record.n_out < 1 else took * 1000 / record.n_out


def _itl_ms(record: RequestRecord) -> float | None:
    if record.t_first is None or record.t_last is None or record.n_out <= 1:
        return None
    return (record.t_last - record.t_first) * 1000 / (record.n_out - 1)


_OBJECTIVES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": lambda record: _ms(ttft_s(record)),
    "tpot_ms": _itl_ms,
    "e2e_ms": lambda record: _ms(_latency_s(record)),
}


def _token_events(record: RequestRecord) -> Weighted:
    return [(at, float(n)) for at, n in zip(record.chunk_at, record.chunk_tokens, strict=True)]


def _weighted(value: float | None, weight: float) -> Weighted:
    return [] if value is None or weight <= 0 else [(value, float(weight))]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _by_status(
    groups: dict[str, list[RequestRecord]],
    values: Callable[[list[RequestRecord]], Weighted],
    count: Callable[[list[RequestRecord]], float] | None = None,
) -> dict[str, Any]:
    """count: the number of items, if it is not the sum of the weights."""
    every = groups | {"total": [record for group in groups.values() for record in group]}
    return {
        name: _distribution(values(group), None if count is None else round(count(group)))
        for name, group in every.items()
    }


def _distribution(pairs: Weighted, count: int | None = None) -> dict[str, Any]:
    """Of weighted values. Without values GuideLLM writes zeros and a count of 0."""
    empty = dict.fromkeys(("mean", "median", "mode", "variance", "std_dev", "min", "max"), 0.0)
    if not pairs:
        none = dict.fromkeys(PERCENTILES, 0.0)
        return empty | {"count": 0, "total_sum": 0.0, "percentiles": none, "pdf": None}
    table: Values = np.asarray(pairs, dtype=np.float64)
    values, places = np.unique(table[:, 0], return_inverse=True)
    weights = np.bincount(places, weights=table[:, 1])
    shares = weights / weights.sum()
    below = np.cumsum(shares)
    seen = {
        key: float(values[min(int(np.searchsorted(below, q, side="left")), len(values) - 1)])
        for key, q in PERCENTILES.items()
    }
    mean = float((values * shares).sum())
    variance = float(((values - mean) ** 2 * shares).sum())
    count = round(float(weights.sum())) if count is None else count
    return {
        "mean": mean,
        "median": seen["p50"],
        "mode": float(values[int(np.argmax(shares))]),
        "variance": variance,
        "std_dev": variance**0.5,
        "min": float(values[0]),
        "max": float(values[-1]),
        "count": count,
        "total_sum": mean * count,
        "percentiles": seen,
        "pdf": None,
    }


def _rates(events: Weighted, start: float, end: float) -> Weighted:
    """Amount per second around each event, weighted by its time: half-way to its neighbours."""
    inside = sorted(event for event in events if start <= event[0] <= end)
    if not inside:
        return []
    merged: list[list[float]] = []
    for at, amount in [(start, 0.0), *inside, (end, 0.0)]:
        if merged and at - merged[-1][0] <= MERGED_S:
            merged[-1][1] += amount
        else:
            merged.append([at, amount])
    if len(merged) < 2:
        return []
    times = np.asarray([at for at, _ in merged])
    middles = (times[1:] + times[:-1]) / 2
    spans = np.diff(np.concatenate(([times[0]], middles, [times[-1]])))
    return [(amount / max(span, 1e-6), float(span)) for (_, amount), span in zip(merged, spans, strict=True)]


def _levels(group: Sequence[RequestRecord], start: float, end: float) -> Weighted:
    """Requests in flight, weighted by duration."""
    changes = sorted(
        [(sent(record), 1) for record in group] + [(_end(record), -1) for record in group],
    )
    levels: Weighted = []
    level, since = 0, start
    for moment, change in [*changes, (end, 0)]:
        if moment > since:
            levels.append((float(level), moment - since))
            since = moment
        level += change
    return levels
