"""What /metrics says of rows, and that several workers' pages become one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.observe import metrics as observe_metrics
from ridgeline.gateway.observe.config import ObserveConfig
from ridgeline.gateway.observe.metrics import (
    CacheReading,
    GatewayMetrics,
    Readings,
    UpstreamReading,
    merge,
    merged,
)


def new_metrics(**config: object) -> GatewayMetrics:
    return GatewayMetrics(ObserveConfig(**config), ["small"], ["local"], ["chat", "messages"])  # type: ignore[arg-type]


def row(**fields: object) -> LedgerRow:
    known: dict[str, object] = {
        "request_id": "req_1",
        "at_ms": 1,
        "key_id": "key_a",
        "endpoint": "chat",
        "model": "small",
        "upstream": "local",
        "status": 200,
        "tokens_in": 10,
        "tokens_cached": 4,
        "tokens_out": 7,
        "cost_pusd": 2_500_000,
        "gateway_ms": 0.2,
        "queue_ms": 0.0,
        "ttft_ms": 30.0,
        "stream_ms": 20.0,
        "total_ms": 51.0,
    }
    return LedgerRow(**(known | fields))  # type: ignore[arg-type]


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """By name and labels, as prometheus_client's own parser reads the page."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            short = sample.name.removeprefix("ridgeline_gateway_")
            found.setdefault(short, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(text: str, name: str, **labels: str) -> float:
    return sum(
        value for of, value in samples(text).get(name, {}).items() if labels.items() <= dict(of).items()
    )


def test_rows_are_counted_by_how_they_ended_with_their_tokens_and_cost() -> None:
    metrics = new_metrics()
    metrics.observe(row())
    metrics.observe(row(outcome="client_gone", tokens_out=3))
    metrics.observe(
        row(outcome="limited", status=429, error_code="rate_limit_exceeded", tokens_in=0, tokens_out=0)
    )
    text = metrics.render(Readings())
    assert total(text, "requests_total") == 3
    assert total(text, "requests_total", outcome="client_gone", status="2xx", model="small") == 1
    assert total(text, "requests_total", outcome="limited", status="4xx") == 1
    assert total(text, "tokens_total", kind="in") == 20
    assert total(text, "tokens_total", kind="out", upstream="local") == 10
    assert total(text, "tokens_total", kind="cached") == 8
    assert total(text, "cost_usd_total") == 5e-6
    assert total(text, "errors_total", code="rate_limit_exceeded") == 1
    assert total(text, "limit_refusals_total", limit="rate_limit_exceeded") == 1


def test_a_histograms_buckets_are_cumulative_and_hold_each_row_once() -> None:
    metrics = new_metrics()
    for ttft_ms in (0.5, 30.0, 30.0, 1e7):
        metrics.observe(row(ttft_ms=ttft_ms))
    metrics.observe(row(ttft_ms=None))
    text = metrics.render(Readings())
    assert total(text, "ttft_seconds_count") == 4
    assert total(text, "total_seconds_count") == 5
    assert total(text, "ttft_seconds_bucket", le="0.001") == 1
    assert total(text, "ttft_seconds_bucket", le="0.05") == 3
    assert total(text, "ttft_seconds_bucket", le="+Inf") == 4
    assert total(text, "ttft_seconds_sum") == 0.0005 + 0.03 + 0.03 + 1e4


def test_names_from_outside_never_become_labels() -> None:
    metrics = new_metrics()
    for number in range(1000):
        metrics.observe(row(model=f'evil"\n{number}', upstream="", endpoint=f"/x{number}", outcome="invalid"))
    text = metrics.render(Readings())
    assert "evil" not in text
    assert "/x1" not in text
    assert total(text, "requests_total", model="other", endpoint="other") == 1000
    assert len(samples(text)["requests_total"]) == 1


def test_a_name_that_only_a_pattern_holds_is_shown_once_an_upstream_answered_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observe_metrics, "MAX_LEARNED", 10)
    metrics = GatewayMetrics(ObserveConfig(), ["small", "local-*"], ["local"], ["chat"])
    metrics.observe(row(model="local-a"))
    metrics.observe(row(model="local-made-up", status=404, outcome="refused"))
    metrics.observe(row(model="far-away"))
    for number in range(1000):
        metrics.observe(row(model=f"local-{number}"))
    text = metrics.render(Readings())
    assert total(text, "requests_total", model="local-a") == 1
    assert "local-made-up" not in text
    assert "far-away" not in text
    assert len(samples(text)["requests_total"]) <= 13


def test_what_is_refused_unseen_is_counted_by_status_alone() -> None:
    metrics = new_metrics()
    metrics.refused(404)
    metrics.refused(404)
    assert total(metrics.render(Readings()), "refused_total", status="404") == 2


def test_labels_are_bounded_whatever_is_configured() -> None:
    metrics = GatewayMetrics(
        ObserveConfig(max_series=10, key_label=True), map(str, range(100)), ["local"], ["chat"]
    )
    for number in range(100):
        metrics.observe(row(model=str(number), key_id=f"key_{number}", error_code=f"code_{number}"))
        metrics.attempt("retry", "local", f"cause {number}")
    text = metrics.render(Readings())
    for name in ("requests_total", "key_requests_total", "errors_total", "attempts_total"):
        assert total(text, name) == 100
        assert len(samples(text)[name]) <= 11


def test_keys_are_counted_only_where_configured() -> None:
    plain, by_key = new_metrics(), new_metrics(key_label=True)
    for metrics in (plain, by_key):
        metrics.observe(row())
    assert "key_a" not in plain.render(Readings())
    assert total(by_key.render(Readings()), "key_tokens_total", key="key_a", kind="out") == 7


def test_what_the_parts_know_of_themselves_is_shown() -> None:
    metrics = new_metrics()
    metrics.inflight = 3
    metrics.guard_found({"email": 2, "iban": 1}, "redacted")
    text = metrics.render(
        Readings(
            upstreams=[UpstreamReading("local", "open", 2, 5, {"live": 1, "dead": 2})],
            caches=[CacheReading("exact", hits=4, misses=6, entries=2, bytes=900, evictions=1)],
            ledger_backlog_rows=12,
            policy_age_s=0.25,
        )
    )
    assert total(text, "requests_inflight") == 3
    assert total(text, "guard_findings_total", kind="email", action="redacted") == 2
    assert total(text, "upstream_breaker", upstream="local", state="open") == 1
    assert total(text, "upstream_breaker", state="closed") == 0
    assert total(text, "upstream_credentials", state="dead") == 2
    assert total(text, "cache_requests_total", cache="exact", result="hit") == 4
    assert total(text, "cache_bytes", cache="exact") == 900
    assert total(text, "ledger_backlog_rows") == 12
    assert total(text, "policy_age_seconds") == 0.25


def test_workers_pages_add_up_and_gauges_follow_their_own_rule() -> None:
    pages = []
    for age_s in (0.1, 4.5):
        metrics = new_metrics()
        metrics.inflight = 2
        metrics.observe(row())
        readings = Readings([UpstreamReading("local", "closed", 1, 0, {"live": 2})], policy_age_s=age_s)
        pages.append(metrics.render(readings))
    text = merge(pages)
    assert total(text, "requests_total") == 2
    assert total(text, "ttft_seconds_bucket", le="+Inf") == 2
    assert total(text, "requests_inflight") == 4
    assert total(text, "upstream_breaker", state="closed") == 2
    assert total(text, "upstream_credentials", state="live") == 2  # each worker has the same ones
    assert total(text, "policy_age_seconds") == 4.5


def test_a_dead_workers_counts_stay_and_its_gauges_go() -> None:
    pages, first = merged(), new_metrics()
    first.observe(row())
    first.inflight = 7
    pages.update("0:100", first.render(Readings()))
    pages.end("0:100")
    successor = new_metrics()
    successor.observe(row())
    pages.update("0:101", successor.render(Readings()))
    assert total(pages.text(), "requests_total") == 2
    assert total(pages.text(), "requests_inflight") == 0


@given(st.text(min_size=1, max_size=20))
def test_any_name_an_upstream_answers_for_survives_writing_and_merging(name: str) -> None:
    metrics = GatewayMetrics(ObserveConfig(), ["*"], ["local"], ["chat"])
    metrics.observe(row(model=name))
    page = metrics.render(Readings())
    assert total(page, "requests_total", model=name) == 1
    assert total(merge([page, page]), "requests_total", model=name) == 2
    page.encode()


def test_one_page_merged_alone_is_that_page() -> None:
    metrics = new_metrics(key_label=True)
    metrics.observe(row(error_code="x"))
    page = metrics.render(Readings([UpstreamReading("local", "closed")], [CacheReading("exact", 1, 2)]))
    assert samples(merge([page])) == samples(page)
