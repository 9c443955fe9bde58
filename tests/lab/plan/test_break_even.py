import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.break_even import HOURS_PER_MONTH, break_even, hourly_profile
from ridgeline.lab.plan.prices import Offer
from ridgeline.lab.traffic.request import PlannedRequest, Traffic

OFFER = Offer("host", "model", input=1.0, output=2.0, cached=0.25, batch_input=0.5, batch_output=1.0)


def traffic(moments: list[float]) -> Traffic:
    return Traffic("test", tuple(PlannedRequest(at, 1000, 500) for at in moments))


def test_a_short_trace_repeats_for_the_busy_hours_of_every_day() -> None:
    half_hour = traffic([float(second) for second in range(0, 1801, 10)])
    profile = hourly_profile(half_hour, busy_hours=8.5)
    assert len(profile.hours) == 24
    assert profile.hours[0].requests == pytest.approx(362)
    assert profile.hours[8].requests == pytest.approx(181)
    assert [hour.requests for hour in profile.hours[9:]] == [0.0] * 15
    assert "30 minutes" in profile.note


def test_a_trace_of_a_day_keeps_its_own_hours() -> None:
    day = traffic([3600.0 * hour + 1 for hour in range(25) for _ in range(1 + 3 * (hour == 12))])
    profile = hourly_profile(day, busy_hours=2)
    assert len(profile.hours) == 24  # to the last arrival
    assert profile.hours[12].requests == 4
    assert profile.month().requests == pytest.approx(28 / 24 * HOURS_PER_MONTH)


def test_costs_of_both_ways_by_hand() -> None:
    # 1 request/s for half of the day; a replica takes 2/s and costs $4 an hour.
    profile = hourly_profile(traffic([0.0, *(float(s) for s in range(1, 3601))]), busy_hours=12)
    even = break_even(profile, OFFER, cached_share=0.4, replica_usd_per_hour=4.0, replica_requests_per_s=2.0)
    requests = 3601 * 12 * HOURS_PER_MONTH / 24
    each = (600 * 1.0 + 400 * 0.25 + 500 * 2.0) / 1e6
    assert even.hosted.per_request == pytest.approx(each)
    assert even.hosted.usd_month == pytest.approx(requests * each)
    assert even.hosted_no_cache.per_request == pytest.approx(2000 / 1e6)
    assert even.hosted_batch is not None
    assert even.hosted_batch.per_request == pytest.approx(1000 / 1e6)
    assert even.own_always.usd_month == pytest.approx(4.0 * HOURS_PER_MONTH)
    assert even.idle_share == pytest.approx(0.75, abs=0.001)
    assert even.even_requests_per_day == pytest.approx(96.0 / each)
    assert even.own_usd_day(even.requests_per_day) == pytest.approx(even.own_scaled.usd_month * 24 / 730)
    assert even.even_share == pytest.approx(4.0 / 7200 / each)
    assert even.hosted.usd_month < even.own.usd_month  # $73 a day against $96: half of the day is idle


def test_scaling_by_the_hour_pays_for_the_busiest_hour_only_then() -> None:
    day = traffic([3600.0 * hour + 1 + k for hour in range(25) for k in range(1000 if hour == 9 else 10)])
    even = break_even(
        hourly_profile(day), OFFER, cached_share=0.0, replica_usd_per_hour=1.0, replica_requests_per_s=0.1
    )
    assert even.replicas_busiest == 3
    assert even.own_always.usd_month == pytest.approx(3 * HOURS_PER_MONTH)
    assert even.own_scaled.usd_month == pytest.approx((24 - 1 + 3) / 24 * HOURS_PER_MONTH)


def test_idle_hours_move_the_break_even_beyond_what_one_replica_would_pay_for() -> None:
    # Two busy hours a day; a replica of $1 an hour serves 0.1/s; a request costs $0.0045 hosted.
    offer = Offer("host", "model", input=2.5, output=4.0)
    profile = hourly_profile(traffic([float(s) for s in range(0, 3601, 10)]), busy_hours=2)
    even = break_even(profile, offer, cached_share=0.0, replica_usd_per_hour=1.0, replica_requests_per_s=0.1)
    # n replicas in 2 hours and 1 in 22 cost 2n + 22 dollars; their 720n requests cost 3.24n: from 18 on.
    assert even.even_requests_per_day == pytest.approx((2 * 18 + 22) / 0.0045)
    assert even.own_usd_day(25 * 720) == pytest.approx(2 * 25 + 22)
    assert even.own_usd_day(0.0) == 24
    assert even.requests_per_replica_day == pytest.approx(720)
    assert even.idle_share_scaled < even.idle_share == pytest.approx(1 - 722 / (24 * 720), abs=0.05)


def test_where_a_busy_replica_costs_more_than_the_api_there_is_no_break_even() -> None:
    profile = hourly_profile(traffic([float(s) for s in range(3601)]))
    even = break_even(profile, OFFER, cached_share=0.0, replica_usd_per_hour=40.0, replica_requests_per_s=1.5)
    assert even.even_requests_per_day is None
    assert even.even_share is None
    assert even.hosted.usd_month < even.own.usd_month


def test_traffic_without_moments_has_no_profile() -> None:
    with pytest.raises(BadInput, match="different times"):
        hourly_profile(traffic([0.0, 0.0]))
    with pytest.raises(BadInput, match="--busy-hours"):
        hourly_profile(traffic([0.0, 5.0]), busy_hours=25)
