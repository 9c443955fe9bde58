"""Two runs compared: differences that are there are seen, and those that are not are not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ridgeline.lab.bench.compare.compare import Comparison, compare
from ridgeline.lab.bench.compare.comparison import comparison_page, comparison_text
from ridgeline.lab.bench.compare.difference import Difference, side_of
from ridgeline.lab.bench.figures.bootstrap import Column, block_weights, student_t
from ridgeline.lab.bench.figures.metrics import flat
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.slo import parse_slo
from tests.lab.bench.synthetic_runs import records, result


def row(found: Comparison, name: str) -> Difference:
    return next(each for each in found.rows if each.name == name)


def compared(a: list[RequestRecord], b: list[RequestRecord], **settings: object) -> Comparison:
    return compare(side_of(result(a), "a"), side_of(result(b, **settings), "b"), resamples=300)  # type: ignore[arg-type]


def test_a_slower_server_is_seen_to_be_slower_by_as_much_as_it_is() -> None:
    found = compared(records(noise=1), records(noise=2, slower=1.05))
    step = row(found, "itl_ms.p50")
    assert step.seen
    assert step.better is False
    assert step.verdict == "worse"
    assert step.ratio is not None
    assert step.ratio.low < 1.05 < step.ratio.high
    # An open loop below capacity gives what it is asked for, however slow.
    assert not row(found, "requests_per_s").seen


def test_equal_servers_are_not_told_apart_and_the_verdict_says_what_would_not_show() -> None:
    seen = total = 0
    for noise in range(2, 8):
        found = compared(records(noise=1), records(noise=noise))
        seen += sum(each.seen for each in found.rows)
        total += len(found.rows)
        assert "no difference seen; one below ±" in comparison_text(found)
    assert seen < 0.12 * total  # 5 % of independent rows; these depend on one another


def test_the_same_traffic_is_compared_request_by_request_which_sees_smaller_differences() -> None:
    ours, theirs = records(noise=1), records(noise=2)
    paired = compared(ours, theirs)
    assert paired.pairs == len(ours)
    shifted = [r for r in theirs if r.index < 200]  # too few in common to be pairs
    unpaired = compared(ours, shifted)
    assert unpaired.pairs == 0
    assert "200 requests" in unpaired.unpaired_because
    widths = [row(each, "e2e_sched_ms.mean").difference for each in (paired, unpaired)]
    assert widths[0].high - widths[0].low < 0.5 * (widths[1].high - widths[1].low)


def test_another_plan_is_never_paired_and_a_warning_says_so() -> None:
    found = compared(records(plan=1), records(plan=2))
    assert found.pairs == 0
    assert any("did not send the same traffic" in note for note in found.notes)


def test_figures_are_those_of_the_runs_own_summaries() -> None:
    a, b = result(records(noise=1)), result(records(noise=2))
    figures_a, figures_b = flat(a.summary), flat(b.summary)
    for each in compare(side_of(a, "a"), side_of(b, "b"), resamples=50).rows:
        # Rates of pairs are taken over what is steady in both runs.
        near = 0.01 if each.name.endswith("_per_s") else 1e-9
        assert each.a == pytest.approx(figures_a[each.name], rel=near), each.name
        assert each.b == pytest.approx(figures_b[each.name], rel=near), each.name
    loop = result(records(noise=1), mode="closed")
    for each in compare(side_of(loop, "a"), side_of(loop, "b"), resamples=50).rows:
        assert each.a == pytest.approx(flat(loop.summary)[each.name]), each.name


def test_requests_that_one_run_failed_are_left_out_of_both_and_counted() -> None:
    found = compared(records(noise=1), records(noise=2, failing=0.05))
    failures = row(found, "failures")
    assert failures.seen
    assert failures.verdict == "worse"
    assert found.pairs < 300
    assert any("favours the run that failed more" in note for note in found.notes)


def test_shares_have_newcombes_interval() -> None:
    """56 of 70 against 48 of 80: the example of Newcombe 1998, method 10: 0.2 (0.0524 to 0.3339)."""
    rows = [[_ended(i, "ok" if i < ok else "failed") for i in range(n)] for ok, n in ((48, 80), (56, 70))]
    slo = parse_slo("ttft=10s")
    sides = [side_of(result(each, mode="closed", slo=slo), "x") for each in rows]
    found = row(compare(*sides, resamples=20), "attainment")
    assert found.difference.value == pytest.approx(0.2)
    assert (found.difference.low, found.difference.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert found.better is True


def test_an_invalid_run_and_changed_settings_are_said_first() -> None:
    sound = side_of(
        result(records(80), engine={"chunk": 64, "blocks": 1}, client={"load_average": [1.0]}), "a"
    )
    late = result(
        records(80, noise=2),
        invalid=("sent late <b>",),
        engine={"chunk": 256, "blocks": 2},
        client={"load_average": [2.0]},  # a state of the machine, not a setting
    )
    found = compare(sound, side_of(late, "b"), resamples=20)
    assert found.changed == (("engine.chunk", "64", "256"), ("engine.blocks", "1", "2"))
    text = comparison_text(found)
    assert text.splitlines()[0].startswith("A run is INVALID")
    assert "2 settings differ" in text
    html = comparison_page(found)
    assert "sent late &lt;b&gt;" in html
    assert "sent late <b>" not in html


def test_a_resamples_quantiles_are_numpys_of_the_repeated_samples() -> None:
    samples = np.random.default_rng(0).random(50)
    column = Column(samples, np.arange(50))
    for weights in block_weights(50, 5, seed=3):
        repeated = np.repeat(samples, weights)
        assert column.quantiles(weights, (0.5, 0.9)) == pytest.approx(np.quantile(repeated, [0.5, 0.9]))
        assert column.mean(weights) == pytest.approx(repeated.mean())


def test_students_quantile_is_that_of_the_tables() -> None:
    tables = {3: 3.182, 4: 2.776, 11: 2.201, 22: 2.074, math.inf: 1.960}
    assert {df: student_t(df) for df in tables} == pytest.approx(tables, rel=0.01)


def test_resamples_are_stretches_of_neighbours_that_wrap_around() -> None:
    for weights in block_weights(100, 20, seed=1):
        assert 100 <= weights.sum() < 109  # blocks of 9
        edges = np.flatnonzero(np.diff(np.append(weights, weights[0])))
        assert len(edges) <= 24  # two ends for each of 12 blocks


def _ended(index: int, status: str) -> RequestRecord:
    return RequestRecord(index, 0, 0, 1, 1, 2, 2, status, 1, 1)  # type: ignore[arg-type]
