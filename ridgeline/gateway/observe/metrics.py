"""GatewayMetrics: one worker's counts, kept as plain integers and rendered as Prometheus' text when scraped.

The pipeline calls `observe` with each request's row, and other methods for events without a row; `render`
takes the values of other parts (`Readings`). Labels are bounded: names that are not configured are `other`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.fleet.router.observe import metrics as fleet_metrics
from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.observe.config import ObserveConfig
from ridgeline.telemetry.exposition import Family, Labels, Merged, Page

OTHER = "other"
MAX_LEARNED = 200  # names that match only a pattern of the configuration

# Seconds: from tens of microseconds in the gateway to minutes for an upstream's answer.
OVERHEAD_EDGES = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
WAIT_EDGES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOTAL_EDGES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

FAMILIES: dict[str, Family] = {
    "requests_total": Family("counter", "Requests that ended, by outcome"),
    "requests_inflight": Family("gauge", "Requests being answered"),
    "tokens_total": Family(
        "counter", "Tokens as reported by upstreams; subsets of other kinds have kinds too"
    ),
    "cost_usd_total": Family("counter", "What answers cost, in US dollars"),
    "overhead_seconds": Family("histogram", "Time in the gateway before the upstream request"),
    "queue_seconds": Family("histogram", "Time in an upstream's queue"),
    "ttft_seconds": Family("histogram", "Time from the upstream request to the first byte of its answer"),
    "total_seconds": Family("histogram", "Time from a request's arrival to its end"),
    "refused_total": Family("counter", "Requests refused before authentication and routing, by status"),
    "errors_total": Family("counter", "Requests that ended with an error, by its code"),
    "key_requests_total": Family("counter", "Requests ended, by key"),
    "key_tokens_total": Family("counter", "Tokens in and out, by key"),
    "key_cost_usd_total": Family("counter", "What answers cost in US dollars, by key"),
    "attempts_total": Family("counter", "Repeated upstream requests: retry, fallback or hedge, by cause"),
    "limit_refusals_total": Family("counter", "Requests refused by a limit or a budget, by which"),
    "guard_findings_total": Family("counter", "What guards found, by kind and what was done"),
    "cache_requests_total": Family("counter", "Lookups in a cache, by result"),
    "cache_bytes": Family("gauge", "Bytes held by a cache in memory"),
    "cache_entries": Family("gauge", "Answers held by a cache in memory"),
    "cache_evictions_total": Family("counter", "Answers a cache gave up for others"),
    "upstream_inflight": Family("gauge", "Requests an upstream is answering"),
    "upstream_waiting": Family("gauge", "Requests in an upstream's queue"),
    "upstream_breaker": Family("gauge", "Workers whose breaker for an upstream is in this state"),
    "upstream_credentials": Family("gauge", "An upstream's credentials in this state", "max"),
    "ledger_backlog_rows": Family("gauge", "Ledger rows on disk here, not yet in the store"),
    "ledger_rows_dropped_total": Family("counter", "Ledger rows that neither file nor memory could take"),
    "ledger_store_away_seconds": Family("gauge", "How long the ledger's store has not answered", "max"),
    "ledger_backlog_bytes": Family("gauge", "Their bytes in the write-ahead files"),
    "policy_age_seconds": Family("gauge", "Since keys and teams were last known to be up to date", "max"),
    "limits_degraded": Family("gauge", "1 while the shared state of limits is unreachable", "max"),
    "spans_dropped_total": Family("counter", "Traced requests dropped because export was behind"),
    "access_lines_dropped_total": Family("counter", "Access log lines dropped because writing was behind"),
    "start_time_seconds": Family("gauge", "When the oldest worker began, unix time", "min"),
}


@dataclass(frozen=True, slots=True)
class UpstreamReading:
    """One upstream's state in this worker."""

    name: str
    breaker: str  # closed, open, half_open
    inflight: int = 0
    waiting: int = 0
    credentials: Mapping[str, int] = field(default_factory=dict)  # number by state


@dataclass(frozen=True, slots=True)
class CacheReading:
    name: str  # exact, semantic
    hits: int
    misses: int
    entries: int = 0
    bytes: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class Readings:
    """Values of other parts at the time of a scrape."""

    upstreams: Sequence[UpstreamReading] = ()
    caches: Sequence[CacheReading] = ()
    ledger_backlog_rows: int = 0
    ledger_backlog_bytes: int = 0
    ledger_rows_dropped: int = 0
    ledger_store_away_s: float = 0.0
    policy_age_s: float = 0.0
    limits_degraded: bool = False
    spans_dropped: int = 0
    access_lines_dropped: int = 0


class _Histogram:
    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value


class _Traffic:
    """Sums of one endpoint, model and upstream."""

    __slots__ = (
        "cost_pusd",
        "overhead",
        "queue",
        "tokens_cache_write",
        "tokens_cached",
        "tokens_in",
        "tokens_out",
        "tokens_reasoning",
        "total",
        "ttft",
    )

    def __init__(self) -> None:
        self.tokens_in = self.tokens_cached = self.tokens_cache_write = 0
        self.tokens_out = self.tokens_reasoning = self.cost_pusd = 0
        self.overhead = _Histogram(OVERHEAD_EDGES)
        self.queue = _Histogram(WAIT_EDGES)
        self.ttft = _Histogram(WAIT_EDGES)
        self.total = _Histogram(TOTAL_EDGES)

    def spend(self, row: LedgerRow) -> None:
        self.tokens_in += row.tokens_in
        self.tokens_cached += row.tokens_cached
        self.tokens_cache_write += row.tokens_cache_write
        self.tokens_out += row.tokens_out
        self.tokens_reasoning += row.tokens_reasoning
        self.cost_pusd += row.cost_pusd


class _Ending:
    """Requests of one traffic with one outcome."""

    __slots__ = ("count", "traffic")

    def __init__(self, traffic: _Traffic) -> None:
        self.count = 0
        self.traffic = traffic


class GatewayMetrics:
    def __init__(
        self,
        config: ObserveConfig,
        models: Iterable[str],
        upstreams: Iterable[str],
        endpoints: Iterable[str],
    ) -> None:
        """The names that labels may take."""
        self.inflight = 0  # incremented and decremented by the pipeline
        self._started = time.time()
        self._key_label = config.key_label
        self._max_series = config.max_series
        self._endpoints = frozenset(endpoints)
        self._endings: dict[tuple[str, str, str, str, int], _Ending] = {}
        self._traffic: dict[tuple[str, str, str], _Traffic] = {}
        self._keys: dict[str, list[int]] = {}  # requests, tokens in, tokens out, cost
        self._events: dict[tuple[str, Labels], int] = {}
        self.know(models, upstreams)

    def know(self, models: Iterable[str], upstreams: Iterable[str]) -> None:
        """Set the configured names, also after a reload. A model's name may end in * as a pattern."""
        names = list(models)
        self._models = {name for name in names if not name.endswith("*")}
        self._patterns = tuple(name[:-1] for name in names if name.endswith("*"))
        self._most_models = len(self._models) + MAX_LEARNED
        self._upstreams = frozenset(upstreams)

    def observe(self, row: LedgerRow) -> None:
        """A request has ended."""
        status = row.status // 100
        key = (row.endpoint, row.model, row.upstream, row.outcome, status)
        ending = self._endings.get(key)
        if ending is None:
            ending = self._ending(row, status)
        ending.count += 1
        traffic = ending.traffic
        if row.tokens_in or row.tokens_out or row.audio_ms or row.characters:
            traffic.spend(row)
        if row.gateway_ms is not None:
            traffic.overhead.add(row.gateway_ms / 1e3)
        if row.queue_ms is not None:
            traffic.queue.add(row.queue_ms / 1e3)
        if row.ttft_ms is not None:
            traffic.ttft.add(row.ttft_ms / 1e3)
        traffic.total.add(row.total_ms / 1e3)
        if row.error_code:
            self._count("errors_total", (("code", row.error_code),))
            if row.outcome == "limited":
                self._count("limit_refusals_total", (("limit", row.error_code),))
        if self._key_label and row.key_id:
            self._count_key(row)

    def spent(self, row: LedgerRow) -> None:
        """An attempt that is billed beside its request: counts tokens and cost, but no request."""
        self._ending(row, row.status // 100).traffic.spend(row)
        if self._key_label and row.key_id:
            self._count_key(row, 0)

    def refused(self, status: int) -> None:
        """A request without a row: an unknown path or no key."""
        self._count("refused_total", (("status", str(status)),))

    def attempt(self, kind: str, upstream: str, cause: str) -> None:
        """An upstream request was repeated. kind: retry, fallback, hedge; cause: timeout, status_503, …"""
        self._count("attempts_total", (("kind", kind), ("upstream", upstream), ("cause", cause)))

    def guard_found(self, findings: Mapping[str, int], action: str) -> None:
        for kind, number in findings.items():
            self._count("guard_findings_total", (("kind", kind), ("action", action)), number)

    def render(self, readings: Readings) -> str:
        page = Page(FAMILIES)
        self._add_requests(page)
        self._add_traffic(page)
        for key_id, (requests, tokens_in, tokens_out, cost_pusd) in self._keys.items():
            of_key = ("key", key_id)
            page.add("key_requests_total", requests, (of_key,))
            page.add("key_tokens_total", tokens_in, (of_key, ("kind", "in")))
            page.add("key_tokens_total", tokens_out, (of_key, ("kind", "out")))
            page.add("key_cost_usd_total", cost_pusd / 1e12, (of_key,))
        for (name, labels), count in self._events.items():
            page.add(name, count, labels)
        _add_readings(page, readings)
        page.add("requests_inflight", self.inflight)
        page.add("start_time_seconds", self._started)
        return page.text()

    def _ending(self, row: LedgerRow, status: int) -> _Ending:
        """The first of its kind. Names from clients reach this too, and must not become labels."""
        key = (
            row.endpoint if row.endpoint in self._endpoints else OTHER,
            row.model if self._is_model(row) else OTHER if row.model else "",
            row.upstream if row.upstream in self._upstreams else OTHER if row.upstream else "",
            row.outcome,
            status,
        )
        ending = self._endings.get(key)
        if ending is None:
            if len(self._endings) >= self._max_series:
                key = (OTHER, OTHER, OTHER, row.outcome, status)
                found = self._endings.get(key)
                if found is not None:
                    return found
            traffic = self._traffic.setdefault(key[:3], _Traffic())
            ending = self._endings[key] = _Ending(traffic)
        return ending

    def _is_model(self, row: LedgerRow) -> bool:
        """A name that matches a pattern becomes a label once an upstream has answered for it."""
        if row.model in self._models:
            return True
        is_new = row.status == 200 and row.outcome == "ok" and row.model.startswith(self._patterns)
        if is_new and len(self._models) < self._most_models:
            self._models.add(row.model)
            return True
        return False

    def _count(self, name: str, labels: Labels, by: int = 1) -> None:
        event = (name, labels)
        if event not in self._events and len(self._events) >= self._max_series:
            event = (name, tuple((label, OTHER) for label, _ in labels))
        self._events[event] = self._events.get(event, 0) + by

    def _count_key(self, row: LedgerRow, requests: int = 1) -> None:
        sums = self._keys.get(row.key_id)
        if sums is None:
            key_id = row.key_id if len(self._keys) < self._max_series else OTHER
            sums = self._keys.setdefault(key_id, [0, 0, 0, 0])
        sums[0] += requests
        sums[1] += row.tokens_in
        sums[2] += row.tokens_out
        sums[3] += row.cost_pusd

    def _add_requests(self, page: Page) -> None:
        for (endpoint, model, upstream, outcome, status), ending in self._endings.items():
            labels = (
                *_traffic_labels(endpoint, model, upstream),
                ("outcome", outcome),
                ("status", f"{status}xx" if status else "none"),
            )
            page.add("requests_total", ending.count, labels)

    def _add_traffic(self, page: Page) -> None:
        for key, traffic in self._traffic.items():
            if not (traffic.tokens_in or traffic.tokens_out):
                continue
            labels = _traffic_labels(*key)
            for kind in ("in", "cached", "cache_write", "out", "reasoning"):
                page.add("tokens_total", getattr(traffic, f"tokens_{kind}"), (*labels, ("kind", kind)))
            page.add("cost_usd_total", traffic.cost_pusd / 1e12, labels)
        for name in ("overhead", "queue", "ttft", "total"):
            for key, traffic in self._traffic.items():
                histogram: _Histogram = getattr(traffic, name)
                if any(histogram.counts):
                    labels = _traffic_labels(*key)
                    page.add_histogram(
                        f"{name}_seconds", histogram.edges, histogram.counts, histogram.total, labels
                    )


def merge(texts: Iterable[str]) -> str:
    """Merge several workers' pages. A supervisor that outlives workers keeps a `merged()` instead."""
    pages = merged()
    for number, text in enumerate(texts):
        pages.update(str(number), text)
    return pages.text()


def merged() -> Merged:
    fleets = {f"{fleet_metrics.PREFIX}{name}": family for name, family in fleet_metrics.FAMILIES.items()}
    return Merged({**FAMILIES, **fleets})


def _traffic_labels(endpoint: str, model: str, upstream: str) -> Labels:
    return ("endpoint", endpoint), ("model", model), ("upstream", upstream)


def _add_readings(page: Page, readings: Readings) -> None:
    for cache in readings.caches:
        of_cache = ("cache", cache.name)
        page.add("cache_requests_total", cache.hits, (of_cache, ("result", "hit")))
        page.add("cache_requests_total", cache.misses, (of_cache, ("result", "miss")))
        page.add("cache_bytes", cache.bytes, (of_cache,))
        page.add("cache_entries", cache.entries, (of_cache,))
        page.add("cache_evictions_total", cache.evictions, (of_cache,))
    for upstream in readings.upstreams:
        of_upstream = ("upstream", upstream.name)
        page.add("upstream_inflight", upstream.inflight, (of_upstream,))
        page.add("upstream_waiting", upstream.waiting, (of_upstream,))
        for state in ("closed", "open", "half_open"):
            page.add("upstream_breaker", upstream.breaker == state, (of_upstream, ("state", state)))
        for state, count in upstream.credentials.items():
            page.add("upstream_credentials", count, (of_upstream, ("state", state)))
    page.add("ledger_backlog_rows", readings.ledger_backlog_rows)
    page.add("ledger_backlog_bytes", readings.ledger_backlog_bytes)
    page.add("ledger_rows_dropped_total", readings.ledger_rows_dropped)
    page.add("ledger_store_away_seconds", readings.ledger_store_away_s)
    page.add("policy_age_seconds", readings.policy_age_s)
    page.add("limits_degraded", readings.limits_degraded)
    page.add("spans_dropped_total", readings.spans_dropped)
    page.add("access_lines_dropped_total", readings.access_lines_dropped)
