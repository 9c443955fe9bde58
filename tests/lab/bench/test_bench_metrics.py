"""Every metric by its formula, against records whose figures were worked out by hand."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import pytest

from ridgeline.lab.bench.figures.metrics import FORMULAS, Metric, flat, summarize
from ridgeline.lab.bench.figures.record import RequestRecord, ServerTiming
from ridgeline.lab.bench.figures.window import concurrency, steady_window
from ridgeline.lab.slo import parse_slo


def answered(index: int = 0, at: float = 0.0, **changes: Any) -> RequestRecord:
    """Due at `at`, sent 0.1 s late; 2 tokens after 1 s, then 1 and 3 tokens after 0.5 s each."""
    fields: dict[str, Any] = {
        "index": index,
        "t_sched": at,
        "t_send": at + 0.1,
        "t_first": at + 1.1,
        "t_first_visible": at + 1.6,
        "t_last": at + 2.1,
        "t_end": at + 2.2,
        "status": "ok",
        "planned_in": 100,
        "planned_out": 6,
        "n_in": 100,
        "n_out": 6,
        "counted_by": "usage",
        "split_by": "usage",
        "n_first": 2,
        "chunk_at": [at + 1.1, at + 1.6, at + 2.1],
        "chunk_tokens": [2, 1, 3],
    }
    return RequestRecord(**(fields | changes))


def failed(index: int = 0, at: float = 0.0, cause: str = "refused") -> RequestRecord:
    return RequestRecord(
        index, at, None, None, None, None, at + 0.1, "failed", planned_in=1, planned_out=1, cause=cause
    )


def the(metric: Metric) -> float:
    assert metric.mean is not None
    return metric.mean


def test_one_answer_has_exactly_the_latencies_of_the_formulas() -> None:
    metrics = summarize([answered()], "open").metrics
    means = {name: the(metrics[name]) for name in metrics if metrics[name].mean is not None}
    assert means == pytest.approx(
        {
            "dispatch_delay_ms": 100,
            "ttft_ms": 1000,
            "ttft_sched_ms": 1100,
            "ttfo_ms": 1500,
            "tpot_ms": 1000 / 4,  # (2.1 − 1.1) / (6 − 2)
            "itl_ms": (500 + 3 * 500 / 3) / 4,
            "icl_ms": 500,
            "e2e_ms": 2000,
            "e2e_sched_ms": 2100,
            "ntpot_ms": 2000 / 6,
        }
    )
    assert (metrics["icl_ms"].min, metrics["icl_ms"].max, metrics["icl_ms"].std) == pytest.approx(
        (500, 500, 0)
    )
    assert metrics["itl_ms"].n == 4  # one token, then three that share their gap
    assert metrics["icl_ms"].n == 2


def test_a_price_is_of_output_tokens_and_says_the_split() -> None:
    """6 tokens out and 100 in, over the whole run of 2.2 s, at $3.60 an hour: $0.0022 for 6 tokens."""
    found = summarize([answered()], "closed", usd_per_hour=3.6)
    assert found.metrics["usd_per_mtok"].value == pytest.approx(0.0022 / 6 * 1e6)
    assert "usd_per_mtok is at 17 input tokens for each output token" in found.notes
    assert summarize([failed()], "closed", usd_per_hour=3.6).metrics["usd_per_mtok"].value is None


def test_every_metric_carries_its_formula() -> None:
    timing = ServerTiming(1, 2, 3, 4, drafted_tokens=4, accepted_tokens=2)
    slo = parse_slo("ttft=400")
    metrics = summarize([answered(server=timing)], "closed", slo, client_cpu=0.1, usd_per_hour=1.0).metrics
    assert metrics.keys() == FORMULAS.keys()
    assert all(metric.formula == FORMULAS[name] for name, metric in metrics.items())


def test_percentiles_of_many_answers_are_those_of_numpy() -> None:
    random = np.random.default_rng(0)
    first = random.lognormal(-1, 1, 1500)
    records = [
        answered(n, at=n * 0.01, t_first=n * 0.01 + 0.1 + wait, chunk_at=[], chunk_tokens=[])
        for n, wait in enumerate(first)
    ]
    found = flat(summarize(records, "open"))
    for name, share in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert found[f"ttft_ms.{name}"] == pytest.approx(np.percentile(first * 1000, share))


def test_an_answer_of_one_chunk_has_no_tpot_and_is_counted_apart() -> None:
    one = answered(n_out=2, chunk_at=[1.1], chunk_tokens=[2], t_last=1.1)
    summary = summarize([one, answered(1)], "closed", parse_slo("tpot=300,ttft=2000"))
    assert (summary.metrics["tpot_ms"].n, summary.undefined_tpot) == (1, 1)
    assert summary.good == 2  # what is undefined passes


def test_failures_are_in_no_plain_percentile_and_at_infinity_in_the_adjusted_ones() -> None:
    summary = summarize([answered(n, at=n) for n in range(8)] + [failed(8), failed(9)], "open")
    named = flat(summary)
    assert named["ttft_ms.p90"] == pytest.approx(1000)
    assert named["adj_ttft_ms.p50"] == pytest.approx(1000)
    assert named["adj_ttft_ms.p90"] == math.inf
    assert (summary.offered, summary.ok, summary.failed) == (10, 8, 2)
    assert summary.causes == {"refused": 2}
    assert named["failures"] == pytest.approx(0.2)


def test_attainment_is_of_all_that_was_offered_and_open_loops_count_from_the_planned_moment() -> None:
    records = [answered(0), answered(1), failed(2), answered(3, status="cancelled", t_end=None)]
    limit = parse_slo("ttft=1050")  # sent in 1000 ms, but 1100 ms after the planned moment
    assert flat(summarize(records, "closed", limit))["attainment"] == pytest.approx(2 / 3)
    assert flat(summarize(records, "open", limit))["attainment"] == 0.0


def test_every_limit_must_be_kept() -> None:
    records = [answered(0), answered(1, t_last=9.0)]
    both = summarize(records, "closed", parse_slo("ttft=1500,e2e=3000"))
    assert both.good == 1


def test_an_itl_limit_is_judged_by_an_answers_longest_gap_per_token() -> None:
    records = [answered()]
    assert summarize(records, "closed", parse_slo("itl=499")).good == 0
    assert summarize(records, "closed", parse_slo("itl=501")).good == 1


def test_a_server_that_does_not_tell_of_its_cache_has_no_hit_rate_rather_than_none_hit() -> None:
    assert summarize([answered()], "closed").metrics["cache_hit"].value is None
    told = [answered(0, n_cached=25), answered(1, n_cached=0)]
    assert summarize(told, "closed").metrics["cache_hit"].value == pytest.approx(25 / 200)


def test_speculation_has_figures_where_the_server_verified_guesses() -> None:
    """6 tokens each: 5 after the first, of which 3 and 1 needed no step of their own."""
    told = [
        answered(0, server=ServerTiming(drafted_tokens=4, accepted_tokens=3)),
        answered(1, server=ServerTiming(drafted_tokens=6, accepted_tokens=1)),
    ]
    metrics = summarize(told, "closed").metrics
    assert metrics["draft_acceptance"].value == pytest.approx(4 / 10)
    assert metrics["tokens_per_step"].value == pytest.approx(10 / 6)
    off = summarize([answered(server=ServerTiming(drafted_tokens=0, accepted_tokens=0))], "closed").metrics
    assert "tokens_per_step" not in off
    assert "draft_acceptance" not in summarize([answered()], "closed").metrics


def test_warm_up_requests_are_counted_and_in_no_metric() -> None:
    cold = answered(0, t_first=50.0, warmup=True)
    summary = summarize([cold, answered(1)], "closed")
    assert (summary.warmup, summary.offered) == (1, 1)
    assert the(summary.metrics["ttft_ms"]) == pytest.approx(1000)


def test_rates_count_what_came_inside_the_steady_window() -> None:
    """Ten answers, one a second: the window is from 2.2 s (the first has ended) to 9 s (the last is due)."""
    records = [answered(n, at=float(n)) for n in range(10)]
    window = steady_window(records)
    assert (window.start, window.end) == pytest.approx((2.2, 9.0))
    metrics = summarize(records, "open").metrics
    ended = sum(2.2 <= record.t_end <= 9.0 for record in records if record.t_end is not None)
    assert metrics["requests_per_s"].value == pytest.approx(ended / 6.8)
    stamps = [(at, n) for r in records for at, n in zip(r.chunk_at, r.chunk_tokens, strict=True)]
    tokens = sum(count for at, count in stamps if 2.2 <= at <= 9.0)
    assert metrics["output_tokens_per_s"].value == pytest.approx(tokens / 6.8)
    prompts = sum(100 for record in records if record.t_first is not None and 2.2 <= record.t_first <= 9.0)
    assert metrics["input_tokens_per_s"].value == pytest.approx(prompts / 6.8)


def closed_loop(latencies: list[float], slots: int, tokens: int = 20) -> list[RequestRecord]:
    """Records of a closed loop whose requests take these seconds, a token every latency / tokens."""
    free = [0.0] * slots
    records = []
    for index, took in enumerate(latencies):
        at = heapq.heappop(free)
        heapq.heappush(free, at + took)
        stamps = [at + took * (place + 1) / tokens for place in range(tokens)]
        end = stamps[-1]
        records.append(
            answered(
                index,
                at,
                t_send=at,
                t_first=stamps[0],
                t_last=end,
                t_end=end,
                n_out=tokens,
                chunk_at=stamps,
                chunk_tokens=[1] * tokens,
            )
        )
    return records


@pytest.mark.parametrize(("requests", "slots", "jitter"), [(100, 8, 0.0), (64, 16, 0.0), (64, 16, 0.05)])
def test_a_closed_loops_rate_is_its_concurrency_over_its_latency(
    requests: int, slots: int, jitter: float
) -> None:
    """Answers end in waves, and the edges of the window lie on waves: none may be counted at both."""
    latencies = (1 + jitter * np.random.default_rng(1).standard_normal(requests)).tolist()
    metrics = summarize(closed_loop(latencies, slots), "closed", parse_slo("e2e=9999")).metrics
    rate = metrics["requests_per_s"].value
    assert rate == pytest.approx(slots / np.mean(latencies), rel=0.02)
    assert metrics["output_tokens_per_s"].value == pytest.approx(rate * 20, rel=0.02)
    assert metrics["input_tokens_per_s"].value == pytest.approx(rate * 100, rel=1e-9)
    assert metrics["goodput_per_s"].value == pytest.approx(rate)


def test_a_closed_loops_rate_has_no_bias_over_many_runs() -> None:
    random = np.random.default_rng(2)
    runs = [closed_loop(random.lognormal(-0.02, 0.2, 100).tolist(), 8, tokens=1) for _ in range(60)]
    rates = [summarize(run, "closed").metrics["requests_per_s"].value for run in runs]
    assert np.mean(rates) == pytest.approx(8.0, rel=0.01)


def test_a_run_too_short_to_be_steady_is_taken_whole_and_says_so() -> None:
    window = steady_window([answered(0), answered(1, at=1.0)])
    assert (window.start, window.end) == pytest.approx((0.0, 3.2))
    assert "too short" in window.note


def test_concurrency_is_weighted_by_time_and_handing_a_slot_on_is_no_peak() -> None:
    """Two slots for ten seconds, each reused as soon as it is free."""
    records = [
        answered(n, at=2.0 * (n // 2), t_send=2.0 * (n // 2), t_end=2.0 * (n // 2) + 2.0) for n in range(10)
    ]
    mean, peak = concurrency(records, steady_window(records))
    assert (mean, peak) == (pytest.approx(2.0), 2)


def test_what_the_server_says_it_took_stands_beside_the_whole_and_the_difference_is_named() -> None:
    timing = ServerTiming(queue_ms=30, ttft_ms=900, tpot_ms=200, inference_ms=1700)
    metrics = summarize([answered(server=timing)], "closed").metrics
    assert the(metrics["inference_ms"]) == 1700
    assert the(metrics["outside_inference_ms"]) == pytest.approx(2000 - 1700)
    assert "server_ttft_ms" not in summarize([answered()], "closed").metrics


def test_counts_that_are_guesses_are_told() -> None:
    records = [
        answered(0, counted_by="chunks"),
        answered(1, split_by="spread"),
        answered(2, n_in=90, n_out=5),
        answered(3, n_out=2),
    ]
    notes = " ".join(summarize(records, "closed").notes)
    for words in (
        "chunks are counted as tokens",
        "more tokens than chunks",
        "another length",
        "longer or shorter",
        "1 answers have no TPOT",
    ):
        assert words in notes


def test_nothing_at_all_is_summarized_without_a_figure() -> None:
    for records in ([], [failed()], [answered(status="cancelled", t_end=None)]):
        summary = summarize(records, "open", parse_slo("ttft=1"))
        assert summary.ok == 0
        assert "ttft_ms.p50" not in flat(summary)
