"""The same three requests in the words of AIPerf, GuideLLM and vLLM, every figure worked out by hand.

Request 0: due 0.0, sent 0.1; 2 tokens at 0.5, 1 at 0.8, 3 at 1.1; over at 1.2   (6 tokens, 10 in, 4 cached)
Request 1: due 1.0, sent 1.0; 1 token at 1.4, 1 at 1.6; over at 1.6              (2 tokens, 20 in)
Request 2: due 1.5, sent 1.5; HTTP 503 at 1.7
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from ridgeline.lab.bench.exports import RunFacts, export, to_aiperf, to_aiperf_csv, to_guidellm, to_vllm
from ridgeline.lab.bench.figures.record import RequestRecord

FIRST = RequestRecord(
    0, 0.0, 0.1, 0.5, 0.5, 1.1, 1.2, "ok", 10, 6, n_in=10, n_cached=4, n_out=6, n_first=2,
    chunk_at=[0.5, 0.8, 1.1], chunk_tokens=[2, 1, 3], counted_by="usage",
)  # fmt: skip
SECOND = RequestRecord(
    1, 1.0, 1.0, 1.4, 1.4, 1.6, 1.6, "ok", 20, 2, n_in=20, n_out=2, n_first=1,
    chunk_at=[1.4, 1.6], chunk_tokens=[1, 1], counted_by="usage",
)  # fmt: skip
REFUSED = RequestRecord(
    2, 1.5, 1.5, None, None, None, 1.7, "failed", 30, 5, http_status=503, cause="http_503", error="busy <b>"
)
BOUNDS = {"ttft_ms": 500.0, "tpot_ms": 160.0}


def run(**changes: object) -> RunFacts:
    facts = {
        "records": [FIRST, SECOND, REFUSED],
        "model": "tiny",
        "url": "http://x",
        "api": "chat",
        "started_at": 1000.0,
        "rate": 2.0,
        "bounds_ms": BOUNDS,
    }
    return RunFacts(**(facts | changes))  # type: ignore[arg-type]


def test_aiperf_takes_the_first_chunks_tokens_off_and_calls_it_inter_token_latency() -> None:
    found = to_aiperf(run())
    # (1.1 − 0.5) / (6 − 2) = 150 ms and (1.6 − 1.4) / (2 − 1) = 200 ms
    assert found["inter_token_latency"]["min"] == pytest.approx(150)
    assert found["inter_token_latency"]["max"] == pytest.approx(200)
    assert found["inter_token_latency"]["p50"] == pytest.approx(175)
    assert found["inter_token_latency"]["std"] == pytest.approx(25)
    assert found["inter_token_latency"]["count"] == 2
    assert found["output_token_throughput_per_user"]["max"] == pytest.approx(1 / 0.150)
    assert found["time_to_first_token"]["sum"] == pytest.approx(800)
    assert found["time_to_second_token"]["avg"] == pytest.approx((300 + 200) / 2)
    assert found["request_latency"]["max"] == pytest.approx(1000)
    assert found["inter_chunk_latency"]["count"] == 3
    # From the first request sent (0.1) to the last answer's last chunk (1.6).
    assert found["benchmark_duration"] == {"unit": "sec", "avg": pytest.approx(1.5)}
    assert found["output_token_throughput"]["avg"] == pytest.approx(8 / 1.5)
    assert found["request_throughput"]["avg"] == pytest.approx(2 / 1.5)
    # The second request's 200 ms a token are over the 160 asked for.
    assert found["good_request_count"]["avg"] == 1
    assert found["error_request_count"]["avg"] == 1
    assert found["error_summary"] == [
        {"error_details": {"code": 503, "type": "http_503", "message": "busy <b>"}, "count": 1}
    ]
    # One of three failed: the median of (400, 400, ∞) is 400, the others fall on infinity and are absent.
    assert found["adj_time_to_first_token"] == {"unit": "ms", "p50": pytest.approx(400)}


def test_aiperf_falls_back_to_one_token_where_the_first_chunk_held_everything() -> None:
    whole = RequestRecord(
        0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, "ok", 1, 4, n_in=1, n_out=4, n_first=4,
        chunk_at=[1.0], chunk_tokens=[4],
    )  # fmt: skip
    assert to_aiperf(run(records=[whole]))["inter_token_latency"]["avg"] == 0.0
    single = RequestRecord(
        0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, "ok", 1, 1, n_in=1, n_out=1, n_first=1,
        chunk_at=[1.0], chunk_tokens=[1],
    )  # fmt: skip
    assert "inter_token_latency" not in to_aiperf(run(records=[single]))


def test_aiperfs_csv_has_distributions_first_and_values_after_an_empty_line() -> None:
    rows = list(csv.reader(io.StringIO(to_aiperf_csv(run()))))
    assert rows[0] == [
        "Metric", "avg", "min", "max", "sum", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99",
        "std",
    ]  # fmt: skip
    by_name = {row[0]: row[1:] for row in rows if row}
    assert by_name["Inter Token Latency (ms)"][:4] == ["175.00", "150.00", "200.00", "350.00"]
    assert rows[rows.index([]) + 1] == ["Metric", "Value"]
    assert by_name["Request Count"] == ["2.00"]
    assert by_name["Request Throughput (requests/sec)"] == ["1.33"]


def test_guidellms_tpot_includes_the_first_token_and_is_weighted_by_tokens() -> None:
    metrics = to_guidellm(run())["benchmarks"][0]["metrics"]
    tpot = metrics["time_per_output_token_ms"]["successful"]
    # (1.1 − 0.1) / 6 with weight 6 and (1.6 − 1.0) / 2 with weight 2
    assert tpot["mean"] == pytest.approx((6 * 1000 / 6 + 2 * 300) / 8)
    assert tpot["count"] == 8
    assert tpot["percentiles"]["p75"] == pytest.approx(1000 / 6)
    assert tpot["percentiles"]["p90"] == pytest.approx(300)
    itl = metrics["inter_token_latency_ms"]["successful"]
    # (1.1 − 0.5) / 5 with weight 5 and (1.6 − 1.4) / 1 with weight 1
    assert itl["mean"] == pytest.approx((5 * 120 + 200) / 6)
    latency = metrics["request_latency"]
    assert latency["successful"]["mean"] == pytest.approx(
        (1.1 + 0.6) / 2
    )  # seconds, to the end of the stream
    assert latency["errored"]["mean"] == pytest.approx(0.2)
    assert latency["total"]["count"] == 3
    assert metrics["request_scheduled_latency"]["successful"]["max"] == pytest.approx(1.2)
    assert metrics["request_totals"] == {"successful": 2, "incomplete": 0, "errored": 1, "total": 3}


def test_guidellms_attainment_judges_tpot_by_its_inter_token_latency_and_counts_failures() -> None:
    metrics = to_guidellm(run())["benchmarks"][0]["metrics"]
    # 120 ms keeps 160, 200 ms does not, and one request failed.
    assert metrics["slo_attainment"] == pytest.approx(1 / 3)
    assert metrics["slo_determined_requests"] == 3
    assert metrics["request_goodput"]["successful"]["mean"] == pytest.approx(1 / 1.6)
    assert to_guidellm(run(bounds_ms={}))["benchmarks"][0]["metrics"]["slo_attainment"] is None


def test_guidellms_rates_average_to_everything_over_the_whole_time() -> None:
    benchmark = to_guidellm(run())["benchmarks"][0]
    assert benchmark["duration"] == pytest.approx(1.6)  # 0.1 to 1.7
    tokens = benchmark["metrics"]["output_tokens_per_second"]["successful"]
    assert tokens["mean"] == pytest.approx(8 / 1.6)
    assert tokens["count"] == 8
    assert benchmark["metrics"]["requests_per_second"]["total"]["mean"] == pytest.approx(3 / 1.6)
    # Under way: one from 0.1 to 1.0, two to 1.2, one to 1.5, two to 1.6, one to 1.7.
    level = benchmark["metrics"]["request_concurrency"]["total"]
    assert level["mean"] == pytest.approx((0.9 + 2 * 0.2 + 0.3 + 2 * 0.1 + 0.1) / 1.6)
    assert level["max"] == 2


def test_guidellm_has_no_schedule_to_be_late_against_in_a_closed_loop() -> None:
    benchmark = to_guidellm(run(rate=None, concurrency=4))["benchmarks"][0]
    assert benchmark["metrics"]["request_dispatch_delay"] is None
    assert benchmark["config"]["strategy"] == {"profile": "concurrent", "rate": [4]}


def test_guidellms_requests_stand_by_status_at_unix_times() -> None:
    requests = to_guidellm(run())["benchmarks"][0]["requests"]
    assert [len(requests[name]) for name in ("successful", "incomplete", "errored")] == [2, 0, 1]
    first = requests["successful"][0]
    assert first["info"]["timings"]["first_token_iteration"] == pytest.approx(1000.5)
    assert first["cached_tokens"] == 4
    assert requests["errored"][0]["info"]["error"] == "busy <b>"
    assert requests["errored"][0]["time_to_first_token_ms"] is None


def test_vllms_tpot_assumes_one_token_first_and_its_itl_are_gaps_between_chunks() -> None:
    found = to_vllm(run())
    assert found["mean_tpot_ms"] == pytest.approx((600 / 5 + 200 / 1) / 2)
    assert found["mean_itl_ms"] == pytest.approx((300 + 300 + 200) / 3)
    assert found["itls"] == [pytest.approx([0.3, 0.3]), pytest.approx([0.2]), []]
    assert found["ttfts"] == [pytest.approx(0.4), pytest.approx(0.4), 0.0]
    assert found["p99_e2el_ms"] == pytest.approx(600 + 0.99 * 400)
    assert found["duration"] == pytest.approx(1.7)  # from the first request due to the last one over
    assert found["output_throughput"] == pytest.approx(8 / 1.7)
    assert found["total_token_throughput"] == pytest.approx(38 / 1.7)
    assert found["request_goodput"] == pytest.approx(1 / 1.7)  # 120 ms keeps 160, 200 ms does not
    assert found["completed"] == 2
    assert found["failed"] == 1
    assert found["output_lens"] == [6, 2, 0]
    assert found["queue_times"] == [pytest.approx(0.1), 0.0, 0.0]
    assert found["max_output_tokens_per_s"] == 3.0  # chunks at 1.1, 1.4 and 1.6: the second one from 0.1 on
    assert found["max_concurrent_requests"] == 2
    assert found["request_rate"] == 2.0
    assert found["errors"][2] == "busy <b>"


def test_vllm_has_no_goodput_without_an_slo_and_zeros_without_answers() -> None:
    found = to_vllm(run(records=[REFUSED], bounds_ms={}, rate=None, concurrency=8))
    assert found["request_goodput"] is None
    assert found["mean_ttft_ms"] == 0.0
    assert found["request_rate"] == "inf"
    assert found["max_concurrency"] == 8


@pytest.mark.parametrize(
    ("dialect", "files"),
    [
        ("aiperf", ["profile_export_aiperf.json", "profile_export_aiperf.csv"]),
        ("guidellm", ["benchmarks.json"]),
        ("vllm", ["vllm-bench-serve.json"]),
    ],
)
def test_every_dialect_writes_the_files_of_its_tool(tmp_path: Path, dialect: str, files: list[str]) -> None:
    written = export(run(), dialect, tmp_path / "out")
    assert [path.name for path in written] == files
    assert json.loads(written[0].read_text())


@pytest.mark.parametrize("dialect", ["aiperf", "guidellm", "vllm"])
def test_a_run_in_which_nothing_was_answered_is_exported_too(tmp_path: Path, dialect: str) -> None:
    for records in ([], [REFUSED]):
        text = export(run(records=records), dialect, tmp_path)[0].read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
