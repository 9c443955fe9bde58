"""Shared by both limiters: the subjects of limits, reservations, and refusals.

The pipeline calls `admit` before it reads a request's body, `reserve` when the body's size is known, and
`settle` when the request's usage is known, whatever its outcome. A minute slides in quarter-second buckets: a
bucket counts until all of it is older than a minute, so that no minute ever has more than its limit and under
overload none less than 99.5 % of it.
"""

from __future__ import annotations

import calendar
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, NoReturn, Protocol

import msgspec

from ridgeline.gateway.errors import BadRequest, Forbidden, Limited, Unavailable
from ridgeline.gateway.tenants.keys import Limits, usd_text

BUCKET_MS = 250
BUCKETS = 60_000 // BUCKET_MS
PICODOLLARS = 10**12
# The end of a running request is unknown. All other refusals give the time until there is room.
CONCURRENT_RETRY_MS = 1000
DAY_MS = 86_400_000

Kind = Literal["key", "team", "model"]
Unit = Literal["requests", "tokens", "concurrent", "daily", "monthly"]


class Subject(msgspec.Struct, frozen=True):
    """A key, team or model whose limits apply to a request. Its counts are found by kind and id."""

    kind: Kind
    id: str
    limits: Limits


# Picodollars that a subject has spent since a time, by the ledger: called when the counts are new or lost.
Spent = Callable[[Subject, int], Awaitable[int]]


class Limiter(Protocol):
    @property
    def degraded(self) -> bool:
        """Limits are unavailable: each key's policy decides."""

    async def admit(
        self, subjects: Sequence[Subject], when_unknown: str = "closed", *, costs: bool = True
    ) -> Reservation:
        """Counts one request of unknown size. Also refuses if no tokens or no money are left."""

    async def reserve(
        self,
        subjects: Sequence[Subject],
        tokens: int,
        cost_pusd: int,
        when_unknown: str = "closed",
        admitted: Reservation | None = None,
    ) -> Reservation:
        """Takes from every subject or from none. Limited has the time to retry.

        admitted: what `admit` returned for this request. Its subjects do not count the request again, and the
        new reservation replaces it; if this raises, `admitted` is still to be settled.
        """

    async def reserve_background(
        self, id: str, subjects: Sequence[Subject], tokens: int, cost_pusd: int, when_unknown: str = "closed"
    ) -> Reservation:
        """For work that outlives its request, as a batch does: takes tokens and money, but is neither a
        request nor one under way."""

    async def hold(self, reservation: Reservation, cost_pusd: int) -> int | None:
        """Set what background work may cost in all, whether or not the budgets have room for it.

        Picodollars that the scarcest budget has left then, negative if it is exceeded; None: no budget.
        Also for a reservation of an earlier process. Unavailable: spending is not known.
        """

    def settle(self, reservation: Reservation, tokens: int, cost_pusd: int) -> None:
        """Books the actual usage. Never raises, never waits; a second call has no effect."""

    async def close(self) -> None: ...


class Standing(NamedTuple):
    """What a subject has left, for the headers; None if it has no such limit."""

    requests_limit: int | None
    requests_left: int
    tokens_limit: int | None
    tokens_left: int
    reset_ms: int  # until all of its usage is out of the window


class Refusal(NamedTuple):
    subject: Subject
    unit: Unit
    retry_ms: int


class Reservation:
    """What one request has reserved, to be settled. `known`: False if the limits were unavailable."""

    __slots__ = (
        "admitted",
        "at_ms",
        "cost_pusd",
        "id",
        "is_background",
        "known",
        "settled",
        "standings",
        "subjects",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        subjects: Sequence[Subject],
        tokens: int,
        cost_pusd: int,
        at_ms: int,
        is_background: bool = False,
    ) -> None:
        self.id, self.subjects, self.tokens, self.cost_pusd = id, subjects, tokens, cost_pusd
        self.is_background = is_background
        self.at_ms = at_ms  # unix time of the process that has the counts
        self.known = True
        self.settled = False
        self.admitted: Reservation | None = None  # that this one replaces
        self.standings: Sequence[Standing] = ()

    def counts(self, subject: Subject) -> bool:
        """Whether the subject counted this request at its admission, or never counts it."""
        before = self.admitted
        if before is None:
            return self.is_background
        return any(one.kind == subject.kind and one.id == subject.id for one in before.subjects)

    @property
    def arrived_ms(self) -> int:
        """When its head was admitted: as in the ledger, money belongs to the day of arrival."""
        return self.at_ms if self.admitted is None else self.admitted.at_ms

    @property
    def headers(self) -> dict[str, str]:
        return rate_headers(self.standings)


def limited_only(subjects: Sequence[Subject]) -> list[Subject]:
    """The subjects that have any limit."""
    return [subject for subject in subjects if subject.limits != NO_LIMITS]


NO_LIMITS = Limits()


def has_budget(subject: Subject) -> bool:
    return subject.limits.daily_usd is not None or subject.limits.monthly_usd is not None


# ---- headers and errors for clients ----


def rate_headers(standings: Sequence[Standing]) -> dict[str, str]:
    """OpenAI's names and formats, for the subject that has least left."""
    headers: dict[str, str] = {}
    requests = [one for one in standings if one.requests_limit is not None]
    if requests:
        least = min(requests, key=lambda one: one.requests_left)
        headers["x-ratelimit-limit-requests"] = str(least.requests_limit)
        headers["x-ratelimit-remaining-requests"] = str(max(least.requests_left, 0))
        headers["x-ratelimit-reset-requests"] = duration(least.reset_ms)
    tokens = [one for one in standings if one.tokens_limit is not None]
    if tokens:
        least = min(tokens, key=lambda one: one.tokens_left)
        headers["x-ratelimit-limit-tokens"] = str(least.tokens_limit)
        headers["x-ratelimit-remaining-tokens"] = str(max(least.tokens_left, 0))
        headers["x-ratelimit-reset-tokens"] = duration(least.reset_ms)
    return headers


def duration(ms: int) -> str:
    """As OpenAI writes them: 20ms, 1.5s, 6m0s."""
    if ms < 1000:
        return f"{max(ms, 0)}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds


_CODES = {
    "requests": "rate_limit_exceeded",
    "tokens": "rate_limit_exceeded",
    "concurrent": "concurrency_limit_exceeded",
    "daily": "budget_exceeded",
    "monthly": "budget_exceeded",
}
_SMALLER = "shorten the prompt or set a smaller max_tokens"


def refuse(
    refusals: Sequence[Refusal], standings: Sequence[Standing], tokens: int, cost_pusd: int
) -> NoReturn:
    """Names the limit that takes longest to have room again: an earlier retry would fail."""
    _check_possible([refusal.subject for refusal in refusals], tokens, cost_pusd)
    subject, unit, retry_ms = max(refusals, key=lambda one: one.retry_ms)
    limit = _limit_of(subject.limits, unit)
    subject_name = f"this {subject.kind}"
    retry_s = max(math.ceil(retry_ms / 1000), 1)
    message = {
        "requests": f"{subject_name} may make {limit} requests per minute; retry in {retry_s} s",
        "tokens": f"{subject_name} may use {limit} tokens per minute; retry in {retry_s} s",
        "concurrent": f"{subject_name} may have {limit} concurrent requests",
        "daily": f"{subject_name} may spend {limit} USD per day, and the rest does not cover this request; "
        "the budget is renewed at 00:00 UTC",
        "monthly": f"{subject_name} may spend {limit} USD per month, and the rest does not cover this "
        "request; the budget is renewed on the first of the month, 00:00 UTC",
    }[unit]
    raise Limited(message, retry_ms / 1000, code=_CODES[unit], headers=rate_headers(standings))


def _check_possible(subjects: Sequence[Subject], tokens: int, cost_pusd: int) -> None:
    """Refuses a request that can never fit, with an error that clients do not retry."""
    for subject in subjects:
        limits = subject.limits
        if limits.requests_per_minute == 0 or limits.concurrent == 0:
            raise Forbidden(f"this {subject.kind} may make no requests", code="limit_is_zero")
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            raise BadRequest(
                f"the request may use {tokens} tokens (its prompt and the most it may generate), and this "
                f"{subject.kind} {limits.tokens_per_minute} per minute; {_SMALLER}",
                code="request_over_limit",
            )
        for unit, usd in (("day", limits.daily_usd), ("month", limits.monthly_usd)):
            if usd is not None and cost_pusd > usd * PICODOLLARS:
                raise BadRequest(
                    f"the request may cost {usd_text(cost_pusd / PICODOLLARS)} USD, and this {subject.kind} "
                    f"may spend {usd_text(usd)} per {unit}; {_SMALLER}",
                    code="request_over_budget",
                )


def _limit_of(limits: Limits, unit: Unit) -> str:
    value = {
        "requests": limits.requests_per_minute,
        "tokens": limits.tokens_per_minute,
        "concurrent": limits.concurrent,
        "daily": limits.daily_usd,
        "monthly": limits.monthly_usd,
    }[unit]
    return usd_text(value) if isinstance(value, float) else str(value)


def unknown(what: str) -> Unavailable:
    """For keys whose requests must not run uncounted."""
    message = f"{what} cannot be checked at the moment"
    return Unavailable(message, code="limits_unknown", headers={"retry-after": "1"})


# ---- days and months, UTC ----


def day_start_ms(at_ms: int) -> int:
    return at_ms - at_ms % DAY_MS


def month_of(at_ms: int) -> int:
    """Months since the year 0: a number that grows by one each month."""
    moment = time.gmtime(at_ms // 1000)
    return moment.tm_year * 12 + moment.tm_mon - 1


def month_start_ms(month: int) -> int:
    return calendar.timegm((month // 12, month % 12 + 1, 1, 0, 0, 0)) * 1000
