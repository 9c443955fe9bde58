"""Compares a hosted API with own GPUs on the actual traffic, including idle hours, caches and batches.

Pure arithmetic on an hourly profile. A hosted model costs per token, a GPU per hour whether used or not: the
share of used hours decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.prices import Offer
from ridgeline.lab.traffic.request import Traffic

HOURS_PER_MONTH = 730.0
HOURS_PER_DAY = 24
HOUR_S = 3600.0
MOST_STEPS = 20_000  # beyond this many replicas, steps are too small to matter


@dataclass(frozen=True, slots=True)
class Hour:
    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Representative hours in order: one day, or as many as the trace has."""

    hours: tuple[Hour, ...]
    note: str

    def total(self) -> Hour:
        return Hour(
            sum(hour.requests for hour in self.hours),
            sum(hour.input_tokens for hour in self.hours),
            sum(hour.output_tokens for hour in self.hours),
        )

    def month(self) -> Hour:
        total, times = self.total(), HOURS_PER_MONTH / len(self.hours)
        return Hour(total.requests * times, total.input_tokens * times, total.output_tokens * times)

    @property
    def tokens_per_day(self) -> float:
        month = self.month()
        return (month.input_tokens + month.output_tokens) * HOURS_PER_DAY / HOURS_PER_MONTH


def hourly_profile(traffic: Traffic, *, busy_hours: float = HOURS_PER_DAY) -> Profile:
    """A trace of a day or more is used directly; a shorter one repeats for `busy_hours` of every day."""
    if not 0 < busy_hours <= HOURS_PER_DAY:
        raise BadInput(f"--busy-hours must be above 0 and at most 24, got {busy_hours:g}")
    seconds = traffic.duration_s
    if not traffic.requests or seconds <= 0:
        raise BadInput(f"{traffic.name}: a profile needs requests at different times")
    if seconds >= (HOURS_PER_DAY - 0.5) * HOUR_S:
        hours = _binned(traffic, max(1, round(seconds / HOUR_S)))
        return Profile(hours, f"the trace's own {len(hours)} hours")
    per_hour = HOUR_S / seconds
    mean = Hour(
        len(traffic.requests) * per_hour, traffic.input_tokens * per_hour, traffic.output_tokens * per_hour
    )
    whole = math.floor(busy_hours)
    part = busy_hours - whole
    busy = [mean] * whole
    if part:
        busy.append(Hour(mean.requests * part, mean.input_tokens * part, mean.output_tokens * part))
    idle = [Hour()] * (HOURS_PER_DAY - len(busy))
    note = f"{_span(seconds)} of traffic, assumed to repeat {busy_hours:g} hours of every day"
    return Profile((*busy, *idle), note)


@dataclass(frozen=True, slots=True)
class Costs:
    """Dollars per month for one way of serving the traffic."""

    usd_month: float
    requests_month: float
    tokens_month: float  # input and output

    @property
    def per_request(self) -> float:
        return self.usd_month / self.requests_month

    @property
    def per_mtok(self) -> float:
        return self.usd_month / self.tokens_month * 1e6

    def per_user(self, users: float) -> float:
        return self.usd_month / users


@dataclass(frozen=True, slots=True)
class BreakEven:
    profile: Profile
    offer: Offer
    hosted: Costs  # with the provider's cache discount
    hosted_no_cache: Costs
    hosted_batch: Costs | None  # all of it through the batch API; None: no batch price is listed
    own_always: Costs  # the busiest hour's replicas, around the clock
    own_scaled: Costs  # each hour only what it needs, at least one
    replicas_busiest: int
    idle_share: float  # of the GPU hours paid for by `own_always`
    idle_share_scaled: float  # and by `own_scaled`
    full_per_request: float  # an own replica at full capacity
    requests_per_replica_day: float  # per replica, with these hours: the busiest hour fills it
    even_requests_per_day: float | None  # with the same daily pattern, own costs the same; None: never

    @property
    def own(self) -> Costs:
        return min(self.own_always, self.own_scaled, key=lambda costs: costs.usd_month)

    @property
    def even_share(self) -> float | None:
        """The minimum utilization of paid GPU hours at which they are worth their price."""
        return None if self.even_requests_per_day is None else self.full_per_request / self.hosted.per_request

    def own_usd_day(self, requests_per_day: float) -> float:
        """Daily cost of hourly scaled replicas for this many requests, spread over the day like these."""
        loads = [hour.requests for hour in self.profile.hours]
        full = max(loads) * self.requests_per_replica_day / self.requests_per_day  # of a replica's hour
        times = requests_per_day / self.requests_per_day
        needed = replicas_by_hour(self.profile.hours, full / HOUR_S / times) if times else [1] * len(loads)
        replica_hour = self.own_always.usd_month / self.replicas_busiest / HOURS_PER_MONTH
        return replica_hour * sum(needed) * HOURS_PER_DAY / len(needed)

    @property
    def requests_per_day(self) -> float:
        return self.hosted.requests_month * HOURS_PER_DAY / HOURS_PER_MONTH


def break_even(
    profile: Profile,
    offer: Offer,
    *,
    cached_share: float,
    replica_usd_per_hour: float,
    replica_requests_per_s: float,
    least_replicas: int = 1,
) -> BreakEven:
    """cached_share: of input tokens, what the provider's cache would hold; 0 where unknown
    replica_requests_per_s: what one replica serves of this traffic within the service level"""
    month = profile.month()
    if not (replica_requests_per_s > 0 and replica_usd_per_hour >= 0 and month.requests > 0):
        raise BadInput("a break-even needs traffic, a replica's capacity and its price")
    tokens = month.input_tokens + month.output_tokens

    def costs(usd: float) -> Costs:
        return Costs(usd, month.requests, tokens)

    hosted = costs(offer.usd(month.input_tokens, month.output_tokens, cached_share * month.input_tokens))
    batch = offer.batch_usd(month.input_tokens, month.output_tokens)
    needed = replicas_by_hour(profile.hours, replica_requests_per_s, least_replicas)
    busiest = max(needed)
    per_hour_share = HOURS_PER_MONTH / len(needed)
    own_always = costs(busiest * replica_usd_per_hour * HOURS_PER_MONTH)
    own_scaled = costs(sum(needed) * replica_usd_per_hour * per_hour_share)
    capacity_hour = replica_requests_per_s * HOUR_S
    total, peak = profile.total().requests, max(hour.requests for hour in profile.hours)
    factor = even_factor(
        [hour.requests / capacity_hour for hour in profile.hours],
        hosted.per_request * total / replica_usd_per_hour if replica_usd_per_hour else math.inf,
        least_replicas,
    )
    requests_day = month.requests * HOURS_PER_DAY / HOURS_PER_MONTH
    return BreakEven(
        profile=profile,
        offer=offer,
        hosted=hosted,
        hosted_no_cache=costs(offer.usd(month.input_tokens, month.output_tokens)),
        hosted_batch=None if batch is None else costs(batch),
        own_always=own_always,
        own_scaled=own_scaled,
        replicas_busiest=busiest,
        idle_share=max(0.0, 1.0 - total / (busiest * len(needed) * capacity_hour)),
        idle_share_scaled=max(0.0, 1.0 - total / (sum(needed) * capacity_hour)),
        full_per_request=replica_usd_per_hour / capacity_hour,
        requests_per_replica_day=requests_day * capacity_hour / peak,
        even_requests_per_day=None if factor is None else factor * requests_day,
    )


def even_factor(loads: Sequence[float], hosted_hours: float, least: int = 1) -> float | None:
    """The traffic multiple at which hourly scaled replicas cost as much as hosting.

    loads: of each hour, in full replicas; hosted_hours: cost of hosting all of them, in replica hours.
    Replicas are whole and at least `least` always run: own costs rise in steps, hosting linearly.
    """
    if hosted_hours <= sum(loads):
        return None
    if math.isinf(hosted_hours):
        return 0.0
    # No hour pays for more than `least` above its load, so beyond this own is always cheaper.
    most = least * len(loads) / (hosted_hours - sum(loads))
    if most * sum(loads) > MOST_STEPS:
        return most
    steps = {whole / load for load in loads if load for whole in range(1, math.ceil(most * load) + 1)}
    before = 0.0
    for step in sorted({*(step for step in steps if step < most), most}):
        paid = sum(max(least, math.ceil(load * step - 1e-9)) for load in loads)
        if (even := max(before, paid / hosted_hours)) <= step:
            return even
        before = step
    return most


def replicas_by_hour(hours: Sequence[Hour], requests_per_s: float, least: int = 1) -> list[int]:
    """An hour without requests still keeps `least` replicas: the first request must not wait for a start."""
    return [max(least, math.ceil(hour.requests / HOUR_S / requests_per_s - 1e-9)) for hour in hours]


def _binned(traffic: Traffic, count: int) -> tuple[Hour, ...]:
    sums = [[0.0, 0.0, 0.0] for _ in range(count)]
    for request in traffic.requests:
        bucket = sums[min(count - 1, int(request.at / HOUR_S))]
        bucket[0] += 1
        bucket[1] += request.input_tokens
        bucket[2] += request.output_tokens
    return tuple(Hour(*bucket) for bucket in sums)


def _span(seconds: float) -> str:
    for size, name in ((HOUR_S, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds"
