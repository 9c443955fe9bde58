"""The result file of `vllm bench serve --save-result --save-detailed`.

vLLM's TPOT assumes one token in the first chunk; its ITL are raw gaps between chunks (our ICL); its rates are
over the whole run, start and end included; failed requests are in no percentile.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ridgeline.lab.bench.exports.facts import RunFacts, e2e_s, gaps_s, sent, ttft_s
from ridgeline.lab.bench.figures.record import RequestRecord

PERCENTILES = (50, 90, 95, 99)
_BACKENDS = {"chat": "openai-chat", "completions": "openai"}
_OBJECTIVES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms": "e2el"}


def to_vllm(run: RunFacts) -> dict[str, Any]:
    ok = run.ok
    ends = [record.t_end for record in run.records if record.t_end is not None]
    start = min((record.t_sched for record in run.records), default=0.0)
    duration = max(ends, default=start) - start
    per_second = 1 / duration if duration > 0 else 0.0
    total_in, total_out = sum(_prompt(record) for record in ok), sum(record.n_out for record in ok)
    backend = _BACKENDS[run.api]
    good = sum(_is_good(record, run.bounds_ms) for record in ok) if _judged(run.bounds_ms) else None
    result: dict[str, Any] = {
        "date": datetime.fromtimestamp(run.started_at, UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": "ridgeline",
        "model_id": run.model,
        "tokenizer_id": run.model,
        "num_prompts": len(run.records),
        "request_rate": "inf" if run.rate is None else run.rate,
        "burstiness": run.burstiness,
        "max_concurrency": run.concurrency,
        "duration": duration,
        "completed": len(ok),
        "failed": len(run.records) - len(ok),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(ok) * per_second,
        "request_goodput": None if good is None else good * per_second,
        "output_throughput": total_out * per_second,
        "total_token_throughput": (total_in + total_out) * per_second,
        "input_lens": [_prompt(record) for record in run.records],
        "output_lens": [record.n_out if record.status == "ok" else 0 for record in run.records],
        "ttfts": [ttft_s(record) or 0.0 for record in run.records],
        "itls": [gaps_s(record) for record in run.records],
        "latencies": [e2e_s(record) or 0.0 for record in run.records],
        "start_times": [sent(record) for record in run.records],
        "queue_times": [sent(record) - record.t_sched for record in run.records],
        "generated_texts": ["" for _ in run.records],
        "errors": [record.error for record in run.records],
        "max_output_tokens_per_s": _busiest_second(ok),
        "max_concurrent_requests": _most_at_once(ok),
        "rtfx": 0.0,
    }
    result |= _statistics("ttft", [took for record in ok if (took := ttft_s(record)) is not None])
    result |= _statistics("tpot", [took for record in ok if (took := _tpot_s(record)) is not None])
    result |= _statistics("itl", [gap for record in ok for gap in gaps_s(record)])
    result |= _statistics("e2el", [took for record in ok if (took := e2e_s(record)) is not None])
    return result


def _prompt(record: RequestRecord) -> int:
    return record.planned_in if record.n_in is None else record.n_in


def _tpot_s(record: RequestRecord) -> float | None:
    if record.t_last is None or record.t_first is None or record.n_out <= 1:
        return None
    return (record.t_last - record.t_first) / (record.n_out - 1)


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """vLLM writes zeros where there are no values; so does this export."""
    values = np.asarray(seconds if seconds else [0.0], dtype=np.float64) * 1000
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return found | {f"p{q}_{name}_ms": float(np.percentile(values, q)) for q in PERCENTILES}


def _judged(bounds_ms: dict[str, float]) -> bool:
    return any(name in bounds_ms for name in _OBJECTIVES)


def _is_good(record: RequestRecord, bounds_ms: dict[str, float]) -> bool:
    """An undefined TPOT counts as zero."""
    took = {"ttft_ms": ttft_s(record), "tpot_ms": _tpot_s(record), "e2e_ms": e2e_s(record)}
    return all((took[name] or 0.0) * 1000 <= bounds_ms[name] for name in _OBJECTIVES if name in bounds_ms)


def _busiest_second(ok: Sequence[RequestRecord]) -> float:
    """Chunks, not tokens, in the busiest second from the first request on, as vLLM counts."""
    stamps = np.asarray([at for record in ok for at in record.chunk_at], dtype=np.float64)
    if not len(stamps):
        return 0.0
    first = min(sent(record) for record in ok)
    return float(np.bincount((stamps - first).astype(np.int64)).max())


def _most_at_once(ok: Sequence[RequestRecord]) -> int:
    """Over [sent, last chunk): at equal times an end precedes a start."""
    changes = [(sent(record), 1) for record in ok]
    changes += [(sent(record) + (e2e_s(record) or 0.0), -1) for record in ok]
    level = most = 0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most
