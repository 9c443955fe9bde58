"""RunFacts: the facts of a run that export formats need, and their shared sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.result import BenchResult

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunFacts:
    """A run for export. `records` excludes warm-up requests and requests never sent."""

    records: Sequence[RequestRecord]
    model: str
    url: str
    api: str  # "chat" or "completions"
    started_at: float  # Unix seconds of the records' zero
    concurrency: int | None = None  # closed loop
    rate: float | None = None  # open loop, requests per second; None if the trace has no single rate
    burstiness: float = 1.0  # shape of the gamma distribution of gaps; 1: Poisson
    seed: int = 0
    interrupted: bool = False
    bounds_ms: dict[str, float] = field(default_factory=dict)  # of the SLO: ttft_ms, tpot_ms, e2e_ms
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> list[RequestRecord]:
        return [record for record in self.records if record.status == "ok"]

    @property
    def failed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.status in ("failed", "timeout")]

    @property
    def cancelled(self) -> list[RequestRecord]:
        return [record for record in self.records if record.status == "cancelled"]


def facts_of(result: BenchResult) -> RunFacts:
    settings = result.settings
    traffic = settings.get("traffic_facts") or {}
    is_open = result.summary.mode == "open"
    variation = traffic.get("gap_cv")
    begun = datetime.fromisoformat(result.started_at).timestamp() if result.started_at else 0.0
    return RunFacts(
        records=[
            r for r in result.records if not r.warmup and (r.status != "cancelled" or r.t_send is not None)
        ],
        model=str(settings.get("model", "")),
        url=str(settings.get("url", "")),
        api=str(settings.get("api", "completions")),
        started_at=begun,
        concurrency=settings.get("concurrency"),
        rate=traffic.get("rps") if is_open else None,
        burstiness=1 / variation**2 if is_open and variation else 1.0,
        seed=int(settings.get("seed", 0)),
        interrupted=result.interrupted,
        bounds_ms={} if result.summary.slo is None else result.summary.slo.bounds_ms(),
        settings=settings,
    )


def sent(record: RequestRecord) -> float:
    """The send time, or the planned time: a refused connection has no first byte."""
    return record.t_sched if record.t_send is None else record.t_send


def ttft_s(record: RequestRecord) -> float | None:
    return None if record.t_first is None else record.t_first - sent(record)


def e2e_s(record: RequestRecord) -> float | None:
    return None if record.t_last is None else record.t_last - sent(record)


def gaps_s(record: RequestRecord) -> list[float]:
    return [float(gap) for gap in np.diff(np.asarray(record.chunk_at, dtype=np.float64))]
