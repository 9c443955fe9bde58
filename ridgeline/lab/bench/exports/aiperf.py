"""AIPerf's profile_export_aiperf.json and .csv.

Its ITL is our TPOT: (latency − TTFT) / (tokens − those of the first chunk); its latency ends with the last
content chunk, as our E2E; its rates are over first request sent to last answer.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ridgeline import __version__
from ridgeline.lab.bench.exports.facts import RunFacts, e2e_s, gaps_s, sent, ttft_s
from ridgeline.lab.bench.figures.record import RequestRecord

SCHEMA_VERSION = "1.1"  # the newest version whose fields a run can fill completely
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
STATISTICS = ("avg", "min", "max", "sum", *(f"p{q}" for q in PERCENTILES), "std")
_OBJECTIVES = ("ttft_ms", "tpot_ms", "e2e_ms")

HEADERS = {
    "time_to_first_token": "Time to First Token",
    "time_to_second_token": "Time to Second Token",
    "time_to_first_output_token": "Time to First Output Token",
    "request_latency": "Request Latency",
    "inter_token_latency": "Inter Token Latency",
    "inter_chunk_latency": "Inter Chunk Latency",
    "output_token_throughput_per_user": "Output Token Throughput Per User",
    "prefill_throughput_per_user": "Prefill Throughput Per User",
    "output_sequence_length": "Output Sequence Length",
    "input_sequence_length": "Input Sequence Length",
    "adj_time_to_first_token": "Adjusted Time to First Token",
    "adj_inter_token_latency": "Adjusted Inter Token Latency",
    "adj_request_latency": "Adjusted Request Latency",
    "request_throughput": "Request Throughput",
    "request_count": "Request Count",
    "error_request_count": "Error Request Count",
    "output_token_throughput": "Output Token Throughput",
    "total_token_throughput": "Total Token Throughput",
    "total_isl": "Total Input Sequence Length",
    "total_osl": "Total Output Sequence Length",
    "benchmark_duration": "Benchmark Duration",
    "good_request_count": "Good Request Count",
    "goodput": "Goodput",
}


def to_aiperf(run: RunFacts) -> dict[str, Any]:
    """Metrics without a value are absent, as in AIPerf's files."""
    ends = [record.t_end for record in run.records if record.t_end is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "exported_by": f"ridgeline {__version__}",
        **_metrics(run),
        "start_time": _moment(run.started_at),
        "end_time": _moment(run.started_at + max(ends, default=0.0)),
        "was_cancelled": run.interrupted,
        "error_summary": _errors(run.failed),
    }


def to_aiperf_csv(run: RunFacts) -> str:
    """Two tables: metrics with percentiles, then single values; sorted by metric name."""
    found = sorted(_metrics(run).items())
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["Metric", *STATISTICS])
    for tag, block in found:
        if "p50" in block:
            cells = [f"{block[key]:.2f}" if key in block else "" for key in STATISTICS]
            writer.writerow([_named(tag, block), *cells])
    writer.writerow([])
    writer.writerow(["Metric", "Value"])
    for tag, block in found:
        if "p50" not in block and "avg" in block:
            writer.writerow([_named(tag, block), f"{block['avg']:.2f}"])
    return text.getvalue()


def _metrics(run: RunFacts) -> dict[str, dict[str, Any]]:
    ok, failures = run.ok, len(run.failed)
    ttft = _milliseconds(ttft_s(record) for record in ok)
    latency = _milliseconds(e2e_s(record) for record in ok)
    itl = _milliseconds(_itl_s(record) for record in ok)
    lengths_in = [float(record.n_in) for record in ok if record.n_in is not None]
    lengths_out = [float(record.n_out) for record in ok]
    prefill = [record.n_in / took for record in ok if record.n_in is not None and (took := ttft_s(record))]
    blocks = {
        "time_to_first_token": _distribution("ms", ttft),
        "time_to_second_token": _distribution("ms", _milliseconds(_second_s(record) for record in ok)),
        "time_to_first_output_token": _distribution("ms", _milliseconds(_visible_s(r) for r in ok)),
        "request_latency": _distribution("ms", latency),
        "inter_token_latency": _distribution("ms", itl),
        "inter_chunk_latency": _distribution("ms", _milliseconds(g for r in ok for g in gaps_s(r))),
        "output_token_throughput_per_user": _distribution(
            "tokens/sec/user", [1000 / took for took in itl if took > 0]
        ),
        "prefill_throughput_per_user": _distribution("tokens/sec/user", prefill),
        "output_sequence_length": _distribution("tokens", lengths_out),
        "input_sequence_length": _distribution("tokens", lengths_in),
        "adj_time_to_first_token": _adjusted(ttft, failures),
        "adj_inter_token_latency": _adjusted(itl, failures),
        "adj_request_latency": _adjusted(latency, failures),
    }
    return {tag: block for tag, block in blocks.items() if len(block) > 1} | _values(run)


def _values(run: RunFacts) -> dict[str, dict[str, Any]]:
    ok = run.ok
    first = min((sent(record) for record in ok), default=0.0)
    last = max((record.t_last for record in ok if record.t_last is not None), default=first)
    duration = last - first
    total_in, total_out = sum(record.n_in or 0 for record in ok), sum(record.n_out for record in ok)
    found = {
        "request_count": ("requests", float(len(ok))),
        "error_request_count": ("requests", float(len(run.failed))),
        "total_isl": ("tokens", float(total_in)),
        "total_osl": ("tokens", float(total_out)),
        "benchmark_duration": ("sec", duration),
    }
    good = sum(_is_good(record, run.bounds_ms) for record in ok)
    if any(name in run.bounds_ms for name in _OBJECTIVES):
        found["good_request_count"] = ("requests", float(good))
    if duration > 0:
        found["request_throughput"] = ("requests/sec", len(ok) / duration)
        found["output_token_throughput"] = ("tokens/sec", total_out / duration)
        found["total_token_throughput"] = ("tokens/sec", (total_in + total_out) / duration)
        if "good_request_count" in found:
            found["goodput"] = ("requests/sec", good / duration)
    return {tag: {"unit": unit, "avg": value} for tag, (unit, value) in found.items()}


def _itl_s(record: RequestRecord) -> float | None:
    """The first chunk's tokens are subtracted, or one if that would leave none. None below two tokens."""
    if record.t_first is None or record.t_last is None or record.n_out < 2:
        return None
    after = record.n_out - record.n_first
    return (record.t_last - record.t_first) / (
        after if record.n_first > 0 and after >= 1 else record.n_out - 1
    )


def _second_s(record: RequestRecord) -> float | None:
    return record.chunk_at[1] - record.chunk_at[0] if len(record.chunk_at) > 1 else None


def _visible_s(record: RequestRecord) -> float | None:
    return None if record.t_first_visible is None else record.t_first_visible - sent(record)


def _is_good(record: RequestRecord, bounds_ms: dict[str, float]) -> bool:
    """A request without a value for an objective is not good."""
    took = {"ttft_ms": ttft_s(record), "tpot_ms": _itl_s(record), "e2e_ms": e2e_s(record)}
    judged = [(took[name], bounds_ms[name]) for name in _OBJECTIVES if name in bounds_ms]
    return all(value is not None and value * 1000 <= most for value, most in judged)


def _milliseconds(seconds: Any) -> list[float]:
    return [took * 1000 for took in seconds if took is not None]


def _distribution(unit: str, samples: Sequence[float]) -> dict[str, Any]:
    if not samples:
        return {"unit": unit}
    values = np.asarray(samples, dtype=np.float64)
    block: dict[str, Any] = {"unit": unit, "avg": float(values.mean())}
    block |= {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}
    block |= {"min": float(values.min()), "max": float(values.max()), "std": float(values.std())}
    return block | {"count": len(samples), "sum": float(values.sum())}


def _adjusted(samples: Sequence[float], failures: int) -> dict[str, Any]:
    """Failures count as infinity. JSON has no infinity, so such a percentile is absent."""
    ordered = np.sort(np.append(np.asarray(samples, dtype=np.float64), np.full(failures, np.inf)))
    block: dict[str, Any] = {"unit": "ms"}
    if not samples:
        return block
    for q in (50, 90, 95, 99):
        place = q / 100 * (len(ordered) - 1)
        below, above = ordered[int(np.floor(place))], ordered[int(np.ceil(place))]
        if np.isfinite(above):
            block[f"p{q}"] = float(below + (place - np.floor(place)) * (above - below))
    return block


def _errors(failed: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    counted = Counter((record.http_status, record.cause or record.status, record.error) for record in failed)
    return [
        {"error_details": {"code": code, "type": cause, "message": words}, "count": count}
        for (code, cause, words), count in counted.most_common()
    ]


def _named(tag: str, block: dict[str, Any]) -> str:
    return HEADERS[tag] if block["unit"] in ("count", "requests") else f"{HEADERS[tag]} ({block['unit']})"


def _moment(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat().replace("+00:00", "Z")
