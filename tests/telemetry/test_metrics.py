"""/metrics: the right numbers under the promised names, and counters that never fall."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.telemetry.metrics import PREFIX, TOKEN_BUCKETS_S, EngineTotals, ServerMetrics
from ridgeline.telemetry.stats import EngineStats
from ridgeline.telemetry.timing import TimingRecord

DOCS = Path(__file__).resolve().parents[2] / "docs" / "telemetry.md"

PROMISED = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "num_requests_running",
    "num_requests_waiting",
    "num_background_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prefix_cache_evicted_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_refused_total",
    "engine_restarts_total",
    "slow_readers_cut_total",
    "startup_seconds",
    "memory_bytes",
    "engine_up",
]


def samples(metrics: ServerMetrics, stats: EngineStats, engine_up: bool = True) -> dict[str, float]:
    """name{labels but the model's} → value, read by the official parser."""
    body, _ = metrics.render(stats, engine_up)
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name.removeprefix(PREFIX)}{{{labels}}}"] = sample.value
            assert sample.labels["model_name"] == "m"
    return found


def finished() -> TimingRecord:
    times = [10.5, 10.6, 10.9]
    return TimingRecord(
        arrival=10.0,
        admitted=10.1,
        token_times=times,
        end=10.95,
        sent=11.0,
        prompt_tokens=300,
        cached_tokens=288,
    )


def test_a_finished_request_is_observed_once_in_every_histogram() -> None:
    metrics = ServerMetrics("m")
    metrics.request_finished(finished(), "/v1/chat/completions", "stop")
    found = samples(metrics, EngineStats())
    expected_s = {
        "time_to_first_token_seconds": 0.5,
        "request_time_per_output_token_seconds": 0.2,
        "e2e_request_latency_seconds": 1.0,
        "request_queue_time_seconds": 0.1,
        "request_prefill_time_seconds": 0.4,
        "request_decode_time_seconds": 0.4,
        "request_inference_time_seconds": 0.85,
        "request_prompt_tokens": 300,
        "request_generation_tokens": 3,
    }
    for name, value in expected_s.items():
        assert found[f"{name}_sum{{}}"] == pytest.approx(value), name
        assert found[f"{name}_count{{}}"] == 1, name
    assert found["inter_token_latency_seconds_count{}"] == 2
    assert found["inter_token_latency_seconds_sum{}"] == pytest.approx(0.4)
    assert found["request_success_total{endpoint=/v1/chat/completions,finished_reason=stop}"] == 1


def test_a_request_aborted_in_the_queue_adds_no_first_token_time() -> None:
    metrics = ServerMetrics("m")
    metrics.request_finished(TimingRecord(arrival=1.0, end=2.0), "/v1/completions", "abort")
    found = samples(metrics, EngineStats())
    assert found["time_to_first_token_seconds_count{}"] == 0
    assert found["e2e_request_latency_seconds_count{}"] == 1
    assert found["request_success_total{endpoint=/v1/completions,finished_reason=abort}"] == 1


def test_of_a_background_request_only_its_end_is_counted() -> None:
    metrics = ServerMetrics("m")
    metrics.request_finished(finished(), "/v1/completions", "stop", background=True)
    found = samples(metrics, EngineStats(waiting=1, waiting_background=5))
    assert found["request_success_total{endpoint=/v1/completions,finished_reason=stop}"] == 1
    assert found["time_to_first_token_seconds_count{}"] == 0
    assert (found["num_requests_waiting{}"], found["num_background_requests_waiting{}"]) == (1, 5)


def test_every_promised_metric_is_exposed_and_documented_and_nothing_undocumented_is() -> None:
    metrics = ServerMetrics("m")
    metrics.request_finished(finished(), "/v1/completions", "stop")
    metrics.request_refused("queue_full", 429)
    metrics.engine_started({"weights": 1.5}, {"kv": 1024})
    metrics.engine_restarted()
    metrics.stream_cut()
    metrics.expert_load.observe({0: [3, 1]})
    body, content_type = metrics.render(EngineStats())
    assert content_type.startswith("text/plain")
    exposed = set(re.findall(r"^# TYPE ridgeline:(\S+)", body.decode(), flags=re.M))
    exposed = {name for name in exposed if not name.endswith("_created")}
    assert set(PROMISED) <= exposed
    documented = set(re.findall(r"^\| `ridgeline:(\w+)", DOCS.read_text(), flags=re.M))
    assert documented == exposed


def test_refusals_cuts_restarts_start_and_memory_are_counted_by_label() -> None:
    metrics = ServerMetrics("m")
    metrics.request_refused("queue_full", 429)
    metrics.request_refused("queue_full", 429)
    metrics.request_refused("invalid", 400)
    metrics.stream_cut()
    metrics.engine_started({"weights": 1.5, "warm-up": 0.5}, {"weights": 100, "kv": 200})
    metrics.engine_restarted()
    found = samples(metrics, EngineStats())
    assert found["request_refused_total{reason=queue_full,status=429}"] == 2
    assert found["request_refused_total{reason=invalid,status=400}"] == 1
    assert found["slow_readers_cut_total{}"] == 1
    assert found["engine_restarts_total{}"] == 1
    assert found["startup_seconds{stage=weights}"] == 1.5
    assert found["memory_bytes{kind=kv}"] == 200


def test_gauges_show_the_engine_as_it_is_now() -> None:
    metrics = ServerMetrics("m")
    stats = EngineStats(
        running=3, waiting=4, kv_blocks_total=10, kv_blocks_held=5, kv_blocks_cached=2, steps=1
    )
    found = samples(metrics, stats)
    assert found["num_requests_running{}"] == 3
    assert found["num_requests_waiting{}"] == 4
    assert found["kv_cache_usage_perc{}"] == 0.5
    assert found["engine_up{}"] == 1
    down = samples(metrics, stats, engine_up=False)
    assert (down["engine_up{}"], down["num_requests_running{}"], down["kv_cache_usage_perc{}"]) == (0, 0, 0)


FIRST = EngineStats(steps=10, output_tokens=100, prompt_tokens=500, last_step_end=50.0)


def test_counters_go_on_from_where_the_dead_engine_stopped() -> None:
    totals = EngineTotals(clock=lambda: 60.0)
    totals.observe(FIRST)
    totals.restart()
    assert totals.total("output_tokens") == 100
    totals.observe(EngineStats(steps=2, output_tokens=7, prompt_tokens=20, last_step_end=70.0))
    assert totals.total("output_tokens") == 107
    assert totals.total("prompt_tokens") == 520


def test_a_scrape_between_death_and_restart_counts_nothing_twice() -> None:
    totals = EngineTotals(clock=lambda: 60.0)
    totals.observe(FIRST)
    totals.restart()
    totals.observe(FIRST)  # the front still holds the dead engine's last figures
    assert totals.total("output_tokens") == 100
    totals.observe(replace(FIRST, output_tokens=130, last_step_end=55.0))  # its very last ones, not yet seen
    assert totals.total("output_tokens") == 130
    totals.observe(EngineStats())  # no engine yet
    assert totals.total("output_tokens") == 130
    totals.observe(EngineStats(steps=1, output_tokens=1, last_step_end=61.0))
    assert totals.total("output_tokens") == 131


def test_a_restart_nobody_announced_is_seen_by_the_falling_step_count() -> None:
    totals = EngineTotals(clock=lambda: 60.0)
    totals.observe(FIRST)
    second = EngineStats(steps=1, output_tokens=2, last_step_end=58.0)
    totals.observe(second)
    totals.observe(second)
    assert totals.total("output_tokens") == 102


def test_totals_add_up_over_many_restarts_and_never_fall() -> None:
    now = 0.0
    totals = EngineTotals(clock=lambda: now)
    seen = [0]
    for engine in range(1, 6):
        for step in range(1, 4):
            now += 1.0
            totals.observe(EngineStats(steps=step, output_tokens=10 * engine * step, last_step_end=now))
            seen.append(totals.total("output_tokens"))
        now += 1.0
        totals.restart()
        seen.append(totals.total("output_tokens"))
    assert seen == sorted(seen)
    assert seen[-1] == sum(30 * engine for engine in range(1, 6))


def test_the_final_figures_given_with_a_restart_are_not_lost() -> None:
    metrics = ServerMetrics("m", clock=lambda: 60.0)
    metrics.engine_restarted(FIRST)  # never scraped before it died
    assert samples(metrics, EngineStats())["generation_tokens_total{}"] == 100


def test_two_fronts_in_one_process_do_not_share_a_registry() -> None:
    first, second = ServerMetrics("m"), ServerMetrics("m")
    first.stream_cut()
    assert samples(second, EngineStats())["slow_readers_cut_total{}"] == 0


def test_every_gap_between_tokens_falls_into_the_bucket_prometheus_would_give_it() -> None:
    """Counted by hand, against the library's own histogram: edges included, beyond the last one too."""
    gaps_s = [0.0, 0.001, 0.0010001, 0.01, 0.02, 0.5, 5.0, 5.1, 100.0]
    times = list(accumulate(gaps_s, initial=0.0))
    record = TimingRecord(token_times=times)
    theirs = Histogram("theirs", "", buckets=TOKEN_BUCKETS_S, registry=None)
    for gap_s in record.inter_token_s:
        theirs.observe(gap_s)
    metrics = ServerMetrics("m")
    metrics.request_finished(record, "/v1/completions", "stop")
    found = samples(metrics, EngineStats())
    [family] = theirs.collect()
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            ours = sample.name.replace("theirs", "inter_token_latency_seconds")
            assert found[f"{ours}{{{labels}}}"] == pytest.approx(sample.value), sample
