"""FleetRun: the result of one fleet simulation, with the figures for comparing policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ridgeline.fleet.scaling import Decision
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.slo import Slo

FRESH_S = 60.0  # a replica's first minute


@dataclass(frozen=True, slots=True)
class Served:
    """A request's replica, the time, and the seconds for which that replica had been ready."""

    index: int
    replica: str
    version: str
    at: float
    replica_age_s: float


@dataclass(slots=True)
class FleetRun:
    """records: one for every request, as bench writes them. scale: above 1 for a projection."""

    policy: str
    records: list[RequestRecord]
    served: dict[int, Served]
    duration_s: float
    replicas: int
    replica_hours: float
    cost: float
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    rollout: str = ""
    scale: float = 1.0

    @property
    def is_projection(self) -> bool:
        return self.scale > 1

    def projected(self, factor: float) -> FleetRun:
        """The result for a fleet and traffic `factor` times as large, in the same time."""
        return replace(
            self,
            replicas=round(self.replicas * factor),
            replica_hours=self.replica_hours * factor,
            cost=self.cost * factor,
            scale=factor,
        )

    def figures(self, slo: Slo) -> dict[str, float]:
        ok = [record for record in self.records if record.status == "ok"]
        ttft = self.ttft_ms(ok)
        kept = sum(slo.is_kept({"ttft_ms": _ttft(r), "tpot_ms": _tpot(r), "e2e_ms": _e2e(r)}) for r in ok)
        tokens_in = sum(record.n_in or 0 for record in ok)
        end = max((record.t_end or 0.0 for record in ok), default=0.0)
        begin = min((record.t_sched for record in self.records), default=0.0)
        seconds = max(end - begin, 1e-9)
        found = {
            "requests": float(len(self.records)),
            "failed": float(len(self.records) - len(ok)),
            "slo": kept / len(self.records) if self.records else 0.0,
            "requests_per_s": self.scale * len(ok) / seconds,
            "output_tokens_per_s": self.scale * sum(record.n_out or 0 for record in ok) / seconds,
            "cache_hit": sum(record.n_cached or 0 for record in ok) / tokens_in if tokens_in else 0.0,
            "replica_hours": self.replica_hours,
            "cost": self.cost,
        }
        for share in (50, 90, 99):
            found[f"ttft_ms.p{share}"] = _percentile(ttft, share)
            found[f"e2e_ms.p{share}"] = _percentile([_e2e(record) for record in ok], share)
        return found

    def ttft_ms(self, records: Sequence[RequestRecord]) -> list[float]:
        return [_ttft(record) for record in records]

    def fresh_ratio(self, after_s: float, percentile: float = 99) -> float | None:
        """TTFT of the replicas that became ready at `after_s`, in their first minute, over the others'.

        None if one of the two served no request then.
        """
        fresh: list[float] = []
        peers: list[float] = []
        for record in self.records:
            served = self.served.get(record.index)
            if record.status != "ok" or served is None or not after_s <= served.at < after_s + FRESH_S:
                continue
            is_fresh = abs(served.at - served.replica_age_s - after_s) < 1.5
            (fresh if is_fresh else peers).append(_ttft(record))
        if not fresh or not peers:
            return None
        return _percentile(fresh, percentile) / _percentile(peers, percentile)


def _ttft(record: RequestRecord) -> float:
    assert record.t_first is not None
    return 1000 * (record.t_first - record.t_sched)


def _e2e(record: RequestRecord) -> float:
    assert record.t_end is not None
    return 1000 * (record.t_end - record.t_sched)


def _tpot(record: RequestRecord) -> float | None:
    if record.t_last is None or record.t_first is None or not record.n_out or record.n_out < 2:
        return None
    return 1000 * (record.t_last - record.t_first) / (record.n_out - 1)


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(np.array(values), share)) if values else 0.0
