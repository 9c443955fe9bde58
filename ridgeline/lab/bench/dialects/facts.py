"""RunFacts: what a dialect needs to know of a run, and the sums all dialects share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.lab.bench.record import RequestRecord

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunFacts:
    """A run as others see it. `records` has neither warm-up requests nor any whose turn never came."""

    records: Sequence[RequestRecord]
    model: str
    url: str
    api: str  # "chat" or "completions"
    started_at: float  # Unix seconds of the records' zero
    concurrency: int | None = None  # closed loop
    rate: float | None = None  # open loop, requests per second; None where the trace has no one rate
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


def sent(record: RequestRecord) -> float:
    """When it was sent, or was to be: a connection that was refused has no first byte."""
    return record.t_sched if record.t_send is None else record.t_send


def ttft_s(record: RequestRecord) -> float | None:
    return None if record.t_first is None else record.t_first - sent(record)


def e2e_s(record: RequestRecord) -> float | None:
    return None if record.t_last is None else record.t_last - sent(record)


def gaps_s(record: RequestRecord) -> list[float]:
    return [float(gap) for gap in np.diff(np.asarray(record.chunk_at, dtype=np.float64))]
