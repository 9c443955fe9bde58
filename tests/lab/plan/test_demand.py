from pathlib import Path

import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.demand import Budget, parse_budget, read_demand, read_slo
from ridgeline.lab.traffic.operations import rate_of
from ridgeline.lab.traffic.source import TrafficOptions

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.0,{100 + second},10\n" for second in range(41)
)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("$5000/month", Budget(5000.0, "month")),
        ("$12k per year", Budget(1000.0, "month")),
        ("2/hour", Budget(1460.0, "month")),
        ("$0.40/Mtok", Budget(0.4, "mtok")),
        ("$20,000.50/month", Budget(20000.5, "month")),
        ("$0.01 per request", Budget(0.01, "request")),
    ],
)
def test_budgets_are_per_month_per_million_tokens_or_per_request(text: str, meant: Budget) -> None:
    assert parse_budget(text) == meant


@pytest.mark.parametrize(
    "text", ["5000", "$x/month", "$5/week of work", "$0/month", "-3/month", "$1.2.3/month", "$0,4/Mtok"]
)
def test_a_budget_that_says_no_price_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match=r"--budget"):
        parse_budget(text)


def test_a_budget_by_the_token_allows_more_where_there_is_more_traffic() -> None:
    assert Budget(0.5, "mtok").usd_month(tokens_month=4e9, requests_month=1) == 2000.0


def test_without_limits_those_of_a_reader_are_planned_for() -> None:
    assert [limit.key for limit in read_slo(None).limits] == ["ttft_ms.p90", "tpot_ms.p90"]


def test_a_share_of_lengths_is_the_same_lengths_at_a_lower_rate() -> None:
    demand = read_demand(TrafficOptions(input="1000", output="100", rate=40.0))
    part = demand.share(10.0)
    assert (demand.rate, part.rate) == (40.0, 10.0)
    assert part.mean_input == demand.mean_input == 1000
    assert part.options.rate == 10.0  # what a bench is told to send to one replica


def test_a_share_of_a_trace_keeps_its_moments(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    demand = read_demand(TrafficOptions(traffic=f"azure:{file}"))
    assert demand.rate == pytest.approx(41 / 40)
    assert (demand.mean_input, demand.longest) == (120, 150)
    part = demand.share(41 / 80)
    assert part.options.sample == pytest.approx(0.5)
    moments = {request.at for request in demand.traffic.requests}
    assert {request.at for request in part.traffic.requests} < moments


@pytest.mark.parametrize("rate", [None, 20.0])
def test_a_share_arrives_at_the_rate_of_a_share(rate: float | None, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    demand = read_demand(TrafficOptions(traffic=f"azure:{file}", rate=rate))
    assert demand.rate is not None
    for part in (0.5, 1.0, 3.0):
        found = demand.share(part * demand.rate)
        assert rate_of(found.traffic) == pytest.approx(part * demand.rate, rel=0.2)


def test_closed_loops_cannot_be_planned_for() -> None:
    with pytest.raises(BadInput, match="with an arrival rate"):
        read_demand(TrafficOptions(arrivals="closed"))
