"""The report of a run or a sweep: every figure of the summary, INVALID before all, nothing unescaped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.lab.bench.figures.ceilings import Share
from ridgeline.lab.bench.figures.metrics import flat
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.reports.report import report_page
from ridgeline.lab.bench.reports.report_charts import _curves
from ridgeline.lab.bench.reports.report_file import write_report
from ridgeline.lab.bench.sweeps.sweep import SweepConfig, SweepResult, judged
from ridgeline.lab.charts import number
from ridgeline.lab.errors import BadInput
from ridgeline.lab.slo import parse_slo
from tests.lab.bench.synthetic_runs import records, result

SLO = parse_slo("ttft_p90=400ms,tpot_p90=50ms")


def test_a_report_has_every_headline_with_formula_and_interval() -> None:
    run = result(records(), slo=SLO)
    run.shares = [Share("tpot_ms.p50", "ms", 20.0, 10.0, 0.5, "1 / decode limit")]
    html = report_page(run)
    for name in run.summary.headline:
        metric = run.summary.metrics[name]
        estimate = metric.percentiles["p90"]
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        assert f"{number(estimate.low)} – {number(estimate.high)}" in html
        assert f'title="{metric.formula}"' in html
    assert "INVALID" not in html
    assert "50.0%" in html
    assert "SLO P90 400 ms" in html
    for chart in ("Time to first token", "End to end", "Time per output token", "Between tokens"):
        assert f'aria-label="{chart}' in html
    for part in ("queued", "prefill", "decode"):
        assert f">{part}</text>" in html
    assert number(flat(run.summary)["output_tokens_per_s"]) in html


def test_tiles_have_human_labels_and_the_slo_a_verdict() -> None:
    html = report_page(result(records(200), slo=parse_slo("ttft=400,tpot=1")))
    tiles = html[html.index('class="tiles"') : html.index("<h2>")]
    assert "time to first token, P90" in tiles
    assert "_ms" not in re.sub('title="[^"]*"', "", tiles)
    assert html.index("<h2>SLO missed") < html.index("<h2>Latency")
    assert ">TTFT P90</td>" in html
    assert "SLO met" in report_page(result(records(200), slo=parse_slo("ttft=400")))


def test_curves_that_lie_upon_each_other_are_one_with_both_names() -> None:
    told = [1.0, 2.0, 3.0, 50.0]
    same = _curves({"from sending": told, "by the server's own clock": [1.005 * one for one in told]})
    assert [mark.name for mark in same] == ["from sending = by the server's own clock"]
    apart = _curves(
        {"from sending": told, "by the server's own clock": [0.5 * one for one in told], "none": []}
    )
    assert [mark.name for mark in apart] == ["from sending", "by the server's own clock"]


def test_an_invalid_run_says_so_before_any_figure() -> None:
    html = report_page(result(records(60), invalid=("sent late <b>",)))
    assert html.index("INVALID") < html.index('class="tile"')
    assert "sent late &lt;b&gt;" in html


def test_failures_stand_by_cause_with_an_example_that_cannot_run() -> None:
    run = result(records(200, failing=0.1))
    html = report_page(run)
    assert "<script>" not in html
    assert "503: queue full &lt;script&gt;" in html
    assert f"<td>http_503</td><td>{run.summary.failed}</td>" in html
    assert "adj_ttft_sched_ms" in html


def test_a_run_in_which_nothing_was_answered_has_a_report_too() -> None:
    dead = RequestRecord(
        0, 0.0, None, None, None, None, 1.0, "failed", 8, 8, cause="refused", error="refused"
    )
    assert "refused" in report_page(result([dead]))
    assert "Benchmark" in report_page(result([]))


def test_a_server_that_does_not_tell_its_queue_has_one_span_to_the_first_token() -> None:
    plain = RequestRecord(
        0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, "ok", 8, 2, n_in=8, n_out=2, n_first=1,
        chunk_at=[0.5, 1.0], chunk_tokens=[1, 1],
    )  # fmt: skip
    html = report_page(result([plain], mode="closed"))
    assert "queue and prefill" in html
    assert "does not report timings" in html


def test_a_sweeps_report_shows_every_point_and_the_knee(tmp_path: Path) -> None:
    points = []
    for load, slower in ((2.0, 1.0), (4.0, 8.0)):
        run = result(records(80, slower=slower), slo=SLO, invalid=("sent late",) if load == 4 else ())
        run.save(tmp_path / f"rate-{load:g}")
        points.append(judged(run, load, f"rate-{load:g}", None, SweepConfig(over="rate", slo=SLO)))
    SweepResult("rate", str(SLO), points, best=2.0, ended="at 4 it is <slow>").save(tmp_path)
    path = write_report(tmp_path)
    html = path.read_text(encoding="utf-8")
    assert path == tmp_path / "report.html"
    assert "The knee: 2 requests/s is the largest load that keeps the SLO" in html
    assert "&lt;slow&gt;" in html
    assert "INVALID points" in html
    assert "no: ttft_sched p90 is" in html


def test_runs_are_reported_from_their_folder_and_other_folders_are_refused(tmp_path: Path) -> None:
    result(records(40)).save(tmp_path)
    assert "Benchmark: synthetic" in write_report(tmp_path, tmp_path / "r.html").read_text(encoding="utf-8")
    with pytest.raises(BadInput, match=r"neither a run \(run.json\) nor a sweep"):
        write_report(tmp_path / "nowhere")
