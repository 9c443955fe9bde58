"""Runs that no server served: eight slots, Poisson arrivals, prefill by length, noisy steps."""

from __future__ import annotations

import numpy as np

from ridgeline.lab.bench.figures.metrics import summarize
from ridgeline.lab.bench.figures.rates import Mode
from ridgeline.lab.bench.figures.record import RequestRecord, ServerTiming
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.figures.validity import Validity
from ridgeline.lab.slo import Slo

REFUSED = "503: queue full <script>alert(1)</script>"


def records(
    n: int = 300, *, plan: int = 1, noise: int = 1, slower: float = 1.0, failing: float = 0.0
) -> list[RequestRecord]:
    """plan: the seed of the traffic. noise: the seed of everything the server does."""
    drawn, luck = np.random.default_rng(plan), np.random.default_rng(noise)
    moments = np.cumsum(drawn.exponential(1 / 6, n))
    lengths_in = drawn.integers(50, 2000, n)
    lengths_out = np.maximum(1, drawn.lognormal(3.0, 0.8, n).astype(int))
    slots = [0.0] * 8
    return [
        _answer(i, float(moments[i]), int(lengths_in[i]), int(lengths_out[i]), slots, luck, slower, failing)
        for i in range(n)
    ]


def _answer(
    index: int,
    due: float,
    n_in: int,
    n_out: int,
    slots: list[float],
    luck: np.random.Generator,
    slower: float,
    failing: float,
) -> RequestRecord:
    sent = due + float(luck.exponential(0.0005))
    if luck.random() < failing:
        return RequestRecord(
            index, due, sent, None, None, None, sent + 0.01, "failed", n_in, n_out,
            http_status=503, cause="http_503", error=REFUSED,
        )  # fmt: skip
    slot = int(np.argmin(slots))
    begun = max(sent + 0.001, slots[slot])
    first = begun + (0.02 + n_in * 6e-5) * slower + float(luck.exponential(0.004))
    gaps = np.maximum(0.002, luck.normal(0.018 * slower, 0.002, n_out - 1))
    chunks = [float(at) for at in first + np.concatenate(([0.0], np.cumsum(gaps)))]
    slots[slot] = chunks[-1]
    return RequestRecord(
        index, due, sent, first, first, chunks[-1], chunks[-1] + 0.0005, "ok", n_in, n_out,
        n_in=n_in, n_cached=n_in // 64 * 16, n_out=n_out, counted_by="usage", n_first=1,
        chunk_at=chunks, chunk_tokens=[1] * n_out, http_status=200,
        server=ServerTiming(queue_ms=(begun - sent) * 1000, inference_ms=(chunks[-1] - begun) * 1000),
    )  # fmt: skip


def result(
    found: list[RequestRecord],
    *,
    mode: Mode = "open",
    slo: Slo | None = None,
    invalid: tuple[str, ...] = (),
    **settings: object,
) -> BenchResult:
    given = {"name": "synthetic", "url": "http://127.0.0.1:8000", "model": "tiny", "api": "completions"}
    ends = [record.t_end for record in found if record.t_end is not None]
    return BenchResult(
        settings={**given, "mode": mode, "traffic_facts": {"rps": 6.0}, "seed": 1, **settings},
        summary=summarize(found, mode, slo),
        validity=Validity(not invalid, invalid),
        records=found,
        started_at="2026-01-02T03:04:05+00:00",
        seconds=max(ends, default=0.0),
    )
