"""Whether a run kept each limit of its service level. Read by the report and by sweeps."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.lab.bench.figures.metrics import Summary
from ridgeline.lab.slo import Limit


@dataclass(frozen=True, slots=True)
class LimitVerdict:
    """value_ms: the measured percentile, failures at infinity; None: too few samples, or no metric."""

    limit: Limit
    name: str  # of the metric that it was judged by
    value_ms: float | None
    kept: bool
    note: str = ""

    @property
    def words(self) -> str:
        return f"{self.name.removesuffix('_sched').upper()} P{self.limit.percentile}"


def limit_verdicts(summary: Summary) -> list[LimitVerdict]:
    return [limit_verdict(limit, summary) for limit in summary.slo.limits] if summary.slo else []


def limit_verdict(limit: Limit, summary: Summary) -> LimitVerdict:
    """By the percentile with failures at infinity; with too few samples, by the share of good answers. In
    open loops latency counts from the planned time.
    """
    name = limit.metric
    if summary.mode == "open" and name in ("ttft", "e2e"):
        name += "_sched"
    metric = summary.metrics.get(f"{name}_ms")
    groups = () if metric is None else (metric.adjusted, metric.percentiles)
    found = next((group[key] for group in groups if (key := f"p{limit.percentile}") in group), None)
    if found is not None:
        return LimitVerdict(limit, name, found.value, found.value <= limit.ms)
    attainment = summary.metrics.get("attainment")
    share = attainment.value if attainment is not None else None
    if share is None:
        return LimitVerdict(limit, name, None, True, "nothing was measured")
    kept = share >= limit.percentile / 100
    return LimitVerdict(limit, name, None, kept, f"{share:.0%} of answers kept the limits")
