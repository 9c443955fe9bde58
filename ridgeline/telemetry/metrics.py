"""ServerMetrics: one server's Prometheus metrics, under the names operators know from vLLM.

The server calls it when a request ends, is rejected or disconnected, and when an engine starts or restarts;
`render` answers /metrics. It only reads TimingRecord and EngineStats, and measures nothing itself.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ridgeline.telemetry.expert_load import INTERVAL_S, ExpertLoad
from ridgeline.telemetry.speculation import speculation_families
from ridgeline.telemetry.stats import EngineStats
from ridgeline.telemetry.timing import TimingRecord

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "ridgeline:"

# Bucket edges in seconds. The finest are below a step of the smallest model on a GPU, the coarsest beyond
# what clients wait for.
TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
TOKEN_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
REQUEST_BUCKETS_S = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# name → (help, bucket edges); each is observed at most once per request
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to the first output token", TTFT_BUCKETS),
    "request_time_per_output_token_seconds": (
        "A request's mean time per token after the first",
        TOKEN_BUCKETS_S,
    ),
    "e2e_request_latency_seconds": ("Arrival to the last byte handed to the client", REQUEST_BUCKETS_S),
    "request_queue_time_seconds": ("Arrival to admission", REQUEST_BUCKETS_S),
    "request_prefill_time_seconds": ("Admission to the first output token", REQUEST_BUCKETS_S),
    "request_decode_time_seconds": ("First output token to the last", REQUEST_BUCKETS_S),
    "request_inference_time_seconds": ("Admission to the engine's end of the request", REQUEST_BUCKETS_S),
    "request_prompt_tokens": ("Prompt tokens of a request", LENGTH_BUCKETS),
    "request_generation_tokens": ("Output tokens of a request", LENGTH_BUCKETS),
}

# name → (help, its value from EngineStats)
ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Sequences being computed", lambda stats: stats.running),
    "num_requests_waiting": ("Requests queued, without background ones", lambda stats: stats.waiting),
    "num_background_requests_waiting": (
        "Background requests queued",
        lambda stats: stats.waiting_background,
    ),
    "kv_cache_usage_perc": ("Share of KV blocks held by live sequences, 0 to 1", lambda stats: stats.kv_use),
    "kv_blocks_cached": ("KV blocks free but reusable by prefix", lambda stats: stats.kv_blocks_cached),
    "kv_blocks_total": ("KV blocks in the pool", lambda stats: stats.kv_blocks_total),
}

# name without _total → (help, field of EngineStats)
ENGINE_COUNTERS: dict[str, tuple[str, str]] = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", "prefix_queries"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", "prefix_hits"),
    "prefix_cache_evicted": ("Prompt tokens missed because their KV was evicted", "prefix_evicted"),
    "num_preemptions": ("Sequences that lost their KV blocks and were recomputed", "preemptions"),
    "recomputed_tokens": ("Tokens computed again because of preemption", "recomputed_tokens"),
    "prompt_tokens": ("Prompt tokens computed or found in the cache", "prompt_tokens"),
    "generation_tokens": ("Output tokens", "output_tokens"),
    "engine_steps": ("Forward passes", "steps"),
}


class EngineTotals:
    """The engine's counters summed over all engines of this server, so that they never decrease.

    Stats of a dead engine may still arrive after its restart was announced (a scrape in between): they are
    recognised by their last step, which was before the restart.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._past = EngineStats()  # engines before the last restart, except the last of them
        self._dead = EngineStats()  # the engine that died last
        self._live = EngineStats()
        self._restarted_at = 0.0

    def observe(self, stats: EngineStats) -> None:
        if stats.last_step_end < self._restarted_at:
            if stats.last_step_end > self._dead.last_step_end:
                self._dead = stats
            return
        if stats.steps < self._live.steps:  # an unannounced restart
            self._begin_new_engine(stats.last_step_end)
        self._live = stats

    def restart(self) -> None:
        self._begin_new_engine(self._clock())

    def _begin_new_engine(self, moment: float) -> None:
        self._past = _sum(self._past, self._dead)
        self._dead, self._live = self._live, EngineStats()
        self._restarted_at = moment

    def total(self, field: str) -> int:
        return sum(getattr(stats, field) for stats in (self._past, self._dead, self._live))


class TokenGaps:
    """The one histogram observed for every token: counted here once per request, without a lock per token."""

    name = "inter_token_latency_seconds"
    doc = "Time between output tokens"

    def __init__(self) -> None:
        self._counts = [0] * (len(TOKEN_BUCKETS_S) + 1)  # the last one: beyond all edges
        self._sum_s = 0.0

    def observe(self, gaps_s: list[float]) -> None:
        for gap_s in gaps_s:
            self._counts[bisect_left(TOKEN_BUCKETS_S, gap_s)] += 1
        self._sum_s += sum(gaps_s)

    def family(self, model_name: str) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        edges = [*(str(float(edge)) for edge in TOKEN_BUCKETS_S), "+Inf"]
        buckets = list(zip(edges, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(PREFIX + self.name, self.doc, labels=["model_name"])
        family.add_metric([model_name], buckets, sum_value=self._sum_s)
        return family


class ServerMetrics:
    """All metrics of one server. Not a singleton: each has its own registry."""

    def __init__(self, model_name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._totals = EngineTotals(clock)
        self._stats = EngineStats()
        self._engine_up = False

        def labelled(kind: Any, name: str, doc: str, *labels: str, **options: Any) -> Any:
            metric = kind(PREFIX + name, doc, ("model_name", *labels), registry=self._registry, **options)
            return metric if labels else metric.labels(model_name)

        self._histograms = {
            name: labelled(Histogram, name, doc, buckets=buckets)
            for name, (doc, buckets) in HISTOGRAMS.items()
        }
        self._token_gaps = TokenGaps()
        self.expert_load = ExpertLoad(clock)
        self._success = labelled(
            Counter, "request_success", "Requests that ended, by reason", "finished_reason", "endpoint"
        )
        self._refused = labelled(
            Counter, "request_refused", "Requests rejected, by reason", "reason", "status"
        )
        self._restarts = labelled(Counter, "engine_restarts", "Engine restarts after a crash")
        self._cuts = labelled(
            Counter, "slow_readers_cut", "Streams closed because the client read too slowly"
        )
        self._startup = labelled(Gauge, "startup_seconds", "Seconds of the last start, by stage", "stage")
        self._memory = labelled(Gauge, "memory_bytes", "Memory by kind, as planned at the last start", "kind")
        self._registry.register(_EngineCollector(self))

    def request_finished(
        self, timing: TimingRecord, endpoint: str, finish_reason: str, background: bool = False
    ) -> None:
        """Count one accepted request that ended, for any reason. Call it once, after `sent` is stamped.

        For a background request only its end is counted: no user waits for it, so its times are not observed.
        """
        self._success.labels(self.model_name, finish_reason, endpoint).inc()
        if background:
            return
        observed = {
            "time_to_first_token_seconds": timing.ttft_s,
            "request_time_per_output_token_seconds": timing.tpot_s,
            "e2e_request_latency_seconds": timing.e2e_s,
            "request_queue_time_seconds": timing.queue_s,
            "request_prefill_time_seconds": timing.prefill_s,
            "request_decode_time_seconds": timing.decode_s,
            "request_inference_time_seconds": timing.inference_s,
            "request_prompt_tokens": timing.prompt_tokens,
            "request_generation_tokens": timing.output_tokens,
        }
        for name, value in observed.items():
            if value is not None:  # a request aborted in the queue has no first token
                self._histograms[name].observe(value)
        self._token_gaps.observe(timing.inter_token_s)

    def request_refused(self, reason: str, status: int) -> None:
        self._refused.labels(self.model_name, reason, str(status)).inc()

    def stream_cut(self) -> None:
        self._cuts.inc()

    def engine_started(self, seconds: Mapping[str, float], bytes: Mapping[str, int]) -> None:
        for stage, duration_s in seconds.items():
            self._startup.labels(self.model_name, stage).set(duration_s)
        for kind, size in bytes.items():
            self._memory.labels(self.model_name, kind).set(size)

    def engine_restarted(self, last: EngineStats | None = None) -> None:
        """An engine died and is being restarted. `last`: the final stats received from the dead one."""
        if last is not None:
            self._totals.observe(last)
        self._totals.restart()
        self._restarts.inc()

    def render(self, stats: EngineStats, engine_up: bool = True) -> tuple[bytes, str]:
        """The exposition text and its content type, with the engine's current figures."""
        return render_all([(self, stats, engine_up)])

    def families(self, stats: EngineStats, engine_up: bool) -> Iterator[Metric]:
        """Every metric, with the engine's current figures."""
        self._totals.observe(stats)
        self._stats = stats if engine_up else replace(stats, running=0, waiting=0, kv_blocks_held=0)
        self._engine_up = engine_up
        yield from self._registry.collect()


def render_all(scrapes: Sequence[tuple[ServerMetrics, EngineStats, bool]]) -> tuple[bytes, str]:
    """The exposition text of several models and its content type: one family per name, labelled by
    model_name.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    merged: dict[str, Metric] = {}
    for metrics, stats, engine_up in scrapes:
        for family in metrics.families(stats, engine_up):
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = family
    return generate_latest(_Families(list(merged.values()))), CONTENT_TYPE_LATEST


@dataclass(frozen=True)
class _Families:
    """The registry interface that the exposition writer needs."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


class _EngineCollector:
    """The metrics created at scrape time: from EngineStats, and the gaps between tokens."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        model = self._metrics.model_name
        up = GaugeMetricFamily(PREFIX + "engine_up", "1 while an engine runs", labels=["model_name"])
        up.add_metric([model], float(self._metrics._engine_up))
        yield up
        yield self._metrics._token_gaps.family(model)
        if self._metrics.expert_load.imbalance:
            doc = (
                "Tokens of a layer's busiest expert over the mean of its experts, in the last interval of at "
                f"least {INTERVAL_S:g} s between scrapes"
            )
            family = GaugeMetricFamily(PREFIX + "expert_imbalance", doc, labels=["model_name", "layer"])
            for layer, value in self._metrics.expert_load.imbalance.items():
                family.add_metric([model, str(layer)], value)
            yield family
        if self._metrics._stats.speculation is not None:
            yield from speculation_families(PREFIX, model, self._metrics._stats.speculation)
        for name, (doc, read) in ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, doc, labels=["model_name"])
            gauge.add_metric([model], read(self._metrics._stats))
            yield gauge
        for name, (doc, field) in ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, doc, labels=["model_name"])
            counter.add_metric([model], self._metrics._totals.total(field))
            yield counter


def _sum(first: EngineStats, second: EngineStats) -> EngineStats:
    fields = [field for _, field in ENGINE_COUNTERS.values()]
    return replace(first, **{name: getattr(first, name) + getattr(second, name) for name in fields})
